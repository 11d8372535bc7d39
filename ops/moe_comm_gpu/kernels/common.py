"""What both directions share: reading choices, addressing rows, copying words."""

from __future__ import annotations

import enum

import triton
import triton.language as tl


class Wait(enum.IntEnum):
    """Codes of the kernels' waits, for the errors of those that take too long."""

    COUNT = 0
    ROWS = 1
    PROGRAMS = 2
    RETURNS = 3
    FLAG = 4


#: What each code of :class:`Wait` is called in an error.
WAIT_NAMES = (
    "dispatch receive: number of rows",
    "dispatch receive: rows",
    "dispatch receive: other programs of this kernel",
    "combine receive: rows",
    "combine receive: end of the peer's dispatch receive",
)

WAIT_COUNT = tl.constexpr(int(Wait.COUNT))
WAIT_ROWS = tl.constexpr(int(Wait.ROWS))
WAIT_PROGRAMS = tl.constexpr(int(Wait.PROGRAMS))
WAIT_RETURNS = tl.constexpr(int(Wait.RETURNS))
WAIT_FLAG = tl.constexpr(int(Wait.FLAG))

#: A count travels in the low half of a signal, below the epoch: the word grows from epoch to epoch. Above the rows, the
#: count's two highest bits tell the manner of the sender's dispatch, which has to be every rank's.
EPOCH_SHIFT, MANNER_SHIFT, MANNER_MASK = tl.constexpr(32), tl.constexpr(30), tl.constexpr(3)
#: Bits of a manner.
WITH_WEIGHTS, WITH_GRADIENT = 1, 2

#: In place of the expert row of a received row's choice: the choice is not of this rank and bucket, or found no room.
ELSEWHERE, NO_ROOM = tl.constexpr(-1), tl.constexpr(-2)

#: How the kernels are compiled. A multiprocessor runs one program, so registers up to the limit cost nothing; without
#: one the assembler aims at several programs and spills a few.
NUM_WARPS, MAX_REGISTERS = 8, 128

#: Words of at most this many go through a program at a time: 16 bytes, four times, for each thread of eight warps.
WORD_BLOCK = tl.constexpr(4096)


@triton.jit
def row_offset(row: tl.tensor, row_bytes: tl.constexpr) -> tl.tensor:
    """Byte offset of a row, 64 bits wide whatever the width of ``row``."""
    return tl.cast(row, tl.int64) * row_bytes


@triton.jit
def as_int32(pointer: tl.tensor) -> tl.tensor:
    """A byte pointer as a pointer to int32."""
    return pointer.to(tl.pointer_type(tl.int32))


@triton.jit
def as_float32(pointer: tl.tensor) -> tl.tensor:
    """A byte pointer as a pointer to float32."""
    return pointer.to(tl.pointer_type(tl.float32))


@triton.jit
def choices_of(
    ids_ptr: tl.tensor, placement_ptr: tl.tensor, tokens: tl.tensor, num_tokens: tl.tensor, layout: tl.constexpr
) -> tl.tensor:
    """Physical experts ``[len(tokens), choice_block]`` int32; -1 for dropped choices and absent tokens."""
    choice = tl.arange(0, layout.choice_block)
    present = (tokens < num_tokens)[:, None] & (choice < layout.choices)[None, :]
    offsets = tokens.to(tl.int64)[:, None] * layout.choices + choice[None, :]
    ids = tl.load(ids_ptr + offsets, mask=present, other=0).to(tl.int64)
    kept = present & (ids >= 0) & (ids < layout.num_experts)
    return tl.load(placement_ptr + ids, mask=kept, other=-1)


@triton.jit
def choices_of_token(
    ids_ptr: tl.tensor, placement_ptr: tl.tensor, token: tl.tensor, num_tokens: tl.tensor, layout: tl.constexpr
) -> tl.tensor:
    """Physical experts ``[choice_block]`` int32 of one token."""
    choice = tl.arange(0, layout.choice_block)
    present = choice < tl.where(token < num_tokens, layout.choices, 0)
    ids = tl.load(ids_ptr + tl.cast(token, tl.int64) * layout.choices + choice, mask=present, other=0).to(tl.int64)
    kept = present & (ids >= 0) & (ids < layout.num_experts)
    return tl.load(placement_ptr + ids, mask=kept, other=-1)


@triton.jit
def ranks_of(physical: tl.tensor, layout: tl.constexpr) -> tl.tensor:
    """Rank of each physical expert, -1 for dropped ones."""
    return tl.where(physical >= 0, physical // layout.local_experts, -1)


@triton.jit
def destinations_of(physical: tl.tensor, layout: tl.constexpr) -> tl.tensor:
    """Destination ``rank * B + bucket`` of each choice, -1 for dropped ones."""
    return physical if layout.per_expert else ranks_of(physical, layout)


@triton.jit
def first_of_each(keys: tl.tensor, layout: tl.constexpr) -> tl.tensor:
    """Which of a token's keys ``[choice_block]`` is the first of its value; never a key of -1."""
    choice = tl.arange(0, layout.choice_block)
    repeats = (keys[:, None] == keys[None, :]) & (choice[:, None] < choice[None, :])
    return (tl.max(repeats.to(tl.int32), axis=0) == 0) & (keys >= 0)


@triton.jit
def element(vector: tl.tensor, index: tl.tensor, layout: tl.constexpr) -> tl.tensor:
    """One element of a vector ``[choice_block]`` as a scalar."""
    return tl.sum(tl.where(tl.arange(0, layout.choice_block) == index, vector, 0), axis=0)


@triton.jit
def num_tokens_that_count(num_tokens: tl.tensor, bound_ptr: tl.tensor) -> tl.tensor:
    """Leading tokens that take part."""
    limit = num_tokens
    if bound_ptr is not None:
        limit = tl.minimum(num_tokens, tl.maximum(tl.load(bound_ptr).to(tl.int32), 0))
    return limit


@triton.jit
def copy_words(target_ptr: tl.tensor, source_ptr: tl.tensor, num_words: tl.constexpr) -> None:
    """Copies ``num_words`` elements between pointers of one type."""
    block: tl.constexpr = min(triton.next_power_of_2(num_words), WORD_BLOCK)
    for begin in tl.static_range(0, num_words, block):
        word = begin + tl.arange(0, block)
        inside = word < num_words
        tl.store(target_ptr + word, tl.load(source_ptr + word, mask=inside), mask=inside)
