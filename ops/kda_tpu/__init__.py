"""Kimi Delta Attention in JAX. ``from ops.kda_tpu import kimi_delta_attention`` loads jax only then."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ops.kda_tpu.api import kimi_delta_attention

__all__ = ["kimi_delta_attention"]


def __getattr__(name: str) -> Any:
    if name == "kimi_delta_attention":
        from ops.kda_tpu.api import kimi_delta_attention

        return kimi_delta_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
