"""The Pallas kernels of a traced program, and what their blocks move through HBM.

A block is copied when its index changes from one grid step to the next, so the traffic is the number of index changes
times the block's bytes in its tiled layout. Index maps that read scalar-prefetch operands (step tables) are evaluated
on the concrete tables where these follow from concrete arguments of the program: known values are propagated through
the jaxpr up to the kernel. Where a table is not known, its blocks count as changing at every step, and a note says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from bench.static_profile.chips import Chip

UNKNOWN = object()
_LANES = 128
_INLINED = {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"} | {
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
}


@dataclass(frozen=True)
class Operand:
    """One array of a kernel and the blocks of it that are copied.

    Attributes:
        name: the operand's name in the kernel's signature, as the block specification has it.
        is_output: written instead of read.
        shape, dtype, block: of the array; the block without squeezed axes' extent (1).
        copies: how often a block is copied, None where the kernel copies by itself.
        moved_bytes: copies times the padded bytes of a block.
        least_bytes: every element once, unpadded.
        note: an assumption behind the figures, empty if none.
    """

    name: str
    is_output: bool
    shape: tuple[int, ...]
    dtype: str
    block: tuple[int, ...]
    copies: int | None
    moved_bytes: int
    least_bytes: int
    note: str = ""


@dataclass(frozen=True)
class PallasCall:
    """A kernel as the traced program calls it.

    Attributes:
        name: the kernel's name.
        results: types of its results as StableHLO writes them; with the name they tell kernels apart.
        grid: extents, outermost first.
        operands: arrays and their traffic.
        dot_flop: multiply-adds of the matrix products of one grid step, times two.
        dot_passes_flop: the same, counting each bf16 pass of a float32 product.
        loop_trips: trip counts of the loops in the kernel's body, in program order; None where not constant.
    """

    name: str
    results: tuple[str, ...]
    grid: tuple[int, ...]
    operands: tuple[Operand, ...]
    dot_flop: int
    dot_passes_flop: int
    loop_trips: tuple[int | None, ...] = field(default=())

    @property
    def steps(self) -> int:
        """Grid steps of one launch."""
        return math.prod(self.grid)

    @property
    def moved_bytes(self) -> int:
        """Bytes through HBM of one launch."""
        return sum(operand.moved_bytes for operand in self.operands)

    @property
    def least_bytes(self) -> int:
        """Bytes of every array once, unpadded."""
        return sum(operand.least_bytes for operand in self.operands)

    @property
    def notes(self) -> tuple[str, ...]:
        """The assumptions behind the traffic, each once."""
        return tuple(dict.fromkeys(f"{o.name}: {o.note}" for o in self.operands if o.note))


def pallas_calls(closed: Any, arguments: Sequence[Any], chip: Chip) -> list[PallasCall]:
    """Every distinct kernel of a traced program.

    Args:
        closed: the program's closed jaxpr.
        arguments: its flat arguments; numpy or jax arrays count as known values, anything else as unknown.
        chip: whose HBM layout counts.

    Returns:
        One entry per kernel, in program order.

    Raises:
        ValueError: two different kernels share a name and the types of their results.
    """
    known = [a if isinstance(a, np.ndarray | jax.Array) else UNKNOWN for a in arguments]
    calls: dict[tuple[str, tuple[str, ...]], tuple[str, PallasCall]] = {}
    with jax.default_device(jax.devices("cpu")[0]):
        for eqn, values in _Propagation().run(closed.jaxpr, list(closed.consts), known):
            identity = f"{eqn.params['grid_mapping']} {[v.aval for v in eqn.invars]} {eqn.params['jaxpr']}"
            key = kernel_name(eqn), tuple(_tensor_type(var.aval) for var in eqn.outvars)
            if key not in calls:
                calls[key] = (identity, _describe(eqn, values, chip))
            elif calls[key][0] != identity:
                raise ValueError(f"name: two different kernels are both called {key[0]!r}; give them distinct names")
    return [call for _, call in calls.values()]


def kernel_name(eqn: Any) -> str:
    """The name that ``pallas_call`` was given, or that of the kernel function."""
    return str(eqn.params.get("name") or eqn.params["jaxpr"].debug_info.func_name)


def _tensor_type(aval: Any) -> str:
    """How StableHLO writes an array's type, e.g. ``16x128xbf16``."""
    kind = str(np.dtype(aval.dtype)).replace("float", "f").replace("int", "i").replace("bool", "i1")
    return "x".join([*map(str, aval.shape), kind])


class _Propagation:
    """Evaluates what follows from known inputs; everything else is UNKNOWN."""

    MOST_ELEMENTS = 1 << 22  # tables are small; larger values are not worth evaluating here

    def run(self, jaxpr: Any, consts: list[Any], inputs: list[Any]) -> Iterator[tuple[Any, list[Any]]]:
        self.outputs: list[Any] = []
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env.get(atom, UNKNOWN)

        for eqn in jaxpr.eqns:
            values = [read(atom) for atom in eqn.invars]
            if eqn.primitive.name == "pallas_call":
                yield eqn, values
                continue
            inner = _inlined(eqn)
            if inner is not None:
                nested = _Propagation()
                yield from nested.run(inner[0], inner[1], values)
                outputs = nested.outputs
            else:
                for sub in _subjaxprs(eqn):  # loops and branches: their kernels, with unknown operands
                    yield from _Propagation().run(sub, [UNKNOWN] * len(sub.constvars), [UNKNOWN] * len(sub.invars))
                outputs = self._evaluate(eqn, values)
            env.update(zip(eqn.outvars, outputs, strict=True))
        self.outputs = [read(atom) for atom in jaxpr.outvars]

    def _evaluate(self, eqn: Any, values: list[Any]) -> list[Any]:
        size = max(
            (math.prod(v.aval.shape) for v in (*eqn.invars, *eqn.outvars) if hasattr(v.aval, "shape")), default=0
        )
        if any(value is UNKNOWN for value in values) or size > self.MOST_ELEMENTS or eqn.effects:
            return [UNKNOWN] * len(eqn.outvars)
        result = eqn.primitive.bind(*values, **eqn.params)
        return list(result) if eqn.primitive.multiple_results else [result]


def _inlined(eqn: Any) -> tuple[Any, list[Any]] | None:
    """The open jaxpr and constants that a call-like equation stands for, or None."""
    if eqn.primitive.name not in _INLINED:
        return None
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in eqn.params:
            inner = eqn.params[key]
            return (inner.jaxpr, list(inner.consts)) if hasattr(inner, "consts") else (inner, [])
    return None


def _subjaxprs(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(item, "eqns"):
                yield item
            elif hasattr(getattr(item, "jaxpr", None), "eqns"):
                yield item.jaxpr


def _describe(eqn: Any, values: list[Any], chip: Chip) -> PallasCall:
    mapping = eqn.params["grid_mapping"]
    grid = tuple(int(extent) for extent in mapping.grid)
    tables = values[: mapping.num_index_operands]
    avals = [v.aval for v in eqn.invars[mapping.num_index_operands :]] + [v.aval for v in eqn.outvars]
    flop, passes = _dot_flop(eqn.params["jaxpr"])
    operands = [
        _operand(block, aval, grid, tables, number >= mapping.num_inputs, chip)
        for number, (block, aval) in enumerate(zip(mapping.block_mappings, avals, strict=False))
    ]
    return PallasCall(
        name=kernel_name(eqn),
        results=tuple(_tensor_type(var.aval) for var in eqn.outvars),
        grid=grid,
        operands=tuple(operands),
        dot_flop=flop,
        dot_passes_flop=passes,
        loop_trips=tuple(_loop_trips(eqn.params["jaxpr"])),
    )


def _operand(
    block_mapping: Any, aval: Any, grid: tuple[int, ...], tables: list[Any], is_output: bool, chip: Chip
) -> Operand:
    shape, dtype = tuple(aval.shape), np.dtype(aval.dtype)
    block = tuple(_extent(extent) for extent in block_mapping.block_shape)
    space = str(getattr(block_mapping.block_aval, "memory_space", None) or "").lower()
    copies: int | None
    if any(word in space for word in ("any", "hbm", "semaphore")):
        copies, moved, note = None, padded_bytes(shape, dtype, chip), "copied by the kernel itself, counted once"
    else:
        copies, note = _block_copies(block_mapping, grid, tables)
        moved = copies * padded_bytes(block, dtype, chip)
    least = math.prod(shape) * dtype.itemsize
    return Operand(str(block_mapping.origin), is_output, shape, str(dtype), block, copies, moved, least, note)


def _extent(extent: Any) -> int:
    if isinstance(extent, int):
        return extent
    return int(getattr(extent, "block_size", 1))  # a squeezed axis has no size of its own


def padded_bytes(shape: Sequence[int], dtype: np.dtype, chip: Chip) -> int:
    """Bytes of an array in HBM: lanes to 128, the axis before them to a tile that shrinks to the axis."""
    if not shape:
        return dtype.itemsize
    extents = list(shape)
    extents[-1] = -(-extents[-1] // _LANES) * _LANES
    if len(extents) > 1:
        tile = 8 * (max(1, 4 // dtype.itemsize) if chip.packed_tiles else 1)
        while tile > 1 and tile // 2 >= extents[-2]:
            tile //= 2
        extents[-2] = -(-extents[-2] // tile) * tile
    return math.prod(extents) * dtype.itemsize


def _block_copies(block_mapping: Any, grid: tuple[int, ...], tables: list[Any]) -> tuple[int, str]:
    """How often the block index changes over the grid, first copy included, and the assumption made if any."""
    steps = math.prod(grid)
    if not grid:
        return 1, ""
    index_map = block_mapping.index_map_jaxpr.jaxpr
    table_vars = set(index_map.invars[len(grid) :])
    reads_table = any(
        atom in table_vars for eqn in index_map.eqns for atom in eqn.invars if not isinstance(atom, Literal)
    )
    if reads_table and any(table is UNKNOWN for table in tables):
        return steps, "its index comes from a table that is not known; counted as changing at every step"
    concrete = [
        np.zeros(var.aval.shape, var.aval.dtype) if table is UNKNOWN else np.asarray(table)
        for table, var in zip(tables, index_map.invars[len(grid) :], strict=True)
    ]
    points = np.indices(grid, dtype=np.int32).reshape(len(grid), -1)

    def starts(*point: Any) -> Any:
        return block_mapping.compute_start_indices_interpret(point, *concrete)

    indices = [np.broadcast_to(np.asarray(index), (steps,)) for index in jax.jit(jax.vmap(starts))(*points)]
    changes = sum((np.diff(index) != 0 for index in indices), start=np.zeros(steps - 1, bool))
    return 1 + int(np.count_nonzero(changes)), ""


def _dot_flop(jaxpr: Any) -> tuple[int, int]:
    """Flop of the matrix products of one grid step: as written, and counting the passes of float32 products."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    highest, high = jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGH
    flop = weighted = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            left, right = (v.aval for v in eqn.invars[:2])
            (contracted, _), _ = eqn.params["dimension_numbers"]
            product = 2 * math.prod(left.shape[i] for i in contracted) * math.prod(eqn.outvars[0].aval.shape)
            precision = eqn.params.get("precision")
            precision = precision[0] if isinstance(precision, tuple) else precision
            wide = max(left.dtype.itemsize, right.dtype.itemsize) == 4
            flop += product
            weighted += product * ({highest: 6, high: 3}.get(precision, 1) if wide else 1)
        trips = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        for sub in _subjaxprs(eqn):
            inner, inner_weighted = _dot_flop(sub)
            flop += trips * inner
            weighted += trips * inner_weighted
    return flop, weighted


def _loop_trips(jaxpr: Any) -> Iterator[int | None]:
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield int(eqn.params["length"]) // max(1, int(eqn.params.get("unroll", 1)))
        elif eqn.primitive.name == "while":
            yield None
        for sub in _subjaxprs(eqn):
            yield from _loop_trips(sub)
