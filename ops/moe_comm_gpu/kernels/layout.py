"""Sizes and byte offsets of the memory that the four kernels share: every formula, once.

A *buffer set* is what one batch needs from dispatch to the end of combine. Part of it is symmetric memory, which other
ranks write (``docs/moe_comm.md`` says who writes what when), part is local and keeps the epochs.

Letters: R ranks, dp ranks of a group, M most tokens of a group, J choices, D hidden, S scales per row, L experts of a
rank, U = ceil(M / dp) tokens that one rank sends, B *buckets*: 1 when a token travels once to each rank, L when once to
each expert.

A dispatched row is ``payload | scales | token, J physical experts, J weights``, each part at a multiple of 16 bytes. A
physical expert is ``rank * L + slot``, or -1 for a dropped choice. A token's results come back *summed*, one row from
each rank that it went to, or in *pairs*, one row for each of its choices. Every offset that multiplies a row number is
64 bits wide.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ops.moe_comm_gpu.contract import Config, round_up

ALIGNMENT = 16  # bytes; the widest load and store of a thread
REGION_ALIGNMENT = 256  # bytes; regions begin on their own cache lines
WORD_BYTES = 8  # of a signal or an epoch
COMPARED = 4096  # elements of a block of comparisons, 16 for each thread of eight warps
HEADER_WORD_BYTES = 4  # of the token index, a physical expert, a weight


@dataclass(frozen=True, kw_only=True, repr=False)
class Layout:
    """Geometry of one buffer set; kernels take it as one compile-time constant.

    Attributes:
        world_size: R.
        dp_size: ranks that hold the same tokens.
        max_num_tokens: M.
        num_experts: E.
        choices: J.
        hidden: D.
        scale_block: elements that share a scale, 0 without scales.
        local_experts: L.
        dispatch_itemsize: most bytes of an element on the way to the experts.
        combine_itemsize: most bytes of an element on the way back.
        per_expert: whether a row travels once to each expert rather than once to each rank.
        return_pairs: whether results come back in pairs rather than summed; always with ``per_expert``.
        room_for_pairs: whether there is memory for pairs, whichever way results come back.
        contiguous: whether expert rows follow one another rather than lie in ``[L, capacity]``.
        capacity: rows of one expert, or of the whole rank when contiguous.
        row_multiple: contiguous: every expert begins at a multiple of it.
    """

    world_size: int
    dp_size: int
    max_num_tokens: int
    num_experts: int
    choices: int
    hidden: int
    scale_block: int
    local_experts: int
    dispatch_itemsize: int
    combine_itemsize: int
    per_expert: bool
    return_pairs: bool
    room_for_pairs: bool
    contiguous: bool
    capacity: int
    row_multiple: int

    @staticmethod
    def of(config: Config) -> Layout:
        """The layout that an exchange of this configuration uses."""
        return Layout(
            world_size=config.world_size,
            dp_size=config.dp_size,
            max_num_tokens=config.max_num_tokens,
            num_experts=config.num_experts,
            choices=config.experts_per_token,
            hidden=config.hidden,
            scale_block=config.scale_block or 0,
            local_experts=config.num_local_experts,
            dispatch_itemsize=config.dispatch_itemsize,
            combine_itemsize=config.combine_itemsize,
            per_expert=config.mode == "per_expert",
            return_pairs=config.mode == "per_expert",
            room_for_pairs=config.mode == "per_expert" or config.late_weights,
            contiguous=config.layout == "contiguous",
            capacity=config.row_capacity,
            row_multiple=config.row_multiple,
        )

    def __repr__(self) -> str:
        """Fields and everything derived from them: compilers remember a kernel by the text of its constants, and a
        formula that changed must not meet a kernel that was compiled with the old one.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        derived = {name: getattr(self, name) for name, member in vars(Layout).items() if isinstance(member, property)}
        return f"Layout({fields | derived})"

    # Counts of rows and words.

    @property
    def num_scales(self) -> int:
        """S, float32 scales of a row."""
        return -(-self.hidden // self.scale_block) if self.scale_block else 0

    @property
    def share(self) -> int:
        """U, tokens of a group that one of its ranks sends."""
        return -(-self.max_num_tokens // self.dp_size)

    @property
    def buckets(self) -> int:
        """B, destinations that one rank stands for: itself, or each of its experts."""
        return self.local_experts if self.per_expert else 1

    @property
    def num_destinations(self) -> int:
        """Destinations in the whole world, ``rank * B + bucket``."""
        return self.world_size * self.buckets

    @property
    def num_sources(self) -> int:
        """Streams of rows that a rank receives, ``bucket * R + source rank``; each has a count and an arrivals word."""
        return self.buckets * self.world_size

    @property
    def num_received(self) -> int:
        """Places for received rows, ``(bucket * R + source rank) * U + slot``."""
        return self.num_sources * self.share

    @property
    def num_rows(self) -> int:
        """N, expert rows that a rank has room for."""
        return self.capacity * (1 if self.contiguous else self.local_experts)

    @property
    def returns(self) -> int:
        """Places for the rows that come back for one token: for each choice, or each rank where those are fewer."""
        return self.choices if self.return_pairs else min(self.choices, self.world_size)

    @property
    def returns_by_rank(self) -> bool:
        """Whether a summed row's place is the rank it comes from, rather than the first choice that went there."""
        return not self.return_pairs and self.world_size <= self.choices

    # Bytes of rows.

    @property
    def scales_offset(self) -> int:
        """Where the scales of a dispatched row begin."""
        return round_up(self.hidden * self.dispatch_itemsize, ALIGNMENT)

    @property
    def header_offset(self) -> int:
        """Where the header of a dispatched row begins: its token's index in the group's batch."""
        return round_up(self.scales_offset + self.num_scales * HEADER_WORD_BYTES, ALIGNMENT)

    @property
    def experts_offset(self) -> int:
        """Where the J physical experts of a dispatched row begin."""
        return self.header_offset + HEADER_WORD_BYTES

    @property
    def weights_offset(self) -> int:
        """Where the J weights of a dispatched row begin."""
        return self.experts_offset + self.choices * HEADER_WORD_BYTES

    @property
    def row_bytes(self) -> int:
        """Bytes from one dispatched row to the next."""
        return round_up(self.weights_offset + self.choices * HEADER_WORD_BYTES, ALIGNMENT)

    @property
    def return_bytes(self) -> int:
        """Bytes from one returned row to the next."""
        return round_up(self.hidden * self.combine_itemsize, ALIGNMENT)

    # Symmetric memory of one set: signals (8 bytes each), then rows.

    @property
    def arrivals_word(self) -> int:
        """First of the B*R counters of arrived rows; the B*R counts stand before them."""
        return self.num_sources

    @property
    def returns_word(self) -> int:
        """First of the M counters of rows that came back."""
        return self.arrivals_word + self.num_sources

    @property
    def flags_word(self) -> int:
        """First of the R flags of ranks whose receive has ended."""
        return self.returns_word + self.max_num_tokens

    @property
    def barrier_word(self) -> int:
        """The counter of this rank's own programs at the barriers inside dispatch-receive."""
        return self.flags_word + self.world_size

    @property
    def num_signals(self) -> int:
        """Signal words of one set."""
        return self.barrier_word + 1

    @property
    def regions(self) -> dict[str, tuple[int, int]]:
        """``(offset, bytes)`` of each region of a set's symmetric memory."""
        most_choices = self.choices if self.room_for_pairs else 1
        sizes = {
            "signals": self.num_signals * WORD_BYTES,
            "send": self.share * self.row_bytes,
            "received": self.num_received * self.row_bytes,
            # Rows are sent back from a place for each received row, or for each choice of each token that may come.
            "return_staging": self.world_size * self.share * most_choices * self.return_bytes,
            "returned": self.max_num_tokens * max(self.returns, most_choices) * self.return_bytes,
        }
        placed, offset = {}, 0
        for name, size in sizes.items():
            placed[name] = (offset, size)
            offset = round_up(offset + size, REGION_ALIGNMENT)
        return placed

    @property
    def symmetric_bytes(self) -> int:
        """Symmetric memory of one rank and set."""
        offset, size = list(self.regions.values())[-1]
        return round_up(offset + size, REGION_ALIGNMENT)

    # Local memory of one set: int64 words that only this rank's kernels touch.

    @property
    def finished_word(self) -> int:
        """The epoch that combine-receive ended last; the word before it holds the epoch under way."""
        return 1

    @property
    def expected_arrivals_word(self) -> int:
        """``[2, B*R]``: arrivals that lie before an even, an odd epoch."""
        return 2

    @property
    def expected_returns_word(self) -> int:
        """``[2, M]``: returned rows that lie before an even, an odd epoch."""
        return self.expected_arrivals_word + 2 * self.num_sources

    @property
    def num_local_words(self) -> int:
        """Local words of one set."""
        return self.expected_returns_word + 2 * self.max_num_tokens

    # Blocks of the kernels' vectors, powers of two.

    @property
    def choice_block(self) -> int:
        """Holds the J choices of a token."""
        return power_of_two(self.choices)

    @property
    def token_tile(self) -> int:
        """Tokens whose choices are compared with those of one token at a time."""
        return max(1, min(power_of_two(self.share), COMPARED // self.choice_block**2))

    @property
    def row_tile(self) -> int:
        """Received rows whose choices are searched for one expert at a time."""
        return max(1, min(power_of_two(self.world_size * self.share), COMPARED // self.choice_block))

    @property
    def expert_block(self) -> int:
        """Holds the L experts of a rank."""
        return power_of_two(self.local_experts)


def power_of_two(number: int) -> int:
    """The smallest power of two that is not less than ``number``, at least 1."""
    return 1 << max(0, number - 1).bit_length()


def source_protocol_bytes(config: Config) -> int:
    """Receive memory of the protocol this one is measured against: ``L G M (row + 4 D) + 4 M E D`` bytes.

    Source: "Efficient and portable mixture-of-experts communication" (2025), receive side of one rank.
    """
    row = Layout.of(dataclasses.replace(config, mode="per_expert")).row_bytes
    received = config.num_local_experts * config.num_groups * config.max_num_tokens * (row + 4 * config.hidden)
    return received + 4 * config.max_num_tokens * config.num_experts * config.hidden
