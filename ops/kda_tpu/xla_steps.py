"""The sequential axis of the XLA path: steps, their tokens, and the loop over them.

A *step* is a chunk of 64 tokens as one state slot sees it. A chunk that k slots share is visited by k steps in a row;
tokens of other slots and padding are then read as zeros with no decay, which neither change a state nor are seen by
another token. So the mathematics of a step knows nothing of segments. M is the number of steps: all chunks S, and with
segments one more for each slot but the first; what is left over has no tokens.

Inside, arrays are ``[M, H, B, C, D]``: steps first, then heads H, batch rows B, the C = 64 tokens of a chunk and D key
or value channels, in float32. The loop takes G steps at a time: what does not depend on the state is computed for all
of them at once. On a CPU G = 1 keeps everything in cache; elsewhere G fills the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ops.kda_tpu.contract import Problem

CHUNK = 64

#: Chunks, over all heads and batch rows, in flight at once: on a CPU the fewest, elsewhere what fills the device.
_IN_FLIGHT = {"cpu": 1}
_IN_FLIGHT_ELSEWHERE = 8192

Arrays = tuple[jax.Array, ...]
Step = Callable[[jax.Array, Arrays], tuple[jax.Array, Arrays]]
Body = Callable[[jax.Array, jax.Array, Arrays], tuple[jax.Array, Arrays]]


@dataclasses.dataclass(frozen=True)
class Steps:
    """The steps of a problem, in shapes that T and N fix.

    Attributes:
        num_tokens: T.
        num_chunks: S.
        num_groups: turns of the loop.
        group_steps: G, steps in a turn; the last turn may hold steps without tokens.
        chunk: [M, B] chunk of each step, or None without segments: step i is chunk i of slot 0.
        slot: [M, B] slot of each step, or None.
        own: [M, 1, B, C] which tokens of its chunk belong to a step, or None for all.
        token_step: [S, B, C] the step of each token, or None.
    """

    num_tokens: int
    num_chunks: int
    num_groups: int
    group_steps: int
    chunk: jax.Array | None = None
    slot: jax.Array | None = None
    own: jax.Array | None = None
    token_step: jax.Array | None = None

    def padded(self, x: jax.Array) -> jax.Array:
        """[H, B, T, D] filled up with zeros to whole chunks, or without segments to whole groups."""
        chunks = self.num_groups * self.group_steps if self.chunk is None else self.num_chunks
        return jnp.pad(x, [(0, 0), (0, 0), (0, chunks * CHUNK - self.num_tokens), (0, 0)])

    def tokens(self, x: jax.Array, group: jax.Array) -> jax.Array:
        """The group's tokens of [H, B, T, D], already :meth:`padded`, as float32 [G, H, B, C, D]; zeros if not own."""
        H, B, T, D = x.shape
        if self.chunk is None:
            length = self.group_steps * CHUNK
            rows = jax.lax.dynamic_slice_in_dim(x, group * length, length, axis=2)
            return jnp.moveaxis(rows.astype(jnp.float32).reshape(H, B, -1, CHUNK, D), 2, 0)
        chunks = x.reshape(H, B, T // CHUNK, CHUNK, D)
        picked = jax.vmap(lambda x, i: jnp.take(x, i, axis=1), (1, 1), 2)(chunks, self.group(self.chunk, group))
        own = self.group(self.own, group)[..., None]
        return jnp.where(own, jnp.moveaxis(picked, 1, 0), 0).astype(jnp.float32)

    def group(self, x: Any, group: jax.Array) -> jax.Array:
        """The group's part of [M, ...]."""
        return jax.lax.dynamic_slice_in_dim(x, group * self.group_steps, self.group_steps, axis=0)

    def loop(
        self, body: Body, states: jax.Array, rows: Arrays = (), *, reverse: bool = False
    ) -> tuple[jax.Array, Arrays]:
        """``body(states, group, rows of the group) -> (states, results of the group)`` for each group in order.

        Args:
            body: hands the states to :meth:`recur`; its results are [G, ...].
            states: [B, N, H, K, V].
            rows: arrays [M, ...].
            reverse: from the last group to the first.

        Returns:
            The states after the last group [B, N, H, K, V], and the results [M, ...].
        """
        slots = states.transpose(1, 2, 0, 3, 4)  # [N, H, B, K, V]
        carry = slots[0] if self.slot is None else slots
        turns = tuple(x.reshape(self.num_groups, self.group_steps, *x.shape[1:]) for x in rows)
        if self.num_groups == 1:
            carry, results = body(carry, jnp.int32(0), tuple(x[0] for x in turns))
        else:
            carry, results = jax.lax.scan(
                lambda carry, turn: body(carry, turn[0], turn[1:]),
                carry,
                (jnp.arange(self.num_groups), *turns),
                reverse=reverse,
            )
            results = tuple(x.reshape(-1, *x.shape[2:]) for x in results)
        slots = slots.at[0].set(carry) if self.slot is None else carry
        return slots.transpose(2, 0, 1, 3, 4), results

    def recur(
        self, step: Step, states: jax.Array, group: jax.Array, rows: Arrays, *, reverse: bool = False
    ) -> tuple[jax.Array, Arrays]:
        """``step(h, row) -> (h, results)`` for the steps of a group, one after the other, each on its own slot's h.

        Args:
            step: works on h [H, B, K, V] and one step of each of ``rows``.
            states: [N, H, B, K, V], or [H, B, K, V] without segments.
            group: which group.
            rows: arrays [G, H, B, ...].
            reverse: from the last step to the first.

        Returns:
            The states after it, and the results [G, ...].
        """
        if self.slot is not None:
            rows = (self.group(self.slot, group), *rows)
            inner = step

            def step(slots: jax.Array, row: Arrays) -> tuple[jax.Array, Arrays]:
                after, results = inner(_read_slot(slots, row[0]), row[1:])
                return _write_slot(slots, row[0], after), results

        if self.group_steps == 1:
            states, results = step(states, tuple(x[0] for x in rows))
            return states, tuple(x[None] for x in results)
        return jax.lax.scan(step, states, rows, reverse=reverse)

    def to_tokens(self, x: jax.Array) -> jax.Array:
        """[M, H, B, C, D] as [H, B, T, D]: each token's row from its own step."""
        if self.token_step is not None:
            rows = jnp.arange(CHUNK)

            def pick(steps: jax.Array, token_step: jax.Array) -> jax.Array:  # [M, H, C, D], [S, C]
                return jnp.moveaxis(steps[token_step, :, rows], 2, 1)

            x = jax.vmap(pick, in_axes=(2, 1), out_axes=2)(x, self.token_step)
        M, H, B, C, D = x.shape
        return jnp.moveaxis(x, 0, 2).reshape(H, B, M * C, D)[:, :, : self.num_tokens]


def find_steps(problem: Problem) -> Steps:
    """The steps of a problem on the default device."""
    H, B, T, _ = problem.query.shape
    num_chunks = -(-T // CHUNK)
    length = num_chunks * CHUNK
    num_steps = num_chunks
    if problem.segment_ids is not None:
        num_steps += min(problem.num_segments, length) - 1
    in_flight = _IN_FLIGHT.get(jax.default_backend(), _IN_FLIGHT_ELSEWHERE)
    num_groups = -(-num_steps // max(1, min(num_steps, in_flight // (H * B))))
    group_steps = -(-num_steps // num_groups)
    if problem.segment_ids is None:
        return Steps(T, num_chunks, num_groups, group_steps)
    ids = jnp.pad(problem.segment_ids, [(0, 0), (0, length - T)])
    slot = jnp.maximum(jax.lax.cummax(ids, axis=1), 1) - 1  # padding continues the slot before it
    starts = (slot != jnp.roll(slot, 1, axis=1)).at[:, ::CHUNK].set(True)
    token_step = jnp.cumsum(starts, axis=1) - 1
    steps = jnp.arange(num_groups * group_steps)
    first = jax.vmap(lambda row: jnp.searchsorted(row, steps))(token_step)  # [B, M]; without tokens: past the end
    first = jnp.minimum(first, length - 1)
    chunk = (first // CHUNK).T
    token_step = jnp.moveaxis(token_step.reshape(B, -1, CHUNK), 1, 0)
    own = jnp.take_along_axis(token_step, chunk[..., None], axis=0) == steps[:, None, None]
    return Steps(
        T,
        num_chunks,
        num_groups,
        group_steps,
        chunk=chunk,
        slot=jnp.take_along_axis(slot, first, axis=1).T,
        own=own[:, None],
        token_step=token_step,
    )


def _read_slot(slots: jax.Array, slot: jax.Array) -> jax.Array:
    """[H, B, K, V] states of slot [B] out of [N, H, B, K, V]."""
    if slot.shape[0] == 1:
        return jax.lax.dynamic_index_in_dim(slots, slot[0], 0, keepdims=False)
    return jax.vmap(lambda x, n: jax.lax.dynamic_index_in_dim(x, n, 0, keepdims=False), (2, 0), 1)(slots, slot)


def _write_slot(slots: jax.Array, slot: jax.Array, states: jax.Array) -> jax.Array:
    """``slots`` with the states of slot [B] replaced."""
    if slot.shape[0] == 1:
        return jax.lax.dynamic_update_index_in_dim(slots, states, slot[0], 0)
    return jax.vmap(lambda x, n, h: jax.lax.dynamic_update_index_in_dim(x, h, n, 0), (2, 0, 1), 2)(slots, slot, states)
