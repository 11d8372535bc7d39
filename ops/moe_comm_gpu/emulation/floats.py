"""Conversions between float32 and the narrow floats, as a GPU does them, on the raw bits that the interpreter holds.

Triton's interpreter keeps bfloat16 as uint16 and the 8-bit floats as uint8. Down-conversion rounds to nearest, ties to
even; the 8-bit formats saturate at their largest finite value, as ``cvt.rn.satfinite`` does, and keep NaN.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]

#: Triton's name of a narrow float that is held as raw bits -> torch's type.
NARROW = {"bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


@functools.cache
def _fp8_values(name: str) -> Array:
    """The float32 value of each of the 256 codes of an 8-bit float."""
    return torch.arange(256, dtype=torch.uint8).view(NARROW[name]).float().numpy()


def widen(bits: Array, name: str) -> Array:
    """The float32 values of the raw ``bits`` of the narrow float ``name``; exact."""
    if name == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return _fp8_values(name)[bits]


def narrow(values: Array, name: str) -> Array:
    """The raw bits of ``values`` (any real type) rounded to the narrow float ``name``."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    if name == "bf16":
        bits = values.view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        nan = np.isnan(values)
        if nan.any():
            rounded = np.where(nan, (bits >> np.uint32(16)) | np.uint32(0x40), rounded)
        return rounded.astype(np.uint16)
    limit = torch.finfo(NARROW[name]).max
    tensor = torch.from_numpy(values.reshape(-1).copy()).clamp(-limit, limit)  # clamp keeps NaN
    return tensor.to(NARROW[name]).view(torch.uint8).numpy().reshape(values.shape)
