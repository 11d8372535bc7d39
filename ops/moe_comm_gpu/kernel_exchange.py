"""The exchange made of the four kernels, over what runs them: a GPU with NVSHMEM, the simulator or the emulation."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import triton.language as tl
from torch import Tensor

from ops.moe_comm_gpu import contract
from ops.moe_comm_gpu.agreement import Ledger
from ops.moe_comm_gpu.batch import CombineRequest, DispatchRequest, Handle
from ops.moe_comm_gpu.contract import Config, Manner
from ops.moe_comm_gpu.device.runtime import NotEnqueuedError, Runtime, host_visible_words
from ops.moe_comm_gpu.device.watchdog import WaitTimeoutError
from ops.moe_comm_gpu.exchange import Exchange
from ops.moe_comm_gpu.kernels import checks, combine, dispatch
from ops.moe_comm_gpu.kernels.common import NUM_WARPS, WAIT_NAMES, WITH_GRADIENT, WITH_WEIGHTS
from ops.moe_comm_gpu.kernels.layout import REGION_ALIGNMENT, Layout

_KERNEL_TYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}
_WORDS = ((4, torch.int32), (2, torch.int16), (1, torch.int8))


@dataclass(eq=False)
class BufferSet:
    """The memory of one batch; all but ``epochs``, which is local, are views of ``memory``, which is symmetric."""

    memory: Tensor
    signals: Tensor
    send: Tensor
    received: Tensor
    return_staging: Tensor
    returned: Tensor
    epochs: Tensor
    late_memory: Tensor | None = None  # where results return in pairs although the mode has them summed
    busy: bool = False


@dataclass(eq=False)
class Batch:
    """A batch's routing at the rank of the experts, and the memory it lives in.

    Attributes:
        buffers: the set it holds until its combine is received.
        layout: geometry, with the item size of its dispatch.
        stream_counts: rows of each stream ``[B, R]`` int32.
        positions: expert row of each choice of each received row ``[B, R, U, J]`` int32.
        row_tokens: token of each received row ``[B, R, U]`` int32.
    """

    buffers: BufferSet
    layout: Layout
    stream_counts: Tensor
    positions: Tensor
    row_tokens: Tensor


class KernelExchange(Exchange):
    """An :class:`~ops.moe_comm_gpu.exchange.Exchange` over a :class:`~ops.moe_comm_gpu.device.runtime.Runtime`.

    Args:
        config: equal on every rank but for the rank.
        runtime: what runs the kernels; its ranks are those of the config.
        ledger: of the ranks' hosts; None if they have none, for a world of one or a simulation.
        num_programs: programs of each kernel; None takes as many as are resident at once, more are refused.
        direct: write to other ranks with plain stores in place of puts; every rank must be within their reach.
        quantise_in_kernel: whether the hardware converts to fp8 (sm_89 or newer); else torch quantises before the send.

    Raises:
        ValueError: the ranks' configurations differ, or do not fit the runtime; raised on every rank.
        MemoryError: the symmetric heap is too small.
    """

    quantises: ClassVar[bool] = True
    reads_raw_ids: ClassVar[bool] = True
    always_agrees: ClassVar[bool] = False  # hosts compare every dispatch, not only with ``check_ids``

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        *,
        ledger: Ledger | None = None,
        num_programs: int | None = None,
        direct: bool = False,
        quantise_in_kernel: bool = True,
    ) -> None:
        super().__init__(config)
        self._runtime = runtime
        # Where hosts meet in every dispatch they note each call too, for the words of errors. Elsewhere the kernels'
        # waits name who is missing, and the one process with the store is spared every call of every rank.
        self._ledger = ledger if self._agrees else None
        self._call = "making the exchange"
        self._broken = False
        self._direct = direct
        self._quantise_in_kernel = quantise_in_kernel
        self._num_programs = checks.checked_num_programs(num_programs, runtime)
        checks.check_same_config(config, runtime)
        runtime.set_operations(WAIT_NAMES)
        runtime.set_timeout(config.timeout_s)
        self._layout = Layout.of(config)
        slots = zip(config.expert_rank, config.expert_slot, strict=True)
        self._placement = torch.tensor(
            [rank * config.num_local_experts + slot for rank, slot in slots], dtype=torch.int32, device=runtime.device
        )
        self._reports = host_visible_words(1 + config.world_size, runtime.device)
        self._reported = self._reports.numpy()  # the same memory, quicker to look at
        self._sets: list[BufferSet] = []
        try:
            for index in range(config.num_buffer_sets):
                self._sets.append(self._new_set(index))
        except MemoryError:  # on every rank, so that all are here to release the sets before
            self.close()
            raise
        runtime.synchronize()  # what was set to zero here is zero on any stream

    def _new_set(self, index: int) -> BufferSet:
        layout = self._layout
        memory = self._runtime.allocate(layout.symmetric_bytes, f"exchange buffer set {index}")
        return BufferSet(
            memory=memory,
            signals=_region(memory, layout, "signals").view(torch.int64),
            send=_region(memory, layout, "send"),
            received=_region(memory, layout, "received"),
            return_staging=_region(memory, layout, "return_staging"),
            returned=_region(memory, layout, "returned"),
            epochs=torch.zeros(layout.num_local_words, dtype=torch.int64, device=self._runtime.device),
        )

    def _dispatch_send(self, request: DispatchRequest) -> Batch:
        if request.tokens.device != self._runtime.device:
            raise ValueError(
                f"tokens: expected on {self._runtime.device}, got on {request.tokens.device}; move them there first"
            )
        self._arrive("dispatch")
        self._raise_reports()
        if self._agrees:
            self._agree(checks.announcement(request, self.config))
        layout = _replaced(self._layout, dispatch_itemsize=request.row_dtype.itemsize)
        batch = self._new_batch(layout)
        tokens, scales = request.tokens, request.scales
        quantise = tokens.dtype != request.row_dtype
        if quantise and not self._quantise_in_kernel:
            assert self.config.scale_block is not None
            tokens, scales = contract.quantise(tokens, request.row_dtype, self.config.scale_block)
            quantise = False
        self._launch(
            dispatch.dispatch_send,
            "dispatch send",
            tokens if quantise else as_words(tokens),
            scales,
            request.ids,
            request.weights,
            request.bound,
            self._placement,
            batch.buffers.send,
            batch.buffers.received,
            batch.buffers.signals,
            batch.buffers.epochs,
            tokens.shape[0],
            self.config.rank,
            _manner_bits(request.manner),
            layout=layout,
            row_type=_KERNEL_TYPES[request.row_dtype] if quantise else None,
            direct=self._direct,
        )
        batch.buffers.busy = True
        return batch

    def _dispatch_recv(self, request: DispatchRequest, handle: Handle) -> None:
        batch: Batch = request.state
        handle.state = batch
        self._launch(
            dispatch.dispatch_receive,
            "dispatch receive",
            batch.buffers.received,
            batch.buffers.signals,
            batch.buffers.epochs,
            self._runtime.watchdog,
            as_words(handle.rows),
            handle.scales,
            handle.tokens_per_expert,
            handle.offsets,
            handle.source_rank,
            handle.source_token,
            handle.source_choice,
            handle.row_weights,
            batch.stream_counts,
            torch.empty_like(batch.positions),
            batch.positions,
            batch.row_tokens,
            self._reports,
            self.config.rank,
            _manner_bits(request.manner),
            layout=batch.layout,
        )
        self._raise_reports()

    def _combine_send(self, request: CombineRequest) -> Layout:
        self._arrive("combine")
        self._raise_reports()
        batch: Batch = request.handle.state
        late = request.weights is not None and not request.weights_sent
        layout = dataclasses.replace(
            _replaced(self._layout, combine_itemsize=request.expert_rows.dtype.itemsize),
            dispatch_itemsize=batch.layout.dispatch_itemsize,
            return_pairs=self._layout.return_pairs or late,
        )
        staging, returned = self._return_regions(batch.buffers, layout)
        self._launch(
            combine.combine_send,
            "combine send",
            request.expert_rows,
            None if request.weights is None or layout.return_pairs else request.handle.row_weights,
            batch.stream_counts,
            batch.positions,
            batch.row_tokens,
            staging,
            returned,
            batch.buffers.signals,
            batch.buffers.epochs,
            self.config.rank,
            layout=layout,
            direct=self._direct,
        )
        return layout

    def _combine_recv(self, request: CombineRequest, out: Tensor, bias: Tensor | None, accumulate: bool) -> None:
        batch: Batch = request.handle.state
        layout: Layout = request.state
        self._launch(
            combine.combine_receive,
            "combine receive",
            request.handle.ids,
            request.weights if layout.return_pairs else None,
            request.handle.bound,
            self._placement,
            self._return_regions(batch.buffers, layout)[1],
            batch.buffers.signals,
            batch.buffers.epochs,
            self._runtime.watchdog,
            out,
            bias,
            request.handle.num_tokens,
            layout=layout,
            row_type=_KERNEL_TYPES[request.expert_rows.dtype],
            accumulate=accumulate,
        )
        batch.buffers.busy = False

    @property
    def symmetric_bytes(self) -> int:
        """Symmetric memory that this rank holds for all buffer sets."""
        late = (buffers.late_memory for buffers in self._sets)
        return sum(self._layout.symmetric_bytes + (0 if memory is None else memory.numel()) for memory in late)

    @property
    def _agrees(self) -> bool:
        return self.always_agrees or self.config.check_ids

    def _agree(self, announcement: checks.Announcement) -> None:
        with self._between_ranks("dispatch"):
            checks.agree_on_dispatch(announcement, self.config, self._runtime)

    def _announce_refusal(self, error: Exception) -> None:
        if self._agrees and not self._broken:
            self._arrive("dispatch")
            try:
                self._agree(checks.Announcement(refusal=str(error)))
            except (ValueError, TimeoutError, RuntimeError) as other:
                error.add_note(f"The other ranks: {other}")

    def _close(self) -> None:
        sets, self._sets = self._sets, []
        if self._broken:
            return  # releasing needs every rank, and some are not where this one is
        # A peer may still read rows from here, or write signals to here.
        self._runtime.synchronize()
        self._runtime.barrier()
        for buffers in sets:
            if buffers.late_memory is not None:
                self._runtime.free(buffers.late_memory)
            self._runtime.free(buffers.memory)
        self._raise_reports()  # of a last batch that no later call has looked at

    def _abandon(self) -> None:
        self._broken = True

    # Helpers.

    def _arrive(self, call: str) -> None:
        """Notes that this rank has come to its next call; for the words of an error here and elsewhere."""
        self._call = call
        if self._ledger is not None:
            self._ledger.arrive(call)

    def _explained(self, error: WaitTimeoutError) -> Exception:
        """The error to raise for a wait that took too long: with the ranks that did not come, if any are known."""
        found = None
        if self._ledger is not None:
            with contextlib.suppress(RuntimeError):  # the store dies with the process that holds it
                found = self._ledger.absentees(self._call)
        return error if found is None else type(found)(f"{found}; {error}")

    @contextlib.contextmanager
    def _between_ranks(self, call: str) -> Iterator[None]:
        """Where ranks wait for one another. After an error there they disagree about what was sent, unless it was
        refused before: nothing may follow but release.
        """
        if self._broken:
            raise RuntimeError(f"{call}: an earlier call failed between the ranks; close the exchange, make a new one")
        try:
            yield
        except (ValueError, NotEnqueuedError):
            raise
        except BaseException as error:
            self._broken = True
            if isinstance(error, WaitTimeoutError):
                raise self._explained(error) from error
            raise

    def _launch(self, kernel: object, label: str, *args: object, **constants: object) -> None:
        grid = (self._num_programs,)
        with self._between_ranks(label):
            self._runtime.launch(kernel, grid, *args, num_warps=NUM_WARPS, label=label, **constants)

    def _new_batch(self, layout: Layout) -> Batch:
        buffers = next(candidate for candidate in self._sets if not candidate.busy)
        new = functools.partial(torch.empty, dtype=torch.int32, device=self._runtime.device)
        return Batch(
            buffers=buffers,
            layout=layout,
            stream_counts=new(layout.num_sources),
            positions=new(layout.num_received, layout.choices),
            row_tokens=new(layout.num_received),
        )

    def _return_regions(self, buffers: BufferSet, layout: Layout) -> tuple[Tensor, Tensor]:
        """Where results are staged and land; allocated on first use if a set has no room for them."""
        if not layout.return_pairs or layout.room_for_pairs:
            return buffers.return_staging, buffers.returned
        staged, landed = _pair_bytes(self._layout)
        if buffers.late_memory is None:
            name = "rows in pairs, for weights first given to combine"
            with self._between_ranks(name):
                self._runtime.synchronize()
                self._raise_reports()  # ranks that disagree about the weights do not meet here
                buffers.late_memory = self._runtime.allocate(staged + landed, name)
        return buffers.late_memory[:staged], buffers.late_memory[staged:]

    def _raise_reports(self) -> None:
        """Raises what a kernel that has run reported."""
        if not self._reported.any():
            return
        self._broken = True
        needed, *differing = self._reported.tolist()
        for rank, report in enumerate(differing):
            if report:
                mine, theirs = (self._manner(bits) for bits in divmod(report - 1, 4))
                contract.check_same_manner({self.config.rank: mine, rank: theirs})
        unit = "rows in all" if self._layout.contiguous else "rows of one expert"
        raise ValueError(
            f"capacity: rank {self.config.rank} received {needed} {unit}, has room for {self._layout.capacity}; "
            f"make the exchange with a larger capacity"
        )

    def _manner(self, bits: int) -> Manner:
        return Manner(self._layout.dispatch_itemsize, bool(bits & WITH_WEIGHTS), bool(bits & WITH_GRADIENT))


def as_words(tensor: Tensor) -> Tensor:
    """A contiguous tensor ``[..., D]`` as the widest integers, of 4 bytes at most, that rows and address allow."""
    row_bytes, width = tensor.shape[-1] * tensor.element_size(), tensor.element_size()
    fits = (t for size, t in _WORDS if size >= width and row_bytes % size == 0 and tensor.data_ptr() % size == 0)
    dtype = next(fits)
    # A tensor without elements may have any strides, which a view would refuse.
    return tensor.view(dtype) if tensor.numel() else tensor.new_empty(0, dtype=dtype)


@functools.lru_cache(maxsize=64)
def _replaced(layout: Layout, **changes: Any) -> Layout:
    return dataclasses.replace(layout, **changes)


def _region(memory: Tensor, layout: Layout, name: str) -> Tensor:
    offset, size = layout.regions[name]
    return memory[offset : offset + size]


def _manner_bits(manner: Manner) -> int:
    return WITH_WEIGHTS * manner.weights | WITH_GRADIENT * manner.gradient


def _pair_bytes(layout: Layout) -> tuple[int, int]:
    """Memory of a set for results in pairs: where they are staged, where they land."""
    regions = _replaced(layout, room_for_pairs=True).regions
    return contract.round_up(regions["return_staging"][1], REGION_ALIGNMENT), regions["returned"][1]


def most_symmetric_bytes(config: Config) -> int:
    """Symmetric memory that an exchange of this configuration may come to need on each rank."""
    layout = Layout.of(config)
    late = 0 if layout.room_for_pairs else contract.round_up(sum(_pair_bytes(layout)), REGION_ALIGNMENT)
    return config.num_buffer_sets * (layout.symmetric_bytes + late)
