"""Short ways for frequent operations on interpreted tensors, where Triton's type rules have nothing to decide.

An operator of two int32, int64, float32 or int1 operands of one type and of one shape (or one of them a scalar), or of
a pointer and an integer, is one numpy call; so are conversions between numbers, ``where``, and loads and stores whose
mask and value fit as they are. Everything else goes the long way. The results are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as ti
from triton.language import core

from ops.moe_comm_gpu.emulation.floats import Array

_NUMPY: dict[str, Any] = {"int32": np.int32, "int64": np.int64, "fp32": np.float32}
_INTEGERS = ("int32", "int64")
_INT32 = range(-(1 << 31), 1 << 31)


def _truncating_division(a: Array, b: Array) -> Array:
    return (a - np.fmod(a, b)) // b


# operator -> numpy function, and the types of operands it takes here
_ARITHMETIC: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "add": (np.add, ("int32", "int64", "fp32")),
    "sub": (np.subtract, ("int32", "int64", "fp32")),
    "mul": (np.multiply, ("int32", "int64", "fp32")),
    "truediv": (np.divide, ("fp32",)),
    "floordiv": (_truncating_division, _INTEGERS),
    "mod": (np.fmod, _INTEGERS),
    "and": (np.bitwise_and, ("int32", "int64", "int1")),
    "or": (np.bitwise_or, ("int32", "int64", "int1")),
}
_COMPARISONS: dict[str, Callable[..., Any]] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
_COMPARED = ("int32", "int64", "fp32")
_CONVERTED = frozenset(("int8", "int16", "int32", "int64", "fp16", "bf16", "fp32", "fp8e4nv", "fp8e5"))
_NUMBERS = _CONVERTED | {"int1"}
_CACHE_HINTS = {"volatile", "cache_modifier", "eviction_policy"}


def _ints(type: Any) -> Any:
    """The shape of a block type made while interpreting, () for a scalar; None if unknown."""
    return vars(type).get("ints") if type.is_block() else ()


def _right_operand(name: str, value: Any) -> Any:
    """(data, shape) of the operand next to one of the type called ``name``; None if the long way is needed."""
    if isinstance(value, core.tensor):
        return (value.handle.data, _ints(value.type)) if value.dtype.name == name else None
    value = value.value if isinstance(value, core.constexpr) else value
    if (type(value) is int and name in _INTEGERS and value in _INT32) or (type(value) is float and name == "fp32"):
        return np.array([value], dtype=_NUMPY[name]), ()
    return None


def _operator(
    function: Callable[..., Any],
    names: tuple[str, ...],
    result: Any,
    swapped: bool,
    long_way: Callable[[Any, Any], Any],
) -> Callable[[Any, Any], Any]:
    def operate(self: Any, other: Any) -> Any:
        dtype = self.dtype
        if dtype.name in names:
            operand = _right_operand(dtype.name, other)
            shape = None if operand is None else _joint_shape(_ints(self.type), operand[1])
            if shape is not None:
                left, right = self.handle.data, operand[0]
                data = function(right, left) if swapped else function(left, right)
                return _tensor(data, dtype if result is None else result, shape)
        return long_way(self, other)

    return operate


def _joint_shape(*shapes: Any) -> Any:
    """The shape of an elementwise result, that of its blocks; None if they differ or one is unknown."""
    joint: Any = ()
    for shape in shapes:
        if shape is None or (shape and joint and shape != joint):
            return None
        joint = shape or joint
    return joint


_block_types: dict[Any, Any] = {}


def _type(dtype: Any, shape: tuple[int, ...]) -> Any:
    """The type of a tensor; types are never changed, so one object serves all."""
    if not shape:
        return dtype
    key = (id(dtype), shape)
    if key not in _block_types:
        _block_types[key] = core.block_type(dtype, shape), dtype  # with dtype, so that its id stays taken
    return _block_types[key][0]


def _tensor(data: Array, dtype: Any, shape: tuple[int, ...]) -> Any:
    return core.tensor(ti.TensorHandle(data, dtype), _type(dtype, shape))


def _add_to_pointer(short: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """``+`` that also knows pointers."""

    def add(self: Any, other: Any) -> Any:
        dtype = self.dtype
        if dtype.is_ptr():
            item_bytes = max(1, dtype.element_ty.primitive_bitwidth // 8)
            number = other.value if isinstance(other, core.constexpr) else other
            if type(number) is int:
                shape = _ints(self.type)
                if shape is not None:
                    return _tensor(self.handle.data + np.uint64(number * item_bytes % (1 << 64)), dtype, shape)
            elif isinstance(other, core.tensor) and other.dtype.name in _INTEGERS:
                shape = _joint_shape(_ints(self.type), _ints(other.type))
                if shape is not None:
                    offset = np.uint64(item_bytes) * other.handle.data.astype(np.uint64)
                    return _tensor(self.handle.data + offset, dtype, shape)
        return short(self, other)

    return add


def _to(builder: Any, long_way: Callable[..., Any]) -> Callable[..., Any]:
    """Conversion between types of numbers."""

    def to(self: Any, dtype: Any, *rest: Any, **options: Any) -> Any:
        dtype = dtype.value if isinstance(dtype, core.constexpr) else dtype
        if not rest and not options and self.dtype.name in _NUMBERS and getattr(dtype, "name", "") in _CONVERTED:
            if dtype == self.dtype:
                return self
            shape = _ints(self.type)
            if shape is not None:
                handle = builder.cast_impl(self.handle, dtype)
                return core.tensor(handle, _type(dtype, shape))
        return long_way(self, dtype, *rest, **options)

    return to


def _where(long_way: Callable[..., Any]) -> Callable[..., Any]:
    def where(condition: Any, x: Any, y: Any) -> Any:
        known = next((v for v in (x, y) if isinstance(v, core.tensor)), None)
        if known is not None and isinstance(condition, core.tensor) and condition.dtype.name == "int1":
            name = known.dtype.name
            if name in _NUMPY:
                operands = [_right_operand(name, v) for v in (x, y)]
                if None not in operands:
                    shape = _joint_shape(_ints(condition.type), *(o[1] for o in operands))
                    if shape is not None:
                        chosen = np.where(condition.handle.data, operands[0][0], operands[1][0])
                        return _tensor(chosen, known.dtype, shape)
        return long_way(condition, x, y)

    return where


@functools.cache
def _filled(shape: tuple[int, ...], value: Any, dtype: Any) -> Array:
    """A constant array, never written to."""
    return np.full(shape, value, dtype)


def _mask(mask: Any, pointer: Any) -> Any:
    """The handle of a load's or a store's mask; None if the long way is needed."""
    if mask is None:
        return ti.TensorHandle(_filled(pointer.handle.data.shape, True, np.dtype(bool)), tl.int1)
    if isinstance(mask, core.tensor) and mask.dtype.name == "int1":
        return mask.handle if mask.handle.data.shape == pointer.handle.data.shape else None
    return None


def _load(builder: Any, long_way: Callable[..., Any]) -> Callable[..., Any]:
    def load(pointer: Any, mask: Any = None, other: Any = None, *rest: Any, **options: Any) -> Any:
        if not rest and not options.keys() - _CACHE_HINTS and isinstance(pointer, core.tensor):
            element = pointer.dtype.element_ty if pointer.dtype.is_ptr() else None
            number = other.value if isinstance(other, core.constexpr) else other
            shape, dtype = _ints(pointer.type), None if element is None else element.name
            if shape is not None and dtype in _CONVERTED and (number is None or type(number) in (int, float)):
                mask_handle = _mask(mask, pointer)
                numpy_dtype = ti._get_np_dtype(element)
                # A narrow float is held as bits: only zero is the same number.
                if mask_handle is not None and (not number or numpy_dtype.kind == {int: "i", float: "f"}[type(number)]):
                    default = _filled(pointer.handle.data.shape, number or 0, numpy_dtype)
                    handle = builder.create_masked_load(pointer.handle, mask_handle, ti.TensorHandle(default, element))
                    return core.tensor(handle, _type(element, shape))
        return long_way(pointer, mask, other, *rest, **options)

    return load


def _store(builder: Any, long_way: Callable[..., Any]) -> Callable[..., Any]:
    def store(pointer: Any, value: Any, mask: Any = None, *rest: Any, **options: Any) -> Any:
        if not rest and not options.keys() - _CACHE_HINTS and isinstance(pointer, core.tensor):
            element = pointer.dtype.element_ty if pointer.dtype.is_ptr() else None
            if element is not None and isinstance(value, core.tensor) and value.dtype.name == element.name:
                mask_handle = _mask(mask, pointer)
                if mask_handle is not None and value.handle.data.shape == pointer.handle.data.shape:
                    return builder.create_masked_store(pointer.handle, value.handle, mask_handle)
        return long_way(pointer, value, mask, *rest, **options)

    return store


def patches(builder: Any) -> list[tuple[Any, str, Any]]:
    """(object, attribute, value) of the short ways; call it while Triton's patches of the interpreter are in place."""
    found: list[tuple[Any, str, Any]] = []
    for name, (function, types) in _ARITHMETIC.items():
        for prefix, swapped in (("", False), ("r", True)):
            attribute = f"__{prefix}{name}__"
            short = _operator(function, types, None, swapped, getattr(core.tensor, attribute))
            found.append((core.tensor, attribute, _add_to_pointer(short) if attribute == "__add__" else short))
    for name, function in _COMPARISONS.items():
        attribute = f"__{name}__"
        short = _operator(function, _COMPARED, tl.int1, False, getattr(core.tensor, attribute))
        found.append((core.tensor, attribute, short))
    found.append((core.tensor, "to", _to(builder, core.tensor.to)))
    functions = {"load": _load(builder, core.load), "store": _store(builder, core.store), "where": _where(core.where)}
    found += [(module, name, short) for module in (tl, core) for name, short in functions.items()]
    return found
