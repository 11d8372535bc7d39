"""The registry: choice, errors, laziness."""

import subprocess
import sys
import types
from importlib import metadata

import pytest

from ops import registry
from ops.registry import Backend, BackendUnavailableError, UnknownBackendError


@pytest.fixture(autouse=True)
def own_table(monkeypatch):
    """Each test gets its own copy of the table and a clean environment."""
    monkeypatch.setattr(registry, "_rows", list(registry._TABLE))
    for op in ("kda", "moe_comm", "toy"):
        monkeypatch.delenv(registry.environment_variable(op), raising=False)


@pytest.fixture
def toy(monkeypatch):
    """An operator of its own with rows in every state."""
    module = types.ModuleType("toy_backends")
    module.first = lambda: "first"
    module.second = lambda: "second"
    monkeypatch.setitem(sys.modules, "toy_backends", module)
    module.__spec__ = types.SimpleNamespace()
    for row in (
        Backend("toy", "missing", "toy_backends:first", requires=("no_such_module",), extra="toy"),
        Backend("toy", "shy", "toy_backends:first", on_request="only when named"),
        Backend("toy", "good", "toy_backends:second"),
        Backend("toy", "broken", "toy_backends:absent"),
    ):
        registry.register(row)
    return module


def test_import_loads_no_framework():
    code = (
        "import ops.registry, sys; "
        "assert not {'jax', 'torch', 'triton', 'nvshmem', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_probing_the_built_in_rows_loads_no_framework():
    code = (
        "import ops.registry as r, sys; [r.backends(op) for op in ('kda', 'moe_comm')]; "
        "assert not {'jax', 'torch', 'triton', 'nvshmem'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_printed_table_names_every_row():
    result = subprocess.run([sys.executable, "-m", "ops.registry"], check=True, capture_output=True, text=True)
    lines = result.stdout.splitlines()[1:]
    assert [tuple(line.split()[:2]) for line in lines] == [(row.op, row.name) for row in registry._TABLE]
    for line in lines:
        assert len(line.split(None, 3)) == 4, f"no reason or summary in {line!r}"


def test_a_broken_table_row_is_named_by_its_own_cause(toy):
    with pytest.raises(BackendUnavailableError, match=r"'broken' of 'toy' is installed but broken.*AttributeError"):
        registry.select("toy", "broken")


def test_first_usable_row_wins_and_rows_on_request_are_passed_over(toy):
    assert registry.select("toy")() == "second"


def test_named_row_on_request_is_returned(toy):
    assert registry.select("toy", "shy")() == "first"


def test_environment_chooses_and_argument_wins_over_it(toy, monkeypatch):
    monkeypatch.setenv("OPS_TOY_BACKEND", "shy")
    assert registry.select("toy")() == "first"
    assert registry.select("toy", "good")() == "second"


def test_explicit_choice_never_falls_back(toy, monkeypatch):
    with pytest.raises(BackendUnavailableError, match=r"no_such_module not installed.*extra .toy. of accelerator-ops"):
        registry.select("toy", "missing")
    monkeypatch.setenv("OPS_TOY_BACKEND", "missing")
    with pytest.raises(BackendUnavailableError, match="no_such_module"):
        registry.select("toy")


def test_unknown_names_list_the_known_ones(monkeypatch):
    with pytest.raises(UnknownBackendError, match=r"'kda', 'moe_comm'.*got 'kdaa'.*did you mean 'kda'"):
        registry.select("kdaa")
    with pytest.raises(UnknownBackendError, match=r"'pallas_tpu', 'xla', 'scan', 'reference'.*got 'pallas'"):
        registry.select("kda", "pallas")
    monkeypatch.setenv("OPS_KDA_BACKEND", "palas_tpu")
    with pytest.raises(UnknownBackendError, match=r"from OPS_KDA_BACKEND.*did you mean 'pallas_tpu'"):
        registry.select("kda")


def test_no_usable_row_lists_every_reason():
    registry.register(Backend("toy", "missing", "toy_backends:first", requires=("no_such_module",)))
    registry.register(Backend("toy", "absent", "ops.no_such_file:run"))
    with pytest.raises(BackendUnavailableError, match=r"(?s)missing: no_such_module not.*absent: not part of this ver"):
        registry.select("toy")


def test_a_crashing_probe_is_a_reason(toy):
    def explode():
        raise OSError("driver too old")

    toy.explode = explode
    registry.register(Backend("toy", "probed", "toy_backends:first", probe="toy_backends:explode"))
    status = registry.backends("toy")[-1]
    assert not status.usable
    assert status.reason == "probe failed: OSError: driver too old"


def test_a_module_that_vanishes_while_importing_is_not_installed(toy, monkeypatch):
    registry.register(Backend("toy", "fragile", "no_such_module.inner:run", requires=("no_such_module",), extra="toy"))
    monkeypatch.setattr(registry, "_installed", lambda module: True)
    with pytest.raises(BackendUnavailableError, match="no_such_module not installed"):
        registry.select("toy", "fragile")


def test_a_missing_undeclared_module_shows_as_broken(toy, monkeypatch):
    registry.register(Backend("toy", "fragile", "no_such_module.inner:run"))
    with pytest.raises(BackendUnavailableError, match=r"installed but broken.*ModuleNotFoundError"):
        registry.select("toy", "fragile")


def test_register_places_and_refuses(toy):
    registry.register(Backend("toy", "ahead", "toy_backends:first"), before="good")
    assert registry.select("toy")() == "first"
    with pytest.raises(ValueError, match="has a row named 'ahead' already"):
        registry.register(Backend("toy", "ahead", "toy_backends:first"))
    with pytest.raises(ValueError, match='expected "module:attribute", got'):
        registry.register(Backend("toy", "odd", "toy_backends.first"))
    with pytest.raises(UnknownBackendError, match="'nowhere'"):
        registry.register(Backend("toy", "lost", "toy_backends:first"), before="nowhere")


def test_entry_points_become_rows_without_being_imported(monkeypatch):
    points = [
        metadata.EntryPoint("kda.theirs", "their_package.kda:attention", registry.ENTRY_POINT_GROUP),
        metadata.EntryPoint("kda.xla", "their_package.kda:usurper", registry.ENTRY_POINT_GROUP),
    ]
    monkeypatch.setattr(registry, "_entry_points_read", False)
    monkeypatch.setattr(metadata, "entry_points", lambda group: points if group == registry.ENTRY_POINT_GROUP else [])
    with pytest.warns(RuntimeWarning, match=r"entry point 'kda.xla'.*ignored"):
        rows = {status.backend.name: status.backend for status in registry.backends("kda")}
    assert rows["theirs"].target == "their_package.kda:attention"
    assert rows["theirs"].on_request, "it may not take over by itself"
    assert rows["xla"].target.startswith("ops.")
    assert list(rows)[-1] == "theirs"


def test_pallas_row_without_a_tpu_is_on_request_only(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    status = registry.backends("kda")[0]
    assert status.backend.name == "pallas_tpu"
    assert status.state != "usable"
    assert status.reason
