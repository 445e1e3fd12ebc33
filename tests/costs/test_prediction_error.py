"""Predicted against measured: the history on disk, who writes it, and its distribution."""

from __future__ import annotations

import dataclasses
import importlib
import json
import multiprocessing
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss
from typer.testing import CliRunner

import autopar
from autopar import Accuracy, Plan
from autopar.cli import app
from autopar.costs.history import Record, costs_of, history_path, recall, remember
from autopar.costs.prediction_error import Distribution
from autopar.plan.stage import Stage
from autopar.report.tables import WIDTH
from cost_models import parse_devices

CPUS = parse_devices(["cpu", "cpu"])
START = datetime(2030, 1, 1, tzinfo=UTC)
ADDED = 15  # records of each process

seconds = st.floats(1e-6, 1e3)
records = st.builds(
    Record,
    time=st.datetimes(timezones=st.just(UTC)),
    autopar=st.just("0.1.0"),
    torch=st.just("2.13"),
    device_kinds=st.lists(st.sampled_from(["NVIDIA H200", "AMD EPYC, 1 thread"]), min_size=1, unique=True).map(tuple),
    model=st.text(max_size=9),
    fingerprint=st.text(max_size=9),
    training=st.booleans(),
    batch_size=st.integers(1, 64),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    stages=st.integers(1, 3),
    devices=st.integers(1, 3),
    n_microbatches=st.integers(1, 3),
    predicted=seconds,
    measured=seconds,
    steps=st.integers(1, 9),
    predicted_memory=st.none() | st.integers(0, 1 << 50),
    measured_memory=st.none() | st.integers(0, 1 << 50),
    source=st.sampled_from(["compare", "tune", "train_step"]),
    costs=st.sampled_from(["measured", "estimated"]),
)


def record(batch_size: int = 1, **changes: Any) -> Record:
    plan = Plan((Stage(("cpu:0",)),), 1, batch_size=batch_size, predicted_step_time=1.0)
    return dataclasses.replace(Record.of(plan, nn.Linear(2, 2), CPUS, [2.0], source="compare"), **changes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "below" / "accuracy.sqlite"


@pytest.fixture
def own_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that nothing is in yet."""
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path / "own"))
    return history_path()


# -- the history -----------------------------------------------------------------------------------------------------


@given(records)
def test_a_record_survives_being_written(one: Record) -> None:
    assert Record.from_json(one.to_json()) == one


def test_what_is_remembered_is_recalled_oldest_first(path: Path) -> None:
    assert recall(path) == ()
    assert not path.parent.exists()
    first, second, third = (record(size) for size in (1, 2, 3))
    remember([first, second], path)
    remember([third], path)
    assert recall(path) == (first, second, third)


def test_the_median_of_the_steps_is_what_was_measured() -> None:
    plan = Plan((Stage(("cpu:1",)), Stage(("cpu:0",))), 2, "gpipe", batch_size=4, predicted_step_time=1.5)
    found = Record.of(plan, nn.Linear(2, 2), CPUS, [3.0, 9.0, 2.0], source="compare")
    assert (found.measured, found.steps, found.error) == (3.0, 3, -0.5)
    assert (found.device_kinds, found.devices, found.stages) == ((CPUS[0].kind,), 2, 2)
    assert found.time.utcoffset() == timedelta(0)
    same = Record.of(plan, nn.Linear(2, 2), CPUS, [1.0], source="compare")
    other = Record.of(plan, nn.Linear(2, 3), CPUS, [1.0], source="compare")
    assert found.fingerprint == same.fingerprint != other.fingerprint


def test_the_oldest_are_dropped_from_a_full_history(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = importlib.import_module("autopar.costs.history")  # `autopar.accuracy` is the call
    monkeypatch.setattr(room, "MOST_RECORDS", 5)
    for start in range(0, 12, 3):
        remember([record(size + 1) for size in range(start, start + 3)], path)
    assert [one.batch_size for one in recall(path)] == [8, 9, 10, 11, 12]


def add_records(path: Path, mine: list[Record], start: Barrier) -> None:
    """A process of its own: a record at a time."""
    start.wait()
    for one in mine:
        remember([one], path)


def test_processes_may_add_at_once_and_none_is_lost(path: Path) -> None:
    some = [record(1 + number) for number in range(3 * ADDED)]
    context = multiprocessing.get_context("fork")  # the others import torch once more
    start = context.Barrier(3, timeout=60)
    writers = [context.Process(target=add_records, args=(path, some[n::3], start)) for n in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert sorted(recall(path), key=lambda one: one.batch_size) == some


def test_entries_that_are_damaged_or_of_another_version_are_skipped_with_a_word(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    remember([record(1)], path)
    good = json.loads(record().to_json())
    bad = [
        "no json",
        "[]",
        json.dumps({**good, "format": 0}),
        json.dumps({name: value for name, value in good.items() if name != "measured"}),
        json.dumps({**good, "measured": 0.0}),
        json.dumps({**good, "measured": "long"}),
        json.dumps({**good, "time": "2030-01-01"}),  # without a time zone
        json.dumps({**good, "device_kinds": None}),
    ]
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executemany("INSERT INTO records (record) VALUES (?)", [(text,) for text in bad])
    remember([record(2)], path)
    assert [one.batch_size for one in recall(path)] == [1, 2]
    assert f"{len(bad)} records of {path} are damaged" in caplog.text


def test_a_damaged_file_is_moved_aside(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir()
    path.write_bytes(b"no history" * 1000)
    assert recall(path) == ()
    assert "cannot be read" in caplog.text
    remember([record(3)], path)
    assert [one.batch_size for one in recall(path)] == [3]
    assert path.with_name(path.name + ".corrupt").read_bytes() == b"no history" * 1000


def test_a_place_that_cannot_be_written_costs_the_record_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    remember([record()], tmp_path / "file" / "accuracy.sqlite")
    assert "not recorded" in caplog.text
    assert recall(tmp_path / "file" / "accuracy.sqlite") == ()


# -- the distribution ------------------------------------------------------------------------------------------------


@given(st.lists(records, min_size=1, max_size=30))
def test_the_distribution_is_numpys_of_the_relative_errors(some: list[Record]) -> None:
    predicted, measured = (np.array([getattr(one, name) for one in some]) for name in ("predicted", "measured"))
    errors = np.abs(predicted - measured) / measured
    found = Distribution.of(some)
    expected = len(some), np.median(errors), np.percentile(errors, 95), errors.max()
    assert dataclasses.astuple(found)[:4] == pytest.approx(expected, rel=1e-9, abs=1e-9)
    signed = np.median((predicted - measured) / measured)
    assert found.signed_median == pytest.approx(signed, rel=1e-9, abs=1e-9)


@given(st.lists(records, max_size=12))
def test_every_record_is_in_one_group_of_each_grouping(some: list[Record]) -> None:
    found = Accuracy.of(some)
    for groups in (found.by_kind, found.by_source, found.by_schedule, found.by_costs):
        assert sum(one.n for one in groups.values()) == len(some)
    for name, one in found.by_source.items():
        assert one == Distribution.of(r for r in some if r.source == name)
    plain = [r for r in some if r.devices == r.n_microbatches == 1]
    assert ("one device" in found.by_schedule) == bool(plain)


def test_only_what_was_measured_since_then_and_on_that_kind_counts() -> None:
    old, new = record(1, time=START), record(2, time=START + timedelta(days=1))
    gpu = record(3, time=START + timedelta(days=2), device_kinds=("NVIDIA H200", "AMD EPYC"))
    some = [old, new, gpu]
    assert Accuracy.of(some).records == (old, new, gpu)
    assert Accuracy.of(some, since=START + timedelta(days=1)).records == (new, gpu)
    assert Accuracy.of(some, since=(START + timedelta(days=1)).astimezone().replace(tzinfo=None)).records == (new, gpu)
    assert Accuracy.of(some, kind="h200").records == (gpu,)
    assert Accuracy.of(some, kind="h200", since=START + timedelta(days=3)).overall is None


@given(st.lists(records, min_size=1, max_size=6))
def test_text_and_json_hold_the_distribution(some: list[Record]) -> None:
    found = Accuracy.of(some)
    text = str(found)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= WIDTH
    assert all(name in text for name in (*found.by_source, *found.by_schedule))
    data = json.loads(found.to_json())
    assert data["overall"] == dataclasses.asdict(Distribution.of(some))
    assert data["by_schedule"].keys() == found.by_schedule.keys()
    assert [Record.from_json(json.dumps(one)) for one in data["records"]] == some


def run(*args: str) -> str:
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_tells_the_distribution_or_what_to_run(own_history: Path) -> None:
    assert "run `autopar compare" in run("accuracy")
    assert json.loads(run("accuracy", "--json"))["overall"] is None
    remember([record(1), record(2, device_kinds=("NVIDIA H200",))])
    assert run("accuracy") == f"{autopar.accuracy()}\n"
    assert json.loads(run("accuracy", "--json", "--kind", "H200"))["overall"]["n"] == 1
    assert "No prediction on TPU" in run("accuracy", "--kind", "TPU")


# -- who records -----------------------------------------------------------------------------------------------------


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))


X, Y = torch.linspace(-1, 1, 64).view(8, 8), torch.linspace(1, 0, 64).view(8, 8)
CALL: dict[str, Any] = {"example_args": (X,), "target": Y, "loss_fn": mse_loss}
SPLIT = {"0": 0, "3": 1}


def hand_plan(schedule: str = "1f1b", n_microbatches: int = 4) -> Plan:
    return Plan.from_split(SPLIT, n_microbatches=n_microbatches, schedule=schedule)


@pytest.mark.slow
def test_every_row_of_a_comparison_is_recorded(own_history: Path) -> None:
    model = net()
    found = autopar.compare(model, ["cpu", "cpu"], {"auto": None, "hand": hand_plan()}, repeats=3, **CALL)
    recorded = recall()
    assert len(recorded) == len(found.rows) == 3
    for one, row in zip(recorded, found.rows, strict=True):
        assert (one.predicted, one.measured, one.steps) == (row.predicted, row.measured, 3)
        assert one.error == row.error
        assert (one.source, one.costs, one.batch_size, one.training) == ("compare", "measured", 8, True)
        assert (one.schedule, one.n_microbatches) == (row.plan.schedule, row.plan.n_microbatches)
        assert (one.stages, one.devices) == (len(row.plan.stages), len(row.plan.used_devices))
        assert one.predicted_memory == max(row.predicted_memory.values())
        assert one.measured_memory == max(row.measured_memory.values())


@pytest.mark.slow
def test_every_plan_that_is_tuned_is_recorded(own_history: Path) -> None:
    pm = autopar.parallelize(net(), ["cpu", "cpu"], tune=1, candidates={"hand": hand_plan()}, **CALL)
    pm.close()
    assert [one.source for one in recall()] == ["tune", "tune"]
    assert recall()[1].schedule == "1f1b"


@pytest.mark.slow
def test_without_the_cache_nothing_is_recorded(own_history: Path) -> None:
    autopar.compare(net(), ["cpu"], repeats=1, cache=False, **CALL)
    pm = autopar.parallelize(net(), ["cpu", "cpu"], cache=False, tune=1, **CALL)
    pm.train_step(X, target=Y, loss_fn=mse_loss, profile=True)
    pm.close()
    assert pm.last_profile is not None
    assert not own_history.exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:measurement cache")
def test_a_comparison_needs_no_place_to_record_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path / "file"))
    assert autopar.compare(net(), ["cpu"], repeats=1, **CALL).single.measured > 0
    assert "not recorded" in caplog.text


def test_a_plan_made_ahead_was_predicted_from_estimates_until_it_is_run() -> None:
    ahead = Plan((Stage(("cpu:0",)),), 1, notes=("estimated from the data sheets of 8 x H100, not measured",))
    assert costs_of(ahead) == "estimated"
    assert costs_of(dataclasses.replace(ahead, measured_step_time=1.0)) == "measured"
    assert costs_of(hand_plan()) == "measured"
