"""Running ``@triton.jit`` functions in Python, one program at a time, without touching Triton for anybody else.

Triton's interpreter is made to be switched on for a whole process by an environment variable, before Triton is
imported. Here it is switched on for the length of a ``with language():`` block: entering replaces the builtins of
``triton.language`` and the call of a jit function, leaving puts the originals back. Kernels may so be decorated in a
process that also compiles for a GPU; only a compilation in another thread *during* the block would be disturbed.

The builder is a subclass of Triton's that repairs the arithmetic of the floats it holds as raw bits (bfloat16 and the
8-bit ones: conversions, arithmetic, reductions) and reports every access to memory to an observer.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as ti
from triton.runtime.jit import JITFunction

from ops.moe_comm_gpu.emulation import fast_operators, fast_types
from ops.moe_comm_gpu.emulation.floats import NARROW, Array, narrow, widen

_MISSING = object()


class MemoryObserver(Protocol):
    """Is told of every access that a program makes, before it happens.

    ``addresses`` are the active lanes' (uint64, any number); an access covers ``item_bytes`` from each.
    """

    def load(self, addresses: Array, item_bytes: int) -> None:
        """A plain load."""

    def store(self, addresses: Array, item_bytes: int) -> None:
        """A plain store."""

    def before_atomic(self, addresses: Array, item_bytes: int) -> None:
        """An atomic operation is about to happen."""

    def after_atomic(self, addresses: Array, item_bytes: int, acquires: bool, releases: bool) -> None:
        """The atomic operation has happened."""


def _float32(handle: Any) -> Any:
    """The float32 array of a handle of a narrow float; other handles' data as they are."""
    name = handle.dtype.scalar.name
    return widen(handle.data, name) if name in NARROW else handle.data


class _Builder(ti.InterpreterBuilder):
    """Triton's interpreter with right narrow floats and an observer of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.observer: MemoryObserver | None = None
        # Detecting int32 overflow doubles the cost of every integer operation and its result is never asserted.
        self.options = ti.InterpreterOptions(sanitize_overflow=False)

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        dst = dst_type.scalar
        if dst.name in NARROW:
            return ti.TensorHandle(narrow(_float32(src), dst.name), dst)
        if src.dtype.scalar.name in NARROW:
            return ti.TensorHandle(_float32(src).astype(ti._get_np_dtype(dst)), dst)
        return super().cast_impl(src, dst_type)

    def get_bf16(self, value: Any) -> Any:
        return self.cast_impl(self.get_fp32(value), tl.bfloat16)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        return self.cast_impl(src, dst_type)

    def _narrow_result(self, values: Array, dtype: Any) -> Any:
        bits = values if values.dtype == bool else narrow(values, dtype.scalar.name)
        return ti.TensorHandle(bits, dtype.scalar)

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar.name not in NARROW:
            return super().binary_op(lhs, rhs, op)
        return self._narrow_result(op(_float32(lhs), _float32(rhs)), lhs.dtype)

    def unary_op(self, arg: Any, op: Any) -> Any:
        if arg.dtype.scalar.name not in NARROW:
            return super().unary_op(arg, op)
        return self._narrow_result(op(_float32(arg)), arg.dtype)

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        if z.dtype.scalar.name not in NARROW:
            return super().create_fma(x, y, z)
        return self._narrow_result(_float32(x).astype("f8") * _float32(y) + _float32(z), z.dtype)

    def create_dot(self, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        wide = (h if h.dtype.scalar.name not in NARROW else self.cast_impl(h, tl.float32) for h in (a, b))
        return super().create_dot(*wide, d, *rest)

    # How caches are to be used comes last, and differs between Triton's versions.
    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *_: Any) -> Any:
        if self.observer is not None:
            self.observer.load(*_active(ptrs, mask))
        element = ptrs.get_element_ty()
        dtype = ti._get_np_dtype(element)
        default = np.zeros(ptrs.data.shape, dtype) if other is None else other.data
        return ti.TensorHandle(ti._interpreter.load(ptrs.data, mask.data, default, dtype), element)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *_: Any) -> Any:
        if self.observer is not None:
            self.observer.store(*_active(ptrs, mask))
        return ti._interpreter.store(ptrs.data, value.data, mask.data)

    def create_atomic_rmw(self, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        with self._atomic(ptr, mask, sem):
            return super().create_atomic_rmw(op, ptr, val, mask, sem, scope)

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
        with self._atomic(ptr, None, sem):
            return super().create_atomic_cas(ptr, cmp, val, sem, scope)

    @contextlib.contextmanager
    def _atomic(self, ptr: Any, mask: Any, sem: Any) -> Iterator[None]:
        if self.observer is None:
            yield
            return
        addresses, item_bytes = _active(ptr, mask)
        self.observer.before_atomic(addresses, item_bytes)
        yield
        both = sem == ti._ir.MEM_SEMANTIC.ACQUIRE_RELEASE
        acquires, releases = both or sem == ti._ir.MEM_SEMANTIC.ACQUIRE, both or sem == ti._ir.MEM_SEMANTIC.RELEASE
        self.observer.after_atomic(addresses, item_bytes, acquires, releases)


def _active(ptrs: Any, mask: Any) -> tuple[Array, int]:
    addresses = ptrs.data.reshape(-1)
    if mask is not None and not mask.data.all():
        addresses = addresses[mask.data.reshape(-1)]
    return addresses, max(1, ptrs.get_element_ty().primitive_bitwidth // 8)


builder = _Builder()
_semantic = fast_types.FastSemantic(builder)


def _reduce(input: Any, axis: Any, combine_fn: Any, keep_dims: bool = False, **_: Any) -> Any:
    return _in_float32(ti.ReduceOps(axis, combine_fn, keep_dims).apply, input)


def _scan(input: Any, axis: Any, combine_fn: Any, reverse: bool = False, **_: Any) -> Any:
    return _in_float32(ti.ScanOps(axis, combine_fn, reverse).apply, input)


def _in_float32(apply: Callable[[Any], Any], inputs: Any) -> Any:
    """Reduces or scans narrow floats as float32 and rounds the result: numpy knows only their bits."""
    several = isinstance(inputs, tuple)
    tensors = inputs if several else (inputs,)
    if not any(t.dtype.name in NARROW for t in tensors):
        return apply(inputs)
    wide = tuple(_semantic.cast(t, tl.float32) if t.dtype.name in NARROW else t for t in tensors)
    results = apply(wide)
    results = tuple(
        _semantic.cast(r, t.dtype) if t.dtype.name in NARROW else r for r, t in zip(results, tensors, strict=True)
    )
    return results if several else results[0]


def _call_jit(function: Any, *args: Any, **kwargs: Any) -> Any:
    """What a call of a jit function inside a kernel becomes."""
    return rewritten(function)(*args, **kwargs)


def _patches() -> list[tuple[Any, str, Any]]:
    """(object, attribute, value) of everything that ``language`` replaces: found once, by letting Triton do it."""
    scope = ti._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    changes = {(id(obj), name): (obj, name, getattr(obj, name)) for obj, name, _ in scope._changes}
    operators = fast_operators.patches(builder)
    scope.restore()
    own: list[tuple[Any, str, Any]] = [
        (ti, "interpreter_semantic", _semantic),
        (ti, "interpreter_builder", builder),
        (JITFunction, "__call__", _call_jit),
        (ti.InterpretedFunction, "__call__", _call_jit),
        *fast_types.patches(),
        *operators,
    ]
    for module in (tl, tl.core):
        own += [(module, "reduce", _reduce), (module, "associative_scan", _scan)]
    changes.update({(id(obj), name): (obj, name, value) for obj, name, value in own})
    return list(changes.values())


_all_patches: list[tuple[Any, str, Any]] = []
_depth = 0


@contextlib.contextmanager
def language() -> Iterator[None]:
    """While open, jit functions and Triton's builtins run in Python; may be nested."""
    global _depth
    if not _all_patches:
        _all_patches.extend(_patches())
    originals = []
    if _depth == 0:
        for obj, name, value in _all_patches:
            originals.append((obj, name, vars(obj).get(name, _MISSING)))
            setattr(obj, name, value)
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        for obj, name, value in reversed(originals):
            if value is _MISSING:
                delattr(obj, name)
            else:
                setattr(obj, name, value)


_rewritten: dict[Callable[..., Any], Callable[..., Any]] = {}


def rewritten(function: Any) -> Callable[..., Any]:
    """The Python function that does what the jit ``function`` says; call it inside ``language()``."""
    source = function.fn
    if source not in _rewritten:
        # A copy, because Triton's rewriter adds its own names to the globals of what it rewrites.
        scope = {**source.__globals__, **inspect.getclosurevars(source).nonlocals, "interpreter_semantic": _semantic}
        copy = types.FunctionType(source.__code__.replace(co_freevars=()), scope, source.__name__, source.__defaults__)
        copy.__annotations__, copy.__kwdefaults__ = source.__annotations__, source.__kwdefaults__
        copy.__module__, copy.__qualname__ = source.__module__, source.__qualname__
        _rewritten[source] = ti.FunctionRewriter(copy).rewrite_ast()
    return _rewritten[source]


def bind(kernel: Any, args: tuple[Any, ...], constexprs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``kernel`` by name, tensors and numbers as the interpreter wants them.

    Raises:
        TypeError: an argument is missing, unknown or given twice.
    """
    signature = inspect.signature(kernel.fn)
    bound = signature.bind(*args, **constexprs)
    bound.apply_defaults()
    constant = {n for n, p in signature.parameters.items() if "constexpr" in str(p.annotation)}
    return {n: v if n in constant else ti._implicit_cvt(v) for n, v in bound.arguments.items()}


def run_program(kernel: Any, arguments: dict[str, Any], index: tuple[int, int, int], grid: tuple[int, ...]) -> None:
    """Runs one program of ``kernel`` to its end; call it inside ``language()``."""
    set_program(index, grid)
    rewritten(kernel)(**arguments)


def set_program(index: tuple[int, int, int], grid: tuple[int, ...]) -> None:
    """Says which program runs from now on; whoever switches between programs says it again."""
    builder.grid_dim, builder.grid_idx = grid, index
