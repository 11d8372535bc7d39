"""What the primitives become in a GPU's code: who executes them, in which order memory becomes visible."""

import re

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ops.moe_comm_gpu.device import hooks, watchdog
from ops.moe_comm_gpu.device import primitives as dev
from ops.moe_comm_gpu.nvshmem.probe import find_library


@triton.jit
def _signal_only(signal, pe):
    dev.signal(signal, 1, dev.SIGNAL_ADD, pe)


@triton.jit
def _wait_only(signal, target, watchdog_block, out):
    value = dev.wait_ge(signal, target, watchdog_block, 3, 4)
    triton.language.store(out, value)


@triton.jit
def _wait_for_any(signal, target, watchdog_block, flags, out):
    triton.language.store(out, dev.wait_ge(signal, target, watchdog_block, 3, -1, flags, target, 2))


@triton.jit
def _put_only(destination, source, signal, pe):
    dev.put_signal_nbi(destination, source, 64, signal, 2, dev.SIGNAL_SET, pe)


@triton.jit
def _peer_only(signal, pe):
    dev.signal_peer(dev.peer_ptr(signal, pe), 5, dev.SIGNAL_ADD)


def ptx(kernel, arch=90, num_warps=4):
    """The PTX of the kernel's own function."""
    signature = {n: "i32" if n in ("pe", "target") else "*i64" for n in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs={}, attrs={})
    library = str(find_library().device_library(arch))
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True
        options = {"num_warps": num_warps, "extern_libs": {"nvshmem": library}}
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    text = compiled.asm["ptx"]
    assert len(compiled.asm["cubin"]) > 0
    return text[text.index(f".entry {kernel.fn.__name__}") :].split("\n}\n")[0]


def _position(text, *patterns):
    """Where the patterns are found one after another."""
    position = 0
    for pattern in patterns:
        match = re.search(pattern, text[position:])
        assert match, f"{pattern} not found in order in\n{text}"
        position += match.end()
    return position


@pytest.mark.parametrize("num_warps", [1, 4])
def test_a_signal_is_fenced_and_sent_by_one_thread(num_warps):
    # A barrier, then all threads but one leave, then the fence, then the library.
    _position(
        ptx(_signal_only, num_warps=num_warps),
        *([r"bar(rier)?\.(sync|warp)"] if num_warps > 1 else []),
        r"mov\.u32 \S+, %tid\.x",
        r"setp\.\w+\.\w+",
        r"@%p\d+ bra",
        r"fence\.acq_rel\.sys",
        r"atom|st\.|call",
    )


def test_a_wait_acquires_at_system_scope_has_a_limit_and_traps():
    text = ptx(_wait_only)
    loads = re.findall(r"(?:ld|atom)[.\w:]*", text)
    polls = [load for load in loads if "acquire" in load]
    assert polls, text
    assert all("sys" in load for load in polls)
    _position(
        text, "acquire", r"%globaltimer", rf"\+{8 * watchdog.OPERATION}\]", rf"\+{8 * watchdog.EXPIRED}\], 1", "trap"
    )


def test_flags_are_only_read_once_the_time_is_over():
    text = ptx(_wait_for_any)
    flag_loads = [match.start() for match in re.finditer(r"ld\.volatile\.global\.b64", text)]
    assert len(flag_loads) >= 3, text  # the limit, and two flags
    assert len([position for position in flag_loads if position < text.rindex("%globaltimer")]) == 1
    _position(text, "%globaltimer", r"ld\.volatile\.global\.b64", rf"\+{8 * watchdog.AWAITED}\]", "trap")
    assert "bar." not in text[text.rindex("%globaltimer") : text.index("trap")], "threads may be here alone"


def test_a_put_is_one_call_of_the_library_by_the_whole_block():
    text = ptx(_put_only)
    before = text[: text.index("nvshmemi_transfer_put_signal")] if "nvshmemi_transfer_put_signal" in text else text
    assert "bar.sync" in before
    assert "setp.ne.s32 \t%p1, %tid" not in before


def test_a_signal_to_a_peer_is_a_release_at_system_scope():
    text = ptx(_peer_only)
    assert re.search(r"(atom|red)\.global(\.sys)?\.(sys\.)?release(\.sys)?\.add\.u64", text), text
    assert "bar.sync" in text


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 100])
@pytest.mark.parametrize("kernel", [_signal_only, _wait_only, _put_only, _peer_only], ids=lambda k: k.fn.__name__)
def test_primitives_compile_for_other_architectures(kernel, arch):
    assert ptx(kernel, arch)


def test_primitives_outside_a_kernel_are_refused():
    with pytest.raises(RuntimeError, match="outside an emulated kernel"):
        dev.my_pe()
    with pytest.raises(RuntimeError, match="launched through a runtime"):
        hooks.current()


def test_the_watchdog_block_fits_its_words():
    assert watchdog.SEEN < watchdog.NUM_WORDS
    assert torch.zeros(watchdog.NUM_WORDS, dtype=torch.int64).nbytes == 64
