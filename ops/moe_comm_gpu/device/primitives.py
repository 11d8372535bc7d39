"""Device primitives of the communication kernels: the only communication a kernel may use.

The same ``@triton.jit`` source runs in three ways. Compiled, the primitives are functions of NVSHMEM's device library
(pass its bitcode as ``extern_libs={"nvshmem": path}``) and a few lines of PTX. In the simulator and in the emulation
they call the current :class:`~ops.moe_comm_gpu.device.hooks.DeviceHooks`. Which of the two is decided at each call by
whether the compiler is at work, so a process may do both and no environment variable is needed.

Memory model, what a kernel may rely on:

- ``put_signal_nbi`` returns at once. Its data are in place before its own signal changes; nothing else is ordered,
  neither with other puts nor with other signals. The source is read at any time until then, so it must not be written
  before some later signal from the destination shows that the put has arrived.
- ``signal``, ``signal_peer`` and the signal of a put are released after everything the program has loaded or stored
  before (by all of its threads), but *not* after its earlier puts.
- ``wait_ge`` acquires: what was released before the signals that it saw is visible after it.
- Signals are 64-bit, in symmetric memory, only written by these primitives (and zero when allocated).

Addresses are passed to the library as int64: a pointer type cannot be a key of ``extern_elementwise``'s table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.language import core

from ops.moe_comm_gpu.device import hooks, watchdog

#: How a signal changes: replaced by the value, or the value added. Numbers of the library's C headers.
SIGNAL_SET = tl.constexpr(9)
SIGNAL_ADD = tl.constexpr(10)

_EXPIRE_PTX = f"""
    st.volatile.global.b64 [$1+{8 * watchdog.OPERATION}], $2;
    st.volatile.global.b64 [$1+{8 * watchdog.AWAITED}], $3;
    st.volatile.global.b64 [$1+{8 * watchdog.TARGET}], $4;
    st.volatile.global.b64 [$1+{8 * watchdog.SEEN}], $5;
    fence.acq_rel.sys;
    st.volatile.global.b64 [$1+{8 * watchdog.EXPIRED}], 1;
    fence.acq_rel.sys;
    trap;
    mov.u32 $0, 0;
"""


def _device_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Makes ``fn`` callable in a kernel.

    The compiler passes ``_semantic``; the interpreter, which knows only Triton's own builtins, leaves it out.
    """

    @functools.wraps(fn)
    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        return fn(*args, _semantic=_semantic, **kwargs)

    setattr(call, core.TRITON_BUILTIN, True)
    return call


def _cast(value: Any, dtype: Any, semantic: Any) -> Any:
    return semantic.cast(semantic.to_tensor(core._unwrap_if_constexpr(value)), dtype)


def _library_call(
    symbol: str, args: Sequence[Any], types: Sequence[Any], result: Any, semantic: Any, pure: bool = False
) -> Any:
    """Calls ``symbol`` of NVSHMEM's device library, with ``args`` cast to ``types``."""
    cast = [_cast(a, t, semantic) for a, t in zip(args, types, strict=True)]
    return core.extern_elementwise("", "", cast, {tuple(types): (symbol, result)}, is_pure=pure, _semantic=semantic)


def _assembly(text: str, constraints: str, args: Sequence[Any], result: Any, semantic: Any) -> Any:
    """Runs ``text`` in every thread; never removed or merged by the compiler."""
    return core.inline_asm_elementwise(text, constraints, args, dtype=result, is_pure=False, pack=1, _semantic=semantic)


def _integer(value: Any) -> int:
    """The Python integer behind an interpreted scalar, a constexpr or a number."""
    if isinstance(value, core.tensor):
        return int(value.handle.data.reshape(-1)[0])
    return int(core._unwrap_if_constexpr(value))


def _interpreted(value: int, dtype: Any) -> Any:
    """An interpreted scalar of ``dtype``."""
    from triton.runtime.interpreter import TensorHandle, _get_np_dtype

    return core.tensor(TensorHandle(np.array([value], dtype=_get_np_dtype(dtype)), dtype), dtype)


@_device_function
def my_pe(_semantic: Any = None) -> Any:
    """Number of the rank that runs the program, int32."""
    if _semantic is None:
        return _interpreted(hooks.current().my_pe(), tl.int32)
    return _library_call("nvshmem_my_pe", [], [], tl.int32, _semantic, pure=True)


@_device_function
def n_pes(_semantic: Any = None) -> Any:
    """Number of ranks, int32."""
    if _semantic is None:
        return _interpreted(hooks.current().n_pes(), tl.int32)
    return _library_call("nvshmem_n_pes", [], [], tl.int32, _semantic, pure=True)


@_device_function
def peer_ptr(pointer: Any, pe: Any, _semantic: Any = None) -> Any:
    """Where the symmetric ``pointer`` (scalar) lies on rank ``pe``, for plain loads and stores.

    A pointer of the same type; the null pointer when the rank is out of reach of loads and stores (no NVLink between
    them). A rank reaches itself.
    """
    if _semantic is None:
        return _interpreted(hooks.current().peer_address(_integer(pointer), _integer(pe)), pointer.type)
    address = _library_call("nvshmem_ptr", [pointer, pe], [tl.int64, tl.int32], tl.int64, _semantic, pure=True)
    return _semantic.cast(address, pointer.type)


@_device_function
def put_signal_nbi(
    destination: Any, source: Any, num_bytes: Any, signal: Any, value: Any, op: Any, pe: Any, _semantic: Any = None
) -> None:
    """Copies ``num_bytes`` from ``source`` to ``destination`` on rank ``pe``, then changes ``signal`` there.

    Called by all threads of the program together (block scope), which are synchronised before and after. Never waits.
    The three pointers are local symmetric scalars, of any element type; ``pe`` may be this rank itself.

    Args:
        destination: symmetric pointer, 16-byte aligned for full speed.
        source: symmetric pointer; written by this program or by an earlier kernel; see the module for its reuse.
        num_bytes: length of the copy; 0 sends the signal alone.
        signal: symmetric pointer to 64 bits.
        value: what to set or add, >= 0.
        op: ``SIGNAL_SET`` or ``SIGNAL_ADD``.
        pe: rank that receives.
    """
    args = [destination, source, num_bytes, signal, value, op, pe]
    if _semantic is None:
        hooks.current().put_signal(*(_integer(a) for a in args))
        return
    types = [tl.int64, tl.int64, tl.int64, tl.int64, tl.uint64, tl.int32, tl.int32]
    _library_call("nvshmemx_putmem_signal_nbi_block", args, types, tl.int32, _semantic)


@_device_function
def emulated(_semantic: Any = None) -> Any:
    """Compile-time: whether the kernel runs under the interpreter."""
    return core.constexpr(_semantic is None)


@_device_function
def _emulated_signal(signal: Any, value: Any, op: Any, pe: Any, _semantic: Any = None) -> None:
    hooks.current().signal(*(_integer(a) for a in (signal, value, op, pe)))


@_device_function
def _emulated_wait_ge(
    signal: Any,
    target: Any,
    timeout_ns: Any,
    operation: Any,
    awaited: Any,
    flags: Any,
    flag_target: Any,
    num_flags: Any,
    _semantic: Any = None,
) -> Any:
    number = _integer(num_flags)
    value = hooks.current().wait_ge(
        _integer(signal),
        _integer(target),
        _integer(timeout_ns),
        _integer(operation),
        _integer(awaited),
        (_integer(flags), _integer(flag_target), number) if number else None,
    )
    return _interpreted(value, tl.int64)


@_device_function
def _signal_op(signal: Any, value: Any, op: Any, pe: Any, _semantic: Any = None) -> None:
    """Signals once *per calling thread*; only for use under a thread guard."""
    types = [tl.int64, tl.uint64, tl.int32, tl.int32]
    _library_call("nvshmemx_signal_op", [signal, value, op, pe], types, tl.int32, _semantic)


@_device_function
def _thread_id(_semantic: Any = None) -> Any:
    return _assembly("mov.u32 $0, %tid.x;", "=r", [], tl.int32, _semantic)


@_device_function
def _global_timer_ns(_semantic: Any = None) -> Any:
    return _assembly("mov.u64 $0, %globaltimer;", "=l", [], tl.int64, _semantic)


@_device_function
def _fence_system(_semantic: Any = None) -> None:
    _assembly("fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], tl.int32, _semantic)


@_device_function
def _expire(block: Any, operation: Any, awaited: Any, target: Any, seen: Any, _semantic: Any = None) -> None:
    """Writes the record of an expired wait and ends the grid. Run by any number of threads: all write the same."""
    words = [_cast(a, tl.int64, _semantic) for a in (block, operation, awaited, target, seen)]
    _assembly(_EXPIRE_PTX, "=r,l,l,l,l,l", words, tl.int32, _semantic)


@triton.jit
def signal(signal_ptr: tl.tensor, value: tl.tensor, op: tl.constexpr, pe: tl.tensor) -> None:
    """Changes ``signal_ptr`` on rank ``pe`` once, after everything this program loaded or stored before.

    Called by all threads together. Never waits. Not ordered after earlier puts: use ``put_signal_nbi`` for data.

    Args:
        signal_ptr: local symmetric pointer (scalar) to 64 bits.
        value: what to set or add, >= 0.
        op: ``SIGNAL_SET`` or ``SIGNAL_ADD``.
        pe: rank whose copy of the signal changes; may be this one.
    """
    if emulated():
        _emulated_signal(signal_ptr, value, op, pe)
    else:
        # The library's call acts once per thread, and it fences only the thread that makes it.
        tl.debug_barrier()
        if _thread_id() == 0:
            _fence_system()
            _signal_op(signal_ptr, value, op, pe)


@triton.jit
def signal_peer(remote_signal_ptr: tl.tensor, value: tl.tensor, op: tl.constexpr) -> None:
    """Like :func:`signal`, for a pointer that ``peer_ptr`` returned: a release at system scope, no library call."""
    # One thread releases; not every version of Triton lets the others arrive first by itself.
    tl.debug_barrier()
    if op == SIGNAL_ADD:
        tl.atomic_add(remote_signal_ptr, value, sem="release", scope="sys")
    else:
        tl.atomic_xchg(remote_signal_ptr, value, sem="release", scope="sys")


@triton.jit
def _load_acquire(signal_ptr: tl.tensor) -> tl.tensor:
    # One thread reads and all get its value: a signal that changes meanwhile cannot split the program.
    return tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")


@triton.jit
def _first_late(flags_ptr: tl.tensor, flag_target: tl.tensor, num_flags: tl.constexpr) -> tl.tensor:
    """The first rank whose flag is lower than ``flag_target``; -1 if there is none."""
    late = tl.full([], -1, tl.int32)
    for rank in range(num_flags):
        flag = tl.load(flags_ptr + rank, volatile=True)
        late = tl.where((late < 0) & (flag < flag_target), rank, late)
    return late


@triton.jit
def _poll_ge(
    signal_ptr: tl.tensor,
    target: tl.tensor,
    watchdog_ptr: tl.tensor,
    operation: tl.constexpr,
    awaited: tl.tensor,
    flags_ptr: tl.tensor,
    flag_target: tl.tensor,
    num_flags: tl.constexpr,
) -> tl.tensor:
    timeout_ns = tl.load(watchdog_ptr, volatile=True)
    start_ns = _global_timer_ns()
    value = _load_acquire(signal_ptr)
    while value < target:
        # Threads may disagree about the time: nothing in this branch needs them together.
        if (timeout_ns > 0) & (_global_timer_ns() - start_ns > timeout_ns):
            if num_flags > 0:
                _expire(watchdog_ptr, operation, _first_late(flags_ptr, flag_target, num_flags), target, value)
            else:
                _expire(watchdog_ptr, operation, awaited, target, value)
        value = _load_acquire(signal_ptr)
    return value


@triton.jit
def wait_ge(
    signal_ptr: tl.tensor,
    target: tl.tensor,
    watchdog_ptr: tl.tensor,
    operation: tl.constexpr,
    awaited: tl.tensor,
    flags_ptr: tl.tensor = None,
    flag_target: tl.tensor = 0,
    num_flags: tl.constexpr = 0,
) -> tl.tensor:
    """Waits until the local signal is at least ``target``; acquires. Called by all threads together.

    Args:
        signal_ptr: symmetric pointer (scalar) to int64; only ever grows, or the value seen may be missed.
        target: value to reach.
        watchdog_ptr: this rank's watchdog block (int64), see :mod:`ops.moe_comm_gpu.device.watchdog`; its first word
            is the limit in ns, 0 for none. Past it the record is written and the grid ends with an error.
        operation: code of the operation for the error message, an index into the names the host knows.
        awaited: rank that is awaited, for the error message; -1 when it may be any.
        flags_ptr: where any rank may be awaited: local signals, one of each rank, which a rank raises to at least
            ``flag_target`` before it sends what is awaited. Read only once the wait has taken too long, to name the
            first rank that has not.
        flag_target: see ``flags_ptr``.
        num_flags: number of ranks at ``flags_ptr``; 0 to name ``awaited``.

    Returns:
        The value seen, int64, the same in all threads.
    """
    if emulated():
        timeout_ns = tl.load(watchdog_ptr)
        value = _emulated_wait_ge(signal_ptr, target, timeout_ns, operation, awaited, flags_ptr, flag_target, num_flags)
    else:
        value = _load_acquire(signal_ptr)
        if value < target:
            value = _poll_ge(signal_ptr, target, watchdog_ptr, operation, awaited, flags_ptr, flag_target, num_flags)
    return value
