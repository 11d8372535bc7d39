"""Dispatch and combine with the signature published for pplx-kernels, on any backend.

Sizes are given in bytes and tensors by the caller, so code written for that interface runs unchanged.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from ops.moe_comm_gpu.batch import CombineRequest, DispatchRequest, Handle, RowTensors
from ops.moe_comm_gpu.contract import Config
from ops.moe_comm_gpu.exchange import Exchange, open_exchange

_IN_DTYPES = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32}  # any type as wide may travel
_SCALE_BYTES = 4


class AllToAll:
    """One exchange through which one batch at a time travels; made by :meth:`intranode` or :meth:`internode`.

    Weights come with combine, so on backends of kernels a row comes back for each choice, not one for each rank. The
    memory for that is set aside from the beginning: ``exchange.symmetric_bytes`` bytes on every rank, which never grow
    (142 MiB at 128 tokens of 7168 bfloat16, 8 of 256 experts, 8 ranks, where weights that came with dispatch would make
    it 44).
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self._sent: DispatchRequest | None = None
        self._handle: Handle | None = None
        self._returning: CombineRequest | None = None

    @classmethod
    def intranode(
        cls,
        *,
        max_num_tokens: int,
        num_experts: int,
        experts_per_token: int,
        rank: int,
        world_size: int,
        dp_size: int,
        hidden_dim: int,
        hidden_dim_bytes: int,
        hidden_dim_scale_bytes: int,
        backend: str | None = None,
        timeout_s: float = 60.0,
        **options: Any,
    ) -> Self:
        """For ranks of one machine.

        Args:
            max_num_tokens: M, most tokens a group sends in one call.
            num_experts: E.
            experts_per_token: J.
            rank: of this process.
            world_size: R.
            dp_size: ranks that hold the same tokens.
            hidden_dim: D, elements of a row.
            hidden_dim_bytes: bytes of a row, 1, 2 or 4 times ``hidden_dim``.
            hidden_dim_scale_bytes: bytes of a row's float32 block scales; 0 for none.
            backend: registry row; None for the environment's choice, or else the first usable.
            timeout_s: seconds after which a wait for other ranks ends in an error that names them.
            options: of the backend, such as ``group``.
        """
        itemsize, rest = divmod(hidden_dim_bytes, hidden_dim)
        if rest or itemsize not in _IN_DTYPES:
            raise ValueError(
                f"hidden_dim_bytes: expected 1, 2 or 4 times hidden_dim = {hidden_dim}, got {hidden_dim_bytes}"
            )
        config = Config(
            max_num_tokens=max_num_tokens,
            num_experts=num_experts,
            experts_per_token=experts_per_token,
            hidden=hidden_dim,
            world_size=world_size,
            rank=rank,
            dp_size=dp_size,
            in_dtype=_IN_DTYPES[itemsize],
            scale_block=_scale_block(hidden_dim, hidden_dim_scale_bytes),
            late_weights=True,
            timeout_s=timeout_s,
        )
        return cls(open_exchange(config, backend, **options))

    @classmethod
    def internode(cls, **arguments: Any) -> Self:
        """For ranks of several machines: the same arguments as :meth:`intranode`; the backend sees to the rest."""
        return cls.intranode(**arguments)

    def dispatch(
        self,
        out_expert_num_tokens: Tensor,
        out_expert_x: Tensor,
        out_expert_x_scale: Tensor | None,
        dp_x: Tensor,
        dp_x_scale: Tensor | None,
        indices: Tensor,
        bound_m: Tensor | None,
        do_send: bool = True,
        do_recv: bool = True,
    ) -> None:
        """Sends this group's tokens to their experts' ranks and fills in those for the local experts.

        Args:
            out_expert_num_tokens: int32 ``[L]``, filled with the rows of each local expert.
            out_expert_x: ``[L, M * groups, D]``, filled; places without a row are left as they are.
            out_expert_x_scale: float32 ``[L, M * groups, S]``, filled, or None.
            dp_x: tokens ``[T, D]``.
            dp_x_scale: block scales ``[T, S]`` float32, or None.
            indices: experts ``[T, J]``.
            bound_m: number of leading tokens that count, one integer; None for all.
            do_send: do the first half.
            do_recv: do the second half.

        Raises:
            ValueError, TypeError, RuntimeError, TimeoutError: as ``Exchange.dispatch``.
        """
        out = RowTensors(out_expert_x, out_expert_x_scale, out_expert_num_tokens)
        if do_send and do_recv:  # in one call, which checks the outputs before it sends
            self._handle = self.exchange.dispatch(dp_x, indices, scales=dp_x_scale, bound=bound_m, out=out)
        elif do_send:
            self._sent = self.exchange.dispatch_send(dp_x, indices, scales=dp_x_scale, bound=bound_m)
        elif do_recv:
            if self._sent is None:
                raise RuntimeError("dispatch: do_recv needs an earlier call with do_send; nothing was sent")
            self._handle = self.exchange.dispatch_recv(self._sent, out)
            self._sent = None

    def combine(
        self,
        out_tokens: Tensor,
        indices: Tensor,
        weights: Tensor,
        expert_y: Tensor,
        bound_m: Tensor | None,
        do_send: bool = True,
        do_recv: bool = True,
    ) -> None:
        """Sends the experts' rows back and fills in the weighted sum of each of this group's tokens.

        Args:
            out_tokens: ``[T, D]`` or longer, filled; tokens from ``bound_m`` on become zero.
            indices: experts ``[T, J]`` as in dispatch, which owns the routing: only the shape is looked at.
            weights: float32 ``[T, J]``.
            expert_y: ``[L, M * groups, D]``.
            bound_m: as in dispatch.
            do_send: do the first half.
            do_recv: do the second half.

        Raises:
            ValueError, TypeError, RuntimeError, TimeoutError: as ``Exchange.combine``.
        """
        if do_send:
            if self._handle is None:
                raise RuntimeError("combine: expected a dispatch before it, got none; call dispatch first")
            expected = (self._handle.num_tokens, self.exchange.config.experts_per_token)
            if tuple(indices.shape) != expected:
                raise ValueError(f"indices: expected shape {list(expected)} as in dispatch, got {list(indices.shape)}")
            if do_recv:  # in one call, which checks the output before it sends
                self.exchange.combine(self._handle, expert_y, weights, out=out_tokens[: self._handle.num_tokens])
            else:
                self._returning = self.exchange.combine_send(self._handle, expert_y, weights)
            self._handle = None
        elif do_recv:
            if self._returning is None:
                raise RuntimeError("combine: do_recv needs an earlier call with do_send; nothing was sent")
            self.exchange.combine_recv(self._returning, out=out_tokens[: self._returning.handle.num_tokens])
            self._returning = None

    def destroy(self) -> None:
        """Releases everything; any later call raises."""
        self.exchange.close()


def _scale_block(hidden: int, scale_bytes: int) -> int | None:
    if scale_bytes == 0:
        return None
    num_scales, rest = divmod(scale_bytes, _SCALE_BYTES)
    block = -(-hidden // max(num_scales, 1))
    if rest or num_scales < 1 or -(-hidden // block) != num_scales:
        raise ValueError(
            f"hidden_dim_scale_bytes: expected 0, or 4 bytes for each block of equal size of {hidden} elements, "
            f"got {scale_bytes}"
        )
    return block
