"""The configuration: its one predicate, the stored choices, the fitting."""

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.kda_tpu.pallas import config as cfg
from ops.kda_tpu.pallas.vmem import vmem_bytes

SHAPE = cfg.ProblemShape(heads=16, batch=1, tokens=8192, key_dim=128, value_dim=128)

SHAPES = st.builds(
    cfg.ProblemShape,
    heads=st.integers(1, 64),
    batch=st.integers(1, 4),
    tokens=st.integers(1, 1 << 20),
    key_dim=st.integers(1, cfg.MAX_KEY_DIM),
    value_dim=st.integers(1, 512),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    segmented=st.booleans(),
    lower_bound=st.sampled_from([None, -5.0, -20.0]),
)


@given(SHAPES, st.sampled_from([None, *cfg.VMEM_BYTES]), st.booleans())
def test_every_shape_has_a_legal_choice(shape, chip, rematerialize):
    config = cfg.choose(shape, chip, rematerialize_for_backward=rematerialize)
    assert cfg.why_illegal(config, shape, chip) is None
    assert config.rematerialize_for_backward is rematerialize
    assert config.chunks_per_step == 1 or (config.chunks_per_step - 1) * config.chunk < shape.tokens


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"chunk": 128}, "chunk"),
        ({"chunks_per_step": 0}, "chunks_per_step"),
        ({"heads_per_step": 5}, "heads_per_step"),
        ({"backward_heads_per_step": 3}, "backward_heads_per_step"),
        ({"sub_block": "middle"}, "sub_block"),
        ({"backward": "two"}, "backward"),
        ({"chunks_per_step": 64}, "VMEM"),
    ],
)
def test_illegal_configurations_are_named(change, names):
    assert cfg.why_illegal(cfg.Config(), SHAPE, "v6e") is None
    config = replace(cfg.Config(), **change)
    with pytest.raises(ValueError, match=names):
        cfg.check(config, SHAPE, "v6e")


def test_key_dimension_beyond_the_kernels_names_the_way_out():
    with pytest.raises(ValueError, match="'xla'"):
        cfg.choose(replace(SHAPE, key_dim=cfg.MAX_KEY_DIM + 1))


def test_vmem_estimate_grows_with_everything_that_is_held():
    base = vmem_bytes(cfg.Config(), SHAPE)
    for larger in (
        vmem_bytes(replace(cfg.Config(), chunks_per_step=8), SHAPE),
        vmem_bytes(cfg.Config(), replace(SHAPE, dtype="float32")),
        vmem_bytes(cfg.Config(), replace(SHAPE, gate_dtype="float32")),
        vmem_bytes(cfg.Config(), replace(SHAPE, segmented=True)),
        vmem_bytes(cfg.Config(), replace(SHAPE, key_dim=129)),
    ):
        assert all(larger[kernel] > base[kernel] for kernel in base)


def test_stored_choices_are_legal_for_their_class():
    for chip, choices in cfg.tuned().items():
        assert chip in cfg.VMEM_BYTES
        for shape_class, stored in choices.items():
            dtype, key, value, heads = shape_class.split()
            shape = cfg.ProblemShape(int(heads[1:]), 1, 8192, int(key[1:]), int(value[1:]), dtype)
            assert shape.shape_class == shape_class
            assert set(stored) <= {"chunks_per_step", "heads_per_step", "backward_heads_per_step"}
            assert cfg.choose(shape, chip) == cfg.check(replace(cfg.rule(shape), **stored), shape, chip)


def test_stored_choice_wins_over_the_rule(monkeypatch):
    stored = {"chunks_per_step": 2, "heads_per_step": 8}
    monkeypatch.setattr(cfg, "tuned", lambda: {"v6e": {SHAPE.shape_class: stored}})
    assert cfg.choose(SHAPE, "v6e") == replace(cfg.rule(SHAPE), **stored)
    assert cfg.choose(SHAPE, "v5e") == cfg.choose(SHAPE, None) == cfg.rule(SHAPE)


@pytest.mark.parametrize(
    ("dtype", "lower_bound", "sub_block"),
    [
        ("bfloat16", None, "clamped"),
        ("float32", None, "tree"),
        ("float32", -5.0, "clamped"),
        ("float32", -20.0, "tree"),
    ],
)
def test_float32_never_clamps(dtype, lower_bound, sub_block):
    assert cfg.rule(replace(SHAPE, dtype=dtype, lower_bound=lower_bound)).sub_block == sub_block


def test_no_chip_on_a_cpu():
    assert cfg.current_chip() is None


def test_import_reads_no_data_and_loads_no_framework():
    code = (
        "import sys, importlib.util as u\n"
        f"spec = u.spec_from_file_location('config', {cfg.__file__!r})\n"
        "m = u.module_from_spec(spec); sys.modules['config'] = m; spec.loader.exec_module(m)\n"
        "assert 'jax' not in sys.modules and m.tuned.cache_info().currsize == 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
