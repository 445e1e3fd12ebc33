"""What does not fit on ranks ends all of them, with one message, on rank 0, that names what differs."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest
import torchruns

pytestmark = pytest.mark.slow

SCRIPT = """
import os, sys, warnings
rank, what = int(os.environ["RANK"]), sys.argv[1]
import torch
if what == "torch" and rank == 1:
    torch.__version__ = "2.11.0"
import autopar
from autopar import Plan
from torch import nn
from torch.nn import functional

torch.manual_seed(rank if what == "seeds" else 0)
width = 16 if what == "models" and rank else 12
model = nn.Sequential(nn.Linear(12, width), nn.Tanh(), nn.Linear(width, 12), nn.Tanh())
if what == "layers" and rank:
    model.append(nn.Linear(12, 12))
class Fails(nn.Module):
    def forward(self, x):
        if rank:
            raise ValueError("this rank's own mistake")
        return x
if what == "capture":
    model.append(Fails())
torch.manual_seed(rank if what == "batches" else 1)
x = torch.randn(8, 12)
plan = Plan.from_split({"0": 0, "2": 1}, n_microbatches=2)
options = {}
if what == "world":
    plan = Plan.from_split({"0": 0, "1": 1, "2": 2}, n_microbatches=2)
if what == "options":
    options["batch_norm"] = ("per-microbatch", "exact")[rank]
if what == "limits" and rank == 0:
    options["max_replicas"] = 1
if what == "dtype" and rank:
    model = model.double()
if what == "frozen" and rank:
    model[0].weight.requires_grad_(False)
if what == "one plan" and rank:
    plan = None
if what == "wrong option":
    options["schedule"] = "fastest"
if what in ("data", "columns", "per-rank"):
    options["data"] = "per-rank" if rank or what != "data" else "whole"
if what == "columns":
    x = torch.randn(4, 12 + rank)
pm = autopar.parallelize(model, plan=plan, **options)
optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
for step in range(3):
    batch = x[: 4 + rank] if what == "lengths" else x
    if what == "per-rank" and rank:
        batch = x[:5]
    if what == "calls" and rank:
        pm(batch)
    else:
        pm.train_step(batch, target=batch, loss_fn=functional.mse_loss)
    optimizer.step()
print("trained", flush=True)
"""

WANTED = {
    "world": "PlanError: .*3.*2",
    "models": r"InputError: ranks differ in the model's tensors: 0.weight: \(12, 12\) .* rank 0, \(16, 12\) .* rank 1",
    "layers": "InputError: ranks differ in the model: module '4': missing on rank 0, in training mode on rank 1",
    "seeds": "InputError: ranks differ in the model's weights: .* on rank 0, .* on rank 1; build the model from",
    "batches": r"InputError: ranks differ in the content of input 'input' \(\(8, 12\) .*\): rank 1 from rank 0",
    "lengths": r"InputError: ranks differ in input 'input': \(4, 12\) torch.float32 on rank 0, \(5, 12\) .* on rank 1",
    "calls": "InputError: ranks differ in the call: train_step .* on rank 0, a forward .* on rank 1",
    "torch": "InputError: ranks differ in the version of torch: .* on rank 0, 2.11.0 on rank 1; install the same",
    "options": "InputError: ranks differ in the options of parallelize: batch_norm: 'per-microbatch' .* 'exact'",
    "limits": "InputError: ranks differ in the options of parallelize: max_replicas: 1 on rank 0, None on rank 1; give",
    "one plan": "InputError: ranks differ in the plan, .* Rank 0 has a plan, rank 1 has no plan",
    "dtype": "InputError: ranks differ in the model's tensors: 0.weight: .*float32, .* rank 0, .*float64, ",
    "frozen": "InputError: ranks differ in the model's tensors: 0.weight: .*, trained .* 0, .*float32 on rank 1",
    "wrong option": "InputError: schedule must be one of",
    "data": "InputError: ranks differ in the options of parallelize: data: 'whole' on rank 0, 'per-rank' on",
    "columns": r"InputError: ranks differ in input 'input': \(samples, 12\) .* on rank 0, \(samples, 13\) .* on rank 1",
    "capture": "InputError: capturing the model failed on rank 1 alone: .*this rank's own mistake",
}


def run(folder: Path, what: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    return torchruns.run(str(script), what, timeout=120)


@pytest.mark.parametrize("what", WANTED)
def test_every_rank_ends_and_rank_0_says_why(tmp_path: Path, what: str) -> None:
    begin = time.monotonic()
    done = run(tmp_path, what)
    assert done.returncode != 0
    assert "trained" not in done.stdout
    # The rank that cannot capture shows its own error, too, with its causes, as far as it gets before torchrun ends it.
    shown = r"^.*\[rank0\].*" if what == "capture" else "^.*"
    messages = re.findall(shown + r"autopar\.errors\.(\w+Error: .*)$", done.stderr, re.MULTILINE)
    assert len(messages) == 1, done.stderr
    assert any(re.match(WANTED[what], message) for message in messages), done.stderr
    assert time.monotonic() - begin < 100  # no rank waited for another until a timeout


def test_shares_of_other_lengths_are_no_mistake(tmp_path: Path) -> None:
    done = run(tmp_path, "per-rank")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == 2
