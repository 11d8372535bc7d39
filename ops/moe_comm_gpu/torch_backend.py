"""The exchange over torch.distributed: gloo on CPUs, NCCL on GPUs.

A dispatch is one gather of counts, after which every rank knows whether the call can go ahead anywhere, and one
all-to-all. A token travels once to each rank that holds one of its experts, as bytes, padded to whole words::

    payload [D] | scales [S] float32 | token int32 | slot of choice j here, or -1 [J] int32 | weights [J] float32

A combine is one all-to-all that returns a row per choice; the sender of a token forms its float32 sum. Groups of ranks
that hold the same tokens share their members' sums in another one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ops.moe_comm_gpu import contract, exchange
from ops.moe_comm_gpu.batch import CombineRequest, DispatchRequest, Handle
from ops.moe_comm_gpu.collectives import Ranks, Traffic
from ops.moe_comm_gpu.contract import Config, Manner

_WORD = torch.int64
_HEADER = ("refused", "tokens", *contract.Manner._fields)  # then rows for each rank [R], rows of each expert [E]


@dataclass(eq=False)
class _Routes:
    """Who gets what, as both sides of one batch know it.

    "Pairs" are kept choices: at the source ordered by (destination rank, token, choice), at the destination by
    (source rank, token, choice), which is the same order for any two ranks.
    """

    wait: Callable[[], Tensor] | None  # None once received, so that the handle does not keep the transfer's memory
    tokens_received: list[int]  # from each rank
    pair_position: Tensor  # [T, J] place among the source's pairs, -1 for choices that this rank does not send
    pairs_sent: list[int]  # to each rank
    expert_counts: Tensor  # [L] rows of each local expert
    pairs_received: list[int] | None = None  # from each rank
    places: Tensor | None = None  # [pairs received] row of handle.rows, seen flat


class Exchange(exchange.Exchange):
    """Dispatch and combine over torch.distributed.

    Args:
        config: of the exchange.
        group: process group of its ``world_size`` ranks; None for the default one. A world of one needs none.
    """

    name: ClassVar[str] = "torch"
    reuses_handles: ClassVar[bool] = True
    unbounded_batches: ClassVar[bool] = True

    def __init__(self, config: Config, group: Any = None) -> None:
        super().__init__(config)
        self._ranks = Ranks(config, group)
        self._expert_rank = torch.tensor(config.expert_rank)
        self._expert_slot = torch.tensor(config.expert_slot)

    @property
    def traffic(self) -> Traffic:
        """Payload that this rank has sent to others so far."""
        return self._ranks.traffic

    def _dispatch_send(self, request: DispatchRequest) -> _Routes:
        config, device = self.config, request.tokens.device
        self._to(device)
        ids = request.ids.to(torch.int64)
        mine = torch.arange(len(ids), device=device) % config.dp_size == config.rank % config.dp_size
        kept = (ids >= 0) & mine[:, None]
        expert = ids.clamp(min=0)
        rank = torch.where(kept, self._expert_rank[expert], -1)
        goes_to = (rank[:, :, None] == torch.arange(config.world_size, device=device)).any(dim=1)
        tables = self._agree(request, goes_to.sum(dim=0), torch.bincount(ids[kept], minlength=config.num_experts))
        tokens_for, rows_of = tables
        destination, token = goes_to.t().nonzero(as_tuple=True)
        slots = torch.where(rank[token] == destination[:, None], self._expert_slot[expert[token]], -1)
        packed = _pack(request, token, slots)
        wait = self._ranks.all_to_all(packed, tokens_for[config.rank].tolist(), tokens_for[:, config.rank].tolist())
        pair_rank = rank[kept]
        order = torch.argsort(pair_rank, stable=True)
        position = torch.full_like(ids, -1)
        position[kept] = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=device))
        return _Routes(
            wait=wait,
            tokens_received=tokens_for[:, config.rank].tolist(),
            pair_position=position,
            pairs_sent=torch.bincount(pair_rank, minlength=config.world_size).tolist(),
            expert_counts=rows_of,
        )

    def _dispatch_recv(self, request: DispatchRequest, handle: Handle) -> None:
        config, routes = self.config, request.state
        arrived = routes.wait()
        routes.wait = None
        device = arrived.device
        payload, scales, token, slots, weights = _unpack(arrived, request, config)
        handle.tokens_per_expert.copy_(routes.expert_counts)
        padded = -(-routes.expert_counts // config.row_multiple) * config.row_multiple
        if config.layout == "expert_major":
            padded = torch.full_like(padded, config.row_capacity)
        handle.offsets[0] = 0
        handle.offsets[1:] = torch.cumsum(padded, dim=0)

        row, choice = (slots >= 0).nonzero(as_tuple=True)
        order = torch.argsort(slots[row, choice], stable=True)
        row_by_expert, choice_by_expert = row[order], choice[order]
        starts = torch.cumsum(routes.expert_counts, dim=0) - routes.expert_counts
        shift = (handle.offsets[:-1].cpu() - starts).to(device)
        place = torch.arange(len(order), device=device) + shift[slots[row, choice][order]]

        sender = torch.arange(config.world_size, device=device).repeat_interleave(
            torch.tensor(routes.tokens_received, device=device)
        )
        for table, values in (
            (handle.source_rank, sender[row_by_expert]),
            (handle.source_token, token[row_by_expert]),
            (handle.source_choice, choice_by_expert),
        ):
            table.fill_(-1).view(-1)[place] = values.to(torch.int32)
        _place(_bytes(handle.rows), place, payload, row_by_expert)
        if handle.scales is not None:
            _place(_bytes(handle.scales), place, scales, row_by_expert)
        if handle.row_weights is not None:
            handle.row_weights.zero_().view(-1)[place] = weights[row_by_expert, choice_by_expert]
        routes.places = torch.empty_like(place).scatter_(0, order, place)
        routes.pairs_received = torch.bincount(sender[row], minlength=config.world_size).tolist()
        handle.state = routes

    def _combine_send(self, request: CombineRequest) -> Callable[[], Tensor]:
        self._ranks.arrive("combine")
        return self._send_back(request.handle.state, _bytes(request.expert_rows))

    def _combine_recv(self, request: CombineRequest, out: Tensor, bias: Tensor | None, accumulate: bool) -> None:
        routes, dtype = request.handle.state, request.expert_rows.dtype
        arrived = request.state().view(dtype)
        total = out.new_zeros(out.shape, dtype=torch.float32)
        for choice in range(self.config.experts_per_token):
            position = routes.pair_position[:, choice]
            (token,) = (position >= 0).nonzero(as_tuple=True)
            rows = arrived[position[token]].float()
            total[token] += rows if request.weights is None else rows * request.weights[token, choice, None]
        total = self._share(total)
        if bias is not None:
            total += bias.float()
        if accumulate:
            total += out.float()
        out.copy_(total)

    def _return_scalars(self, handle: Handle, values: Tensor) -> Tensor:
        self._ranks.arrive("gradient of weights")
        routes = handle.state
        arrived = self._send_back(routes, _bytes(values.float()[:, None]))().view(torch.float32)[:, 0]
        returned = values.new_zeros(routes.pair_position.shape, dtype=torch.float32)
        sent = routes.pair_position >= 0
        returned[sent] = arrived[routes.pair_position[sent]]
        return self._share(returned)

    def _close(self) -> None:
        self._ranks.close()

    def _announce_refusal(self, error: Exception) -> None:
        self._ranks.arrive("dispatch")
        self._ranks.refuse(str(error))
        width = len(_HEADER) + self.config.world_size + self.config.num_experts
        try:
            self._ranks.gather(torch.tensor([1] + [0] * (width - 1)))
        except (TimeoutError, RuntimeError) as failure:
            error.add_note(f"The other ranks could not be told: {failure}")

    def _agree(self, request: DispatchRequest, tokens_for: Tensor, rows_of: Tensor) -> tuple[Tensor, Tensor]:
        """Compares what all ranks are about to send before anything is sent.

        Returns:
            Tokens from each rank to each rank ``[R, R]``, and rows of each local expert ``[L]``, on the host.
        """
        config = self.config
        self._ranks.arrive("dispatch")
        head = torch.tensor([0, len(request.tokens), *map(int, request.manner)])
        table = self._ranks.gather(torch.cat([head, tokens_for.cpu(), rows_of.cpu()]))
        heads, counts = table[:, : len(_HEADER)].tolist(), table[:, len(_HEADER) :]
        refusing = [rank for rank, head in enumerate(heads) if head[0]]
        if refusing:
            self._ranks.raise_refusals(refusing)
        for rank, (_, num_tokens, *_) in enumerate(heads):
            peer = rank - rank % config.dp_size
            if num_tokens != heads[peer][1]:
                raise ValueError(
                    f"tokens: expected as many on every rank of a group, got {heads[peer][1]} on rank {peer} and "
                    f"{num_tokens} on rank {rank}"
                )
        contract.check_same_manner(
            {
                rank: Manner(size, bool(weights), bool(gradient))
                for rank, (*_, size, weights, gradient) in enumerate(heads)
            }
        )
        rows_of_all = counts[:, config.world_size :].sum(dim=0).tolist()
        contract.check_capacity(config, rows_of_all)
        local = [rows_of_all[expert] for expert in config.local_experts()]
        local += [0] * (config.num_local_experts - len(local))
        return counts[:, : config.world_size], torch.tensor(local)

    def _send_back(self, routes: _Routes, rows: Tensor) -> Callable[[], Tensor]:
        assert routes.places is not None
        assert routes.pairs_received is not None
        return self._ranks.all_to_all(_pick(rows, routes.places), routes.pairs_received, routes.pairs_sent)

    def _share(self, rows: Tensor) -> Tensor:
        """Fills in the rows ``[T, n]`` float32 of tokens that other members of the group sent."""
        config = self.config
        if config.dp_size == 1:
            return rows
        member, first = config.rank % config.dp_size, config.rank - config.rank % config.dp_size
        shares = [len(range(other, len(rows), config.dp_size)) for other in range(config.dp_size)]
        sent, received = [0] * config.world_size, [0] * config.world_size
        sent[first : first + config.dp_size] = [shares[member]] * config.dp_size
        received[first : first + config.dp_size] = shares
        own = rows[member :: config.dp_size]
        arrived = self._ranks.all_to_all(_bytes(own.repeat(config.dp_size, 1)), sent, received)().view(rows.dtype)
        for other, part in enumerate(arrived.split(shares)):
            rows[other :: config.dp_size] = part
        return rows

    def _to(self, device: torch.device) -> None:
        if self._expert_rank.device != device:
            self._expert_rank, self._expert_slot = self._expert_rank.to(device), self._expert_slot.to(device)


def _bytes(rows: Tensor) -> Tensor:
    """Rows ``[..., n]`` as ``[rows, bytes]``, the same memory."""
    width = rows.shape[-1] * rows.itemsize
    if rows.numel() == 0:  # whose strides may be anything
        return rows.new_empty(rows.shape[:-1].numel(), width, dtype=torch.uint8)
    return rows.view(torch.uint8).view(-1, width)


def _words(*tables: Tensor) -> tuple[Tensor, ...]:
    """Rows of bytes as rows of words, if all of them can be: indexing goes element by element."""
    fits = all(
        table.shape[1] % _WORD.itemsize
        == table.stride(0) % _WORD.itemsize
        == table.storage_offset() % _WORD.itemsize
        == 0
        and table.stride(1) == 1
        for table in tables
    )
    return tuple(table.view(_WORD) for table in tables) if fits else tables


def _pick(rows: Tensor, index: Tensor) -> Tensor:
    """``rows[index]`` of rows of bytes."""
    (words,) = _words(rows)
    return words.index_select(0, index).view(torch.uint8)


def _place(table: Tensor, place: Tensor, rows: Tensor, index: Tensor) -> None:
    """``table[place] = rows[index]`` of rows of bytes."""
    into, words = _words(table, rows)
    into[place] = words.index_select(0, index)


def _pack(request: DispatchRequest, token: Tensor, slots: Tensor) -> Tensor:
    parts = [_pick(_bytes(request.tokens), token)]
    if request.scales is not None:
        parts.append(_pick(_bytes(request.scales), token))
    parts.append(_bytes(token.to(torch.int32)[:, None]))
    parts.append(_bytes(slots.to(torch.int32)))
    if request.weights is not None:
        parts.append(_pick(_bytes(request.weights), token))
    width = sum(part.shape[1] for part in parts)
    parts.append(parts[0].new_zeros(len(token), -width % _WORD.itemsize))
    return torch.cat(parts, dim=1)


def _unpack(arrived: Tensor, request: DispatchRequest, config: Config) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Payload and scales as bytes, tokens, slots and weights as numbers."""
    choices = 4 * config.experts_per_token
    sizes = [config.hidden * request.tokens.itemsize, 4 * config.num_scales, 4, choices]
    sizes.append(choices if request.weights is not None else 0)
    payload, scales, token, slots, weights, _ = arrived.split([*sizes, arrived.shape[1] - sum(sizes)], dim=1)
    return (
        payload,
        scales,
        _numbers(token, torch.int32)[:, 0].to(torch.int64),
        _numbers(slots, torch.int32).to(torch.int64),
        _numbers(weights, torch.float32),
    )


def _numbers(part: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of bytes ``[n, width]`` as numbers; a copy always, because a part of a row may begin anywhere."""
    numbers = torch.empty(len(part), part.shape[1] // dtype.itemsize, dtype=dtype, device=part.device)
    _bytes(numbers).copy_(part)
    return numbers
