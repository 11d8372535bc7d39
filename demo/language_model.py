"""A small byte-level language model of Kimi Delta Attention blocks, trained on packed documents."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from demo.text import PackedText
from ops.kda_tpu import kimi_delta_attention

Parameters = dict[str, Any]

WIDTH = 128
HEADS = 4
HEAD_DIM = 32
LAYERS = 2
LOWER_BOUND = -5.0
LEARNING_RATE = 4e-3


@dataclass(frozen=True)
class Trained:
    """What training leaves behind.

    Attributes:
        parameters: the model's weights.
        bits_per_byte: the loss of every step.
    """

    parameters: Parameters
    bits_per_byte: list[float]


def initialise(key: jax.Array) -> Parameters:
    """Random weights, scaled by their fan-in."""
    inner = HEADS * HEAD_DIM

    def dense(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape) / np.sqrt(shape[-2])

    def layer(key: jax.Array) -> Parameters:
        keys = jax.random.split(key, 7)
        return {
            "query_key_value": dense(keys[0], 3, 2 * WIDTH, inner),
            "gate": dense(keys[1], WIDTH, inner),
            "beta": dense(keys[2], WIDTH, HEADS),
            "a_log": jnp.zeros(HEADS),
            "delta_time_bias": jnp.linspace(-4.0, 0.0, inner),
            "output_gate": dense(keys[3], WIDTH, inner),
            "output": dense(keys[4], inner, WIDTH) / LAYERS,
            "up": dense(keys[5], 2, WIDTH, 2 * WIDTH),
            "down": dense(keys[6], 2 * WIDTH, WIDTH) / LAYERS,
        }

    embed, unembed, *layers = jax.random.split(key, LAYERS + 2)
    return {
        "embedding": jax.random.normal(embed, (256, WIDTH)),
        "unembedding": dense(unembed, WIDTH, 256) * 0.1,
        "layers": [layer(k) for k in layers],
    }


def _norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def _heads_first(x: jax.Array) -> jax.Array:
    """[T, H*D] -> [H, 1, T, D]."""
    return x.reshape(x.shape[0], HEADS, -1).transpose(1, 0, 2)[:, None]


def _attention(layer: Parameters, x: jax.Array, segment_ids: jax.Array, max_segments: int) -> jax.Array:
    same = jnp.concatenate([jnp.zeros(1, bool), segment_ids[1:] == segment_ids[:-1]])
    shifted = jnp.where(same[:, None], jnp.roll(x, 1, axis=0), 0.0)  # the previous byte of the same document
    query, key, value = jnp.einsum("td,cde->cte", jnp.concatenate([x, shifted], 1), layer["query_key_value"])
    output, _ = kimi_delta_attention(
        _heads_first(jax.nn.silu(query)),
        _heads_first(jax.nn.silu(key)),
        _heads_first(value),
        _heads_first(x @ layer["gate"]),
        jax.nn.sigmoid(x @ layer["beta"]).T[:, None],
        a_log=layer["a_log"],
        delta_time_bias=layer["delta_time_bias"],
        lower_bound=LOWER_BOUND,
        use_qk_l2norm=True,
        use_gate_in_kernel=True,
        segment_ids=segment_ids[None],
        max_num_segments=max_segments,
    )
    merged = _norm(output)[:, 0].transpose(1, 0, 2).reshape(x.shape[0], -1)
    return (merged * jax.nn.sigmoid(x @ layer["output_gate"])) @ layer["output"]


def bits_per_byte(parameters: Parameters, tokens: jax.Array, segment_ids: jax.Array, max_segments: int) -> jax.Array:
    """Mean cross entropy, in bits, of every byte that has a predecessor in its document.

    Args:
        parameters: as of :func:`initialise`.
        tokens: bytes, int32 [T].
        segment_ids: document of each byte, int32 [T], 1-based; 0 is padding.
        max_segments: the most documents a row may hold.

    Returns:
        A float32 scalar.
    """
    x = parameters["embedding"][tokens]
    for layer in parameters["layers"]:
        x = x + _attention(layer, _norm(x), segment_ids, max_segments)
        gate, value = jnp.einsum("td,cde->cte", _norm(x), layer["up"])
        x = x + (jax.nn.silu(gate) * value) @ layer["down"]
    logits = _norm(x) @ parameters["unembedding"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:-1], tokens[1:])
    predicted = (segment_ids[1:] == segment_ids[:-1]) & (segment_ids[1:] > 0)
    return jnp.sum(losses * predicted) / jnp.maximum(jnp.sum(predicted), 1) / np.log(2)


def train(batches: list[PackedText], max_segments: int, on_step: Callable[[float], None]) -> Trained:
    """Adam on one packed row a step; ``on_step`` is told each step's bits per byte."""
    parameters = initialise(jax.random.key(0))
    schedule = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, 10, len(batches), LEARNING_RATE / 10)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(
        parameters: Parameters, state: optax.OptState, tokens: jax.Array, segment_ids: jax.Array
    ) -> tuple[Parameters, optax.OptState, jax.Array]:
        loss, gradient = jax.value_and_grad(bits_per_byte)(parameters, tokens, segment_ids, max_segments)
        updates, state = optimiser.update(gradient, state)
        return optax.apply_updates(parameters, updates), state, loss

    state = optimiser.init(parameters)
    losses = []
    for batch in batches:
        parameters, state, loss = step(parameters, state, jnp.asarray(batch.tokens), jnp.asarray(batch.segment_ids))
        losses.append(float(loss))
        on_step(losses[-1])
    return Trained(parameters, losses)
