"""Runs cases of the exchange's harness on the kernels in the simulator, several rounds on one set of buffers."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ops.moe_comm_gpu.contract import Config
from ops.moe_comm_gpu.emulation.operations import Fault
from ops.moe_comm_gpu.emulation.simulator import Simulation
from ops.moe_comm_gpu.exchange import Exchange
from ops.moe_comm_gpu.kernel_exchange import KernelExchange
from reference.moe_cases import Shape
from tests.moe import harness
from tests.moe.strategies import Case


def opened(config: Config, group: Any) -> contextlib.nullcontext[Exchange]:
    """Stands for an exchange that stays open, given in the place of a process group."""
    assert group.config == config, "rounds on one exchange differ in their config"
    return contextlib.nullcontext(group)


def simulate(
    rounds: Sequence[Case],
    seed: int = 0,
    *,
    num_programs: int = 2,
    direct: bool = False,
    fault: Fault | None = None,
    heap_bytes: int = 1 << 17,
) -> Simulation:
    """Runs the rounds one after another on one exchange and checks every row and sum of every rank.

    Raises:
        AssertionError: a wrong row, count or sum.
        SimulationError: a race, a deadlock, an access out of bounds.
    """
    simulation = Simulation(
        rounds[0].shape.world_size, seed, heap_bytes=heap_bytes, max_resident_programs=num_programs, fault=fault
    )

    def host(runtime: Any) -> list[list[harness.Observation]]:
        with KernelExchange(rounds[0].config(runtime.my_pe), runtime, direct=direct) as exchange:
            return [harness._observe_rank(runtime.my_pe, exchange, case, f"{__name__}:opened") for case in rounds]

    by_rank = simulation.run(host)
    for number, case in enumerate(rounds):
        harness.check(case, [observed[number] for observed in by_rank])
    return simulation


def draw(seed: int, mode: str, batches: int) -> dict[str, Any]:
    """Arguments of :func:`simulate`: a small world, two or three rounds, everything from the seed."""
    rng = random.Random(seed)
    world_size = rng.choice((2, 2, 2, 2, 2, 2, 2, 2, 3, 4)) if seed % 25 else rng.choice((5, 6, 7, 8))
    most = 2 if world_size < 4 else 1
    num_experts = rng.randint(1, 2 * world_size if world_size < 4 else world_size)
    shape = Shape(
        num_experts=num_experts,
        experts_per_token=min(rng.choice((1, 2, 2, 3)), num_experts),
        hidden=8,
        max_num_tokens=rng.randint(1, most + (seed % 5 == 0)),
        world_size=world_size,
        dp_size=rng.choice([size for size in (1, 1, 1, 2, world_size) if world_size % size == 0]),
        expert_map=rng.choice([None, tuple(rng.randrange(world_size) for _ in range(num_experts))]),
    )
    layout = rng.choice(("expert_major", "contiguous"))
    first = Case(
        shape=shape,
        num_tokens=(),
        layout=layout,
        row_multiple=1 if layout == "expert_major" else rng.choice((1, 4)),
        mode=mode,
        weights_early=rng.random() < 0.7,
        batches=batches,
    )
    rounds = [
        replace(
            first,
            num_tokens=tuple(rng.randint(0, shape.max_num_tokens) for _ in range(shape.num_groups)),
            routing=rng.choice(("random", "dropped", "one_expert", "out_of_range")),
            seed=rng.randrange(1000) * 2,
        )
        for _ in range(3 if batches == 1 and world_size == 2 and seed % 3 == 0 else 2)
    ]
    return {
        "rounds": rounds,
        "seed": seed,
        "num_programs": rng.choice((1, 1, 1, 2, 3)),
        "direct": rng.random() < 0.2,
    }
