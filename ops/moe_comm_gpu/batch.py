"""One batch on its way: what travels between the public exchange, its gradients and a backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ops.moe_comm_gpu.contract import Config, Manner


@dataclass(eq=False)
class Progress:
    """How far one batch is; the caller's handle and the graph's share it.

    Attributes:
        combined: its combine was sent.
        tokens_need_gradient: dispatch's backward will run.
        return_path: an uncombined handle with the batch's routing, left by combine's backward.
    """

    combined: bool = False
    tokens_need_gradient: bool = False
    return_path: Handle | None = None


@dataclass(eq=False)
class Handle:
    """What a dispatch delivered to this rank, and the routing its combine needs.

    Row tensors have the leading axes ``config.rows_prefix``: ``[L, capacity]`` expert-major, ``[capacity]``
    contiguous. Seen flat, expert l's rows are ``offsets[l] + 0 .. tokens_per_expert[l] - 1`` in both layouts, ordered
    by (source rank, token, choice).

    Attributes:
        owner: the exchange that made it.
        config: the exchange's.
        num_tokens: T, tokens of this rank's group.
        ids: expert of every choice ``[T, J]``, as the backend took them.
        bound: number of leading tokens that count, if the backend applies it itself, or None.
        weights: weights ``[T, J]`` float32 given to dispatch, or None.
        rows: tokens ``[..., D]`` in the dtype sent.
        scales: block scales ``[..., S]`` float32, or None.
        tokens_per_expert: rows of each local expert ``[L]`` int32.
        offsets: first row of each expert, then the end ``[L + 1]`` int64, multiples of ``row_multiple``.
        source_rank: rank that sent each row ``[...]`` int32; -1 where there is no row, as in the next two.
        source_token: index of the row's token in its group ``[...]`` int32.
        source_choice: which choice of the token ``[...]`` int32.
        row_weights: weight of each row ``[...]`` float32, if weights were given to dispatch; 0 where there is no row.
        state: the backend's own.
    """

    owner: Any = field(repr=False)
    config: Config
    num_tokens: int
    ids: Tensor
    bound: Tensor | None
    weights: Tensor | None
    rows: Tensor
    scales: Tensor | None
    tokens_per_expert: Tensor
    offsets: Tensor
    source_rank: Tensor
    source_token: Tensor
    source_choice: Tensor
    row_weights: Tensor | None
    state: Any = None
    anchor: Tensor | None = field(default=None, repr=False)  # ties combine's backward to dispatch's
    progress: Progress = field(default_factory=Progress, repr=False)


@dataclass(eq=False)
class RowTensors:
    """Tensors of the caller that a dispatch fills in place of new ones; None: make a new one."""

    rows: Tensor | None = None
    scales: Tensor | None = None
    tokens_per_expert: Tensor | None = None


@dataclass(eq=False)
class DispatchRequest:
    """A dispatch that is on its way, with checked, contiguous arguments.

    Attributes:
        tokens: ``[T, D]``; fp8, 16 or 32 bits wide. With ``quantises``, possibly wider than the rows to make.
        row_dtype: element type of the rows to deliver.
        scales: ``[T, S]`` float32 or None.
        ids: ``[T, J]`` int32, -1 for a dropped choice, all others in ``[0, E)``; with ``reads_raw_ids`` as given.
        weights: ``[T, J]`` float32 to deliver as ``row_weights``, or None.
        bound: with ``reads_raw_ids``: number of leading tokens that count, one integer on the device, or None.
        source: the caller's tokens, for autograd.
        source_weights: the caller's weights, for autograd.
        needs_gradient: whether the tokens' gradient will be asked for.
        state: what ``_dispatch_send`` returned.
    """

    tokens: Tensor
    row_dtype: torch.dtype
    scales: Tensor | None
    ids: Tensor
    weights: Tensor | None
    bound: Tensor | None = None
    source: Tensor | None = None
    source_weights: Tensor | None = None
    needs_gradient: bool = False
    state: Any = None
    received: bool = False

    @property
    def manner(self) -> Manner:
        """What every rank has to have in common in this dispatch."""
        return Manner(self.row_dtype.itemsize, self.weights is not None, self.needs_gradient)


@dataclass(eq=False)
class CombineRequest:
    """A combine that is on its way, with checked, contiguous arguments.

    Attributes:
        handle: of the dispatch.
        expert_rows: ``[..., D]``, what the experts made of ``handle.rows``; places without a row are never read.
        weights: ``[T, J]`` float32 at the source, or None for unit weights.
        weights_sent: these weights went out with dispatch, so ``handle.row_weights`` has them too.
        source_rows: the caller's rows, for autograd.
        source_weights: the caller's weights, for autograd.
        state: what ``_combine_send`` returned.
    """

    handle: Handle
    expert_rows: Tensor
    weights: Tensor | None
    weights_sent: bool
    source_rows: Tensor | None = None
    source_weights: Tensor | None = None
    state: Any = None
    received: bool = False
