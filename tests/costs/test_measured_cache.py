"""Cached costs: used where they fit, measured again where they do not."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.costs import measured
from cost_models.measuring import cache


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every measurement from here on, by name."""
    counted: list[str] = []

    def counting(name: str) -> Any:
        real = getattr(measured, name)

        def measure(*args: Any, **kwargs: Any) -> Any:
            counted.append(name)
            return real(*args, **kwargs)

        return measure

    for name in ("measure", "measure_links", "measure_accumulate"):
        monkeypatch.setattr(measured, name, counting(name))
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
