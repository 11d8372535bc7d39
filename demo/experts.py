"""Token embeddings of real text through a top-k router and an exchange between eight local processes."""

import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import numpy as np

WORLD_SIZE = 8
NUM_EXPERTS = 16
EXPERTS_PER_TOKEN = 2
TOKENS_PER_RANK = 256
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class RankReport:
    """What one rank saw.

    Attributes:
        rows_received: rows its experts got.
        misrouted: rows that differ from the token they are said to come from, in any bit.
        squared_error: sum over its tokens of the squared difference from the same experts applied locally.
        squared_norm: sum over its tokens of the squares of those.
        seconds: time of dispatch, experts and combine.
        backend: registry row that ran.
    """

    rows_received: int
    misrouted: int
    squared_error: float
    squared_norm: float
    seconds: float
    backend: str


def run(embedding: np.ndarray, text: np.ndarray) -> list[RankReport]:
    """Runs the exchange on every rank.

    Args:
        embedding: float32 [256, D], one row per byte.
        text: bytes, integers; the first ``WORLD_SIZE * TOKENS_PER_RANK`` are used, in the order of the ranks.

    Returns:
        One report per rank.
    """
    tokens = text[: WORLD_SIZE * TOKENS_PER_RANK].reshape(WORLD_SIZE, TOKENS_PER_RANK)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["demo.experts", "torch", "torch.distributed"])
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(WORLD_SIZE, context) as pool:
        ranks = [
            pool.submit(_run_rank, rank, f"file://{folder}/store", embedding, tokens) for rank in range(WORLD_SIZE)
        ]
        return [rank.result(timeout=2 * TIMEOUT_S) for rank in ranks]


def _run_rank(rank: int, store: str, embedding: np.ndarray, text: np.ndarray) -> RankReport:
    """One rank: route, dispatch, apply the local experts, combine, compare."""
    import time

    import torch
    import torch.distributed as distributed

    from ops.moe_comm_gpu.contract import Config
    from ops.moe_comm_gpu.exchange import open_exchange

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=TIMEOUT_S)
    )
    every_token = torch.from_numpy(embedding[text]).to(torch.bfloat16)  # [R, T, D], so that sources can be checked
    hidden = every_token.shape[-1]
    generator = torch.Generator().manual_seed(0)
    router = torch.randn(hidden, NUM_EXPERTS, generator=generator)
    experts = torch.randn(NUM_EXPERTS, hidden, hidden, generator=generator) / hidden**0.5
    tokens = every_token[rank]
    scores, ids = torch.topk(tokens.float() @ router, EXPERTS_PER_TOKEN)
    weights = torch.softmax(scores, dim=-1)

    def apply_expert(expert: int, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(rows.float() @ experts[expert]).to(torch.bfloat16)

    config = Config(
        max_num_tokens=TOKENS_PER_RANK,
        num_experts=NUM_EXPERTS,
        experts_per_token=EXPERTS_PER_TOKEN,
        hidden=hidden,
        world_size=WORLD_SIZE,
        rank=rank,
        timeout_s=TIMEOUT_S,
    )
    with open_exchange(config) as exchange:
        begun = time.perf_counter()
        handle = exchange.dispatch(tokens, ids)
        answers = torch.empty_like(handle.rows)
        misrouted = 0
        for slot, expert in enumerate(config.local_experts()):
            held = (slot, slice(int(handle.tokens_per_expert[slot])))
            sources = every_token[handle.source_rank[held].long(), handle.source_token[held].long()]
            misrouted += int((handle.rows[held] != sources).any(dim=-1).sum())
            answers[held] = apply_expert(expert, handle.rows[held])
        output = exchange.combine(handle, answers, weights)
        seconds = time.perf_counter() - begun
        backend = exchange.name
    chosen = torch.stack([apply_expert(expert, tokens) for expert in range(NUM_EXPERTS)], dim=1)
    chosen = torch.gather(chosen, 1, ids[..., None].expand(-1, -1, hidden)).float()
    expected = (weights[..., None] * chosen).sum(dim=1)
    report = RankReport(
        rows_received=int(handle.tokens_per_expert.sum()),
        misrouted=misrouted,
        squared_error=float((output.float() - expected).square().sum()),
        squared_norm=float(expected.square().sum()),
        seconds=seconds,
        backend=backend,
    )
    distributed.destroy_process_group()
    return report
