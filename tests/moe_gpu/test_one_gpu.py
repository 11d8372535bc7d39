"""One GPU, a world of one: rows and sums, CUDA graphs, timeouts, memory. Run by ``scripts/moe_one_gpu.sh``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ops.moe_comm_gpu import Config
from ops.moe_comm_gpu.nvshmem import probe
from tests.moe.strategies import Case
from tests.moe_gpu import cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(probe.probe() is not None, reason=f"nvshmem: {probe.probe()}")]
CONFIG = Config(max_num_tokens=32, num_experts=8, experts_per_token=4, hidden=1024, num_buffer_sets=2)


@pytest.fixture(scope="module")
def device() -> Iterator[torch.device]:
    from ops.moe_comm_gpu.nvshmem import host

    torch.cuda.set_device(0)
    yield torch.device("cuda", 0)
    host.finalise()


def opened(config: Config, **options: Any) -> Any:
    from ops.moe_comm_gpu.nvshmem.backend import Exchange

    return Exchange(config, **options)


def random_batch(device: torch.device, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    tokens = torch.randn(32, 1024, device=device, generator=generator).bfloat16()
    ids = torch.rand(32, 8, device=device, generator=generator).argsort(dim=1)[:, :4].to(torch.int32)
    weights = torch.rand(32, 4, device=device, generator=generator)
    return tokens, ids, weights


@pytest.mark.parametrize("case", cases.world_cases(1), ids=str)
@pytest.mark.parametrize("direct", [False, True])
def test_rows_and_sums(device: torch.device, case: Case, direct: bool) -> None:
    with opened(case.config(), direct=direct) as exchange:
        for _ in range(3):
            cases.check_everywhere(case, [cases.observe(case, exchange, device)])


def test_a_captured_graph_replays_what_running_it_gives(device: torch.device) -> None:
    tokens, ids, weights = random_batch(device)
    with opened(CONFIG) as exchange:

        def both() -> torch.Tensor:
            handle = exchange.dispatch(tokens, ids, weights=weights)
            return exchange.combine(handle, handle.rows)

        both()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = both()
        for seed in range(1, 20):
            for target, values in zip((tokens, ids, weights), random_batch(device, seed), strict=True):
                target.copy_(values)
            graph.replay()
            torch.cuda.synchronize()
            replayed = captured.clone()
            assert torch.equal(replayed, both())


@pytest.mark.parametrize("number", [0, 1, 16, 31])
def test_another_number_of_tokens_is_captured_without_compiling(device: torch.device, number: int) -> None:
    tokens, ids, weights = random_batch(device)
    with opened(CONFIG) as exchange:

        def both(number: int) -> torch.Tensor:
            handle = exchange.dispatch(tokens[:number], ids[:number], weights=weights[:number])
            return exchange.combine(handle, handle.rows)

        want = both(32)[:number].clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = both(number)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, want)


def test_the_first_call_inside_a_capture_is_refused_in_words(device: torch.device) -> None:
    config = Config(max_num_tokens=32, num_experts=8, experts_per_token=4, hidden=1024, row_multiple=1)
    tokens, ids, weights = random_batch(device)
    with opened(config) as exchange:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            try:
                with pytest.raises(RuntimeError, match="once before the capture"):
                    exchange.dispatch(tokens, ids, weights=weights)
            finally:
                graph.capture_end()


def test_many_calls_with_changing_numbers_of_tokens(device: torch.device) -> None:
    tokens, ids, weights = random_batch(device)
    with opened(CONFIG) as exchange:
        for call in range(1000):
            number = call % 33
            handle = exchange.dispatch(tokens[:number], ids[:number], weights=weights[:number])
            output = exchange.combine(handle, handle.rows)
            want = tokens[:number].float() * weights[:number].sum(dim=1, keepdim=True)
            torch.testing.assert_close(output.float(), want, rtol=2**-6, atol=2**-6)


def test_making_and_closing_returns_all_memory(device: torch.device) -> None:
    from ops.moe_comm_gpu.nvshmem import host

    before = host._used_bytes
    for _ in range(100):
        opened(CONFIG).close()
    assert host._used_bytes == before


def test_more_programs_than_multiprocessors_are_refused(device: torch.device) -> None:
    most = torch.cuda.get_device_properties(device).multi_processor_count
    with pytest.raises(ValueError, match="num_programs"):
        opened(CONFIG, num_programs=most + 1)


def test_a_heap_that_is_too_small_is_named(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSHMEM_SYMMETRIC_SIZE", "64K")
    with pytest.raises(MemoryError, match="NVSHMEM_SYMMETRIC_SIZE"):
        opened(CONFIG)


_WAITS_FOR_NOBODY = """
import torch
from dataclasses import replace
from ops.moe_comm_gpu import Config
from ops.moe_comm_gpu.kernels import dispatch
from ops.moe_comm_gpu.nvshmem.backend import Exchange
exchange = Exchange(Config(max_num_tokens=4, num_experts=2, experts_per_token=1, hidden=64, timeout_s=0.5))
tokens, ids = torch.ones(4, 64).bfloat16().cuda(), torch.zeros(4, 1, dtype=torch.int32).cuda()
request = exchange.dispatch_send(tokens, ids)
torch.cuda.synchronize()
request.state.buffers.signals.zero_()  # as if nothing had been sent
try:
    exchange.dispatch_recv(request)
    exchange._runtime.synchronize()
except TimeoutError as error:
    print("caught:", error)
"""


def test_a_wait_that_takes_too_long_ends_in_an_error_that_names_it(device: torch.device) -> None:
    # In a process of its own: a trap ends everything this process has on the GPU.
    run = subprocess.run([sys.executable, "-c", _WAITS_FOR_NOBODY], capture_output=True, text=True, timeout=120)
    assert "caught: rank 0: dispatch receive: number of rows: waits for rank 0" in run.stdout, run.stdout + run.stderr
