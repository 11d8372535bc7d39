"""Runs the harness's cases with tensors on a GPU; shared by the tests of one GPU and the run on several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ops.moe_comm_gpu.batch import Handle
from ops.moe_comm_gpu.exchange import Exchange
from reference.moe_cases import SHAPES, Shape
from tests.moe import harness
from tests.moe.strategies import Case, full


def world_cases(world_size: int) -> list[Case]:
    """What to run on a world of this size: all dtypes, both modes, both layouts, two batches, reuse, extremes."""
    shape = Shape(num_experts=4 * world_size + 1, experts_per_token=min(4, 4 * world_size), hidden=1024,
                  max_num_tokens=33, world_size=world_size)  # fmt: skip
    small = replace(SHAPES["published_small"], world_size=world_size, dp_size=2 if world_size % 2 == 0 else 1)
    cases = []
    for mode in ("per_rank", "per_expert"):
        for in_dtype in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float32"):
            block = 128 if in_dtype.startswith("float8") else None
            out_dtype = "float16" if in_dtype == "float16" else "bfloat16"
            cases.append(full(shape, mode=mode, in_dtype=in_dtype, out_dtype=out_dtype, scale_block=block,
                              weights_early=in_dtype != "float16"))  # fmt: skip
        cases += [
            full(shape, mode=mode, batches=2, weights_early=True),
            full(shape, mode=mode, layout="contiguous", row_multiple=128, routing="dropped", weights_early=True),
            full(shape, mode=mode, routing="one_expert", bias=True, accumulate=True, weights_early=True),
            full(shape, mode=mode, routing="duplicates", id_dtype="uint32"),
            replace(full(shape, mode=mode, weights_early=True), num_tokens=(0, *[33] * (world_size - 1))),
            full(small, mode=mode, weights_early=True),
            *(full(replace(shape, hidden=hidden), mode=mode, weights_early=True) for hidden in (136, 2880, 3584)),
        ]
    return cases


def observe(case: Case, exchange: Exchange, device: torch.device) -> list[harness.Observation]:
    """What this rank sees of every batch of a case, as :func:`tests.moe.harness.observe` does on the CPU."""
    config = exchange.config
    group = config.group

    def there(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(device)

    weights = [there(harness._floats(case.weights(group, batch))) for batch in range(case.batches)]
    sent = [
        exchange.dispatch_send(
            there(harness._tokens(case, group, batch)),
            there(harness._ids(case, group, batch)),
            scales=there(harness._scales(case, group)),
            weights=weights[batch] if case.weights_early else None,
        )
        for batch in range(case.batches)
    ]
    observations = []
    for batch, request in enumerate(sent):
        out = harness._poisoned(case, config)
        out.rows, out.scales, out.tokens_per_expert = map(there, (out.rows, out.scales, out.tokens_per_expert))
        handle = exchange.dispatch_recv(request, out)
        addends = {
            name: there(value) if isinstance(value, torch.Tensor) else value
            for name, value in harness._addends(case, group).items()
        }
        rows = there(harness._apply_experts(case, _on_cpu(handle)))
        output = exchange.combine(handle, rows, None if case.weights_early else weights[batch], **addends)
        observations.append(harness._observation(_on_cpu(handle), output.cpu()))
    return observations


def _on_cpu(handle: Handle) -> Handle:
    tensors = {name: value.cpu() for name, value in vars(handle).items() if isinstance(value, torch.Tensor)}
    return replace(handle, **tensors)


def check_everywhere(case: Case, observed: list[Any]) -> None:
    """Holds the observations of all ranks against the reference."""
    harness.check(case, observed)
