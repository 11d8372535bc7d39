"""What ranks compare on the host, before anything is allocated or sent: configurations, and dispatches when asked."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ops.moe_comm_gpu import contract
from ops.moe_comm_gpu.agreement import PeerError
from ops.moe_comm_gpu.batch import DispatchRequest
from ops.moe_comm_gpu.contract import Config
from ops.moe_comm_gpu.device.runtime import Runtime


@dataclass(frozen=True)
class Announcement:
    """What one rank is about to dispatch, or why it will not.

    Attributes:
        refusal: reason; empty if it takes part.
        num_tokens: T of its group.
        manner: what every rank has to have in common; None with a refusal.
        rows_of_expert: rows it sends to every expert of the world.
    """

    refusal: str = ""
    num_tokens: int = 0
    manner: contract.Manner | None = None
    rows_of_expert: tuple[int, ...] = ()


def announcement(request: DispatchRequest, config: Config) -> Announcement:
    """What this rank is about to dispatch; looks at the ids on the host."""
    ids = contract.normalise_ids(request.ids, config.num_experts, request.bound)
    mine = ids[config.rank % config.dp_size :: config.dp_size]
    counts = torch.bincount(mine[mine >= 0].to(torch.int64), minlength=config.num_experts)
    return Announcement(
        num_tokens=request.tokens.shape[0],
        manner=request.manner,
        rows_of_expert=tuple(counts.tolist()),
    )


def agree_on_dispatch(mine: Announcement, config: Config, runtime: Runtime) -> None:
    """Compares what all ranks are about to dispatch.

    Raises:
        PeerError: another rank refuses.
        ValueError: the ranks do not fit together, or a rank has no room for its rows; raised on every rank.
    """
    all_ranks: list[Announcement] = runtime.all_gather(mine, "dispatch")
    for rank, other in enumerate(all_ranks):
        if other.refusal and rank != config.rank:
            raise PeerError(f"rank {rank} refused this call, so no rank sent anything: {other.refusal}")
    if mine.refusal:
        return
    for rank, other in enumerate(all_ranks):
        first = rank - rank % config.dp_size
        if other.num_tokens != all_ranks[first].num_tokens:
            raise ValueError(
                f"tokens: expected as many on every rank of a group, got {all_ranks[first].num_tokens} on rank {first} "
                f"and {other.num_tokens} on rank {rank}"
            )
    contract.check_same_manner({rank: other.manner for rank, other in enumerate(all_ranks) if other.manner})
    counts = (other.rows_of_expert for other in all_ranks)
    contract.check_capacity(config, [sum(of_expert) for of_expert in zip(*counts, strict=True)])


def check_same_config(config: Config, runtime: Runtime) -> None:
    """Compares the ranks' configurations.

    Raises:
        ValueError: on every rank, if any two differ, or if ranks are not numbered as the runtime's.
    """
    entries = runtime.all_gather((config.rank, config.shared_fields()), "making the exchange")
    if config.world_size != runtime.n_pes:
        raise ValueError(f"world_size: expected {runtime.n_pes}, the ranks of the runtime, got {config.world_size}")
    for pe, (rank, _) in enumerate(entries):
        if rank != pe:
            raise ValueError(f"rank: expected {pe} on the runtime's rank {pe}, got {rank} there")
    contract.check_same_fields([fields for _, fields in entries], config.rank)


def checked_num_programs(num_programs: int | None, runtime: Runtime) -> int:
    """The single statement of how many programs a kernel may have.

    Raises:
        TypeError: not an int.
        ValueError: none, or more than are resident at once.
    """
    most = runtime.max_resident_programs
    if num_programs is None:
        return most
    if isinstance(num_programs, bool) or not isinstance(num_programs, int):
        raise TypeError(f"num_programs: expected an int, got {type(num_programs).__name__}")
    if not 1 <= num_programs <= most:
        raise ValueError(
            f"num_programs: expected 1 to {most}, which is what is resident at once, got {num_programs}; "
            f"programs wait for one another"
        )
    return num_programs
