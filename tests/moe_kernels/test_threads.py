"""What the simulator, where a program is one thread, cannot see: the threads of a program against one another.

A scalar is loaded by every thread of a program and stored by one of them, and a vector's elements belong to threads. So
between two barriers of the program, none may load what it has stored, nor store a scalar where it has loaded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl

from ops.moe_comm_gpu.emulation import simulator
from ops.moe_comm_gpu.emulation.operations import Operation
from ops.moe_comm_gpu.emulation.simulator import Simulation
from tests.moe.strategies import Case, full
from tests.moe_kernels.worlds import simulate


class _ThreadObserver(simulator._Observer):
    """Watches each program's own loads and stores; primitives that contain a barrier begin anew."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self._seen: dict[Any, tuple[int, set[int], set[int]]] = {}

    def _since_barrier(self) -> tuple[set[int], set[int]]:
        program = self._actor.name
        primitives = sum(1 for o in self._simulation.trace if _name(o) == program)
        number, loaded, stored = self._seen.get(program, (-1, set(), set()))
        if number != primitives:
            loaded, stored = set(), set()
        self._seen[program] = (primitives, loaded, stored)
        return loaded, stored

    def load(self, addresses: np.ndarray, item_bytes: int) -> None:
        loaded, stored = self._since_barrier()
        assert not stored.intersection(addresses.tolist()), f"{self._actor.name} loads what it has stored"
        loaded.update(addresses.tolist())
        super().load(addresses, item_bytes)

    def store(self, addresses: np.ndarray, item_bytes: int) -> None:
        loaded, stored = self._since_barrier()
        if addresses.size == 1:
            assert not loaded.intersection(addresses.tolist()), f"{self._actor.name} stores where it loaded"
        stored.update(addresses.tolist())
        super().store(addresses, item_bytes)

    def after_atomic(self, *args: Any) -> None:
        super().after_atomic(*args)
        self._seen.pop(self._actor.name, None)


def _name(operation: Operation) -> str:
    return f"rank {operation.rank}, {operation.label} (launch {operation.call}), program {operation.program[0]}"


CASES = [
    full("two_ranks", mode="per_rank", weights_early=True, in_dtype="float8_e4m3fn", scale_block=16),
    full("two_ranks", mode="per_expert", layout="contiguous", row_multiple=4),
    full("six_of_eight", mode="per_rank", bias=True, accumulate=True),
]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("direct", [False, True])
def test_threads_of_a_program_do_not_race(monkeypatch: pytest.MonkeyPatch, case: Case, direct: bool) -> None:
    monkeypatch.setattr(simulator, "_Observer", _ThreadObserver)
    simulate([case], direct=direct, heap_bytes=1 << 19)


@triton.jit
def _adds_one(word_ptr: tl.tensor) -> None:
    tl.store(word_ptr, tl.load(word_ptr) + 1)


@triton.jit
def _stores_then_loads(word_ptr: tl.tensor) -> None:
    tl.store(word_ptr, 1)
    tl.store(word_ptr + 1, tl.load(word_ptr))


@pytest.mark.parametrize("kernel", [_adds_one, _stores_then_loads])
def test_such_races_are_seen(monkeypatch: pytest.MonkeyPatch, kernel: Any) -> None:
    monkeypatch.setattr(simulator, "_Observer", _ThreadObserver)

    def host(runtime: Any) -> None:
        import torch

        runtime.launch(kernel, (1,), torch.zeros(2, dtype=torch.int64))

    with pytest.raises(AssertionError, match=r"it has stored|it loaded"):
        Simulation(1, 0).run(host)
