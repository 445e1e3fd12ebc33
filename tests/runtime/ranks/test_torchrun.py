"""An ordinary script, unchanged, under torchrun."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torchruns

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
import autopar, torch
from torch import nn
from torch.nn import functional

torch.manual_seed(0)
model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
x = torch.randn(16, 64)
pm = model if "plain" in sys.argv else autopar.parallelize(model, n_microbatches=2, max_replicas=1, cache=False)
for step in range(4):
    optimizer.zero_grad()
    loss = functional.mse_loss(pm(x), x)
    if step == 3 and "mistake" in sys.argv:
        raise ValueError("a mistake in the script")
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.6f}", flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_prints_the_same_losses_on_every_rank_as_in_one_process(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), "plain"])
    runpy.run_path(str(script))
    alone = re.findall(r"loss ([\d.]+)", capsys.readouterr().out)
    assert len(alone) == 4
    fixed = {"PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=150, env={**os.environ, **fixed}, check=False
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"loss ([\d.]+)", done.stdout)  # two ranks may write one line
    assert sorted(map(float, found)) == pytest.approx(sorted(2 * [float(loss) for loss in alone]), abs=2e-6)


def test_a_script_that_fails_ends_on_all_ranks(script: Path) -> None:
    done = torchruns.run(str(script), "mistake")
    assert done.returncode != 0
    assert "a mistake in the script" in done.stderr


def test_a_world_without_an_address_is_refused(script: Path) -> None:
    done = torchruns.run(str(script), ranks=None, env={"WORLD_SIZE": "2", "RANK": "0"})
    assert done.returncode != 0
    assert "WORLD_SIZE is 2, but MASTER_ADDR, MASTER_PORT is not set: start the script with torchrun" in done.stderr
