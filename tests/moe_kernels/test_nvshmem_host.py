"""NVSHMEM's host side as far as it goes without a GPU: probing, choosing the device library, refusing."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ops.moe_comm_gpu import Config
from ops.moe_comm_gpu.agreement import Ledger
from ops.moe_comm_gpu.device import primitives
from ops.moe_comm_gpu.device.runtime import NotEnqueuedError
from ops.moe_comm_gpu.device.watchdog import WaitTimeoutError
from ops.moe_comm_gpu.kernel_exchange import KernelExchange
from ops.moe_comm_gpu.kernels.heap import heap_bytes_wanted
from ops.moe_comm_gpu.nvshmem import backend, host, probe
from ops.moe_comm_gpu.nvshmem.host import NvshmemRuntime
from tests.moe.workers import workers
from tests.moe_kernels.pretend import Core, gpu

DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Release Build\nGCC version: gcc 12\n"


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """Pretends that a driver and a GPU are there; returns a function that sets the driver's version."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(probe, "DEVICE_FOLDER", tmp_path)
    monkeypatch.setattr(probe, "DRIVER_FILE", tmp_path / "version")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return lambda version: (tmp_path / "version").write_text(DRIVER.format(version))


def test_probing_and_making_an_exchange_name_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(probe, "DRIVER_FILE", tmp_path / "absent")
    assert probe.probe() == "no NVIDIA driver on this machine"
    with pytest.raises(RuntimeError, match="no NVIDIA driver"):
        backend.Exchange(Config(max_num_tokens=4, num_experts=2, experts_per_token=1, hidden=16))


def test_an_old_driver_is_named(driver):
    driver("535.104.05")
    assert probe.probe() == "the NVIDIA driver 535.104 is too old for CUDA 13.0, which needs 580 or newer"


def test_a_new_driver_passes(driver):
    driver("580.65.06")
    assert probe.probe() is None


def test_a_driver_without_a_gpu(driver, tmp_path):
    driver("580.65.06")
    (tmp_path / "nvidia0").unlink()
    assert "no GPU" in probe.probe()


def test_a_torch_without_cuda(driver, monkeypatch):
    driver("580.65.06")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in probe.probe()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModuleNotFoundError("No module named 'nvshmem'", name="nvshmem"), "nvshmem not installed"),
        (RuntimeError("libnvshmem_host.so not found"), "does not load"),
        (OSError("disk on fire"), "disk on fire"),
    ],
)
def test_a_missing_or_broken_library(driver, monkeypatch, error, words):
    driver("580.65.06")

    def raises():
        raise error

    monkeypatch.setattr(probe, "find_library", raises)
    assert words in probe.probe()


def test_probing_does_not_initialise_nvshmem():
    code = (
        "from ops.moe_comm_gpu.nvshmem import probe; probe.find_library(); probe.probe(); import nvshmem.core as c; "
        "print(int(c.init_status()))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.strip() == "0"


def test_the_device_library_fits_the_gpu(tmp_path):
    library = probe.Library("3.8.0", tmp_path)
    with pytest.raises(FileNotFoundError, match="sm_90"):
        library.device_library(90)
    (tmp_path / "libnvshmem_device.bc").touch()
    assert library.device_library(90).name == "libnvshmem_device.bc"
    for capability in (80, 90, 100):
        (tmp_path / f"libnvshmem_device_sm_{capability}.bc").touch()
    names = {capability: library.device_library(capability).name for capability in (86, 89, 90, 103)}
    assert names == {
        86: "libnvshmem_device_sm_80.bc",
        89: "libnvshmem_device_sm_80.bc",
        90: "libnvshmem_device_sm_90.bc",
        103: "libnvshmem_device_sm_100.bc",
    }


@triton.jit
def _signals(signal, pe):
    primitives.signal(signal, 1, primitives.SIGNAL_ADD, pe)


@triton.jit
def _adds(signal, pe):
    tl.atomic_add(signal, pe)


def _kept(kernel, folder):
    """What Triton keeps of a compiled kernel when it is told to store machine code only."""
    source = ASTSource(fn=kernel, signature={"signal": "*i64", "pe": "i32"}, constexprs={}, attrs={})
    options = {"extern_libs": {"nvshmem": str(probe.find_library().device_library(90))}}
    with triton.knobs.cache.scope(), triton.knobs.compilation.scope():
        triton.knobs.cache.dir = str(folder)
        triton.knobs.compilation.store_binary_only = True
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert not any(name.endswith(".ptx") for name in compiled.metadata_group)
    return compiled.metadata_group


def test_binding_a_module_before_initialisation_raises_rather_than_crash(tmp_path):
    with pytest.raises(RuntimeError, match="before it is initialised"):
        host.bind_module(1, None, "kernel", _kept(_signals, tmp_path), "")


def test_modules_that_do_not_call_the_library_are_left_alone(tmp_path):
    host.bind_module(1, None, "kernel", _kept(_adds, tmp_path), "")


def test_a_module_without_machine_code_is_refused_in_words():
    with pytest.raises(RuntimeError, match=r"kernel: expected one .cubin .* got \['kernel.json', 'kernel.ptx'\]"):
        host.bind_module(1, None, "kernel", {"kernel.ptx": "a", "kernel.json": "b"}, "")


# Several ranks, and a GPU that is only pretended.

PAIR = Config(max_num_tokens=4, num_experts=2, experts_per_token=1, hidden=16, world_size=2)


def _pretended(rank: int, group: Any) -> NvshmemRuntime:
    return NvshmemRuntime(Ledger(replace(PAIR, rank=rank), group), PAIR.timeout_s)


def _allocates(rank: int, group: Any) -> list[str]:
    core = Core(refuses=(4096,) if rank == 1 else ())
    with gpu(core):
        runtime = _pretended(rank, group)
        assert core.calls == [f"init {rank} of 2, id 7"]
        assert runtime.allocate(64, "small").tolist() == [0] * 64
        with pytest.raises(MemoryError) as caught:
            runtime.allocate(4096, "large")
        with pytest.raises(RuntimeError) as later:
            runtime.allocate(64, "small")
        return [str(caught.value), str(later.value)]


def test_an_allocation_that_fails_on_one_rank_fails_on_every_rank() -> None:
    for large, small in workers().run(_allocates, [()] * 2):
        assert "large needs 4096 bytes" in large
        assert "no room on ranks [1]" in large
        assert "NVSHMEM_SYMMETRIC_SIZE" in large
        assert small.startswith("small: an earlier allocation succeeded on some ranks only")


def _refused_by_settings(rank: int, group: Any) -> int:
    core = Core()
    with gpu(core), pytest.MonkeyPatch.context() as patch:
        runtime = _pretended(rank, group)
        patch.setenv("NVSHMEM_SYMMETRIC_SIZE", "1K" if rank == 0 else "1M")
        with pytest.raises(MemoryError, match=r"no room on ranks \[0\]"):
            runtime.allocate(4096, "large")
        runtime.allocate(64, "small")
        return core.calls.count("tensor")


def test_an_allocation_that_settings_forbid_on_one_rank_is_not_tried() -> None:
    assert workers().run(_refused_by_settings, [()] * 2) == [1, 1]


def _meets_alone(rank: int, group: Any, call: str) -> str:
    core = Core()
    with gpu(core):
        runtime = _pretended(rank, group)
        dist.barrier(group)
        report = ""
        if rank == 0:
            runtime.set_timeout(0.5)
            with pytest.raises(WaitTimeoutError) as caught:
                runtime.barrier() if call == "barrier" else runtime.all_gather(rank, "dispatch")
            report = str(caught.value)
            assert "barrier_all" not in core.calls
        dist.barrier(group)
        return report


@pytest.mark.parametrize("call", ["barrier", "dispatch"])
def test_a_host_that_does_not_come_is_named(call: str) -> None:
    report, _ = workers().run(_meets_alone, [(call,)] * 2)
    assert report.startswith(f"rank 0: {call}: ranks [1] did not come within 0.5 s")


def _gathers(rank: int, group: Any) -> int:
    core = Core()
    with gpu(core):
        runtime = _pretended(rank, group)
        store = dist.distributed_c10d._get_default_store()
        sizes = []
        for number in range(50):
            assert runtime.all_gather((rank, number)) == [(0, number), (1, number)]
            sizes.append(store.num_keys())
        runtime.barrier()
        return max(sizes[-5:]) - max(sizes[:5])


def test_gathering_leaves_nothing_in_the_store() -> None:
    assert max(workers().run(_gathers, [()] * 2)) <= 4


class _Kernel:
    """Stands for a jit function: takes any launch."""

    fn = dict

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: None


def test_what_would_compile_anew_is_refused_while_a_graph_is_captured() -> None:
    kernel, rows = _Kernel(), torch.zeros(8, dtype=torch.int32)
    with gpu(Core()), pytest.MonkeyPatch.context() as patch:
        runtime = NvshmemRuntime()
        runtime.launch(kernel, (1,), rows, None, 1)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        runtime.launch(kernel, (1,), rows[4:], None, 16)
        for anew in ((rows[1:], None, 1), (rows.long(), None, 1), (rows, rows, 1)):
            with pytest.raises(NotEnqueuedError, match="once before the capture"):
                runtime.launch(kernel, (1,), *anew)
        with pytest.raises(NotEnqueuedError, match="waiting for the GPU, while a CUDA graph is captured"):
            runtime.synchronize()


def test_a_second_group_of_the_same_size_is_refused() -> None:
    core = Core()
    with gpu(core):
        host._initialise(0, (0, 1), torch.device("cuda", 0), lambda value, what: [value, value])
        host._initialise(0, (0, 1), torch.device("cuda", 0), lambda value, what: [value, value])
        with pytest.raises(RuntimeError, match=r"rank 0 of the ranks \(0, 1\) of .*, got rank 0 of \(2, 3\)"):
            host._initialise(0, (2, 3), torch.device("cuda", 0), lambda value, what: [value, value])
    assert core.calls == ["init 0 of 2, id 7"]


def _alone(rank: int, group: Any) -> tuple[int, int]:
    """A world of one where torch.distributed has a larger one."""
    made: list[NvshmemRuntime] = []

    class Stop(Exception):
        pass

    def stop(self: Any, config: Config, runtime: Any, **_: Any) -> None:
        made.append(runtime)
        raise Stop

    with gpu(Core()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelExchange, "__init__", stop)
        with pytest.raises(Stop):
            backend.Exchange(replace(PAIR, world_size=1))
    return made[0].my_pe, made[0].n_pes


def test_a_world_of_one_is_one_within_a_larger_world() -> None:
    assert workers().run(_alone, [()] * 2) == [(0, 1)] * 2


@pytest.mark.parametrize(
    ("text", "size"), [("", None), ("4096", 4096), ("64m", 64 << 20), ("1.5G", 3 << 29), ("2KB", 2048)]
)
def test_the_size_of_the_heap(monkeypatch, text, size):
    monkeypatch.setenv("NVSHMEM_SYMMETRIC_SIZE", text)
    assert heap_bytes_wanted() == size


@pytest.mark.parametrize("text", ["much", "1.2.3G", "-1", "G"])
def test_no_size_of_a_heap(monkeypatch, text):
    monkeypatch.setenv("NVSHMEM_SYMMETRIC_SIZE", text)
    with pytest.raises(ValueError, match="NVSHMEM_SYMMETRIC_SIZE"):
        heap_bytes_wanted()
