"""Several hosts, as network namespaces of this machine joined by links of limited bandwidth (`benchmarks.hosts`)."""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path

import pytest
import torchruns

from benchmarks.hosts import hosts, losses, why_not
from benchmarks.network import FAST, SLOW, planned

REASON = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=REASON)]
exhaustive = pytest.mark.exhaustive
FORKING = [torchruns.__file__]  # of each host, whose ranks torchrun forks

SCRIPT = """
import sys
import autopar, torch
from autopar import Plan
from torch import nn
from torch.nn import functional

n, kinds = int(sys.argv[1]), sys.argv[2:]
torch.set_num_threads(1)
names = [f"cpu:{i}" for i in range(n)]
for kind in kinds:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(24, 64)
    if kind in ("pipeline", "endless"):
        plan = Plan.from_split({str(i): i * n // 12 for i in range(12)}, n_microbatches=4)
    else:
        plan = Plan.from_split({"": 0}, devices=[names], n_microbatches=n) if kind == "replicas" else None
    options = {"plan": plan} if plan else {"n_microbatches": 3, "max_replicas": 1, "max_shards": 2, "cache": False}
    pm = model if kind == "plain" else autopar.parallelize(model, **options)
    step = 0
    while step < 3 or kind == "endless":
        step += 1
        optimizer.zero_grad()
        loss = functional.mse_loss(pm(x), x)
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.6f}", flush=True)
        if kind == "endless":
            open(__file__ + ".steps", "a").write(".")
    if kind == "searched":
        print(*pm.plan.notes, sep="\\n")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def alone(script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[float]:
    """The losses of the plain model in this process."""
    monkeypatch.setattr(sys, "argv", [str(script), "1", "plain"])
    runpy.run_path(str(script))
    return losses([capsys.readouterr().out])[0]


@exhaustive
def test_hosts_with_different_numbers_of_ranks_train_as_one_process_does(script: Path, alone: list[float]) -> None:
    counts = (2, 1)
    with hosts(2, FAST) as network:
        printed = network.torchrun(script, "3", "replicas", "searched", per_host=counts, start=FORKING)
    for found, count in zip(losses(printed), counts, strict=True):
        assert sorted(found) == pytest.approx(sorted(2 * count * alone), abs=2e-6)
    assert "no stage has a mesh" not in printed[0]  # meshes of the two ranks of the first host are searched


@pytest.mark.parametrize(("n", "per_host"), [(2, 2), pytest.param(3, 1, marks=exhaustive)])
def test_hosts_train_as_one_process_does(script: Path, alone: list[float], n: int, per_host: int) -> None:
    with hosts(n, FAST) as network:
        printed = network.torchrun(script, str(n * per_host), "pipeline", "replicas", per_host=per_host, start=FORKING)
    for found in losses(printed):
        assert sorted(found) == pytest.approx(sorted(2 * per_host * alone), abs=2e-6)


def test_a_host_that_cannot_be_reached_any_more_ends_the_ranks_of_both(script: Path) -> None:
    steps = Path(f"{script}.steps")

    def unplug() -> None:
        end = time.monotonic() + 120
        while (not steps.exists() or len(steps.read_text()) < 10) and time.monotonic() < end:
            time.sleep(0.1)
        network.unplug(1)

    limit = {"AUTOPAR_RANK_TIMEOUT": "8"}
    with hosts(2, FAST) as network, pytest.raises(RuntimeError) as error:
        network.torchrun(script, "2", "endless", env=limit, meanwhile=unplug, start=FORKING)
    assert steps.exists()
    text = str(error.value)
    assert "rank 1 failed, last heard of" in text
    assert "no sign of life for 8 s: it is stopped, or its machine cannot be reached" in text
    assert "has not answered for 8 s: it is stopped, or its machine cannot be reached; rank 1 ends in" in text


@exhaustive  # what it measures must not be disturbed
def test_a_network_ten_times_slower_changes_the_plan(tmp_path: Path) -> None:
    """Replicas, which add up gradients, where the network is fast; a pipeline cut at the waist where it is slow. The
    second plan is made although the cache knows the fast network. `python -m benchmarks run network` measures both."""
    with hosts(2, FAST) as network:
        for attempt in range(3):  # where other programs use a core meanwhile, one rank is measured to be the fastest
            folder = tmp_path / str(attempt)
            folder.mkdir()
            fast, slow = planned(network, FAST, folder), planned(network, SLOW, folder)
            if len(fast.used_devices) == len(slow.used_devices) == 2:
                break
    assert fast.predicted_step_time is not None
    assert slow.predicted_step_time is not None
    assert [stage.replicas for stage in fast.stages] == [2]
    assert [stage.replicas for stage in slow.stages] == [1, 1]
    assert fast.predicted_step_time < slow.predicted_step_time < fast.single_device_time
