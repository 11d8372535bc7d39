"""The exchange over torch.distributed with its tensors on a GPU."""

from __future__ import annotations

import pytest
import torch

from ops.moe_comm_gpu.contract import Config
from ops.moe_comm_gpu.exchange import open_exchange


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["expert_major", "contiguous"])
def test_a_round_trip_with_gradients(layout):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    config = Config(max_num_tokens=16, num_experts=4, experts_per_token=2, hidden=64, layout=layout)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(16, 64, generator=generator).to(torch.bfloat16)
    ids = torch.rand(16, 4, generator=generator).argsort(dim=1)[:, :2]
    weights = torch.rand(16, 2, generator=generator)
    results = []
    for device in ("cpu", "cuda"):
        x, w = (tensor.to(device).requires_grad_() for tensor in (tokens, weights))
        with open_exchange(config, "torch") as exchange:
            handle = exchange.dispatch(x, ids.to(device))
            output = exchange.combine(handle, handle.rows * 2, w)
            output.float().square().sum().backward()
        assert output.device.type == device
        results.append([tensor.detach().float().cpu() for tensor in (output, x.grad, w.grad)])
    for on_cpu, on_gpu in zip(*results, strict=True):
        assert torch.allclose(on_cpu, on_gpu, rtol=2**-7, atol=2**-7)
