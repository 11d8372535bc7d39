"""Sparse dispatch and combine of tokens to experts across ranks.

    >>> from ops.moe_comm_gpu import Config, open_exchange
    >>> with open_exchange(Config(max_num_tokens=128, num_experts=8, experts_per_token=2, hidden=64)) as exchange:
    ...     handle = exchange.dispatch(tokens, ids)
    ...     output = exchange.combine(handle, experts(handle.rows, handle.tokens_per_expert), weights)

Names are resolved on first use, so importing this package loads no framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ops.moe_comm_gpu.all_to_all import AllToAll as AllToAll
    from ops.moe_comm_gpu.batch import Handle as Handle
    from ops.moe_comm_gpu.contract import Config as Config
    from ops.moe_comm_gpu.exchange import Exchange as Exchange
    from ops.moe_comm_gpu.exchange import open_exchange as open_exchange

_HOMES = {
    "AllToAll": "all_to_all",
    "Config": "contract",
    "Exchange": "exchange",
    "Handle": "batch",
    "open_exchange": "exchange",
}
__all__ = ["AllToAll", "Config", "Exchange", "Handle", "open_exchange"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
