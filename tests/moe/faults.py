"""Exchanges that are wrong on purpose, each in one way; the harness must refuse every one of them."""

from __future__ import annotations

from typing import Any

import torch

from ops.moe_comm_gpu.torch_backend import Exchange


def _rows_of(handle: Any, slot: int) -> slice:
    start = int(handle.offsets[slot])
    return slice(start, start + int(handle.tokens_per_expert[slot]))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).view(-1, tensor.shape[-1] * tensor.itemsize)


def _fullest(handle: Any) -> slice:
    return _rows_of(handle, int(handle.tokens_per_expert.argmax()))


class DroppedRow(Exchange):
    """Forgets the last row of the fullest expert."""

    def _dispatch_recv(self, request, handle):
        super()._dispatch_recv(request, handle)
        handle.tokens_per_expert[handle.tokens_per_expert.argmax()] -= 1


class SwappedExperts(Exchange):
    """Delivers to slot 0 what is slot 1's, and the other way round."""

    def __init__(self, config, group=None):
        super().__init__(config, group)
        self._expert_slot = torch.where(self._expert_slot < 2, 1 - self._expert_slot, self._expert_slot)


class SwappedRows(Exchange):
    """Delivers the first two rows of an expert in the other order, with their sources."""

    def _dispatch_recv(self, request, handle):
        super()._dispatch_recv(request, handle)
        first = _fullest(handle).start
        for table in (_flat(handle.rows), *(getattr(handle, n).view(-1) for n in _SOURCES)):
            table[first : first + 2] = table[first : first + 2].flip(0)


class RowOfAnotherSource(Exchange):
    """Gives one row the payload of another token."""

    def _dispatch_recv(self, request, handle):
        super()._dispatch_recv(request, handle)
        first = _fullest(handle).start
        _flat(handle.rows)[first] = _flat(handle.rows)[first + 1]


class DuplicatedRow(Exchange):
    """Delivers one row once more."""

    def _dispatch_recv(self, request, handle):
        super()._dispatch_recv(request, handle)
        rows = _fullest(handle)
        _flat(handle.rows)[rows.stop] = _flat(handle.rows)[rows.stop - 1]
        handle.tokens_per_expert[handle.tokens_per_expert.argmax()] += 1


class WrongSource(Exchange):
    """Says that a row comes from the next token."""

    def _dispatch_recv(self, request, handle):
        super()._dispatch_recv(request, handle)
        handle.source_token.view(-1)[_fullest(handle).start] += 1


class ScalesOfAnotherRow(Exchange):
    """Gives one row the block scales of another."""

    def _dispatch_recv(self, request, handle):
        super()._dispatch_recv(request, handle)
        first = _fullest(handle).start
        _flat(handle.scales)[first] = _flat(handle.scales)[first + 1]


class PlaceWritten(Exchange):
    """Clears the places that hold no row."""

    def _dispatch_recv(self, request, handle):
        super()._dispatch_recv(request, handle)
        _flat(handle.rows)[handle.source_rank.view(-1) < 0] = 0


class StaleBatch(Exchange):
    """Delivers the first batch's rows again in the second."""

    def _dispatch_recv(self, request, handle):
        super()._dispatch_recv(request, handle)
        self.earlier = getattr(self, "earlier", handle.rows.clone())
        handle.rows.copy_(self.earlier)


class OneColumnOff(Exchange):
    """Delivers one row one element further on."""

    def _dispatch_recv(self, request, handle):
        super()._dispatch_recv(request, handle)
        row = _flat(handle.rows)[_fullest(handle).start]
        row.copy_(row.roll(handle.rows.itemsize))


class DoubleWeighting(Exchange):
    """Weighs the rows where the experts are, and again at the source."""

    def _combine_send(self, request):
        request.expert_rows = request.expert_rows * request.handle.row_weights[..., None].to(request.expert_rows.dtype)
        return super()._combine_send(request)


class WeightOfAnotherChoice(Exchange):
    """Weighs each choice with the weight of the next one."""

    def _combine_recv(self, request, out, bias, accumulate):
        if request.weights is not None:
            request.weights = request.weights.roll(1, dims=1)
        super()._combine_recv(request, out, bias, accumulate)


class CombineDropsAChoice(Exchange):
    """Leaves the last choice out of the sum."""

    def _combine_recv(self, request, out, bias, accumulate):
        if request.weights is not None:
            request.weights[:, -1] = 0
        super()._combine_recv(request, out, bias, accumulate)


class OneTokenMissing(Exchange):
    """Leaves one token of the whole batch at zero, which a mean would hide."""

    def _combine_recv(self, request, out, bias, accumulate):
        super()._combine_recv(request, out, bias, accumulate)
        out[-1:] = 0


class TokensSwapped(Exchange):
    """Returns two tokens' results in the other order."""

    def _combine_recv(self, request, out, bias, accumulate):
        super()._combine_recv(request, out, bias, accumulate)
        out[:2] = out[:2].flip(0)


class ReadsUnusedPlaces(Exchange):
    """Adds nothing times what lies in places without a row."""

    def _combine_recv(self, request, out, bias, accumulate):
        super()._combine_recv(request, out, bias, accumulate)
        out += 0 * request.expert_rows.sum()


class GroupNotShared(Exchange):
    """Keeps a member's sums from the rest of its group."""

    def _share(self, rows):
        return rows


class BiasForgotten(Exchange):
    """Does not add the bias."""

    def _combine_recv(self, request, out, bias, accumulate):
        super()._combine_recv(request, out, None, accumulate)


class AccumulateForgotten(Exchange):
    """Overwrites instead of adding."""

    def _combine_recv(self, request, out, bias, accumulate):
        super()._combine_recv(request, out, bias, False)


class SumInSixteenBits(Exchange):
    """Rounds after every choice."""

    def _combine_recv(self, request, out, bias, accumulate):
        super()._combine_recv(request, out, bias, accumulate)
        weights, request.weights = request.weights, request.weights.clone()
        out.zero_()
        for choice in range(weights.shape[1]):
            request.weights = torch.zeros_like(weights)
            request.weights[:, choice] = weights[:, choice]
            super()._combine_recv(request, out, None, True)


class MissingTokenGradient(Exchange):
    """Returns no gradient along the way of dispatch."""

    def _combine_recv(self, request, out, bias, accumulate):
        super()._combine_recv(request, out, bias, accumulate)
        if request.weights is None:
            out.zero_()


class MissingWeightGradient(Exchange):
    """Returns no gradient of the weights."""

    def _return_scalars(self, handle, values):
        return torch.zeros_like(super()._return_scalars(handle, values))


class ScaledRowGradient(Exchange):
    """Doubles the weights that scale the gradient of the experts' rows."""

    def _dispatch_recv(self, request, handle):
        super()._dispatch_recv(request, handle)
        if request.source is None:  # a dispatch of gradients
            handle.row_weights *= 2


class WeightGradientOfAnotherChoice(Exchange):
    """Returns the gradient of the weights one choice further on."""

    def _return_scalars(self, handle, values):
        return super()._return_scalars(handle, values).roll(1, dims=1)


_SOURCES = ("source_rank", "source_token", "source_choice")
