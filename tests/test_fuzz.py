"""Whatever a file or a command line holds: an error of autopar that names the place, or what was printed is done.

Never the traceback of something else, never a hang, and never a plan that runs otherwise than it prints.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sqlite3
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import mlp
from mutations import mutated, mutated_bytes, mutated_json
from torch import nn
from typer.testing import CliRunner

import autopar
from autopar import AutoparError, Cluster, DeviceError, PipelinedModule, Plan, PlanError
from autopar.analysis.operators import compute_nodes, operator_keys, replicable_nodes
from autopar.cli import app
from autopar.costs.history import Record, recall, remember
from autopar.plan.display import printable
from autopar.sharding.stage_sharding import (
    parse_layout,
    parse_passage,
    parse_stored,
    parse_strategy,
    passage_text,
    stored_text,
    strategy_text,
)
from cost_models import MeasurementCache

DEVICES = ["cpu", "cpu"]
few = settings(
    deadline=None,
    max_examples=examples(25),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)
many = settings(few, max_examples=examples(60))


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


X = torch.linspace(-1, 1, 96).view(6, 16)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return mlp()


@functools.cache
def plans() -> tuple[str, ...]:
    """The texts of plans for `model()`: made by hand, found by the search, priced, with a mesh."""
    call: dict[str, Any] = {"example_args": (X,), "cache": False}
    by_hand = Plan.from_split({"0": 0, "3": 1}, n_microbatches=3)
    searched = autopar.plan(model(), DEVICES, n_microbatches=2, max_replicas=1, **call)
    priced = autopar.plan(model(), DEVICES, plan=by_hand, **call)
    hinted = model()
    autopar.shard(hinted[0], ((2, 1),))
    autopar.shard(hinted[4], parameter_plan={"weight": (2, 1)})
    with_mesh = autopar.plan(hinted, DEVICES, **call)
    assert any(stage.sharding for stage in with_mesh.stages)
    return tuple(plan.to_json() for plan in (by_hand, searched, priced, with_mesh))


def read(text: str) -> Plan | None:
    """The plan, if the text holds one; otherwise the error is a PlanError with a text that may be printed."""
    try:
        return Plan.from_json(text)
    except PlanError:
        return None


# -- plan files --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(many)
@given(st.data())
def test_a_mutated_plan_file_is_refused_or_prints_saves_and_explains_itself(data: st.DataObject) -> None:
    text = data.draw(st.one_of([mutated_json(text) for text in plans()]))
    plan = read(text)
    if plan is None:
        return
    for shown in (str(plan), str(plan.explain()), str(plan.diff(Plan.from_json(plans()[0])))):
        assert all(line == printable(line) for line in shown.splitlines())
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.slow
@settings(few)
@given(st.data())
def test_a_mutated_plan_file_runs_as_it_prints_or_not_at_all(data: st.DataObject) -> None:
    plan = read(data.draw(st.one_of([mutated_json(text) for text in plans()])))
    if plan is None:
        return
    original = model()
    wanted = original(X)
    try:
        pm = autopar.parallelize(original, DEVICES, plan=plan, cache=False)
        found = pm(X)
    except AutoparError:
        return
    torch.testing.assert_close(found, wanted)
    found.sum().backward()
    assert_runs_as_printed(pm, plan)
    pm.close()


def assert_runs_as_printed(pm: PipelinedModule, given: Plan) -> None:
    """Stages, operators, devices, micro-batches, schedule and meshes are those of the plan in force, which decides what
    the given one decides."""
    plan, signature = pm.plan, pm._signatures.newest()
    assert plan is not None
    assert signature is not None
    assert (plan.schedule, len(plan.stages)) == (given.schedule, len(given.stages))
    assert signature.n_microbatches == plan.n_microbatches == given.n_microbatches
    keys, free = operator_keys(signature.program), replicable_nodes(signature.program)
    named = {node.name: keys[node] for node in compute_nodes(signature.program.graph) if node not in free}
    assert signature.lowered is not None
    for stage, lowered, asked in zip(plan.stages, signature.lowered.stages, given.stages, strict=True):
        nodes = {node.name for node in lowered.module.graph.nodes if node.op != "placeholder"}
        if signature.executable is not None and asked.operators and stage.sharding is None:
            assert {key for name, key in named.items() if name in nodes} == set(named.values()) & set(stage.operators)
            assert set(asked.operators) & set(named.values()) <= set(stage.operators)
        assert stage.recompute == asked.recompute
        assert len(stage.devices) == len(asked.devices)
    if signature.executable is not None:
        placed = [tuple(worker.device.name for worker in group) for group in workers_of(pm)]
        assert placed == [stage.devices[:: stage.shards] for stage in plan.stages]


def workers_of(pm: PipelinedModule) -> list[list[Any]]:
    """For every stage, the workers of its replicas."""
    signature = pm._signatures.newest()
    assert signature is not None
    executable = signature.executable
    assert executable is not None
    counts = [stage.replicas for stage in pm.plan.stages]  # type: ignore[union-attr]
    return [[executable.replica(s, m).worker for m in range(n)] for s, n in enumerate(counts)]


@settings(many)
@given(st.one_of(st.text(max_size=20), mutated("S0R RP -> S1S0"), mutated("S0R > RR, back RP > S0R")))
def test_texts_of_strategies_are_refused_or_written_back(text: str) -> None:
    for parse, write in (
        (parse_strategy, strategy_text),
        (parse_stored, stored_text),
        (parse_passage, passage_text),
        (parse_layout, lambda layout: layout),
    ):
        with contextlib.suppress(PlanError):
            value = parse(text)  # type: ignore[operator]
            if parse is not parse_layout:
                assert parse(write(value)) == value  # type: ignore[operator]


# -- clusters ----------------------------------------------------------------------------------------------------------


CLUSTERS = [
    Cluster.preset("2xH100", nodes=2, inter_node="EFA").to_toml(),
    Cluster.preset("1xA100-80+2xT4").to_toml(),
    'node = "4xT4"\n',
]


@settings(many)
@given(st.one_of([mutated(text) for text in CLUSTERS]))
def test_a_mutated_cluster_file_is_refused_or_survives_a_file(text: str) -> None:
    path = Path("cluster.toml")
    path.write_bytes(text.encode(errors="replace"))
    try:
        cluster = Cluster.from_toml(path)
    except DeviceError as error:
        message = str(error)
    else:
        _survives(cluster, path)
        return
    assert message.startswith("cluster.toml")


def _survives(cluster: Cluster, path: Path) -> None:
    assert str(cluster)
    with contextlib.suppress(DeviceError):  # names that no file can hold
        cluster.to_toml(path)
        assert Cluster.from_toml(path) == cluster
    group = cluster.devices[:4]
    assert cluster.seconds("all_reduce", 1e6, group) >= 0


@settings(few, max_examples=examples(8))
@given(st.one_of([mutated(text) for text in CLUSTERS]))
def test_a_plan_for_a_mutated_cluster_is_made_or_refused(text: str) -> None:
    Path("cluster.toml").write_bytes(text.encode(errors="replace"))
    with contextlib.suppress(AutoparError):
        cluster = Cluster.from_toml("cluster.toml")
        if len(cluster.devices) <= 16:
            plan = autopar.plan(model(), cluster, example_args=(X,), max_shards=1)
            assert Plan.from_json(plan.to_json()) == plan
            assert str(plan)


@settings(many)
@given(st.one_of(st.text(max_size=12), mutated("8xH100"), mutated("4xA100-80+4xT4")))
def test_a_mutated_node_is_known_or_refused(text: str) -> None:
    with contextlib.suppress(DeviceError):
        assert Cluster.preset(text).devices


# -- cache and history -------------------------------------------------------------------------------------------------


FIXED: dict[str, Any] = {"n_microbatches": 2}  # so that a plan measures few sizes


def _rewrite(path: Path, table: str, column: str, draw: Any) -> None:
    """Mutate one value of an SQLite table."""
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        rows = connection.execute(f"SELECT rowid, {column} FROM {table} ORDER BY rowid").fetchall()
        row, text = rows[draw(st.integers(0, len(rows) - 1))]
        try:
            json.loads(text)
        except ValueError:  # broken by an earlier mutation
            return
        connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (draw(mutated_json(text)), row))


@functools.cache
def _filled(directory: Path) -> bytes:
    """A cache of measurements as a plan leaves it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOPAR_CACHE_DIR", str(directory))
        autopar.compare(model(), DEVICES, example_args=(X,), repeats=1, **FIXED)
    (path,) = (p for p in directory.glob("*.sqlite") if p.name != "accuracy.sqlite")
    return path.read_bytes() + b"|" + path.name.encode()


@pytest.fixture
def cache(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in which `_filled` has left its files."""
    source = tmp_path_factory.mktemp("filled")
    content, _, name = _filled(source).rpartition(b"|")
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    path = tmp_path / name.decode()
    path.write_bytes(content)
    (tmp_path / "accuracy.sqlite").write_bytes((source / "accuracy.sqlite").read_bytes())
    return path


@pytest.mark.slow
@settings(few, max_examples=examples(6))
@given(st.data())
def test_a_plan_from_mutated_measurements_is_a_plan(cache: Path, data: st.DataObject) -> None:
    content = cache.read_bytes()
    try:
        for _ in range(data.draw(st.integers(1, 4))):
            _rewrite(cache, "measurements", "value", data.draw)
        plan = autopar.plan(model(), DEVICES, example_args=(X,), **FIXED)
        assert Plan.from_json(plan.to_json()) == plan
    except AutoparError:
        pass
    finally:
        cache.write_bytes(content)


@pytest.mark.slow
@settings(few, max_examples=examples(12))
@given(st.data())
def test_a_damaged_cache_is_no_obstacle(cache: Path, data: st.DataObject) -> None:
    content = cache.read_bytes()
    cache.write_bytes(data.draw(mutated_bytes(content)))
    with MeasurementCache(cache) as store:
        store.put("key", 1.0)
        assert store.get("key") == 1.0
    cache.write_bytes(content)


@pytest.mark.slow
@settings(few)
@given(st.data())
def test_a_mutated_history_still_shows_what_can_be_read(cache: Path, data: st.DataObject) -> None:
    path = cache.with_name("accuracy.sqlite")
    content, known = path.read_bytes(), recall(path)
    assert known
    try:
        if data.draw(st.booleans()):
            _rewrite(path, "records", "record", data.draw)
        else:
            path.write_bytes(data.draw(mutated_bytes(content)))
        assert all(isinstance(record, Record) for record in recall(path))
        assert str(autopar.accuracy())
        assert json.loads(autopar.accuracy().to_json())
        remember(known[:1], path)
    finally:
        for leftover in path.parent.glob("accuracy.sqlite*"):
            leftover.unlink()
        path.write_bytes(content)


# -- command lines -----------------------------------------------------------------------------------------------------


FACTORIES = """
import torch
from torch import nn

def small():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), (torch.ones(4, 8),)
"""

LINES = [
    ["plan", "fuzzed:small", "--devices", "cpu,cpu", "--n-microbatches", "2", "--schedule", "1f1b"],
    ["plan", "fuzzed:small", "--cluster", "2xH100", "--nodes", "1", "--max-shards", "1", "--explain"],
    ["plan", "fuzzed:small", "--devices", "cpu", "--memory-limit", "8GB", "--optimizer", "sgd", "--json"],
    ["plan", "fuzzed:small", "--devices", "cpu,cpu", "--plan", "plan.json", "--save", "saved.json"],
    ["profile", "fuzzed:small", "--devices", "cpu", "--optimizer", "adam"],
    ["compare", "fuzzed:small", "--devices", "cpu", "--repeats", "1", "--plan", "mine=plan.json"],
    ["diff", "plan.json", "plan.json", "--json"],
    ["accuracy", "--kind", "CPU"],
    ["--version"],
]


@st.composite
def command_lines(draw: Any) -> list[str]:
    line = list(draw(st.sampled_from(LINES)))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(line) - 1)) if line else 0
        how = draw(st.integers(0, 4))
        if how == 0 and line:
            del line[at]
        elif how == 1:
            line.insert(at, draw(st.sampled_from([word for other in LINES for word in other])))
        elif how == 2:
            line.insert(at, draw(st.text(max_size=8)))
        elif line:
            line[at] = draw(mutated(line[at]))
    # Numbers this large are allowed, and would take as long.
    return ["1" if word.isdigit() and len(word) > 1 else word for word in line]


@pytest.fixture
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "fuzzed.py").write_text(FACTORIES)
    Plan.from_split({"0": 0, "2": 1}, n_microbatches=2).save(tmp_path / "plan.json")
    yield
    sys.modules.pop("fuzzed", None)


@pytest.mark.slow
@settings(few)
@given(command_lines())
@pytest.mark.usefixtures("_files")
def test_a_mutated_command_line_ends_with_a_status_and_a_sentence(line: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = CliRunner().invoke(app, line)
    assert result.exit_code in (0, 1, 2)
    assert isinstance(result.exception, SystemExit | None)
    assert "inside autopar" not in result.stderr
    assert "Traceback" not in result.output
    assert result.exit_code == 0 or result.stderr.strip()
