"""Combine: the experts' rows travel back to the ranks of their tokens' group and are summed.

Send: each rank tells every other that its receive buffer is free, sums a received row's results with their weights in
float32 (or leaves them apart, in pairs) and puts them into places at the source that only they have. Nothing is
awaited.

Receive: a token's rows are awaited and summed in float32, in the order of their places; then every rank's flag is
awaited, the only barrier. The letters are those of :mod:`ops.moe_comm_gpu.kernels.layout`; ``docs/moe_comm.md`` has
the protocol.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ops.moe_comm_gpu.device.primitives import (
    SIGNAL_ADD,
    SIGNAL_SET,
    peer_ptr,
    put_signal_nbi,
    signal,
    signal_peer,
    wait_ge,
)
from ops.moe_comm_gpu.kernels.common import (
    ELSEWHERE,
    WAIT_FLAG,
    WAIT_RETURNS,
    choices_of_token,
    element,
    first_of_each,
    num_tokens_that_count,
    ranks_of,
    row_offset,
)

#: Numbers of a row that are summed at a time: 32 for each thread of eight warps.
SUM_BLOCK = tl.constexpr(8192)


@triton.jit(do_not_specialize=["rank"])
def combine_send(
    expert_rows_ptr: tl.tensor,
    row_weights_ptr: tl.tensor,
    stream_counts_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    row_tokens_ptr: tl.tensor,
    staging_ptr: tl.tensor,
    returned_ptr: tl.tensor,
    signals_ptr: tl.tensor,
    epochs_ptr: tl.tensor,
    rank: tl.tensor,
    layout: tl.constexpr,
    direct: tl.constexpr,
) -> None:
    """Sends the experts' rows back; never waits.

    Args:
        expert_rows_ptr: ``[N, D]``.
        row_weights_ptr: weight of each row ``[N]`` float32, or None for ones; not used for pairs.
        stream_counts_ptr: rows of each stream ``[B, R]`` int32.
        positions_ptr: expert row of each choice of each received row ``[B, R, U, J]`` int32.
        row_tokens_ptr: token of each received row ``[B, R, U]`` int32.
        staging_ptr: bytes ``[places, return_bytes]``, symmetric: where rows are sent from, ``[R, U]`` or, for pairs,
            ``[R, U, J]``.
        returned_ptr: bytes ``[M, returns, return_bytes]``, symmetric: where rows land, at the source.
        signals_ptr: the set's signal words, symmetric.
        epochs_ptr: the set's local words.
        rank: this rank.
        layout: the set's geometry, with the item size of this call.
        direct: whether every rank can be written with plain stores.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(epochs_ptr)
    for peer in range(program, layout.world_size, num_programs):
        signal(signals_ptr + layout.flags_word + rank, epoch, SIGNAL_SET, peer)
    choices = tl.arange(0, layout.choice_block)
    for stream in range(layout.num_sources):
        count = tl.load(stream_counts_ptr + stream)
        source = stream % layout.world_size
        for slot in range((program + stream) % num_programs, count, num_programs):
            row = stream * layout.share + slot
            token = tl.load(row_tokens_ptr + row)
            first_position_ptr = positions_ptr + tl.cast(row, tl.int64) * layout.choices
            if layout.return_pairs:
                # A row of another bucket may carry the same token: the place depends on the choice alone.
                staged_row = (source * layout.share + token // layout.dp_size) * layout.choices
                for choice in range(layout.choices):
                    position = tl.load(first_position_ptr + choice)
                    if position != ELSEWHERE:
                        _send_row(
                            expert_rows_ptr, None, first_position_ptr + choice, 1, staging_ptr, staged_row + choice,
                            returned_ptr, token * layout.returns + choice, signals_ptr, token, source, layout, direct,
                        )  # fmt: skip
            else:
                place = token * layout.returns
                if layout.returns_by_rank:
                    place += rank
                else:
                    positions = tl.load(first_position_ptr + choices, mask=choices < layout.choices, other=ELSEWHERE)
                    place += tl.min(tl.where(positions != ELSEWHERE, choices, layout.choices), axis=0)
                _send_row(
                    expert_rows_ptr, row_weights_ptr, first_position_ptr, layout.choices, staging_ptr, row,
                    returned_ptr, place, signals_ptr, token, source, layout, direct,
                )  # fmt: skip


@triton.jit
def _send_row(
    expert_rows_ptr: tl.tensor,
    row_weights_ptr: tl.tensor,
    position_ptr: tl.tensor,
    num_summed: tl.constexpr,
    staging_ptr: tl.tensor,
    staged_row: tl.tensor,
    returned_ptr: tl.tensor,
    place: tl.tensor,
    signals_ptr: tl.tensor,
    token: tl.tensor,
    source: tl.tensor,
    layout: tl.constexpr,
    direct: tl.constexpr,
) -> None:
    """Sends the sum of ``num_summed`` expert rows to every rank of the source's group."""
    row_type: tl.constexpr = expert_rows_ptr.dtype
    target = returned_ptr + row_offset(place, layout.return_bytes)
    counter = signals_ptr + layout.returns_word + token
    staged = staging_ptr + row_offset(staged_row, layout.return_bytes)
    if not direct:
        _sum_rows(staged.to(row_type), expert_rows_ptr, row_weights_ptr, position_ptr, num_summed, layout)
    group_size: tl.constexpr = layout.dp_size
    for member in tl.static_range(group_size):
        peer = source // layout.dp_size * layout.dp_size + member
        if direct:
            remote = tl.multiple_of(peer_ptr(target, peer), 16).to(row_type)
            _sum_rows(remote, expert_rows_ptr, row_weights_ptr, position_ptr, num_summed, layout)
            signal_peer(peer_ptr(counter, peer), 1, SIGNAL_ADD)
        else:
            put_signal_nbi(target, staged, layout.return_bytes, counter, 1, SIGNAL_ADD, peer)


@triton.jit
def _sum_rows(
    target_ptr: tl.tensor,
    expert_rows_ptr: tl.tensor,
    row_weights_ptr: tl.tensor,
    position_ptr: tl.tensor,
    num_summed: tl.constexpr,
    layout: tl.constexpr,
) -> None:
    """Writes the weighted float32 sum of the expert rows at the first positions, rounded to the rows' type."""
    block: tl.constexpr = min(triton.next_power_of_2(layout.hidden), SUM_BLOCK)
    hidden: tl.constexpr = layout.hidden
    for begin in tl.static_range(0, hidden, block):
        column = begin + tl.arange(0, block)
        inside = column < layout.hidden
        total = tl.zeros([block], tl.float32)
        for index in tl.static_range(num_summed):
            position = tl.load(position_ptr + index)
            if position >= 0:
                row = expert_rows_ptr + position.to(tl.int64) * layout.hidden
                values = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
                if row_weights_ptr is not None:
                    values *= tl.load(row_weights_ptr + position)
                total += values
        tl.store(target_ptr + column, total.to(target_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def combine_receive(
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    bound_ptr: tl.tensor,
    placement_ptr: tl.tensor,
    returned_ptr: tl.tensor,
    signals_ptr: tl.tensor,
    epochs_ptr: tl.tensor,
    watchdog_ptr: tl.tensor,
    out_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    num_tokens: tl.tensor,
    layout: tl.constexpr,
    row_type: tl.constexpr,
    accumulate: tl.constexpr,
) -> None:
    """Waits for the rows of this rank's tokens and sums them.

    Args:
        ids_ptr: ``[T, J]``, any integer type.
        weights_ptr: ``[T, J]`` float32, or None for ones; used for pairs alone.
        bound_ptr: number of leading tokens that count, or None for all.
        placement_ptr: physical expert of each expert ``[E]`` int32.
        returned_ptr: bytes ``[M, returns, return_bytes]``, symmetric.
        signals_ptr: the set's signal words, symmetric.
        epochs_ptr: the set's local words.
        watchdog_ptr: this rank's watchdog block.
        out_ptr: out, ``[T, D]``.
        bias_ptr: ``[T, D]`` added in float32, or None.
        num_tokens: T.
        layout: the set's geometry, with the item size of this call.
        row_type: element type of the returned rows.
        accumulate: whether to add to what ``out`` holds.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(epochs_ptr)
    limit = num_tokens_that_count(num_tokens, bound_ptr)
    before_ptr = epochs_ptr + layout.expected_returns_word + epoch % 2 * layout.max_num_tokens
    after_ptr = epochs_ptr + layout.expected_returns_word + (epoch + 1) % 2 * layout.max_num_tokens
    flags_ptr = signals_ptr + layout.flags_word
    for token in range(program, num_tokens, num_programs):
        physical = choices_of_token(ids_ptr, placement_ptr, token, limit, layout)
        comes = physical >= 0 if layout.return_pairs else first_of_each(ranks_of(physical, layout), layout)
        expected = tl.load(before_ptr + token) + tl.sum(comes.to(tl.int32), axis=0)
        counter = signals_ptr + layout.returns_word + token
        wait_ge(counter, expected, watchdog_ptr, WAIT_RETURNS, -1, flags_ptr, epoch, layout.world_size)
        tl.store(after_ptr + token, expected)
        _sum_returns(returned_ptr, weights_ptr, out_ptr, bias_ptr, physical, comes, token, layout, row_type, accumulate)
    _carry_over(before_ptr, after_ptr, num_tokens, layout)
    for peer in range(program, layout.world_size, num_programs):
        wait_ge(flags_ptr + peer, epoch, watchdog_ptr, WAIT_FLAG, peer)
    if program == 0:
        tl.store(epochs_ptr + layout.finished_word, epoch)


@triton.jit
def _sum_returns(
    returned_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    out_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    physical: tl.tensor,
    comes: tl.tensor,
    token: tl.tensor,
    layout: tl.constexpr,
    row_type: tl.constexpr,
    accumulate: tl.constexpr,
) -> None:
    """Writes the float32 sum of a token's returned rows, in the order of their places."""
    block: tl.constexpr = min(triton.next_power_of_2(layout.hidden), SUM_BLOCK)
    hidden: tl.constexpr = layout.hidden
    for begin in tl.static_range(0, hidden, block):
        column = begin + tl.arange(0, block)
        inside = column < layout.hidden
        place_in_out = tl.cast(token, tl.int64) * layout.hidden + column
        total = tl.zeros([block], tl.float32)
        num_places: tl.constexpr = layout.returns
        for place in tl.static_range(num_places):
            if layout.returns_by_rank:
                present = tl.max((ranks_of(physical, layout) == place).to(tl.int32), axis=0) > 0
            else:
                present = element(comes.to(tl.int32), place, layout) > 0
            if present:
                row = returned_ptr + row_offset(token * layout.returns + place, layout.return_bytes)
                values = tl.load(row.to(tl.pointer_type(row_type)) + column, mask=inside, other=0.0).to(tl.float32)
                if layout.return_pairs and weights_ptr is not None:
                    values *= tl.load(weights_ptr + tl.cast(token, tl.int64) * layout.choices + place)
                total += values
        if bias_ptr is not None:
            total += tl.load(bias_ptr + place_in_out, mask=inside, other=0.0).to(tl.float32)
        if accumulate:
            total += tl.load(out_ptr + place_in_out, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + place_in_out, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _carry_over(before_ptr: tl.tensor, after_ptr: tl.tensor, num_tokens: tl.tensor, layout: tl.constexpr) -> None:
    """Expected returns of the places that this batch has no token for stay what they were."""
    block: tl.constexpr = min(triton.next_power_of_2(layout.max_num_tokens), 1024)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    for first in range(program * block, layout.max_num_tokens, num_programs * block):
        token = first + tl.arange(0, block)
        absent = (token >= num_tokens) & (token < layout.max_num_tokens)
        tl.store(after_ptr + token, tl.load(before_ptr + token, mask=absent, other=0), mask=absent)
