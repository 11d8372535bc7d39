"""How much symmetric memory a process is asked to set aside."""

from __future__ import annotations

import os
import re

VARIABLE = "NVSHMEM_SYMMETRIC_SIZE"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def heap_bytes_wanted() -> int | None:
    """``NVSHMEM_SYMMETRIC_SIZE`` in bytes, or None if it is not set.

    Raises:
        ValueError: it is no size.
    """
    text = os.environ.get(VARIABLE, "").strip().upper()
    if not text:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d*)?)([KMGT]?)B?", text)
    if match is None:
        raise ValueError(f"{VARIABLE}: expected bytes, with K, M, G or T if you like, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])
