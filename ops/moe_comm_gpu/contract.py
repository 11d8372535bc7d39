"""What every backend of the exchange agrees on: sizes, placement of experts, layouts, and the rules for arguments.

Letters: R ranks, dp ranks of one data-parallel group (they hold the same tokens), G = R / dp groups, M most tokens of
a group, T tokens of a group in one call, E experts, L experts of a rank, J choices per token, D hidden, S scales per
row, N rows that a rank has room for.

Rules, the same for every backend:

- Expert ``e`` lives on rank ``e // ceil(E / R)``, or on ``expert_map[e]``. A rank numbers its experts by ascending id.
- Token ``t`` of a group is sent by the group's member ``t % dp``.
- An id of -1 (as uint32: 4294967295) drops the choice. Any other id outside ``[0, E)`` drops it too, unless
  ``check_ids`` asks for an error.
- Two equal ids in one token are two choices: two rows, each with its own weight.
- The rows of an expert are ordered by (source rank, token, choice).
- Places that hold no row are left as they were; nothing is ever read from them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
IN_DTYPES = (torch.bfloat16, torch.float16, torch.float32, *FLOAT8)
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ID_DTYPES = (torch.int32, torch.int64, torch.uint32)
DROPPED = -1

_LOCAL_FIELDS = ("rank", "timeout_s")  # may differ between the ranks of one exchange


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and options of one exchange; equal on every rank but for ``rank`` and ``timeout_s``.

    Attributes:
        max_num_tokens: M, most tokens a data-parallel group sends in one call.
        num_experts: E, experts in the whole world; redundant copies count as experts of their own.
        experts_per_token: J, choices per token.
        hidden: D, elements of a row.
        world_size: R.
        rank: this rank.
        dp_size: ranks that hold the same tokens, numbered one after another; divides ``world_size``.
        in_dtype: element type of dispatched rows.
        out_dtype: element type of the rows that experts return, and of combined tokens.
        scale_block: elements of a row that share one float32 scale; None for rows without scales.
        layout: ``"expert_major"``, rows ``[L, capacity, D]``; or ``"contiguous"``, rows ``[capacity, D]``, expert
            after expert.
        row_multiple: contiguous layout: every expert begins at a multiple of it.
        capacity: most rows of one expert (expert-major), or of one rank with its padding (contiguous). None takes the
            most that tokens with distinct ids can need. What happens to more rows depends on ``check_ids``.
        expert_map: rank of every expert; None for blocks of ``ceil(E / R)``.
        mode: what kernel backends send: ``"per_rank"``, a token once to each destination rank, or ``"per_expert"``,
            once to each expert.
        num_buffer_sets: batches that may be between dispatch and the end of combine at the same time.
        differentiable: size buffers so that gradients, which travel the other way, fit as well.
        late_weights: kernel backends, ``"per_rank"``: set aside, when the exchange is made, the memory that it takes to
            give weights to combine and not to dispatch, where a row comes back for each choice. False: the first such
            combine allocates it, all ranks together.
        check_ids: raise for ids outside ``[-1, E)`` rather than drop them, on every rank and before anything is sent;
            and on GPUs, where this alone lets the hosts meet in each dispatch, the same for more rows than
            ``capacity``, for refused arguments of another rank, and for ranks that do not fit together. Costs a look at
            the ids on the host and a meeting of all hosts. Without it, backends other than ``"nvshmem"`` still do all
            but the first; ``"nvshmem"`` writes no row past the capacity, returns zeros for it, and raises only on the
            rank whose experts they are, in the first call that begins after its receive has run, or in close, whichever
            is first, never while a captured graph is replayed; after that the exchange can only be closed.
        timeout_s: seconds after which a wait for other ranks ends in an error that names them.
    """

    max_num_tokens: int
    num_experts: int
    experts_per_token: int
    hidden: int
    world_size: int = 1
    rank: int = 0
    dp_size: int = 1
    in_dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype = torch.bfloat16
    scale_block: int | None = None
    layout: Literal["expert_major", "contiguous"] = "expert_major"
    row_multiple: int = 1
    capacity: int | None = None
    expert_map: tuple[int, ...] | None = None
    mode: Literal["per_rank", "per_expert"] = "per_rank"
    num_buffer_sets: int = 1
    differentiable: bool = False
    late_weights: bool = False
    check_ids: bool = False
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for name in (
            "max_num_tokens", "num_experts", "experts_per_token", "hidden", "world_size", "dp_size", "row_multiple",
            "num_buffer_sets",
        ):  # fmt: skip
            _require_int(name, getattr(self, name), 1)
        _require_int("rank", self.rank, 0)
        if self.scale_block is not None:
            _require_int("scale_block", self.scale_block, 1)
        if self.capacity is not None:
            _require_int("capacity", self.capacity, 1)
        if not self.rank < self.world_size:
            raise ValueError(f"rank: expected less than world_size = {self.world_size}, got {self.rank}")
        if self.world_size % self.dp_size:
            raise ValueError(
                f"dp_size: expected a divisor of world_size = {self.world_size}, got {self.dp_size}; "
                f"groups have equal sizes"
            )
        _require_member("in_dtype", self.in_dtype, IN_DTYPES, TypeError)
        _require_member("out_dtype", self.out_dtype, OUT_DTYPES, TypeError)
        _require_member("layout", self.layout, ("expert_major", "contiguous"))
        _require_member("mode", self.mode, ("per_rank", "per_expert"))
        if self.layout == "expert_major" and self.row_multiple != 1:
            raise ValueError(
                f'row_multiple: expected 1 in layout "expert_major", got {self.row_multiple}; '
                f"choose capacity a multiple of it"
            )
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s: expected a positive number of seconds, got {self.timeout_s}")
        if self.expert_map is not None:
            _check_expert_map(self.expert_map, self.num_experts, self.world_size)

    @property
    def num_groups(self) -> int:
        """G, data-parallel groups."""
        return self.world_size // self.dp_size

    @property
    def group(self) -> int:
        """Index of this rank's data-parallel group."""
        return self.rank // self.dp_size

    @property
    def num_scales(self) -> int:
        """S, float32 scales of a row; 0 without scales."""
        return 0 if self.scale_block is None else -(-self.hidden // self.scale_block)

    @functools.cached_property
    def expert_rank(self) -> tuple[int, ...]:
        """The rank that holds each expert."""
        if self.expert_map is not None:
            return self.expert_map
        block = -(-self.num_experts // self.world_size)
        return tuple(expert // block for expert in range(self.num_experts))

    @functools.cached_property
    def expert_slot(self) -> tuple[int, ...]:
        """The number each expert has on its rank."""
        held = [0] * self.world_size
        slots = []
        for rank in self.expert_rank:
            slots.append(held[rank])
            held[rank] += 1
        return tuple(slots)

    @functools.cached_property
    def num_local_experts(self) -> int:
        """L, the most experts that any rank holds, so that shapes are the same everywhere; surplus slots stay empty."""
        return max(self.expert_slot) + 1

    def local_experts(self, rank: int | None = None) -> tuple[int, ...]:
        """Ids of the experts of ``rank`` (default: this one), ascending: slot l holds the l-th."""
        rank = self.rank if rank is None else rank
        return tuple(expert for expert, owner in enumerate(self.expert_rank) if owner == rank)

    @functools.cached_property
    def row_capacity(self) -> int:
        """``capacity`` or its default: rows of one expert (expert-major) or of one rank (contiguous)."""
        if self.capacity is not None:
            return self.capacity
        sent = self.num_groups * self.max_num_tokens
        if self.layout == "expert_major":
            return sent
        experts = self.num_local_experts
        rows = sent * min(self.experts_per_token, experts)
        return round_up(rows + min(experts, rows) * (self.row_multiple - 1), self.row_multiple)

    @property
    def num_rows(self) -> int:
        """N, rows that a rank has room for, in either layout."""
        return self.row_capacity * (self.num_local_experts if self.layout == "expert_major" else 1)

    @property
    def rows_prefix(self) -> tuple[int, ...]:
        """Leading axes of everything held per row: ``(L, capacity)`` or ``(capacity,)``."""
        return (self.num_local_experts, self.row_capacity) if self.layout == "expert_major" else (self.row_capacity,)

    @property
    def dispatch_itemsize(self) -> int:
        """Most bytes of an element on the way to the experts."""
        return max(self.in_dtype.itemsize, self.out_dtype.itemsize if self.differentiable else 0)

    @property
    def combine_itemsize(self) -> int:
        """Most bytes of an element on the way back."""
        return max(self.out_dtype.itemsize, self.in_dtype.itemsize if self.differentiable else 0)

    def sender(self, group: int, token: int) -> int:
        """Rank that sends a token of a group."""
        return group * self.dp_size + token % self.dp_size

    def shared_fields(self) -> dict[str, str]:
        """Every field that must be equal on all ranks, as text, for comparison before the first call."""
        fields = (field.name for field in dataclasses.fields(self) if field.name not in _LOCAL_FIELDS)
        return {name: str(getattr(self, name)) for name in fields}


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not less than ``number``."""
    return -(-number // multiple) * multiple


def check_same_fields(fields: Sequence[dict[str, str]], rank: int) -> None:
    """The single statement that configurations agree: every rank's :meth:`Config.shared_fields`, seen from ``rank``.

    Raises:
        ValueError: a rank's differ from those of ``rank``.
    """
    own = fields[rank]
    for other, theirs in enumerate(fields):
        name = next((name for name in own | theirs if own.get(name) != theirs.get(name)), None)
        if name is not None:
            raise ValueError(
                f"config: expected the same on every rank, got between rank {rank} (here) and rank {other} (there) "
                f"{name}: {own.get(name)} here, {theirs.get(name)} there"
            )


class Manner(NamedTuple):
    """What has to be the same on every rank in one dispatch.

    Attributes:
        itemsize: bytes of an element that travels.
        weights: whether dispatch is given the weights.
        gradient: whether the tokens' gradient will be asked for, which takes every rank.
    """

    itemsize: int
    weights: bool
    gradient: bool


def check_same_manner(manners: Mapping[int, Manner]) -> None:
    """The single statement that ranks dispatch in the same manner.

    Args:
        manners: by rank.

    Raises:
        ValueError: two differ.
    """
    (first, expected), *others = sorted(manners.items())
    for rank, manner in others:
        if manner != expected:
            raise ValueError(
                f"tokens, weights: expected the same width, weights on all ranks or on none, and tokens that need a "
                f"gradient on all ranks or on none, got {expected} on rank {first} and {manner} on rank {rank}"
            )


def check_tensor(
    name: str,
    tensor: object,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None = None,
) -> torch.Tensor:
    """Returns ``tensor`` if it has the shape (None: any length) and one of the dtypes, on ``device`` if given.

    Raises:
        TypeError: not a tensor, or another dtype.
        ValueError: another shape or device.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(
            f"{name}: expected dtype {expected}, got {str(tensor.dtype).removeprefix('torch.')}; convert it first"
        )
    fits = tensor.dim() == len(shape) and all(
        want is None or want == got for want, got in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: expected shape [{expected}], got {list(tensor.shape)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: expected on {device}, got on {tensor.device}; move it there first")
    return tensor


def check_contiguous(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """As :func:`check_tensor`, for a tensor to be filled.

    Raises:
        TypeError: not a tensor, or another dtype.
        ValueError: another shape or device, or not contiguous.
    """
    check_tensor(name, tensor, shape, dtypes, device)
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tuple(tensor.stride())}; pass another")


def check_bound(bound: object, device: torch.device) -> None:
    """The single statement of what a bound is.

    Raises:
        TypeError: not a tensor of integers.
        ValueError: not one number, or on another device.
    """
    if not isinstance(bound, torch.Tensor) or bound.dtype not in (torch.int32, torch.int64, torch.uint32):
        got = bound.dtype if isinstance(bound, torch.Tensor) else type(bound).__name__
        raise TypeError(f"bound: expected a tensor of one int32, int64 or uint32, got {got}; make it torch.tensor([n])")
    if bound.numel() != 1:
        raise ValueError(f"bound: expected one integer, got a tensor of shape {list(bound.shape)}")
    if bound.device != device:
        raise ValueError(f"bound: expected on {device}, beside the tokens, got on {bound.device}; move it there first")


def check_num_tokens(name: str, got: int, config: Config) -> None:
    """The single statement of how many tokens fit.

    Raises:
        ValueError: more than ``max_num_tokens``.
    """
    if got > config.max_num_tokens:
        raise ValueError(
            f"{name}: expected at most max_num_tokens = {config.max_num_tokens} tokens, got {got}; "
            f"send fewer at a time or make the exchange with a larger max_num_tokens"
        )


def same_width(dtype: torch.dtype, among: tuple[torch.dtype, ...]) -> tuple[torch.dtype, ...]:
    """The dtypes of ``among`` as wide as ``dtype``, which comes first: buffers are sized in bytes."""
    return (dtype, *(other for other in among if other.itemsize == dtype.itemsize and other != dtype))


def normalise_ids(ids: torch.Tensor, num_experts: int, bound: torch.Tensor | None = None) -> torch.Tensor:
    """Ids as contiguous int32 with every dropped choice as -1.

    Args:
        ids: expert ids ``[T, J]``, int32, int64 or uint32.
        num_experts: E.
        bound: number of leading tokens that count, one integer on the ids' device; None for all.
    """
    wide = ids.to(torch.int64)
    kept = (wide >= 0) & (wide < num_experts)
    if bound is not None:
        rows = torch.arange(ids.shape[0], device=ids.device)[:, None]
        kept &= rows < bound.to(torch.int64).reshape(())
    return torch.where(kept, wide, DROPPED).to(torch.int32)


def check_id_range(ids: torch.Tensor, num_experts: int) -> None:
    """Looks at the ids on the host.

    Raises:
        ValueError: an id outside ``[-1, E)``; the message names the first.
    """
    wide = ids.to(torch.int64)
    if ids.dtype == torch.uint32:
        wide = torch.where(wide == 2**32 - 1, DROPPED, wide)
    bad = (wide < DROPPED) | (wide >= num_experts)
    if bool(bad.any()):
        token, choice = (int(index) for index in bad.nonzero()[0])
        raise ValueError(
            f"ids: expected -1 (dropped) or 0 to {num_experts - 1}, got {int(wide[token, choice])} at token {token}, "
            f"choice {choice}"
        )


def check_capacity(config: Config, rows_of_expert: Sequence[int]) -> None:
    """The single statement of what a rank has room for.

    Args:
        config: of the exchange.
        rows_of_expert: rows of every expert of the world ``[E]``.

    Raises:
        ValueError: one expert's rows, or one rank's with their padding, exceed ``capacity``.
    """
    if config.layout == "expert_major":
        worst = max(range(config.num_experts), key=rows_of_expert.__getitem__)
        needed, whose = rows_of_expert[worst], f"expert {worst}"
    else:
        padded = [0] * config.world_size
        for rank, rows in zip(config.expert_rank, rows_of_expert, strict=True):
            padded[rank] += round_up(rows, config.row_multiple)
        worst = max(range(config.world_size), key=padded.__getitem__)
        needed, whose = padded[worst], f"rank {worst} with padding to {config.row_multiple}"
    if needed > config.row_capacity:
        raise ValueError(
            f"capacity: expected at least {needed}, the rows of {whose}, got {config.row_capacity}; nothing was sent; "
            f"make the exchange with a larger capacity"
        )


def quantise(tokens: torch.Tensor, dtype: torch.dtype, scale_block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as fp8 with a float32 scale a block: ``max |x| / largest fp8`` (1 for zeros), ``row = x / scale``.

    Args:
        tokens: ``[T, D]``, a floating dtype.
        dtype: the fp8 type.
        scale_block: elements per scale; the last block may be shorter.

    Returns:
        The rows ``[T, D]`` and their scales ``[T, S]``; ``row * scale`` restores the values.
    """
    num_tokens, hidden = tokens.shape
    num_scales = -(-hidden // scale_block)
    blocks = torch.nn.functional.pad(tokens.float(), (0, num_scales * scale_block - hidden))
    blocks = blocks.reshape(num_tokens, num_scales, scale_block)
    largest = torch.finfo(dtype).max
    peak = blocks.abs().amax(dim=-1)
    scales = torch.where(peak > 0, peak / largest, torch.ones_like(peak))
    rows = (blocks / scales[..., None]).clamp(-largest, largest).to(dtype)
    return rows.reshape(num_tokens, -1)[:, :hidden].contiguous(), scales


def _require_int(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")


def _require_member(name: str, value: object, members: tuple[object, ...], error: type[Exception] = ValueError) -> None:
    if value not in members:
        raise error(f"{name}: expected one of {', '.join(map(str, members))}, got {value}")


def _check_expert_map(expert_map: object, num_experts: int, world_size: int) -> None:
    if not isinstance(expert_map, tuple):
        raise TypeError(f"expert_map: expected a tuple of ranks, got {type(expert_map).__name__}")
    if len(expert_map) != num_experts:
        raise ValueError(f"expert_map: expected one rank for each of {num_experts} experts, got {len(expert_map)}")
    for expert, rank in enumerate(expert_map):
        if not isinstance(rank, int) or not 0 <= rank < world_size:
            raise ValueError(f"expert_map: expected ranks 0 to {world_size - 1}, got {rank!r} for expert {expert}")
