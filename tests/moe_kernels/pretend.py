"""A GPU and NVSHMEM as far as the host side needs them, on a machine that has neither."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton

from ops.moe_comm_gpu.nvshmem import host, probe


class Core:
    """Stands for ``nvshmem.core``; ``refuses`` names the sizes that it has no memory for."""

    def __init__(self, refuses: tuple[int, ...] = ()) -> None:
        self.calls: list[str] = []
        self._refuses = refuses

    def get_unique_id(self, empty: bool = False) -> Any:
        return SimpleNamespace(_data=np.full(128, 0 if empty else 7, np.int8))

    def init(self, uid: Any, rank: int, nranks: int, **_: Any) -> None:
        self.calls.append(f"init {rank} of {nranks}, id {uid._data[0]}")

    def init_status(self) -> int:
        return 2

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.calls.append("tensor")
        if shape[0] in self._refuses:
            raise RuntimeError("out of memory")
        return torch.empty(shape, dtype=dtype)

    def free_tensor(self, tensor: torch.Tensor) -> None:
        self.calls.append("free")

    def barrier_all(self, stream: Any) -> None:
        self.calls.append("barrier_all")

    def finalize(self) -> None:
        self.calls.append("finalize")


@contextlib.contextmanager
def gpu(core: Core) -> Iterator[None]:
    """Lets ``host`` find a GPU, and ``core`` in place of NVSHMEM, in this process."""
    cuda = {
        "current_device": lambda: 0,
        "get_device_properties": lambda _: SimpleNamespace(multi_processor_count=132, major=9, minor=0),
        "current_stream": lambda _: SimpleNamespace(cuda_stream=0),
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda *_: None,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cuda.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(probe, "probe", lambda: None)
        patch.setattr(probe, "find_library", lambda: SimpleNamespace(device_library=lambda _: Path("library.bc")))
        patch.setattr(host, "_core", lambda: core)
        patch.setattr(host, "_current_device", lambda index: index)
        patch.setattr(host, "host_visible_words", lambda number, device: torch.zeros(number, dtype=torch.int64))
        for name, value in {"_initialised_for": None, "_used_bytes": 0, "_uneven": False, "_finalised": False}.items():
            patch.setattr(host, name, value)
        patch.setattr(triton.knobs.runtime, "kernel_load_end_hook", SimpleNamespace(add=lambda _: None, remove=print))
        yield
