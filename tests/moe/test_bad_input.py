"""What is refused, in which words, and on which ranks; and who is named when a rank does not come."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ops.moe_comm_gpu.batch import RowTensors
from ops.moe_comm_gpu.contract import Config
from ops.moe_comm_gpu.emulation.operations import drop
from ops.moe_comm_gpu.exchange import Exchange, open_exchange
from ops.moe_comm_gpu.kernel_exchange import KernelExchange
from tests.moe import harness
from tests.moe.workers import workers

CONFIG = Config(max_num_tokens=4, num_experts=4, experts_per_token=2, hidden=16)
PAIR = replace(CONFIG, world_size=2)
BACKENDS = harness.usable_backends()
GATHERING = [name for name in BACKENDS if name != "nvshmem"]  # that hear of a refusal without being asked


def good() -> dict[str, Any]:
    """Arguments that every rank may dispatch with."""
    return {"tokens": torch.ones(3, 16, dtype=torch.bfloat16), "ids": torch.tensor([[0, 1], [2, 3], [1, 3]])}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"tokens": [1]}, TypeError, "tokens: expected a torch.Tensor, got list"),
        ({"tokens": torch.ones(3, 16)}, TypeError, "tokens: expected dtype bfloat16 or float16, got float32; convert"),
        ({"tokens": torch.ones(3, 8).bfloat16()}, ValueError, r"tokens: expected shape \[any, 16\], got \[3, 8\]"),
        ({"tokens": torch.ones(3).bfloat16()}, ValueError, r"tokens: expected shape \[any, 16\], got \[3\]"),
        ({"tokens": torch.ones(5, 16).bfloat16()}, ValueError, "expected at most max_num_tokens = 4 tokens, got 5"),
        ({"ids": torch.zeros(3, 3, dtype=torch.int32)}, ValueError, r"ids: expected shape \[3, 2\], got \[3, 3\]"),
        (
            {"ids": torch.zeros(3, 2, dtype=torch.int16)},
            TypeError,
            "ids: expected dtype int32 or int64 or uint32, got int16",
        ),
        ({"ids": torch.zeros(3, 2)}, TypeError, "ids: expected dtype int32 or int64 or uint32, got float32"),
        ({"scales": torch.ones(3, 1)}, ValueError, "scales: expected None, got a tensor; make .* with scale_block"),
        ({"weights": torch.ones(3, 1)}, ValueError, r"weights: expected shape \[3, 2\], got \[3, 1\]"),
        ({"weights": torch.ones(3, 2).half()}, TypeError, "weights: expected dtype float32, got float16"),
        ({"bound": torch.ones(2, dtype=torch.int32)}, ValueError, "bound: expected one integer"),
        ({"bound": 2}, TypeError, "bound: expected a tensor of one int32, int64 or uint32, got int"),
        ({"bound": torch.tensor(2.7)}, TypeError, "bound: expected a tensor of one int32, .* got torch.float32"),
        (
            {"ids": torch.tensor([[0, 1], [2, 4], [1, 3]])},
            ValueError,
            "ids: expected .* 0 to 3, got 4 at token 1, choice 1",
        ),
        (
            {"ids": torch.tensor([[0, 0], [0, 0], [0, 0]])},
            ValueError,
            "capacity: expected at least 6, .* expert 0, got 4",
        ),
        (
            {"out": RowTensors(rows=torch.ones(4, 4, 8).bfloat16())},
            ValueError,
            r"out.rows: expected shape \[4, 4, 16\]",
        ),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_dispatch_refuses(backend, changes, error, words):
    with open_exchange(replace(CONFIG, check_ids=True), backend) as exchange:
        with pytest.raises(error, match=words):
            exchange.dispatch(**(good() | changes))
        exchange.dispatch(**good())


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"handle": 3}, TypeError, "handle: expected the Handle that dispatch returned, got int"),
        (
            {"expert_rows": torch.ones(4, 4, 16)},
            TypeError,
            "expert_rows: expected dtype bfloat16 or float16, got float32",
        ),
        ({"expert_rows": torch.ones(4, 3, 16).bfloat16()}, ValueError, r"expert_rows: expected shape \[4, 4, 16\]"),
        ({"weights": None}, ValueError, "weights: expected a float32 tensor, here or in dispatch, got None in both"),
        ({"weights": torch.ones(4, 2)}, ValueError, r"weights: expected shape \[3, 2\], got \[4, 2\]"),
        ({"weights": torch.ones(3, 2).double()}, TypeError, "weights: expected dtype float32, got float64"),
        ({"out": torch.ones(3, 8).bfloat16()}, ValueError, r"out: expected shape \[3, 16\], got \[3, 8\]"),
        ({"out": torch.ones(3, 16).half()}, TypeError, "out: expected dtype bfloat16 or float32, got float16"),
        ({"out": torch.ones(16, 3).t()}, ValueError, "out: expected a contiguous tensor"),
        ({"bias": torch.ones(16)}, ValueError, r"bias: expected shape \[3, 16\], got \[16\]"),
        ({"accumulate": True}, ValueError, "accumulate: expected out, the tensor to add to, got None"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_combine_refuses(backend, changes, error, words):
    with open_exchange(CONFIG, backend) as exchange:
        handle = exchange.dispatch(**good())
        arguments = {"handle": handle, "expert_rows": handle.rows, "weights": torch.ones(3, 2)}
        with pytest.raises(error, match=words):
            exchange.combine(**(arguments | changes))
        assert not handle.progress.combined
        exchange.combine(**arguments)


def test_weights_belong_to_one_call():
    with open_exchange(CONFIG, "torch") as exchange:
        handle = exchange.dispatch(**good(), weights=torch.ones(3, 2))
        with pytest.raises(ValueError, match=r"weights: expected None, because dispatch got weights already"):
            exchange.combine(handle, handle.rows, torch.zeros(3, 2))
        with open_exchange(CONFIG, "torch") as other, pytest.raises(ValueError, match="got another exchange's"):
            other.combine(handle, handle.rows)


def test_scales_are_required_where_configured():
    config = replace(CONFIG, in_dtype=torch.float8_e4m3fn, scale_block=8)
    with (
        open_exchange(config, "torch") as exchange,
        pytest.raises(ValueError, match=r"scales: expected .* \[3, 2\], got None"),
    ):
        exchange.dispatch(torch.ones(3, 16).to(torch.float8_e4m3fn), good()["ids"])


def test_what_cannot_be_differentiated():
    with open_exchange(replace(CONFIG, in_dtype=torch.float32), "torch") as exchange:
        tokens = torch.ones(3, 16, requires_grad=True)
        with pytest.raises(ValueError, match=r"differentiable: expected True, .* got False"):
            exchange.dispatch(tokens, good()["ids"])
    with open_exchange(replace(CONFIG, hidden=7), "torch") as exchange:
        handle = exchange.dispatch(torch.ones(3, 7).bfloat16(), good()["ids"])
        with pytest.raises(ValueError, match=r"hidden: expected at least 8, 4 .* experts_per_token, .* got 7"):
            exchange.combine(handle, handle.rows, torch.ones(3, 2, requires_grad=True))
    with open_exchange(CONFIG, "torch") as exchange:
        handle = exchange.dispatch(torch.ones(3, 16, requires_grad=True, dtype=torch.bfloat16), good()["ids"])
        with pytest.raises(ValueError, match="out: expected None while gradients are recorded"):
            exchange.combine(handle, handle.rows, torch.ones(3, 2), out=torch.zeros(3, 16).bfloat16())


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_works_after_close(backend):
    exchange = open_exchange(CONFIG, backend)
    handle = exchange.dispatch(**good())
    exchange.close()
    exchange.close()
    with pytest.raises(RuntimeError, match="dispatch: this exchange is closed"):
        exchange.dispatch(**good())
    with pytest.raises(RuntimeError, match="combine: this exchange is closed"):
        exchange.combine(handle, handle.rows, torch.ones(3, 2))


def test_each_half_is_received_once():
    with open_exchange(CONFIG, "torch") as exchange:
        sent = exchange.dispatch_send(**good())
        handle = exchange.dispatch_recv(sent)
        with pytest.raises(RuntimeError, match="dispatch_recv: this dispatch was received already"):
            exchange.dispatch_recv(sent)
        returning = exchange.combine_send(handle, handle.rows, torch.ones(3, 2))
        exchange.combine_recv(returning)
        with pytest.raises(RuntimeError, match="combine_recv: this combine was received already"):
            exchange.combine_recv(returning)


def test_several_ranks_need_a_process_group():
    with pytest.raises(RuntimeError, match=r"world_size: 2 ranks need torch.distributed; call torch.distributed.init"):
        open_exchange(PAIR, "torch")


# Several ranks. Jobs return what they caught, as text.


def _attempt(rank: int, group: Any, backend: str, config: Config, changes: dict[str, Any], delay_s: float = 0) -> str:
    """Dispatches with changed arguments, then, where that is refused, with good ones."""
    try:
        exchange = open_exchange(replace(config, rank=rank), backend, group=group)
    except (ValueError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    with exchange:
        time.sleep(delay_s)
        buffers = RowTensors(rows=torch.full((*config.rows_prefix, 16), 7.0).bfloat16())
        try:
            exchange.dispatch_recv(exchange.dispatch_send(**(good() | changes)), buffers)
        except (ValueError, TypeError, TimeoutError) as error:
            assert bool((buffers.rows == 7).all()), "buffers were touched"
            if not isinstance(error, TimeoutError):
                exchange.dispatch(**good())
            return f"{type(error).__name__}: {error}"
        return "dispatched"


def attempts(backend: str, *arguments: tuple[Any, ...]) -> list[str]:
    """What each rank reports, given config and changes of each."""
    return workers().run(_attempt, [(backend, *each) for each in arguments])


@pytest.mark.parametrize("backend", GATHERING)
def test_too_many_tokens_on_one_rank_are_refused_on_every_rank(backend):
    large = {"tokens": torch.ones(5, 16).bfloat16(), "ids": torch.zeros(5, 2, dtype=torch.int32)}
    both = "tokens: expected at most max_num_tokens = 4 tokens, got 5"
    fine, refused = attempts(backend, (PAIR, {}), (PAIR, large))
    assert refused.startswith(f"ValueError: {both}")
    assert fine.startswith("PeerError: rank 1 refused this call, so no rank sent anything")
    assert both in fine


@pytest.mark.parametrize("backend", GATHERING)
@pytest.mark.parametrize("layout", ["expert_major", "contiguous"])
def test_an_expert_without_room_is_an_error_on_every_rank(backend, layout):
    config = replace(PAIR, capacity=6, layout=layout)
    reports = attempts(backend, *[(config, {"ids": torch.zeros(3, 2, dtype=torch.int32)})] * 2)
    if layout == "expert_major":
        assert all("capacity: expected at least 12, the rows of expert 0, got 6" in report for report in reports)
    else:
        assert all("capacity: expected at least 12, the rows of rank 0 with padding to 1, got 6" in r for r in reports)


@pytest.mark.parametrize("backend", GATHERING)
def test_bad_ids_on_one_rank_are_refused_on_every_rank(backend):
    config = replace(PAIR, check_ids=True)
    bad = {"ids": torch.tensor([[0, 1], [2, 9], [1, 3]])}
    refused, fine = attempts(backend, (config, bad), (config, {}))
    assert refused.startswith("ValueError: ids: expected -1 (dropped) or 0 to 3, got 9 at token 1, choice 1")
    assert fine.startswith("PeerError: rank 0 refused this call")


@pytest.mark.parametrize("backend", GATHERING)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": torch.ones(3, 2)}, "weights on all ranks or on none"),
        ({"tokens": torch.ones(3, 16).bfloat16().requires_grad_()}, "a gradient on all ranks or on none"),
    ],
)
def test_dispatches_that_differ_between_ranks(backend, changes, words):
    reports = attempts(backend, (PAIR, {}), (PAIR, changes))
    assert all(report.startswith("ValueError") and words in report for report in reports)


def test_tokens_that_differ_within_a_group():
    config = replace(PAIR, dp_size=2)
    fewer = {"tokens": torch.ones(2, 16).bfloat16(), "ids": torch.zeros(2, 2, dtype=torch.int32)}
    reports = attempts("torch", (config, {}), (config, fewer))
    assert all("expected as many on every rank of a group, got 3 on rank 0 and 2 on rank 1" in r for r in reports)


@pytest.mark.parametrize("backend", GATHERING)
@pytest.mark.parametrize("changes", [{"hidden": 32}, {"max_num_tokens": 5}, {"out_dtype": torch.float16}])
def test_configurations_that_differ_are_an_error_on_every_rank(backend, changes):
    reports = attempts(backend, (PAIR, {}), (replace(PAIR, **changes), {}))
    (name,) = changes
    assert all("ValueError: config: expected the same on every rank" in report for report in reports)
    assert all(f"{name}: " in report for report in reports)


def _shorten(exchange: Exchange, seconds: float) -> None:
    """Changes the limit of this rank's waits, which until now were for ranks that surely come."""
    if isinstance(exchange, KernelExchange):
        exchange._runtime.set_timeout(seconds)
        exchange._ledger.timeout_s = seconds
    else:
        exchange._ranks._ledger.timeout_s = seconds
        exchange._ranks._host._set_default_timeout(timedelta(seconds=seconds))


def _late(rank: int, group: Any, backend: str, absent: str) -> tuple[str, float]:
    """Rank 1 leaves out a call, and goes on once rank 0 has given up; what rank 0 hears, and after how long."""
    exchange = open_exchange(replace(PAIR, rank=rank), backend, group=group)
    weights = torch.ones(3, 2)
    handle = exchange.dispatch(**good(), weights=weights) if absent == "combine" else None
    dist.barrier(group)
    report, started = "", time.perf_counter()
    if rank == 0:
        _shorten(exchange, 1.0)
        with pytest.raises(TimeoutError) as caught:
            exchange.combine(handle, handle.rows) if handle else exchange.dispatch(**good(), weights=weights)
        report = str(caught.value)
    waited = time.perf_counter() - started
    dist.barrier(group)
    exchange._abandon()
    exchange.close()
    return report, waited


@pytest.mark.parametrize("backend", GATHERING)
@pytest.mark.parametrize("absent", ["dispatch", "combine"])
def test_a_rank_that_never_comes_is_named(backend, absent):
    (report, waited), _ = workers().run(_late, [(backend, absent)] * 2)
    assert absent in report
    assert "did not arrive within 1 s: rank 1 (" in report
    assert ("has made no call yet" if absent == "dispatch" else "last seen at dispatch, call 1") in report
    assert waited < PAIR.timeout_s


def _rows_lost(rank: int, group: Any) -> str:
    """Rank 1 comes to combine, but its rows do not."""
    with open_exchange(replace(PAIR, rank=rank), "nvshmem_emulated", group=group) as exchange:
        handle = exchange.dispatch(**good(), weights=torch.ones(3, 2))
        if rank == 1:
            exchange._runtime._fault = drop(lambda o: o.kind == "put" and o.pe == 0)
        pending = exchange.combine_send(handle, handle.rows)
        dist.barrier(group)
        if rank == 0:
            exchange._runtime.set_timeout(0.5)
            with pytest.raises(TimeoutError) as caught:
                exchange.combine_recv(pending)
        exchange._abandon()
    return str(caught.value) if rank == 0 else ""


def test_where_every_rank_has_come_the_wait_itself_is_told():
    report, _ = workers().run(_rows_lost, [()] * 2)
    assert "combine receive: rows: waits for its peers (signal is" in report
    assert "did not arrive" not in report


def _absent_from_the_start(rank: int, group: Any) -> str:
    if rank == 1:
        return ""
    with pytest.raises(TimeoutError) as late:
        open_exchange(replace(PAIR, rank=rank, timeout_s=0.5), "torch", group=group)
    return str(late.value)


def test_a_rank_that_does_not_make_its_exchange_is_named_and_may_come_later():
    report, _ = workers().run(_absent_from_the_start, [()] * 2)
    assert report == "making the exchange: did not arrive within 0.5 s: rank 1"
    assert attempts("torch", (PAIR, {}), (PAIR, {})) == ["dispatched"] * 2


def test_a_late_rank_with_nothing_to_send_completes_the_exchange():
    none = {"tokens": torch.ones(0, 16).bfloat16(), "ids": torch.zeros(0, 2, dtype=torch.int32)}
    assert attempts("torch", (PAIR, {}), (PAIR, none, 0.5)) == ["dispatched"] * 2


def _other_call(rank: int, group: Any) -> str:
    with open_exchange(replace(PAIR, rank=rank), "torch", group=group) as exchange:
        handle = exchange.dispatch(**good())
        _shorten(exchange, 1.0)
        arrive = exchange._ranks.arrive

        def together(call: str) -> None:
            arrive(call)
            dist.barrier(group)

        exchange._ranks.arrive = together
        with pytest.raises((TimeoutError, RuntimeError)) as caught:
            exchange.combine(handle, handle.rows, torch.ones(3, 2)) if rank else exchange.dispatch(**good())
        exchange._ranks.arrive = arrive
        with pytest.raises(RuntimeError, match="failed before and can only be closed"):
            exchange.dispatch(**good())
    return str(caught.value)


def test_ranks_in_different_calls_are_told_apart():
    reports = workers().run(_other_call, [()] * 2)
    assert "rank 1 (last seen at combine, call 2)" in reports[0]
    assert "rank 0 (last seen at dispatch, call 2)" in reports[1]
