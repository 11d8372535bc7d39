"""Dispatch: tokens travel to the ranks of their experts.

Send: each rank counts the rows for every destination, announces the count with one signal, packs each of its tokens
once and puts the row into a place at every destination that only this rank writes. Nothing is awaited.

A program never stores where it has loaded: a scalar is loaded by every thread and stored by one, and nothing orders the
two between threads.

Receive: counts and rows are awaited, rows are numbered by (expert, source rank, token, choice) and copied to where the
grouped matrix product wants them. The letters are those of :mod:`ops.moe_comm_gpu.kernels.layout`;
``docs/moe_comm.md`` has the protocol.
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
    EPOCH_SHIFT,
    MANNER_MASK,
    MANNER_SHIFT,
    NO_ROOM,
    WAIT_COUNT,
    WAIT_PROGRAMS,
    WAIT_ROWS,
    as_float32,
    as_int32,
    choices_of,
    choices_of_token,
    copy_words,
    destinations_of,
    element,
    first_of_each,
    num_tokens_that_count,
    row_offset,
)


@triton.jit(do_not_specialize=["num_tokens", "rank", "manner"])
def dispatch_send(
    tokens_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    bound_ptr: tl.tensor,
    placement_ptr: tl.tensor,
    send_ptr: tl.tensor,
    received_ptr: tl.tensor,
    signals_ptr: tl.tensor,
    epochs_ptr: tl.tensor,
    num_tokens: tl.tensor,
    rank: tl.tensor,
    manner: tl.tensor,
    layout: tl.constexpr,
    row_type: tl.constexpr,
    direct: tl.constexpr,
) -> None:
    """Sends this rank's share of its group's tokens; never waits.

    Args:
        tokens_ptr: ``[T, D]`` as words of 4, 2 or 1 bytes, or as numbers when ``row_type`` asks for quantisation.
        scales_ptr: ``[T, S]`` float32, or None.
        ids_ptr: ``[T, J]``, any integer type.
        weights_ptr: ``[T, J]`` float32, or None for ones.
        bound_ptr: number of leading tokens that count, or None for all.
        placement_ptr: physical expert of each expert ``[E]`` int32.
        send_ptr: bytes ``[U, row_bytes]``, symmetric: where rows are packed.
        received_ptr: bytes ``[B, R, U, row_bytes]``, symmetric: where rows land, at the destination.
        signals_ptr: the set's signal words, symmetric.
        epochs_ptr: the set's local words.
        num_tokens: T.
        rank: this rank.
        manner: bits of what has to be the same on every rank.
        layout: the set's geometry, with the item size of this call.
        row_type: None to send rows as they are, or the fp8 type to quantise them to.
        direct: whether every rank can be written with plain stores.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(epochs_ptr + layout.finished_word) + 1
    if program == 0:
        tl.store(epochs_ptr, epoch)
    limit = num_tokens_that_count(num_tokens, bound_ptr)
    share = (tl.maximum(limit - rank % layout.dp_size, 0) + layout.dp_size - 1) // layout.dp_size
    for destination in range(program, layout.num_destinations, num_programs):
        count = _count(ids_ptr, placement_ptr, destination, share, limit, rank, layout)
        word = signals_ptr + destination % layout.buckets * layout.world_size + rank
        announced = (epoch << EPOCH_SHIFT) + (tl.cast(manner, tl.int64) << MANNER_SHIFT) + count
        signal(word, announced, SIGNAL_SET, destination // layout.buckets)
    for index in range(program, share, num_programs):
        token = index * layout.dp_size + rank % layout.dp_size
        physical = choices_of_token(ids_ptr, placement_ptr, token, limit, layout)
        destinations = destinations_of(physical, layout)
        slots = _slots(ids_ptr, placement_ptr, destinations, index, limit, rank, layout)
        places = (destinations % layout.buckets * layout.world_size + rank) * layout.share + slots
        sent = first_of_each(destinations, layout)
        staged = send_ptr + row_offset(index, layout.row_bytes)
        if not direct:
            _pack(staged, tokens_ptr, scales_ptr, weights_ptr, physical, token, layout, row_type)
        for choice in range(layout.choices):
            destination = element(tl.where(sent, destinations + 1, 0), choice, layout) - 1
            if destination >= 0:
                place = received_ptr + row_offset(element(places, choice, layout), layout.row_bytes)
                stream = destination % layout.buckets * layout.world_size + rank
                arrivals = signals_ptr + layout.arrivals_word + stream
                peer = destination // layout.buckets
                if direct:
                    remote = tl.multiple_of(peer_ptr(place, peer), 16)
                    _pack(remote, tokens_ptr, scales_ptr, weights_ptr, physical, token, layout, row_type)
                    signal_peer(peer_ptr(arrivals, peer), 1, SIGNAL_ADD)
                else:
                    put_signal_nbi(place, staged, layout.row_bytes, arrivals, 1, SIGNAL_ADD, peer)


@triton.jit
def _shared_tokens(first: tl.tensor, rank: tl.tensor, layout: tl.constexpr) -> tl.tensor:
    """A tile of this rank's tokens, from the ``first`` of its share."""
    return (first + tl.arange(0, layout.token_tile)) * layout.dp_size + rank % layout.dp_size


@triton.jit
def _count(
    ids_ptr: tl.tensor,
    placement_ptr: tl.tensor,
    destination: tl.tensor,
    share: tl.tensor,
    limit: tl.tensor,
    rank: tl.tensor,
    layout: tl.constexpr,
) -> tl.tensor:
    """Number of this rank's tokens with a choice at ``destination``."""
    count = tl.zeros([], tl.int32)
    for first in range(0, share, layout.token_tile):
        tokens = _shared_tokens(first, rank, layout)
        keys = destinations_of(choices_of(ids_ptr, placement_ptr, tokens, limit, layout), layout)
        count += tl.sum(tl.max((keys == destination).to(tl.int32), axis=1), axis=0)
    return count


@triton.jit
def _slots(
    ids_ptr: tl.tensor,
    placement_ptr: tl.tensor,
    destinations: tl.tensor,
    index: tl.tensor,
    limit: tl.tensor,
    rank: tl.tensor,
    layout: tl.constexpr,
) -> tl.tensor:
    """For each destination ``[choice_block]`` of token ``index`` of the share, how many earlier tokens go there too."""
    choice_block: tl.constexpr = layout.choice_block  # Triton 3.7 makes no zeros of what is no constexpr by itself
    slots = tl.zeros([choice_block], tl.int32)
    for first in range(0, index, layout.token_tile):
        tokens = _shared_tokens(first, rank, layout)
        keys = destinations_of(choices_of(ids_ptr, placement_ptr, tokens, limit, layout), layout)
        earlier = (first + tl.arange(0, layout.token_tile) < index)[:, None]
        same = (keys[:, :, None] == destinations[None, None, :]).to(tl.int32)
        slots += tl.sum(tl.where(earlier, tl.max(same, axis=1), 0), axis=0)
    return slots


@triton.jit
def _pack(
    row_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    physical: tl.tensor,
    token: tl.tensor,
    layout: tl.constexpr,
    row_type: tl.constexpr,
) -> None:
    """Writes a token's row ``payload | scales | token, experts, weights``."""
    if row_type is None:
        word_type: tl.constexpr = tokens_ptr.dtype.element_ty
        num_words: tl.constexpr = layout.hidden * layout.dispatch_itemsize * 8 // word_type.primitive_bitwidth
        source = tokens_ptr + tl.cast(token, tl.int64) * num_words
        copy_words(row_ptr.to(tl.pointer_type(word_type)), source, num_words)
        if layout.scale_block > 0:
            scales = scales_ptr + tl.cast(token, tl.int64) * layout.num_scales
            copy_words(as_float32(row_ptr + layout.scales_offset), scales, layout.num_scales)
    else:
        _quantise(row_ptr, tokens_ptr + tl.cast(token, tl.int64) * layout.hidden, layout, row_type)
    choice = tl.arange(0, layout.choice_block)
    inside = choice < layout.choices
    tl.store(as_int32(row_ptr + layout.header_offset), token)
    tl.store(as_int32(row_ptr + layout.experts_offset) + choice, physical, mask=inside)
    weights = tl.full([layout.choice_block], 1.0, tl.float32)
    if weights_ptr is not None:
        weights = tl.load(weights_ptr + tl.cast(token, tl.int64) * layout.choices + choice, mask=inside, other=0.0)
    tl.store(as_float32(row_ptr + layout.weights_offset) + choice, weights, mask=inside)


@triton.jit
def _quantise(row_ptr: tl.tensor, token_ptr: tl.tensor, layout: tl.constexpr, row_type: tl.constexpr) -> None:
    """Writes a token as fp8 with a float32 scale a block: ``scale = max |x| / largest`` (1 for zeros), ``x / scale``.

    The same numbers as :func:`ops.moe_comm_gpu.contract.quantise`.
    """
    largest: tl.constexpr = 448.0 if row_type == tl.float8e4nv else 57344.0
    width: tl.constexpr = triton.next_power_of_2(layout.scale_block)
    height: tl.constexpr = max(1, min(triton.next_power_of_2(layout.num_scales), 4096 // width))
    column = tl.arange(0, width)
    num_scales: tl.constexpr = layout.num_scales
    for begin in tl.static_range(0, num_scales, height):
        block = begin + tl.arange(0, height)
        element_index = block[:, None] * layout.scale_block + column[None, :]
        inside = (column < layout.scale_block)[None, :] & (element_index < layout.hidden)
        values = tl.load(token_ptr + element_index, mask=inside, other=0.0).to(tl.float32)
        # Reductions and clamps may drop NaN, and a row that is not finite must not arrive as one that is.
        has_nan = tl.max((values != values).to(tl.int32), axis=1) > 0
        peak = tl.max(tl.abs(values), axis=1)
        scale = tl.where(has_nan, 1.0, tl.where(peak > 0, tl.div_rn(peak, largest), 1.0))
        scaled = tl.div_rn(values, tl.broadcast_to(scale[:, None], values.shape))
        scaled = tl.where(scaled != scaled, scaled, tl.minimum(tl.maximum(scaled, -largest), largest))
        tl.store(row_ptr.to(tl.pointer_type(row_type)) + element_index, scaled.to(row_type), mask=inside)
        tl.store(as_float32(row_ptr + layout.scales_offset) + block, scale, mask=block < layout.num_scales)


@triton.jit(do_not_specialize=["rank", "manner"])
def dispatch_receive(
    received_ptr: tl.tensor,
    signals_ptr: tl.tensor,
    epochs_ptr: tl.tensor,
    watchdog_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    source_rank_ptr: tl.tensor,
    source_token_ptr: tl.tensor,
    source_choice_ptr: tl.tensor,
    row_weights_ptr: tl.tensor,
    stream_counts_ptr: tl.tensor,
    numbers_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    row_tokens_ptr: tl.tensor,
    reports_ptr: tl.tensor,
    rank: tl.tensor,
    manner: tl.tensor,
    layout: tl.constexpr,
) -> None:
    """Waits for every row of this rank and delivers them by expert.

    Args:
        received_ptr: bytes ``[B, R, U, row_bytes]``, symmetric.
        signals_ptr: the set's signal words, symmetric.
        epochs_ptr: the set's local words.
        watchdog_ptr: this rank's watchdog block.
        rows_ptr: out, ``[N, D]`` as words of 4, 2 or 1 bytes.
        scales_ptr: out, ``[N, S]`` float32, or None.
        counts_ptr: out, rows of each expert ``[L]`` int32.
        offsets_ptr: out, first row of each expert and the end ``[L + 1]`` int64.
        source_rank_ptr: out, ``[N]`` int32, -1 where there is no row, as in the next two.
        source_token_ptr: out, ``[N]`` int32.
        source_choice_ptr: out, ``[N]`` int32.
        row_weights_ptr: out, ``[N]`` float32, 0 where there is no row; or None.
        stream_counts_ptr: out, rows of each stream ``[B, R]`` int32, for combine.
        numbers_ptr: room for the number of each choice among its expert's ``[B, R, U, J]`` int32.
        positions_ptr: out, expert row of each choice of each received row ``[B, R, U, J]`` int32; ``ELSEWHERE`` for
            the choices of other buckets and ranks, ``NO_ROOM`` past the capacity.
        row_tokens_ptr: out, index in its group's batch of the token of each received row ``[B, R, U]`` int32.
        reports_ptr: out, what went wrong, ``[1 + R]`` int64, only written if it did: the capacity that would have held
            the rows; for each rank, 1 + its manner + 4 * this rank's, if they differ.
        rank: this rank.
        manner: bits of what has to be the same on every rank.
        layout: the set's geometry, with the item size of this call.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(epochs_ptr)
    _clear(source_rank_ptr, source_token_ptr, source_choice_ptr, row_weights_ptr, layout)
    before_ptr = epochs_ptr + layout.expected_arrivals_word + epoch % 2 * layout.num_sources
    after_ptr = epochs_ptr + layout.expected_arrivals_word + (epoch + 1) % 2 * layout.num_sources
    announced = epoch << EPOCH_SHIFT
    for stream in range(program, layout.num_sources, num_programs):
        source = stream % layout.world_size
        word = wait_ge(signals_ptr + stream, announced, watchdog_ptr, WAIT_COUNT, source) - announced
        theirs = (word >> MANNER_SHIFT) & MANNER_MASK
        count = word - (theirs << MANNER_SHIFT)
        # Every rank hears from every other, so each one notices; one bucket tells enough.
        if (theirs != manner) & (stream < layout.world_size):
            tl.store(reports_ptr + 1 + source, 1 + theirs + 4 * manner)
        expected = tl.load(before_ptr + stream) + count
        wait_ge(signals_ptr + layout.arrivals_word + stream, expected, watchdog_ptr, WAIT_ROWS, source)
        tl.store(after_ptr + stream, expected)
        tl.store(stream_counts_ptr + stream, count.to(tl.int32))
    _join_programs(signals_ptr, watchdog_ptr, 2 * epoch - 1, rank, layout)
    for expert in range(program, layout.local_experts, num_programs):
        count = _number_rows(received_ptr, stream_counts_ptr, numbers_ptr, expert, rank, layout)
        tl.store(counts_ptr + expert, count)
    _join_programs(signals_ptr, watchdog_ptr, 2 * epoch, rank, layout)
    if program == 0:
        _write_offsets(counts_ptr, offsets_ptr, reports_ptr, layout)
    for stream in range(layout.num_sources):
        count = tl.load(stream_counts_ptr + stream)
        for slot in range((program + stream) % num_programs, count, num_programs):
            row = stream * layout.share + slot
            header = received_ptr + row_offset(row, layout.row_bytes)
            tl.store(row_tokens_ptr + row, tl.load(as_int32(header + layout.header_offset)))
            num_choices: tl.constexpr = layout.choices
            for choice in tl.static_range(num_choices):
                pair = tl.cast(row, tl.int64) * layout.choices + choice
                physical = tl.load(as_int32(header + layout.experts_offset) + choice)
                expert = physical - rank * layout.local_experts
                if _is_here(expert, stream, layout):
                    position = _position(counts_ptr, expert, tl.load(numbers_ptr + pair), layout)
                    tl.store(positions_ptr + pair, position)
                    if position >= 0:
                        _deliver(
                            header, rows_ptr, scales_ptr, source_rank_ptr, source_token_ptr, source_choice_ptr,
                            row_weights_ptr, position, stream % layout.world_size, choice, layout,
                        )  # fmt: skip
                else:
                    tl.store(positions_ptr + pair, ELSEWHERE)


@triton.jit
def _is_here(expert: tl.tensor, stream: tl.tensor, layout: tl.constexpr) -> tl.tensor:
    """Whether a choice, as its distance from this rank's first physical expert, belongs to the stream's bucket."""
    if layout.per_expert:
        here = expert == stream // layout.world_size
    else:
        here = (expert >= 0) & (expert < layout.local_experts)
    return here


@triton.jit
def _clear(
    source_rank_ptr: tl.tensor,
    source_token_ptr: tl.tensor,
    source_choice_ptr: tl.tensor,
    row_weights_ptr: tl.tensor,
    layout: tl.constexpr,
) -> None:
    """Marks every place as holding no row, while rows are still on their way."""
    block: tl.constexpr = min(triton.next_power_of_2(layout.num_rows), 1024)
    for first in range(tl.program_id(0) * block, layout.num_rows, tl.num_programs(0) * block):
        place = first + tl.arange(0, block)
        inside = place < layout.num_rows
        none = tl.full([block], -1, tl.int32)
        tl.store(source_rank_ptr + place, none, mask=inside)
        tl.store(source_token_ptr + place, none, mask=inside)
        tl.store(source_choice_ptr + place, none, mask=inside)
        if row_weights_ptr is not None:
            tl.store(row_weights_ptr + place, tl.zeros([block], tl.float32), mask=inside)


@triton.jit
def _join_programs(
    signals_ptr: tl.tensor, watchdog_ptr: tl.tensor, round: tl.tensor, rank: tl.tensor, layout: tl.constexpr
) -> None:
    """Waits for every program of the grid to come here for the ``round``-th time since the set was made."""
    counter = signals_ptr + layout.barrier_word
    signal_peer(counter, 1, SIGNAL_ADD)
    wait_ge(counter, round * tl.num_programs(0), watchdog_ptr, WAIT_PROGRAMS, rank)


@triton.jit
def _number_rows(
    received_ptr: tl.tensor,
    stream_counts_ptr: tl.tensor,
    numbers_ptr: tl.tensor,
    expert: tl.tensor,
    rank: tl.tensor,
    layout: tl.constexpr,
) -> tl.tensor:
    """Numbers one expert's choices by (source rank, token, choice); returns how many there are."""
    bucket = expert if layout.per_expert else 0
    num_rows: tl.constexpr = layout.world_size * layout.share
    choice = tl.arange(0, layout.choice_block)
    total = tl.zeros([], tl.int32)
    for first in range(0, num_rows, layout.row_tile):
        index = first + tl.arange(0, layout.row_tile)
        source = index // layout.share
        counts = tl.load(stream_counts_ptr + bucket * layout.world_size + source, mask=index < num_rows, other=0)
        present = (index % layout.share < counts)[:, None] & (choice < layout.choices)[None, :]
        row = bucket * num_rows + index
        experts = as_int32(received_ptr + row_offset(row, layout.row_bytes) + layout.experts_offset)
        physical = tl.load(experts[:, None] + choice[None, :], mask=present, other=-1)
        mine = physical == rank * layout.local_experts + expert
        ones = mine.to(tl.int32)
        per_row = tl.sum(ones, axis=1)
        before = (tl.cumsum(per_row, axis=0) - per_row)[:, None] + tl.cumsum(ones, axis=1) - ones
        places = tl.cast(row, tl.int64)[:, None] * layout.choices + choice[None, :]
        tl.store(numbers_ptr + places, total + before, mask=mine)
        total += tl.sum(per_row, axis=0)
    return total


@triton.jit
def _padded(counts: tl.tensor, layout: tl.constexpr) -> tl.tensor:
    """Rows that experts take up in the contiguous layout."""
    return (counts + layout.row_multiple - 1) // layout.row_multiple * layout.row_multiple


@triton.jit
def _position(counts_ptr: tl.tensor, expert: tl.tensor, number: tl.tensor, layout: tl.constexpr) -> tl.tensor:
    """Place of an expert's row of this number."""
    first = expert * layout.capacity
    room = number < layout.capacity
    if layout.contiguous:
        experts = tl.arange(0, layout.expert_block)
        counts = tl.load(counts_ptr + experts, mask=experts < expert, other=0)
        first = tl.sum(_padded(counts, layout), axis=0)
        room = first + number < layout.capacity
    return tl.where(room, first + number, NO_ROOM)


@triton.jit
def _write_offsets(counts_ptr: tl.tensor, offsets_ptr: tl.tensor, reports_ptr: tl.tensor, layout: tl.constexpr) -> None:
    """Writes where each expert's rows begin and where the last ones end, and whether there is no room for them."""
    experts = tl.arange(0, layout.expert_block)
    inside = experts < layout.local_experts
    counts = tl.load(counts_ptr + experts, mask=inside, other=0)
    if layout.contiguous:
        ends = tl.cumsum(_padded(counts, layout), axis=0)
        needed = tl.max(ends, axis=0)
    else:
        ends = (experts + 1) * layout.capacity
        needed = tl.max(counts, axis=0)
    tl.store(offsets_ptr, tl.zeros([], tl.int64))
    tl.store(offsets_ptr + 1 + experts, ends.to(tl.int64), mask=inside)
    if needed > layout.capacity:
        tl.store(reports_ptr, needed.to(tl.int64))


@triton.jit
def _deliver(
    header: tl.tensor,
    rows_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    source_rank_ptr: tl.tensor,
    source_token_ptr: tl.tensor,
    source_choice_ptr: tl.tensor,
    row_weights_ptr: tl.tensor,
    position: tl.tensor,
    source: tl.tensor,
    choice: tl.constexpr,
    layout: tl.constexpr,
) -> None:
    """Copies a received row to its place among its expert's rows."""
    word_type: tl.constexpr = rows_ptr.dtype.element_ty
    num_words: tl.constexpr = layout.hidden * layout.dispatch_itemsize * 8 // word_type.primitive_bitwidth
    copy_words(rows_ptr + position.to(tl.int64) * num_words, header.to(tl.pointer_type(word_type)), num_words)
    if layout.scale_block > 0:
        scales = as_float32(header + layout.scales_offset)
        copy_words(scales_ptr + position.to(tl.int64) * layout.num_scales, scales, layout.num_scales)
    tl.store(source_rank_ptr + position, source)
    tl.store(source_token_ptr + position, tl.load(as_int32(header + layout.header_offset)))
    tl.store(source_choice_ptr + position, choice)
    if row_weights_ptr is not None:
        tl.store(row_weights_ptr + position, tl.load(as_float32(header + layout.weights_offset) + choice))
