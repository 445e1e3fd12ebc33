"""The scripts under examples/ run, and train."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {"with_trainer": "accelerate", "with_accelerate": "accelerate", "with_lightning": "lightning"}


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(NEEDS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NEEDS)
def test_an_example_runs(name: str) -> None:
    pytest.importorskip(NEEDS[name], reason=f"examples/{name}.py needs {NEEDS[name]}: pip install {NEEDS[name]}")
    result = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name=name)["main"](2)
    for loss in result if isinstance(result, list) else [result]:
        assert math.isfinite(loss)
        assert 0 < loss < 10
