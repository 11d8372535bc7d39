"""Gradients of dispatch and combine, made of dispatches and combines.

With row r carrying choice j of token t::

    d_tokens[t]      = sum_j d_rows[r(t, j)]                    a combine with unit weights
    d_expert_rows[r] = weights[t, j] * d_output[t]              a dispatch of d_output
    d_weights[t, j]  = <expert_rows[r(t, j)], d_output[t]>      dot products where the rows are, carried back as scalars

A backward of combine leaves the handle of its dispatch behind, and the backward of the matching dispatch sends its
rows back along it: dispatch and combine alternate backward as they do forward, which is what keeps a backend's
buffers safe.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ops.moe_comm_gpu import contract
from ops.moe_comm_gpu.batch import CombineRequest, DispatchRequest, Handle, RowTensors

if TYPE_CHECKING:
    from ops.moe_comm_gpu.exchange import Exchange

_BYTES_OF_FLOAT32 = 4


def check_gradients_fit(config: contract.Config, dtype: torch.dtype, quantised: bool) -> None:
    """The single statement of what can be differentiated.

    Raises:
        ValueError: fp8 rows, or gradients wider than the buffers.
    """
    if quantised or dtype in contract.FLOAT8:
        raise ValueError(
            "tokens: expected no gradient for fp8 rows, got requires_grad; use 16 or 32 bit rows, or torch.no_grad()"
        )
    widest = max(config.in_dtype.itemsize, config.out_dtype.itemsize)
    if widest > min(config.dispatch_itemsize, config.combine_itemsize):
        raise ValueError(
            f"differentiable: expected True, because rows of {config.in_dtype} and {config.out_dtype} "
            f"also travel the other way as gradients, got False"
        )


def check_scalars_fit(config: contract.Config) -> None:
    """The single statement of when weights can be differentiated.

    Raises:
        ValueError: a row is too narrow to carry one float32 for every choice.
    """
    needed = _BYTES_OF_FLOAT32 * config.experts_per_token
    if config.hidden < needed:
        raise ValueError(
            f"hidden: expected at least {needed}, 4 * experts_per_token, for gradients of weights, got {config.hidden}"
        )


def dispatch(exchange: Exchange, request: DispatchRequest, out: RowTensors | None) -> Handle:
    """Receives a dispatch whose tokens need a gradient."""
    found: list[Handle] = []
    rows, anchor = _Dispatch.apply(request.source, exchange, request, out, found)
    (handle,) = found
    handle.rows, handle.anchor = rows, anchor
    handle.progress.tokens_need_gradient = True
    return handle


def combine(exchange: Exchange, request: CombineRequest, bias: Tensor | None) -> Tensor:
    """Receives a combine of which an input needs a gradient."""
    output: Tensor = _Combine.apply(
        request.source_rows, request.source_weights, bias, request.handle.anchor, exchange, request
    )
    return output


def return_scalars(exchange: Exchange, handle: Handle, values: Tensor) -> Tensor:
    """Carries one float32 per row back to its choice with a combine of rows made for it.

    A row holds the four bytes of its value, each as a small integer, in the four columns of its choice, and zeros
    elsewhere. All floating types hold 0 to 255 exactly, and a token's rows do not overlap, so the sum is exact.
    """
    config = exchange.config
    choices = config.experts_per_token
    choice = handle.source_choice.reshape(-1).to(torch.int64)
    holds_row = choice >= 0
    columns = choice.clamp(min=0)[:, None] * _BYTES_OF_FLOAT32 + torch.arange(_BYTES_OF_FLOAT32, device=values.device)
    packed = torch.where(holds_row, values.float(), 0.0).contiguous().view(torch.uint8).reshape(-1, _BYTES_OF_FLOAT32)
    rows = torch.zeros(config.num_rows, config.hidden, dtype=config.out_dtype, device=values.device)
    rows.scatter_(1, columns, packed.to(rows.dtype))
    summed = _return_rows(exchange, handle, rows.reshape(*config.rows_prefix, config.hidden))
    unpacked = summed[:, : choices * _BYTES_OF_FLOAT32].to(torch.uint8).contiguous()
    return unpacked.view(torch.float32).reshape(handle.num_tokens, choices)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, exchange: Exchange, request: Any, out: Any, found: list[Handle]) -> Any:
        handle = exchange._finish_dispatch(request, out)
        found.append(handle)
        ctx.exchange, ctx.routing = exchange, _routing(handle)
        return handle.rows, torch.zeros((), device=tokens.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor, d_anchor: Tensor) -> Any:
        exchange, routing = ctx.exchange, ctx.routing
        exchange._check_open("backward of dispatch")
        handle = routing.progress.return_path
        routing.progress.return_path = None
        return _return_rows(exchange, handle or routing, d_rows.contiguous()), None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, bias: Any, anchor: Any, exchange: Exchange, request: CombineRequest
    ) -> Tensor:
        ctx.exchange, ctx.routing = exchange, _routing(request.handle)
        ctx.save_for_backward(rows, weights)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return exchange._finish_combine(request, None, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> Any:
        rows, weights = ctx.saved_tensors
        exchange, routing = ctx.exchange, ctx.routing
        exchange._check_open("backward of combine")
        needs_rows, needs_weights, needs_bias = ctx.needs_input_grad[:3]
        handle = _redispatch(exchange, routing, d_output, weights)
        holds_row = (handle.source_rank >= 0)[..., None]
        gradient = torch.where(holds_row, handle.rows.float(), 0.0)
        d_rows = d_weights = None
        if needs_rows:
            assert handle.row_weights is not None
            scaled = gradient * torch.where(holds_row[..., 0], handle.row_weights, 0.0)[..., None]
            d_rows = scaled.to(rows.dtype)
        if needs_weights:
            values = (torch.where(holds_row, rows.float(), 0.0) * gradient).sum(dim=-1)
            d_weights = exchange._return_scalars(handle, values.reshape(-1))
        if routing.progress.tokens_need_gradient:
            routing.progress.return_path = handle
        else:
            _retire(exchange, handle)
        d_bias = d_output.to(ctx.bias_dtype) if needs_bias else None
        d_anchor = torch.zeros((), device=d_output.device) if ctx.needs_input_grad[3] else None
        return d_rows, d_weights, d_bias, d_anchor, None, None


def _routing(handle: Handle) -> Handle:
    """The handle as the graph keeps it: the routing alone, and the progress that it shares with the caller's."""
    return dataclasses.replace(handle, rows=handle.rows.new_empty(0), scales=None, weights=None, anchor=None)


def _redispatch(exchange: Exchange, routing: Handle, tokens: Tensor, weights: Tensor | None) -> Handle:
    """Dispatches other tokens along the routing of an earlier batch: rows land in the same places."""
    config = exchange.config
    scales = None
    if config.num_scales:
        scales = torch.ones(tokens.shape[0], config.num_scales, device=tokens.device)
    request = DispatchRequest(
        tokens=tokens.detach().contiguous(),
        row_dtype=tokens.dtype,
        scales=scales,
        ids=routing.ids,
        bound=routing.bound,
        weights=None if weights is None else weights.contiguous(),
    )
    return exchange._finish_dispatch(exchange._start_dispatch(request))


def _return_rows(exchange: Exchange, handle: Handle, rows: Tensor) -> Tensor:
    """A combine with unit weights, after a dispatch along the same routing where the backend needs one."""
    if handle.progress.combined and not exchange.reuses_handles:
        empty = rows.new_zeros(handle.num_tokens, exchange.config.hidden)
        handle = _redispatch(exchange, handle, empty, None)
    request = CombineRequest(handle=handle, expert_rows=rows, weights=None, weights_sent=False)
    return exchange._finish_combine(exchange._start_combine(request))


def _retire(exchange: Exchange, handle: Handle) -> None:
    """Ends a batch that nothing will be combined from, so that its buffers are free again."""
    if not exchange.unbounded_batches and not handle.progress.combined:
        _return_rows(exchange, handle, torch.zeros_like(handle.rows))
