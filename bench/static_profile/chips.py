"""The TPUs that programs are compiled for, and tracing as if one of them were there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class Chip:
    """One TPU as one JAX device sees it.

    Attributes:
        name: short name, the key of :data:`CHIPS`.
        topology: what ``jax.experimental.topologies`` calls the smallest slice of it.
        device_kind: what ``jax.Device.device_kind`` says.
        cores: TensorCores behind one JAX device (2 where they run as one, "megacore").
        clock_hz: cycles a second, from libtpu's peak flop/s over its flop a cycle.
        hbm_bytes_per_s: bandwidth of the device, as libtpu's cost model has it.
        bf16_flop_per_cycle: of one core with every matrix unit busy.
        vmem_bytes: of one core.
        packed_tiles: whether narrow types have taller tiles in HBM (16 rows of bf16) instead of packed 8-row ones.
    """

    name: str
    topology: str
    device_kind: str
    cores: int
    clock_hz: float
    hbm_bytes_per_s: float
    bf16_flop_per_cycle: int
    vmem_bytes: int
    packed_tiles: bool = False

    def core_ms(self, cycles: float) -> float:
        """Milliseconds that ``cycles`` take on one core."""
        return cycles / self.clock_hz * 1e3

    def hbm_ms(self, moved_bytes: float) -> float:
        """Milliseconds that ``moved_bytes`` take at full bandwidth."""
        return moved_bytes / self.hbm_bytes_per_s * 1e3


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("v5e", "v5e:2x2", "TPU v5 lite", 1, 1.50e9, 0.82e12, 131_072, 128 * MIB),
        Chip("v6e", "v6e:2x2", "TPU v6 lite", 1, 1.75e9, 1.64e12, 524_288, 128 * MIB),
        Chip("v5p", "v5p:2x2x1", "TPU v5", 2, 1.75e9, 2.76e12, 131_072, 64 * MIB),
        Chip("tpu7x", "tpu7x:2x2x1", "TPU7x", 1, 1.90e9, 3.69e12, 524_288, 64 * MIB, packed_tiles=True),
    )
}


def chip_named(name: str) -> Chip:
    """The chip called ``name``.

    Raises:
        ValueError: unknown name; lists the known ones.
    """
    if name not in CHIPS:
        raise ValueError(f"chip: expected one of {', '.join(CHIPS)}, got {name!r}")
    return CHIPS[name]


@contextlib.contextmanager
def tracing_for(chip: Chip) -> Iterator[None]:
    """Inside, traced code sees ``chip``: ``pltpu.get_tpu_info()`` answers for it."""
    import jax
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType

    device = AbstractDevice(device_kind=chip.device_kind, num_cores=chip.cores, platform="tpu")
    mesh = AbstractMesh((1,), ("_profiled",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield
