"""Configuration of the Pallas TPU kernels: what can be chosen, what is legal, and the choice per chip and shape.

:func:`why_illegal` is the single statement of which configurations the kernels accept; launchers, the tuner and the
tests all ask it. :func:`choose` takes the stored choice of the offline tuner (``tuned.json``: data per chip and shape
class, read on first use), for the rest and for a class nobody tuned a rule, and makes it fit the shape. Importing this
module touches no device.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, Literal, get_args

SubBlock = Literal["clamped", "tree"]
Backward = Literal["fused", "split"]

CHUNK = 64
MAX_KEY_DIM = 256
LANES = 128
MIB = 1 << 20
# Log decay of a token, in nats, that the backward's blocks with one anchor carry in float32 without a floor, with room.
STEEPEST_ANCHORED = -8.0

# VMEM of one TensorCore, and how much of it a kernel may ask for: the compiler keeps some for itself.
VMEM_BYTES: Mapping[str, int] = {"v5e": 128 * MIB, "v6e": 128 * MIB, "v5p": 64 * MIB, "tpu7x": 64 * MIB}
_USABLE_VMEM = 15 / 16
# Without a known chip (interpret mode) the smallest VMEM counts, so that what runs there compiles everywhere.
_ANY_CHIP_VMEM = min(VMEM_BYTES.values())


@dataclass(frozen=True)
class Config:
    """How the kernels cut and schedule a problem. Every legal configuration computes the same function, up to floors.

    Attributes:
        chunks_per_step: chunks of one grid step; a *tile* has ``chunks_per_step * chunk`` rows. The forward and the
            backward share it, because the residuals are laid out by tile.
        heads_per_step: heads of one forward grid step, interleaved in program order.
        backward_heads_per_step: the same for the backward; None for ``heads_per_step``.
        sub_block: where the decay between two rows is split in the backward: ``"clamped"`` (at the first row of small
            blocks, with a floor where the gate needs one) or ``"tree"`` (between the two rows down to blocks of 4; more
            work, a floor only beyond 40 nats a token).
        rematerialize_for_backward: recompute what the backward needs instead of saving it.
        backward: ``"fused"`` for one kernel, ``"split"`` for three that pass their intermediates through HBM.
        chunk: tokens a chunk.
    """

    chunks_per_step: int = 4
    heads_per_step: int = 16
    backward_heads_per_step: int | None = None
    sub_block: SubBlock = "clamped"
    rematerialize_for_backward: bool = False
    backward: Backward = "fused"
    chunk: int = CHUNK

    @property
    def tile(self) -> int:
        """Rows of one grid step."""
        return self.chunk * self.chunks_per_step

    @property
    def backward_heads(self) -> int:
        """Heads of one backward grid step."""
        return self.heads_per_step if self.backward_heads_per_step is None else self.backward_heads_per_step


@dataclass(frozen=True)
class ProblemShape:
    """What the choice of a configuration may depend on.

    Attributes:
        heads, batch, tokens, key_dim, value_dim: H, B, T, K, V.
        dtype: compute dtype of the kernels, ``"bfloat16"`` or ``"float32"``.
        gate_dtype: dtype of the gate; None for the compute dtype.
        segmented: whether segment ids are given.
        lower_bound: bound of the log decay of a token in nats, None if there is none.
    """

    heads: int
    batch: int
    tokens: int
    key_dim: int
    value_dim: int
    dtype: str = "bfloat16"
    segmented: bool = False
    lower_bound: float | None = None
    gate_dtype: str | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of one element in the compute dtype."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def shape_class(self) -> str:
        """Key of ``tuned.json``: compute dtype, lanes of K and V, heads that can share a step."""
        key, value = round_up(self.key_dim, LANES), round_up(self.value_dim, LANES)
        return f"{self.dtype} k{key} v{value} h{largest_divisor(self.heads, 16)}"


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def largest_divisor(number: int, at_most: int) -> int:
    """Largest divisor of ``number`` that is at most ``at_most``."""
    return next(d for d in range(min(number, at_most), 0, -1) if number % d == 0)


def vmem_limit_bytes(chip: str | None = None) -> int:
    """VMEM a kernel may ask the compiler for on ``chip``; without a chip, what every supported one has."""
    return int(VMEM_BYTES.get(chip or "", _ANY_CHIP_VMEM) * _USABLE_VMEM)


def why_illegal(config: Config, shape: ProblemShape, chip: str | None = None) -> str | None:
    """Why the kernels refuse ``config`` for ``shape`` on ``chip``, or None if they accept it."""
    if config.chunk != CHUNK:
        return (
            f"chunk: expected {CHUNK}, got {config.chunk}; the saved slab holds two {CHUNK}-wide matrices in 128 lanes"
        )
    if config.chunks_per_step < 1:
        return f"chunks_per_step: expected at least 1, got {config.chunks_per_step}"
    for name, heads in (("heads_per_step", config.heads_per_step), ("backward_heads_per_step", config.backward_heads)):
        if heads < 1 or shape.heads % heads:
            return f"{name}: expected a divisor of the {shape.heads} heads, got {heads}"
    for name, value, choices in (
        ("sub_block", config.sub_block, get_args(SubBlock)),
        ("backward", config.backward, get_args(Backward)),
    ):
        if value not in choices:
            return f"{name}: expected one of {choices}, got {value!r}"
    if not 1 <= shape.key_dim <= MAX_KEY_DIM:
        return f"key dimension: expected 1 to {MAX_KEY_DIM}, got {shape.key_dim}; use the 'xla' backend"
    from ops.kda_tpu.pallas.vmem import vmem_bytes  # loads the kernels, which load this module

    limit = vmem_limit_bytes(chip)
    for kernel, needed in vmem_bytes(config, shape).items():
        if needed > limit:
            return (
                f"the kernel {kernel} needs about {needed / MIB:.0f} MiB of VMEM, {chip or 'every chip'} has "
                f"{limit / MIB:.0f}; lower chunks_per_step or heads_per_step"
            )
    return None


def check(config: Config, shape: ProblemShape, chip: str | None = None) -> Config:
    """Returns ``config`` if legal.

    Raises:
        ValueError: with the reason :func:`why_illegal` gives.
    """
    reason = why_illegal(config, shape, chip)
    if reason:
        raise ValueError(f"config: {reason}")
    return config


@functools.cache
def tuned() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """The tuner's stored cuts, chip -> shape class -> fields of :class:`Config`; read once, on first use."""
    return json.loads(resources.files(__package__).joinpath("tuned.json").read_text())["choices"]


def rule(shape: ProblemShape) -> Config:
    """The configuration for a class nobody tuned.

    64 heads times chunks a step in bfloat16 but at most 8 chunks (more take minutes to compile and save nothing), 16 in
    float32, where products cost six passes and code grows as much.
    Clamping an anchored block errs by more than float32 should, so there it takes a gate that needs no clamp.
    """
    exact = shape.dtype == "float32"
    heads = largest_divisor(shape.heads, 8 if exact else 16)
    clamps = shape.lower_bound is None or shape.lower_bound < STEEPEST_ANCHORED
    return Config(
        chunks_per_step=min(8, max(1, (16 if exact else 64) // heads)),
        heads_per_step=heads,
        sub_block="tree" if exact and clamps else "clamped",
    )


def choose(
    shape: ProblemShape,
    chip: str | None = None,
    *,
    rematerialize_for_backward: bool = False,
    backward: Backward = "fused",
) -> Config:
    """The configuration for ``shape`` on ``chip``: the rule's, cut as tuned for its class, fitted to the shape.

    Fitting never changes the numerics: it lowers ``chunks_per_step`` to the tokens there are, then lowers it and the
    heads a step until the kernels fit the VMEM.

    Args:
        shape: the problem.
        chip: ``"v5e"``, ``"v5p"``, ``"v6e"``, ``"tpu7x"``, another name or None for an unknown one.
        rematerialize_for_backward: the memory policy, which the caller decides.
        backward: one kernel or three, which the caller decides as well.

    Returns:
        A legal configuration.

    Raises:
        ValueError: no configuration is legal for the shape.
    """
    config = replace(rule(shape), **tuned().get(chip or "", {}).get(shape.shape_class, {}))
    chunks = -(-shape.tokens // config.chunk)
    config = replace(
        config,
        rematerialize_for_backward=rematerialize_for_backward,
        backward=backward,
        chunks_per_step=max(1, min(config.chunks_per_step, chunks)),
    )
    while why_illegal(config, shape, chip):
        smaller = _smaller(config, shape)
        if smaller is None:
            return check(config, shape, chip)
        config = smaller
    return config


def _smaller(config: Config, shape: ProblemShape) -> Config | None:
    if config.chunks_per_step > 1:
        return replace(config, chunks_per_step=config.chunks_per_step // 2)
    if max(config.heads_per_step, config.backward_heads) > 1:
        return replace(
            config,
            heads_per_step=largest_divisor(shape.heads, max(1, config.heads_per_step // 2)),
            backward_heads_per_step=largest_divisor(shape.heads, max(1, config.backward_heads // 2)),
        )
    return None


def current_chip() -> str | None:
    """Name of the TPU that the program is traced for, e.g. ``"v6e"``; None off TPU or for an unknown kind."""
    from jax.experimental.pallas import tpu as pltpu

    try:
        version = str(pltpu.get_tpu_info().chip_version)
    except ValueError:  # the device is no TPU that this jax knows
        return None
    name = "tpu7x" if version == "7x" else version
    return name if name in VMEM_BYTES else None
