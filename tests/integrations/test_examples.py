"""The scripts under examples/ run, and train."""

from __future__ import annotations

import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torchruns

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {
    "with_trainer": "accelerate",
    "with_accelerate": "accelerate",
    "with_lightning": "lightning",
}


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*NEEDS, "many_processes", "with_restarts"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NEEDS)
def test_an_example_runs(name: str) -> None:
    pytest.importorskip(NEEDS[name], reason=f"examples/{name}.py needs {NEEDS[name]}: pip install {NEEDS[name]}")
    result = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name=name)["main"](2)
    for loss in result if isinstance(result, list) else [result]:
        assert math.isfinite(loss)
        assert 0 < loss < 10


@pytest.mark.slow
def test_a_killed_training_goes_on(tmp_path: Path) -> None:
    """Under torchrun, with the command that its docstring gives; the losses are those of one process."""
    script = EXAMPLES / "with_restarts.py"
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
    killed = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *options,
            str(script),
            str(tmp_path / "a"),
            "--kill-in-step",
            "7",
        ],
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"},
        check=True,
    )
    # By the watcher, or by torchrun where it has ended the other rank before.
    assert re.search(r"rank 1 failed|exitcode: -9\) local_rank: 1", killed.stderr)
    found = {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss (\S+)", killed.stdout)}
    alone = runpy.run_path(str(script), run_name="example")["main"](tmp_path / "b")
    assert found == pytest.approx(alone, abs=2e-6)


@pytest.mark.slow
def test_the_example_of_many_processes_gives_the_losses_of_one() -> None:
    pytest.importorskip("transformers", reason="examples/many_processes.py needs it: pip install transformers")
    script = EXAMPLES / "many_processes.py"
    done = torchruns.run(str(script), "3")
    assert done.returncode == 0, done.stderr
    found = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    alone = runpy.run_path(str(script), run_name="example")["main"](3)
    assert len(alone) == 3
    assert found == pytest.approx(alone, abs=1e-4)
