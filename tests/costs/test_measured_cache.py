"""Cached costs: used where they fit, measured again where they do not."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_times import FakeTimes
from torch import nn

import autopar
from autopar.analysis.example import capture_example
from autopar.costs import measured, operator_passes
from autopar.costs.call_signature import call_signature
from cost_models import parse_devices
from cost_models.measuring import cache, timed_passes


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every measurement from here on, by name."""
    counted: list[str] = []

    def counting(module: Any, name: str) -> Any:
        real = getattr(module, name)

        def measure(*args: Any, **kwargs: Any) -> Any:
            counted.append(name)
            return real(*args, **kwargs)

        return measure

    for module, name in (
        (operator_passes, "measure"),
        (measured, "measure_links"),
        (measured, "measure_accumulate"),
    ):
        monkeypatch.setattr(module, name, counting(module, name))
    return counted


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    return cache.default_cache_path()


def profile() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    autopar.profile(model, ["cpu", "cpu"], example_args=(torch.randn(4, 8),))


def rewrite(path: Path, change: Any) -> None:
    """Replace every cached value by `change(value)`."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for key, text in connection.execute("SELECT key, value FROM measurements").fetchall():
            new = json.dumps(change(json.loads(text)))
            connection.execute("UPDATE measurements SET value = ? WHERE key = ?", (new, key))


def values(path: Path) -> list[Any]:
    with closing(sqlite3.connect(path)) as connection:
        return [json.loads(text) for (text,) in connection.execute("SELECT value FROM measurements ORDER BY key")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda value: [1],
        lambda value: {"another": "program"},
        lambda value: [value, value],
        lambda value: {**value, "forward": {}} if isinstance(value, dict) else [],
    ],
    ids=["list", "table", "nested", "no operators"],
)
def test_values_of_another_shape_are_measured_again(path: Path, measurements: list[str], change: Any) -> None:
    profile()
    first = list(measurements)
    assert {"measure", "measure_links", "measure_accumulate"} == set(first)
    shapes = [type(value) for value in values(path)]
    measurements.clear()
    profile()
    assert measurements == []  # all of them are known
    rewrite(path, change)
    profile()
    assert set(measurements) == set(first)
    assert [type(value) for value in values(path)] == shapes  # and they are known once more
    measurements.clear()
    profile()
    assert measurements == []


@pytest.mark.slow
def test_another_setting_of_torch_is_measured_by_itself(path: Path, measurements: list[str]) -> None:
    profile()
    measurements.clear()
    before = torch.backends.cudnn.benchmark
    try:
        torch.backends.cudnn.benchmark = not before
        profile()
    finally:
        torch.backends.cudnn.benchmark = before
    assert {"measure", "measure_links", "measure_accumulate"} == set(measurements)


@pytest.mark.slow
def test_costs_are_those_under_the_callers_autocast(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes: list[set[torch.dtype]] = []  # of the results of operators, by pass
    real = timed_passes.run_nodes

    def seen(module: Any, inputs: Any, call: Any) -> Any:
        mine: set[torch.dtype] = set()
        dtypes.append(mine)

        def recorded(node: Any, function: Any, args: Any, kwargs: Any) -> Any:
            value = call(node, function, args, kwargs)
            mine.add(value.dtype)
            return value

        return real(module, inputs, call=recorded)

    monkeypatch.setattr(timed_passes, "run_nodes", seen)
    profile()
    assert dtypes
    assert all(found == {torch.float32} for found in dtypes)
    for dtype in (torch.bfloat16, torch.float16):
        dtypes.clear()
        with torch.autocast("cpu", dtype=dtype):
            profile()
        assert dtypes
        assert all(found == {dtype} for found in dtypes)


def test_left_out_operators_are_replaced_by_values_of_the_dtype_that_autocast_gives_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of equal layers a few are measured; the next operator then reads a stand-in."""
    stand_ins: list[torch.dtype] = []
    real = operator_passes.reduce_graph

    def reduced(*args: Any) -> Any:
        found = real(*args)
        stand_ins.extend(shape.dtype for shape, _ in found.stand_ins)
        return found

    monkeypatch.setattr(operator_passes, "reduce_graph", reduced)
    monkeypatch.setattr(operator_passes, "measure", FakeTimes())
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)), nn.Linear(8, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autopar.profile(model, ["cpu"], example_args=(torch.randn(4, 8),), cache=False)
    assert stand_ins
    assert set(stand_ins) == {torch.bfloat16}


def test_what_stages_send_under_autocast_has_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_passes, "measure", FakeTimes())
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def sent() -> list[int]:
        profile = autopar.profile(model, ["cpu"], example_args=(torch.randn(4, 8),), cache=False)
        return [cost.output_bytes for cost in profile.operators]

    full = sent()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert [2 * nbytes for nbytes in sent()] == full


@pytest.mark.slow
def test_each_autocast_is_measured_by_itself_and_once(path: Path, measurements: list[str]) -> None:
    profile()
    for dtype in (torch.bfloat16, torch.float16):
        measurements.clear()
        with torch.autocast("cpu", dtype=dtype):
            profile()
            assert "measure" in measurements
            measurements.clear()
            profile()
        assert measurements == []
    with torch.autocast("cpu", enabled=False):
        profile()
    assert measurements == []


def test_steps_of_plans_are_remembered_for_each_autocast_by_itself() -> None:
    devices = parse_devices(["cpu", "cpu"])
    model, x = nn.Linear(4, 4), torch.randn(4, 4)
    example = capture_example(model, devices, (x,), {})
    plain = call_signature(example, devices)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert call_signature(example, devices) != plain
    assert call_signature(example, devices) == plain
