"""Cases of the exchange, drawn or named; all in a case is plain data, so that it prints and pickles."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st

from ops.moe_comm_gpu.contract import Config
from reference import moe_cases
from reference.moe_cases import Shape


@dataclass(frozen=True)
class Case:
    """One exchange, and the batches that go through it.

    Attributes:
        shape: sizes.
        num_tokens: tokens of each group.
        routing: ``"random"``, ``"dropped"`` (a third of the choices), ``"one_expert"`` (all to the last),
            ``"duplicates"``, ``"out_of_range"``.
        in_dtype, out_dtype: names of torch dtypes.
        scale_block: elements per scale, or None.
        id_dtype: name of a torch dtype.
        layout, row_multiple, mode: as in the config.
        weights_early: weights go to dispatch rather than to combine.
        bias, accumulate: what combine adds.
        batches: dispatched one after another before the first is combined.
        gradient: check gradients as well.
        seed: of everything random.
    """

    shape: Shape
    num_tokens: tuple[int, ...]
    routing: str = "random"
    in_dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    scale_block: int | None = None
    id_dtype: str = "int32"
    layout: str = "expert_major"
    row_multiple: int = 1
    mode: str = "per_rank"
    weights_early: bool = False
    bias: bool = False
    accumulate: bool = False
    batches: int = 1
    gradient: bool = False
    seed: int = 0

    def config(self, rank: int = 0) -> Config:
        """The exchange's config with just the room that the routing needs."""
        shape = self.shape
        rows = shape.max_num_tokens * shape.num_groups
        capacity = None
        if self.routing == "duplicates":
            capacity = rows * shape.experts_per_token
            if self.layout == "contiguous":
                capacity += shape.num_experts * self.row_multiple
        return Config(
            max_num_tokens=shape.max_num_tokens,
            num_experts=shape.num_experts,
            experts_per_token=shape.experts_per_token,
            hidden=shape.hidden,
            world_size=shape.world_size,
            rank=rank,
            dp_size=shape.dp_size,
            in_dtype=getattr(torch, self.in_dtype),
            out_dtype=getattr(torch, self.out_dtype),
            scale_block=self.scale_block,
            layout=self.layout,
            row_multiple=self.row_multiple,
            capacity=capacity,
            expert_map=shape.expert_map,
            mode=self.mode,
            num_buffer_sets=self.batches,
            differentiable=self.gradient,
            timeout_s=60,
        )

    def ids(self, group: int, batch: int = 0) -> np.ndarray:
        """Experts of a group's tokens ``[T, J]`` int64."""
        shape, count, seed = self.shape, self.num_tokens[group], self.seed + batch
        ids = moe_cases.random_ids(shape, count, seed, group, dropped=1 / 3 if self.routing == "dropped" else 0)
        if self.routing == "one_expert":
            ids[:] = -1
            ids[:, 0] = shape.num_experts - 1
        if self.routing == "duplicates":
            ids[:, :] = ids[:, :1]
        if self.routing == "out_of_range":
            ids[::2, -1] = shape.num_experts + ids[::2, -1]
        return ids

    def weights(self, group: int, batch: int = 0) -> np.ndarray:
        """Weights of a group's choices ``[T, J]``."""
        return moe_cases.random_weights(self.shape, self.num_tokens[group], self.seed + batch, group)

    def global_ids(self, group: int) -> np.ndarray:
        """Ids that tell the tokens of the world apart."""
        return moe_cases.global_ids(self.shape, group, self.num_tokens[group])

    def payload(self, group: int, batch: int = 0) -> np.ndarray:
        """Tokens of a group ``[T, D]``; each row tells its token and batch."""
        return moe_cases.payload(self.global_ids(group), self.shape.hidden, layer=batch + self.seed % 32)

    def scales(self, group: int) -> np.ndarray | None:
        """Block scales of a group's tokens ``[T, S]``; each tells its token."""
        if self.scale_block is None:
            return None
        return moe_cases.payload_scales(self.global_ids(group), -(-self.shape.hidden // self.scale_block))

    def addend(self, group: int, what: str) -> np.ndarray:
        """Bias, earlier output or cotangent of a group ``[T, D]``."""
        salt = {"bias": 1, "accumulate": 2, "cotangent": 3}[what]
        return moe_cases.random_floats(
            (self.num_tokens[group], self.shape.hidden), 1000 * self.seed + 10 * group + salt
        )

    def small(self) -> bool:
        """Whether an emulation, at a fraction of a millisecond a message, can run it quickly."""
        return max(self.num_tokens) <= 16 and 16 <= self.shape.hidden <= 256 and self.shape.world_size <= 4


def expert_factor(expert: int) -> float:
    """What an expert multiplies its rows by: exact in every type, different for neighbours."""
    return (1.0, 2.0, -1.0, 0.5, -2.0, 4.0, -0.5)[expert % 7]


def full(shape: Shape | str, **changes: object) -> Case:
    """The case in which every group sends all the tokens it may."""
    shape = moe_cases.SHAPES[shape] if isinstance(shape, str) else shape
    return replace(Case(shape, (shape.max_num_tokens,) * shape.num_groups), **changes)


@st.composite
def shapes(draw: st.DrawFn, hiddens: tuple[int, ...]) -> Shape:
    """Small shapes over 1, 2 or 4 ranks, with every kind of group, and experts that do not divide evenly."""
    world_size = draw(st.sampled_from([1, 2, 4]))
    num_experts = draw(st.integers(1, 9))
    return Shape(
        num_experts=num_experts,
        experts_per_token=draw(st.integers(1, min(4, num_experts))),
        hidden=draw(st.sampled_from(hiddens)),
        max_num_tokens=draw(st.integers(1, 8)),
        world_size=world_size,
        dp_size=draw(st.sampled_from([size for size in (1, 2, 4) if world_size % size == 0])),
        expert_map=draw(
            st.none() | st.tuples(*[st.integers(0, world_size - 1)] * num_experts),
        ),
    )


@st.composite
def cases(draw: st.DrawFn, gradient: bool = False) -> Case:
    """Everything that may vary, varied together."""
    # Rows of 7 bytes leave nothing aligned; a gradient of four weights needs 16 elements.
    shape = draw(shapes((16, 40, 136) if gradient else (7, 16, 40, 136)))
    wide = ["bfloat16", "float16", "float32"]
    layout = draw(st.sampled_from(["expert_major", "contiguous"]))
    return Case(
        shape=shape,
        num_tokens=tuple(draw(st.integers(0, shape.max_num_tokens)) for _ in range(shape.num_groups)),
        routing=draw(st.sampled_from(["random", "dropped", "one_expert", "duplicates", "out_of_range"])),
        in_dtype=draw(st.sampled_from(wide if gradient else [*wide, "float8_e4m3fn", "float8_e5m2"])),
        out_dtype=draw(st.sampled_from(wide)),
        scale_block=draw(st.sampled_from([None, 8, 128])),
        id_dtype=draw(st.sampled_from(["int32", "int64", "uint32"])),
        layout=layout,
        row_multiple=1 if layout == "expert_major" else draw(st.sampled_from([1, 4, 16])),
        mode=draw(st.sampled_from(["per_rank", "per_expert"])),
        weights_early=draw(st.booleans()),
        bias=draw(st.booleans()),
        accumulate=not gradient and draw(st.booleans()),
        batches=draw(st.sampled_from([1, 2])),
        gradient=gradient,
        seed=draw(st.integers(0, 31)),
    )
