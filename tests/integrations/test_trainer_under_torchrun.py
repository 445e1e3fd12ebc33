"""transformers' Trainer and Accelerate on the ranks of torchrun do what they do in one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "trained_by_trainer.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(*command: str, ranked: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *(TORCHRUN if ranked else []), *command],
        capture_output=True,
        text=True,
        timeout=250,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=False,
    )


def trained(folder: Path, model: str, *options: str, ranked: bool) -> Any:
    """What was logged in each step, the loss of the evaluation, and the weights that were saved."""
    folder.mkdir(exist_ok=True)
    done = run(str(SCRIPT), model, str(folder), *options, ranked=ranked)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "found.pt")


def assert_same(found: Any, expected: Any) -> None:
    (logged, evaluated, weights), (of_one, evaluated_by_one, weights_of_one) = found, expected
    torch.testing.assert_close(torch.tensor(logged), torch.tensor(of_one[-len(logged) :]), rtol=2e-4, atol=2e-4)
    assert evaluated == pytest.approx(evaluated_by_one, rel=2e-4)
    assert weights.keys() == weights_of_one.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, weights_of_one[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize(("model", "options"), [("bert", ()), ("gpt2", ("accumulate",))])
def test_losses_norms_and_weights_are_those_of_one_process(
    tmp_path: Path, model: str, options: tuple[str, ...]
) -> None:
    """Also where samples have different numbers of targets, with accumulation and clipping, and after resuming."""
    expected = trained(tmp_path / "one", model, *options, ranked=False)
    ranks = tmp_path / "ranks"
    assert_same(trained(ranks, model, *options, ranked=True), expected)
    if not options:
        resumed = trained(ranks, model, "resume", *options, ranked=True)
        assert len(resumed[0]) >= 2
        assert_same((resumed[0][-2:], *resumed[1:]), expected)


@pytest.mark.parametrize("name", ["with_trainer", "with_accelerate"])
def test_an_example_runs_under_torchrun(name: str) -> None:
    done = run(str(ROOT / "examples" / f"{name}.py"), "2")
    assert done.returncode == 0, done.stderr
    losses = [float(text) for text in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == {"with_trainer": 1, "with_accelerate": 2}[name]  # rank 0 alone prints
    assert all(0 < loss < 10 for loss in losses)


def test_a_module_with_the_whole_batch_on_every_rank_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import autopar, torch\nfrom accelerate import Accelerator\nfrom autopar.integrations import for_ranks\n"
        "pm = autopar.parallelize(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))\n"
        "for_ranks(Accelerator(cpu=True)).prepare(pm)\n"
    )
    done = run(str(script))
    assert done.returncode != 0
    assert "make the module with autopar.parallelize(model, data='per-rank')" in done.stderr
