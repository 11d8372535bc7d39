"""What a stage of the backward sees of the kernel's refs: the rows of one chunk of one head, masked.

Rows of other segments and padding are no-op tokens: zero query, key, v_new, cotangent and log decay. A tile that is
visited several times collects the rows of each visit.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ops.kda_tpu.pallas.backward_chunk import Form

Array = jax.Array

PARAMETER_ROWS = 8
"""Rows of a head's block of gate parameters, and of each of its two sums of gradients."""

Refs = SimpleNamespace
"""A kernel's refs by name: blocks [HB, NC * C, ...] of tokens, [HB, NC, ...] of chunks, scratch; None where absent."""


class ChunkView:
    """One chunk of one head in the kernel's refs; loads are float32 or the compute dtype, masked, [C, K] or [C, V]."""

    def __init__(self, form: Form, refs: Refs, head: int, chunk: int) -> None:
        self._form, self._refs, self._head, self._chunk = form, refs, head, chunk
        self._rows = slice(chunk * form.chunk, (chunk + 1) * form.chunk)
        self.here = (head, chunk)
        self.later = (head, chunk + 1)

    def masked(self, x: Array) -> Array:
        """``x`` (float32 or bfloat16) with zeros in the rows that take no part, whatever they held."""
        return _from_words(_to_words(x) & self._row_bits(x), x.dtype) if self._form.masked else x

    def _row_bits(self, x: Array) -> Array:
        """All bits set in the words of rows that take part, for :func:`_to_words` of ``x``."""
        ref = self._refs.mask if x.dtype == jnp.float32 else self._refs.packed_mask
        return ref[self._chunk, :, : x.shape[1]]

    def raw(self, name: str) -> Array:
        """Rows of an input, float32."""
        return self.masked(getattr(self._refs, name)[self._head, self._rows].astype(jnp.float32))

    def operand(self, name: str) -> Array:
        """Rows of an input in the compute dtype."""
        x = getattr(self._refs, name)[self._head, self._rows]
        if x.dtype != self._form.dtype:
            return self.masked(x.astype(jnp.float32)).astype(self._form.dtype)
        return self.masked(x)

    def gate(self) -> Array:
        """The gate input."""
        return self.raw("gate")

    def gate_row(self, row: int) -> Array:
        """A row [1, K] of the gate's parameters, see :func:`gate_rows`."""
        return self._refs.parameters[self._head, row : row + 1]

    def query(self) -> Array:
        """The query as the mathematics sees it, float32."""
        return self.saved("query") if self._form.normalize else self.raw("query")

    def key(self) -> Array:
        """The key as the mathematics sees it, float32."""
        return self.saved("key") if self._form.normalize else self.raw("key")

    def v_new(self) -> Array:
        """Saved v_new, compute dtype."""
        return self.operand("v_new")

    def d_output(self) -> Array:
        """Cotangent of the output, compute dtype."""
        return self.operand("d_output")

    def slab(self) -> Array:
        """Saved slab [C, 2 C]."""
        return self.block("slab")

    def state(self) -> Array:
        """State on entry, [V, K]."""
        return self.block("states")

    def beta(self) -> Array:
        """Beta as a row [1, C]."""
        return self.row("beta")

    def block(self, name: str) -> Array:
        """The chunk's block of an input that has one a chunk, unmasked."""
        return getattr(self._refs, name)[self._head, self._chunk]

    def set_block(self, name: str, x: Array) -> None:
        """Stores the chunk's block of a result that has one a chunk."""
        ref = getattr(self._refs, name)
        ref[self._head, self._chunk] = x.astype(ref.dtype)

    def row(self, name: str) -> Array:
        """The chunk's row [1, width] of an input that has one a chunk."""
        return getattr(self._refs, name)[self._chunk, pl.ds(self._head, 1)]

    def set_row(self, name: str, x: Array) -> None:
        """Stores the chunk's row [1, width] of a result that has one a chunk."""
        getattr(self._refs, name)[self._chunk, pl.ds(self._head, 1)] = x

    def d_state(self) -> Array:
        """Running gradient of the state, [V, K]."""
        return self._refs.d_state[self._head]

    def set_d_state(self, x: Array) -> None:
        """Replaces it."""
        self._refs.d_state[self._head] = x

    def save(self, name: str, x: Array) -> None:
        """Keeps ``x`` for a later stage, if the kernel has one that wants it."""
        ref = self._refs.saved.get(name)
        if ref is not None:
            ref[self._head * self._form.chunks + self._chunk] = x.astype(ref.dtype)

    def saved(self, name: str) -> Array:
        """What :meth:`save` kept."""
        return self._refs.saved[name][self._head * self._form.chunks + self._chunk]

    def add(self, name: str, x: Array) -> None:
        """Stores the rows that take part in a result; the others are zero or an earlier visit's."""
        ref, index = getattr(self._refs, name), (self._head, self._rows)
        x = x.astype(ref.dtype)
        if self._form.masked:
            x = _from_words(_to_words(self.masked(x)) | _to_words(ref[index]), ref.dtype)
        ref[index] = x

    def add_d_query(self, x: Array) -> None:
        """Stores this visit's rows of d_query."""
        self.add("d_query", x)

    def add_d_key(self, x: Array) -> None:
        """Stores this visit's rows of d_key."""
        self.add("d_key", x)

    def add_d_value(self, x: Array) -> None:
        """Stores this visit's rows of d_value."""
        self.add("d_value", x)

    def add_d_gate(self, x: Array) -> None:
        """Stores this visit's rows of d_gate."""
        self.add("d_gate", x)

    def add_d_beta(self, x: Array) -> None:
        """Adds this visit's part of d_beta, [1, C], zero where no row takes part."""
        ref, index = self._refs.d_beta, (self._chunk, pl.ds(self._head, 1))
        ref[index] = ref[index] + x if self._form.masked else x

    def add_d_parameters(self, d_bias: Array, d_a_log: Array) -> None:
        """Adds per-row gradients [C, K] of bias and a_log to the head's sums, eight rows kept apart."""
        ref, R = self._refs.d_parameters, PARAMETER_ROWS
        for offset, x in ((0, d_bias), (R, d_a_log)):
            total = ref[self._head, offset : offset + R]
            for row in range(0, self._form.chunk, R):
                total = total + x[row : row + R]
            ref[self._head, offset : offset + R] = total


def make_mask(form: Form, refs: Refs, segment: Array) -> None:
    """Rows of the step's segment as all-ones words, once for all heads: a row of ids turned into columns.

    The packed mask is for bfloat16, two rows a word: from the bits of 1.0, 0x3F80.
    """
    C, width = form.chunk, refs.mask.shape[2]
    eye = jax.lax.broadcasted_iota(jnp.int32, (C, C), 0) == jax.lax.broadcasted_iota(jnp.int32, (C, C), 1)
    for chunk in range(form.chunks):
        here = (refs.ids[chunk : chunk + 1] == segment).astype(jnp.float32)
        column = jnp.sum(jnp.where(eye, here, 0.0), axis=1, keepdims=True)
        rows = jnp.broadcast_to(column, (C, width))
        refs.mask[chunk] = jnp.where(rows > 0, -1, 0)
        refs.packed_mask[chunk] = ((_to_words(rows.astype(jnp.bfloat16)) >> 7) & 0x00010001) * 0xFFFF


def _to_words(x: Array) -> Array:
    """Bits of ``x`` [C, n] as int32, [C, n] for float32 and [C / 2, n] for bfloat16."""
    return pltpu.bitcast(x, jnp.int32)


def _from_words(words: Array, dtype: Any) -> Array:
    """Inverse of :func:`_to_words`."""
    return pltpu.bitcast(words, dtype)
