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
        _original_block_type_init(self, element_ty, list(ints))
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
        (ti.TensorHandle, "__post_init__", lambda self: None),  # checks that the interpreter keeps its own rules
    ]


#: Types for which two operands need no conversion, whatever the operation.
_PLAIN = frozenset(("int32", "int64", "fp32", "int1"))
_INT32 = range(-(1 << 31), 1 << 31)


def _same_shape(a: Any, b: Any) -> bool:
    """Whether both are scalars, or blocks of one shape (as far as is known)."""
    a_ints, b_ints = vars(a).get("ints"), vars(b).get("ints")
    return a_ints == b_ints if a_ints is not None else not (a.is_block() or b.is_block())


class FastSemantic(TritonSemantic):
    """Triton's type rules, with a short way for operands that agree already."""

    def __init__(self, builder: Any) -> None:
        super().__init__(builder)
        self._constants: dict[Any, Any] = {}

    def broadcast_impl_value(self, lhs: Any, rhs: Any) -> Any:
        """Broadcasts two operands to one shape."""
        if _same_shape(lhs.type, rhs.type):
            return lhs, rhs
        return super().broadcast_impl_value(lhs, rhs)

    def binary_op_type_checking_impl(self, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        """Casts and broadcasts two operands to one type."""
        if not isinstance(lhs, core.tensor):
            lhs = self._constant(lhs, rhs) or lhs
        elif not isinstance(rhs, core.tensor):
            rhs = self._constant(rhs, lhs) or rhs
        if isinstance(lhs, core.tensor) and isinstance(rhs, core.tensor):
            left, right = lhs.dtype, rhs.dtype
            same = left is right and left.name in _PLAIN
            # An offset is added to a pointer as it is; args[0] says that the left operand may be one.
            if same or (args and args[0] and left.is_ptr() and right.name in ("int32", "int64")):
                return self._spread(lhs, rhs)
        return super().binary_op_type_checking_impl(lhs, rhs, *args, **kwargs)

    def _constant(self, value: Any, other: Any) -> Any:
        """A scalar of the type of ``other``, where Python's number takes that type without any rule; else None."""
        name = other.dtype.name if isinstance(other, core.tensor) else ""
        fits = name in ("int32", "int64") and type(value) is int and value in _INT32
        if not fits and not (name == "fp32" and type(value) is float):
            return None
        key = (name, value, math.copysign(1.0, value))
        if key not in self._constants:
            self._constants[key] = self.scalar_constant(value, dtype=other.dtype)
        return self._constants[key]

    def _spread(self, lhs: Any, rhs: Any) -> Any:
        """Gives both operands of an elementwise operation one type; numpy broadcasts a scalar's data by itself."""
        if _same_shape(lhs.type, rhs.type):
            return lhs, rhs
        if not rhs.type.is_block():
            return lhs, core.tensor(rhs.handle, core.block_type(rhs.dtype, lhs.type.shape))
        if not lhs.type.is_block():
            return core.tensor(lhs.handle, core.block_type(lhs.dtype, rhs.type.shape)), rhs
        return super().broadcast_impl_value(lhs, rhs)
