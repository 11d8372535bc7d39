"""NVSHMEM's host side as far as it goes without a GPU: probing, choosing the device library, refusing."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from ops.moe_comm_gpu import Config
from ops.moe_comm_gpu.kernels.heap import heap_bytes_wanted
from ops.moe_comm_gpu.nvshmem import backend, host, probe

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


def test_binding_a_module_before_initialisation_raises_rather_than_crash(tmp_path):
    ptx = tmp_path / "kernel.ptx"
    ptx.write_text(".extern .const .align 8 .b8 nvshmemi_device_state_d[512];")
    with pytest.raises(RuntimeError, match="before it is initialised"):
        host.bind_module(1, None, "kernel", {"kernel.ptx": str(ptx)}, "")


def test_modules_that_do_not_call_the_library_are_left_alone(tmp_path):
    ptx = tmp_path / "kernel.ptx"
    ptx.write_text(".visible .entry kernel()")
    host.bind_module(1, None, "kernel", {"kernel.ptx": str(ptx), "kernel.cubin": "absent"}, "")


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
