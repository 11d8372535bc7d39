"""The exchange that gathers every rank's data and asks the float64 reference: slow, and the oracle's arithmetic."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ops.moe_comm_gpu import contract, exchange
from ops.moe_comm_gpu.batch import CombineRequest, DispatchRequest, Handle
from ops.moe_comm_gpu.collectives import Ranks
from ops.moe_comm_gpu.contract import Config
from reference import moe


class Exchange(exchange.Exchange):
    """Dispatch and combine by :mod:`reference.moe`.

    Args:
        config: of the exchange.
        group: process group of its ``world_size`` ranks; None for the default one. A world of one needs none.
    """

    name: ClassVar[str] = "reference"
    reuses_handles: ClassVar[bool] = True
    unbounded_batches: ClassVar[bool] = True

    def __init__(self, config: Config, group: Any = None) -> None:
        super().__init__(config)
        self._ranks = Ranks(config, group)
        self._world = moe.World(config.world_size, config.expert_rank, config.dp_size)

    def _dispatch_send(self, request: DispatchRequest) -> dict[str, list[Any]]:
        self._ranks.arrive("dispatch")
        mine = {
            "tokens": _numpy_bytes(request.tokens),
            "scales": None if request.scales is None else request.scales.cpu().numpy(),
            "weights": None if request.weights is None else request.weights.cpu().numpy(),
            "ids": request.ids.cpu().numpy(),
            "manner": request.manner,
        }
        everyone = self._ranks.gather_objects(mine)
        for rank, theirs in enumerate(everyone):
            if isinstance(theirs, str):
                self._ranks.raise_refusals([rank])
        contract.check_same_manner({rank: theirs["manner"] for rank, theirs in enumerate(everyone)})
        world = {name: [theirs[name] for theirs in everyone[:: self.config.dp_size]] for name in mine}
        contract.check_capacity(self.config, [len(source.rank) for source in moe.sources(self._world, world["ids"])])
        return world

    def _dispatch_recv(self, request: DispatchRequest, handle: Handle) -> None:
        config, world, table = self.config, request.state, moe.sources(self._world, request.state["ids"])
        rows = moe.dispatch(self._world, world["tokens"], world["ids"])
        scales = None if handle.scales is None else moe.dispatch(self._world, world["scales"], world["ids"])
        for tensor in (handle.source_rank, handle.source_token, handle.source_choice):
            tensor.fill_(-1)
        if handle.row_weights is not None:
            handle.row_weights.zero_()
        experts = self._world.experts_of(config.rank)
        counts = [len(table[expert].rank) for expert in experts]
        counts += [0] * (config.num_local_experts - len(counts))
        starts = self._starts(counts)
        handle.tokens_per_expert.copy_(torch.tensor(counts))
        handle.offsets.copy_(torch.tensor(starts))
        for start, expert in zip(starts, experts, strict=False):
            source = table[expert]
            place = slice(start, start + len(source.rank))
            handle.rows.view(torch.uint8).view(config.num_rows, -1)[place] = torch.from_numpy(rows[expert])
            if handle.scales is not None and scales is not None:
                handle.scales.view(config.num_rows, -1)[place] = torch.from_numpy(scales[expert])
            handle.source_rank.view(-1)[place] = torch.from_numpy(source.rank)
            handle.source_token.view(-1)[place] = torch.from_numpy(source.token)
            handle.source_choice.view(-1)[place] = torch.from_numpy(source.choice)
            if handle.row_weights is not None:
                weights = [world["weights"][rank // config.dp_size] for rank in source.rank]
                picked = [w[t, c] for w, t, c in zip(weights, source.token, source.choice, strict=True)]
                handle.row_weights.view(-1)[place] = torch.tensor(picked, dtype=torch.float32)
        handle.state = world["ids"]

    def _combine_send(self, request: CombineRequest) -> list[Any]:
        self._ranks.arrive("combine")
        handle, config = request.handle, self.config
        flat = request.expert_rows.to(torch.float64).cpu().numpy().reshape(config.num_rows, -1)
        starts, counts = handle.offsets.tolist(), handle.tokens_per_expert.tolist()
        mine = {
            expert: flat[starts[slot] : starts[slot] + counts[slot]]
            for slot, expert in enumerate(self._world.experts_of(config.rank))
        }
        weights = None if request.weights is None else request.weights.cpu().numpy()
        return self._ranks.gather_objects((mine, weights))

    def _combine_recv(self, request: CombineRequest, out: Tensor, bias: Tensor | None, accumulate: bool) -> None:
        ids, config = request.handle.state, self.config
        by_expert = {expert: rows for rows_of_rank, _ in request.state for expert, rows in rows_of_rank.items()}
        rows = [by_expert[expert] for expert in range(config.num_experts)]
        weights = [given for _, given in request.state[:: config.dp_size]]
        if request.weights is None:
            weights = [np.ones(group_ids.shape) for group_ids in ids]
        total = torch.from_numpy(moe.combine(self._world, rows, ids, weights)[config.group]).to(out.device)
        if bias is not None:
            total += bias.double()
        if accumulate:
            total += out.double()
        out.copy_(total)

    def _close(self) -> None:
        self._ranks.close()

    def _announce_refusal(self, error: Exception) -> None:
        self._ranks.arrive("dispatch")
        self._ranks.refuse(str(error))
        try:
            self._ranks.gather_objects("refused")
        except (TimeoutError, RuntimeError) as failure:
            error.add_note(f"The other ranks could not be told: {failure}")

    def _starts(self, counts: list[int]) -> list[int]:
        if self.config.layout == "contiguous":
            return moe.first_rows(counts, self.config.row_multiple)
        return [slot * self.config.row_capacity for slot in range(len(counts) + 1)]


def _numpy_bytes(rows: Tensor) -> Any:
    array = np.ascontiguousarray(rows.cpu().view(torch.uint8).numpy()) if rows.numel() else None
    return np.zeros((len(rows), rows.shape[1] * rows.itemsize), np.uint8) if array is None else array
