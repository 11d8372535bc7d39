"""The exchange: what every backend offers, written once.

A backend implements five methods, ``_dispatch_send``, ``_dispatch_recv``, ``_combine_send``, ``_combine_recv`` and
``_close``. They get checked arguments and tensors to fill. Everything else is here: arguments, the order of calls,
who owns the routing, gradients.

Forward, with row r of an expert coming from choice j of token t::

    rows[r] = tokens[t]                            dispatch
    output[t] = sum_j weights[t, j] * rows[r(t, j)]    combine, in float32

Gradients: of dispatch, a combine with unit weights; of combine, a dispatch of the output's gradient, and for the
weights the dot product of each row with it. Every backward is as collective as its forward: a rank without tokens
takes part. So every rank has to ask for the same gradients: of the tokens, which every dispatch compares, and of the
weights and the experts' rows, which nothing compares; a rank that does not run a backward is waited for in vain.
"""

from __future__ import annotations

import abc
from types import TracebackType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ops import registry
from ops.moe_comm_gpu import autograd, contract
from ops.moe_comm_gpu.batch import CombineRequest, DispatchRequest, Handle, RowTensors
from ops.moe_comm_gpu.contract import Config


class Exchange(abc.ABC):
    """Moves tokens to the ranks of their experts and back.

    Collective: every rank makes the same calls in the same order.

    Example:
        >>> with Exchange(config) as exchange:  # of a backend
        ...     handle = exchange.dispatch(tokens, ids)
        ...     output = exchange.combine(handle, experts(handle.rows, handle.tokens_per_expert), weights)
    """

    name: ClassVar[str] = ""  # of the registry row, for messages
    quantises: ClassVar[bool] = False  # makes fp8 rows and scales of wider tokens itself
    reads_raw_ids: ClassVar[bool] = False  # applies the rule for ids and the bound itself
    reuses_handles: ClassVar[bool] = False  # a handle may be combined more than once
    unbounded_batches: ClassVar[bool] = False  # any number of batches between dispatch and the end of combine

    def __init__(self, config: Config) -> None:
        self.config = config
        self._closed = False
        self._batches = 0

    # What a backend implements.

    @abc.abstractmethod
    def _dispatch_send(self, request: DispatchRequest) -> Any:
        """Starts sending; returns the backend's state, kept as ``request.state``."""

    @abc.abstractmethod
    def _dispatch_recv(self, request: DispatchRequest, handle: Handle) -> None:
        """Waits for the rows and fills every tensor of ``handle``."""

    @abc.abstractmethod
    def _combine_send(self, request: CombineRequest) -> Any:
        """Starts sending rows back; returns the backend's state, kept as ``request.state``."""

    @abc.abstractmethod
    def _combine_recv(self, request: CombineRequest, out: Tensor, bias: Tensor | None, accumulate: bool) -> None:
        """Waits and fills ``out [T, D]``: the float32 sum, plus ``bias [T, D]``, plus what it held if so asked."""

    @abc.abstractmethod
    def _close(self) -> None:
        """Releases what the backend holds; called once."""

    def _announce_refusal(self, error: Exception) -> None:  # noqa: B027 - a backend need not be able to
        """Lets the other ranks, which may wait for this one, know that it refuses to dispatch."""

    def _abandon(self) -> None:  # noqa: B027 - a backend need not wait for anyone in close
        """The caller's block failed, the other ranks may be anywhere: close must not wait for them."""

    def _return_scalars(self, handle: Handle, values: Tensor) -> Tensor:
        """Carries one float32 per row ``[N]`` to the choice it came from ``[T, J]``; 0 for dropped choices."""
        return autograd.return_scalars(self, handle, values)

    # What a caller uses.

    def dispatch(
        self,
        tokens: Tensor,
        ids: Tensor,
        *,
        scales: Tensor | None = None,
        weights: Tensor | None = None,
        bound: Tensor | None = None,
        out: RowTensors | None = None,
    ) -> Handle:
        """Sends each token to the ranks of its experts and receives those for the local ones.

        Args:
            tokens: ``[T, D]`` in ``in_dtype`` or another type as wide; rows arrive in it. With an fp8 ``in_dtype`` and
                ``scale_block``, 16 or 32 bit tokens without scales are quantised on the way. Ranks of a group hold
                the same tokens.
            ids: experts ``[T, J]``, int32, int64 or uint32; -1 drops the choice.
            scales: block scales ``[T, S]`` float32; given exactly if the config has ``scale_block``.
            weights: ``[T, J]`` float32, optional, on all ranks or on none: known this early, a backend can sum a
                token's rows where the experts are.
            bound: number of leading tokens that count, one integer tensor on the tokens' device; None for all.
            out: tensors to fill instead of new ones.

        Returns:
            The rows and their routing.

        Raises:
            ValueError, TypeError: an argument breaks the contract; nothing was sent.
            RuntimeError: closed, or too many batches under way.
            TimeoutError: a rank did not arrive within ``timeout_s``; names it.
        """
        request = self._prepare_dispatch(tokens, ids, scales, weights, bound, out)
        return self.dispatch_recv(self._start_dispatch(request), out)

    def combine(
        self,
        handle: Handle,
        expert_rows: Tensor,
        weights: Tensor | None = None,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Sends the experts' rows back and sums them for each token of this rank's group.

        Args:
            handle: of the dispatch; it owns the routing.
            expert_rows: as ``handle.rows``, in ``out_dtype`` or another type as wide. Places without a row are never
                read.
            weights: ``[T, J]`` float32; None takes those given to dispatch.
            out: ``[T, D]`` to fill, in the rows' dtype or float32; None for a new tensor.
            accumulate: add to what ``out`` holds.
            bias: ``[T, D]`` in the rows' dtype or float32, added in float32.

        Returns:
            ``[T, D]``, equal on every rank of the group.

        Raises:
            ValueError, TypeError, RuntimeError, TimeoutError: as for :meth:`dispatch`.
        """
        self._check_open("combine")
        request = self._checked_combine(handle, expert_rows, weights)
        self._check_sum(request, out, accumulate, bias)
        return self.combine_recv(self._start_combine(request), out=out, accumulate=accumulate, bias=bias)

    def dispatch_send(
        self,
        tokens: Tensor,
        ids: Tensor,
        *,
        scales: Tensor | None = None,
        weights: Tensor | None = None,
        bound: Tensor | None = None,
    ) -> DispatchRequest:
        """First half of :meth:`dispatch`: starts sending and returns what :meth:`dispatch_recv` takes."""
        return self._start_dispatch(self._prepare_dispatch(tokens, ids, scales, weights, bound, None))

    def dispatch_recv(self, request: DispatchRequest, out: RowTensors | None = None) -> Handle:
        """Second half of :meth:`dispatch`: waits for the rows."""
        self._check_open("dispatch_recv")
        if request.received:
            raise RuntimeError(
                "dispatch_recv: this dispatch was received already; each dispatch_send has one dispatch_recv"
            )
        self._check_row_tensors(request, out)
        if request.needs_gradient:
            return autograd.dispatch(self, request, out)
        return self._finish_dispatch(request, out)

    def combine_send(self, handle: Handle, expert_rows: Tensor, weights: Tensor | None = None) -> CombineRequest:
        """First half of :meth:`combine`: starts sending and returns what :meth:`combine_recv` takes."""
        self._check_open("combine")
        return self._start_combine(self._checked_combine(handle, expert_rows, weights))

    def combine_recv(
        self,
        request: CombineRequest,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Second half of :meth:`combine`: waits for the rows and sums them."""
        self._check_open("combine_recv")
        if request.received:
            raise RuntimeError(
                "combine_recv: this combine was received already; each combine_send has one combine_recv"
            )
        self._check_sum(request, out, accumulate, bias)
        if _records_gradient(request.source_rows, request.source_weights, bias, request.handle.anchor):
            return autograd.combine(self, request, bias)
        return self._finish_combine(request, out, bias, accumulate)

    @property
    def symmetric_bytes(self) -> int:
        """Symmetric memory that this rank holds for the exchange; 0 for a backend that needs none."""
        return 0

    def close(self) -> None:
        """Releases what the exchange holds; any later call raises. May be called again."""
        if not self._closed:
            self._closed = True
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._abandon()
        self.close()

    # Steps without checks; gradients use them as well.

    def _prepare_dispatch(
        self,
        tokens: Tensor,
        ids: Tensor,
        scales: Tensor | None,
        weights: Tensor | None,
        bound: Tensor | None,
        out: RowTensors | None,
    ) -> DispatchRequest:
        self._check_open("dispatch")
        try:
            request = self._checked_dispatch(tokens, ids, scales, weights, bound)
            self._check_row_tensors(request, out)
        except (ValueError, TypeError) as error:
            self._announce_refusal(error)
            raise
        return request

    def _start_dispatch(self, request: DispatchRequest) -> DispatchRequest:
        limit = self.config.num_buffer_sets
        if not self.unbounded_batches and self._batches >= limit:
            raise RuntimeError(
                f"dispatch: {self._batches} dispatched but not yet combined, the buffers hold {limit}; receive a "
                f"combine first, or make the exchange with num_buffer_sets = {limit + 1}"
            )
        request.state = self._dispatch_send(request)
        self._batches += 1
        return request

    def _finish_dispatch(self, request: DispatchRequest, out: RowTensors | None = None) -> Handle:
        handle = self._new_handle(request, out or RowTensors())
        self._dispatch_recv(request, handle)
        request.received = True
        return handle

    def _start_combine(self, request: CombineRequest) -> CombineRequest:
        request.state = self._combine_send(request)
        request.handle.progress.combined = True
        return request

    def _finish_combine(
        self, request: CombineRequest, out: Tensor | None = None, bias: Tensor | None = None, accumulate: bool = False
    ) -> Tensor:
        if out is None:
            rows = request.expert_rows
            out = rows.new_empty(request.handle.num_tokens, self.config.hidden)
        self._combine_recv(request, out, None if bias is None else bias.detach().contiguous(), accumulate)
        request.received = True
        self._batches = max(0, self._batches - 1)
        return out

    def _new_handle(self, request: DispatchRequest, out: RowTensors) -> Handle:
        config = self.config
        device = request.tokens.device
        prefix = config.rows_prefix

        def new(shape: tuple[int, ...], dtype: torch.dtype, given: Tensor | None = None) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device) if given is None else given

        scales = None
        if config.num_scales:
            scales = new((*prefix, config.num_scales), torch.float32, out.scales)
        return Handle(
            owner=self,
            config=config,
            num_tokens=request.tokens.shape[0],
            ids=request.ids,
            bound=request.bound,
            weights=request.source_weights if request.source_weights is not None else request.weights,
            rows=new((*prefix, config.hidden), request.row_dtype, out.rows),
            scales=scales,
            tokens_per_expert=new((config.num_local_experts,), torch.int32, out.tokens_per_expert),
            offsets=new((config.num_local_experts + 1,), torch.int64),
            source_rank=new(prefix, torch.int32),
            source_token=new(prefix, torch.int32),
            source_choice=new(prefix, torch.int32),
            row_weights=None if request.weights is None else new(prefix, torch.float32),
        )

    # Checks.

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise RuntimeError(f"{call}: this exchange is closed; make a new one")

    def _checked_dispatch(
        self, tokens: Tensor, ids: Tensor, scales: Tensor | None, weights: Tensor | None, bound: Tensor | None
    ) -> DispatchRequest:
        config = self.config
        row_dtypes = contract.same_width(config.in_dtype, contract.IN_DTYPES)
        quantise = (
            config.in_dtype in contract.FLOAT8
            and config.scale_block is not None
            and scales is None
            and getattr(tokens, "dtype", None) in contract.OUT_DTYPES
        )
        contract.check_tensor("tokens", tokens, (None, config.hidden), contract.OUT_DTYPES if quantise else row_dtypes)
        num_tokens, device = tokens.shape[0], tokens.device
        contract.check_num_tokens("tokens", num_tokens, config)
        choices = (num_tokens, config.experts_per_token)
        contract.check_tensor("ids", ids, choices, contract.ID_DTYPES, device)
        if weights is not None:
            contract.check_tensor("weights", weights, choices, (torch.float32,), device)
        if bound is not None:
            contract.check_bound(bound, device)
            bound = bound.clone()
        if scales is not None and not config.num_scales:
            raise ValueError("scales: expected None, got a tensor; make the exchange with scale_block")
        if scales is None and config.num_scales and not quantise:
            raise ValueError(
                f"scales: expected a float32 tensor of shape [{num_tokens}, {config.num_scales}], got None"
            )
        if scales is not None:
            contract.check_tensor("scales", scales, (num_tokens, config.num_scales), (torch.float32,), device)
        needs_gradient = _records_gradient(tokens)
        if needs_gradient:
            autograd.check_gradients_fit(config, tokens.dtype, quantise)
        if config.check_ids:
            contract.check_id_range(ids, config.num_experts)
        # The caller may reuse its routing tensors at once; this batch, and its gradient, keep their own.
        weights = None if weights is None else weights.clone()
        ids = ids.clone() if self.reads_raw_ids else contract.normalise_ids(ids, config.num_experts, bound)
        payload, row_dtype = tokens.detach(), config.in_dtype if quantise else tokens.dtype
        if quantise and not self.quantises:
            assert config.scale_block is not None
            payload, scales = contract.quantise(payload, row_dtype, config.scale_block)
        return DispatchRequest(
            tokens=payload.contiguous(),
            row_dtype=row_dtype,
            scales=None if scales is None else scales.detach().contiguous(),
            ids=ids.contiguous(),
            weights=None if weights is None else weights.detach().contiguous(),
            bound=bound if self.reads_raw_ids else None,
            source=tokens,
            source_weights=weights,
            needs_gradient=needs_gradient,
        )

    def _check_row_tensors(self, request: DispatchRequest, out: RowTensors | None) -> None:
        if out is None:
            return
        config = self.config
        if out.rows is not None and request.needs_gradient:
            raise ValueError("out.rows: expected None while gradients are recorded, got a tensor; use torch.no_grad()")
        for name, given, shape, dtype in (
            ("out.rows", out.rows, (*config.rows_prefix, config.hidden), request.row_dtype),
            ("out.scales", out.scales, (*config.rows_prefix, config.num_scales), torch.float32),
            ("out.tokens_per_expert", out.tokens_per_expert, (config.num_local_experts,), torch.int32),
        ):
            if given is not None:
                contract.check_contiguous(name, given, shape, (dtype,), request.tokens.device)

    def _check_sum(self, request: CombineRequest, out: Tensor | None, accumulate: bool, bias: Tensor | None) -> None:
        rows, handle = request.expert_rows, request.handle
        shape = (handle.num_tokens, self.config.hidden)
        dtypes = tuple(dict.fromkeys((rows.dtype, torch.float32)))
        if bias is not None:
            contract.check_tensor("bias", bias, shape, dtypes, rows.device)
        if out is not None:
            contract.check_contiguous("out", out, shape, dtypes, rows.device)
            if _records_gradient(request.source_rows, request.source_weights, bias, handle.anchor):
                raise ValueError(
                    "out: expected None while gradients are recorded, got a tensor; use bias, or torch.no_grad()"
                )
        elif accumulate:
            raise ValueError("accumulate: expected out, the tensor to add to, got None")

    def _checked_combine(self, handle: Handle, expert_rows: Tensor, weights: Tensor | None) -> CombineRequest:
        config = self.config
        if not isinstance(handle, Handle):
            raise TypeError(f"handle: expected the Handle that dispatch returned, got {type(handle).__name__}")
        if handle.owner is not self:
            raise ValueError("handle: expected one of this exchange's dispatches, got another exchange's")
        if handle.progress.combined and not self.reuses_handles:
            raise RuntimeError(
                f"combine: this handle was combined already; the {self.name} backend needs a new dispatch"
            )
        out_dtypes = contract.same_width(config.out_dtype, contract.OUT_DTYPES)
        device = handle.rows.device
        contract.check_tensor("expert_rows", expert_rows, (*config.rows_prefix, config.hidden), out_dtypes, device)
        if weights is not None and handle.weights is not None:
            raise ValueError("weights: expected None, because dispatch got weights already; give them to one call")
        sent = handle.weights is not None
        weights = handle.weights if weights is None else weights.clone()
        if weights is None:
            raise ValueError("weights: expected a float32 tensor, here or in dispatch, got None in both")
        contract.check_tensor(
            "weights", weights, (handle.num_tokens, config.experts_per_token), (torch.float32,), device
        )
        if torch.is_grad_enabled() and (expert_rows.requires_grad or weights.requires_grad):
            autograd.check_gradients_fit(config, expert_rows.dtype, False)
            if weights.requires_grad:
                autograd.check_scalars_fit(config)
        return CombineRequest(
            handle=handle,
            expert_rows=expert_rows.detach().contiguous(),
            weights=weights.detach().contiguous(),
            weights_sent=sent,
            source_rows=expert_rows,
            source_weights=weights,
        )


def _records_gradient(*inputs: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs)


def open_exchange(config: Config, backend: str | None = None, **options: Any) -> Exchange:
    """Makes an exchange of the backend that :func:`ops.registry.select` chooses; use it in a ``with`` block.

    Args:
        config: equal on every rank but for the rank.
        backend: name of a registry row; None for the environment's choice, or else the first usable.
        options: of the backend, such as ``group``, the torch.distributed process group.
    """
    exchange: Exchange = registry.select("moe_comm", backend)(config, **options)
    return exchange
