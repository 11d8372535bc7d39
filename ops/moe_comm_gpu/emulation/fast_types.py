"""Makes the interpreter's bookkeeping of types cheap; results are the same.

Each operation of Triton's interpreter builds several type and tensor objects, and their constructors, written for a
compiler, take most of its time. These stand-ins remember what they have built and skip broadcasts that do nothing.
"""

from __future__ import annotations

import math
from typing import Any

import triton.runtime.interpreter as ti
from triton.language import core
from triton.language.semantic import TritonSemantic

_block_types: dict[Any, dict[str, Any]] = {}
_original_block_type_init = core.block_type.__init__


def _block_type_init(self: Any, element_ty: Any, shape: Any) -> None:
    ints = tuple([s.value if isinstance(s, core.constexpr) else s for s in shape])
    pointer = getattr(element_ty, "const", None), getattr(element_ty, "address_space", None)
    key = (element_ty.name, pointer, ints)
    known = _block_types.get(key)
    if known is None:
        _original_block_type_init(self, element_ty, shape)
        _block_types[key] = {**vars(self), "ints": ints, "tensor_shape": _tensor_shape(ints)}
    vars(self).update(_block_types[key])


def _tensor_shape(ints: tuple[int, ...]) -> tuple[Any, Any]:
    """What a tensor keeps of its shape."""
    return core.tuple([core.constexpr(s) for s in ints]), core.constexpr(math.prod(ints))


_SCALAR_SHAPE = _tensor_shape(())


def _tensor_init(self: Any, handle: Any, type: Any) -> None:
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    known = vars(type).get("tensor_shape")
    if known is None:
        known = _tensor_shape(tuple(type.shape)) if type.is_block() else _SCALAR_SHAPE
    self.shape, self.numel = known


_numpy_dtypes: dict[str, Any] = {}
_original_get_np_dtype = ti._get_np_dtype


def _numpy_dtype(dtype: Any) -> Any:
    known = _numpy_dtypes.get(dtype.name)
    if known is None:
        known = _numpy_dtypes[dtype.name] = _original_get_np_dtype(dtype)
    return known


def patches() -> list[tuple[Any, str, Any]]:
    """(object, attribute, value) of the stand-ins."""
    return [
        (core.block_type, "__init__", _block_type_init),
        (core.tensor, "__init__", _tensor_init),
        (ti, "_get_np_dtype", _numpy_dtype),
    ]


#: Types for which two operands need no conversion, whatever the operation.
_PLAIN = frozenset(("int32", "int64", "fp32", "int1"))


def _same_shape(a: Any, b: Any) -> bool:
    """Whether both are scalars, or blocks of one shape (as far as is known)."""
    a_ints, b_ints = vars(a).get("ints"), vars(b).get("ints")
    return a_ints == b_ints if a_ints is not None else not (a.is_block() or b.is_block())


class FastSemantic(TritonSemantic):
    """Triton's type rules, with a short way for operands that agree already."""

    def broadcast_impl_value(self, lhs: Any, rhs: Any) -> Any:
        """Broadcasts two operands to one shape."""
        if _same_shape(lhs.type, rhs.type):
            return lhs, rhs
        return super().broadcast_impl_value(lhs, rhs)

    def binary_op_type_checking_impl(self, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        """Casts and broadcasts two operands to one type."""
        if isinstance(lhs, core.tensor) and isinstance(rhs, core.tensor):
            dtype = lhs.dtype
            if dtype is rhs.dtype and dtype.name in _PLAIN and _same_shape(lhs.type, rhs.type):
                return lhs, rhs
        return super().binary_op_type_checking_impl(lhs, rhs, *args, **kwargs)
