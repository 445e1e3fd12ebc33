"""torchrun starts a failed job again, and it goes on as if nothing had happened."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torchruns
from rank_pool import RankPool
from restarted_training import undisturbed

pytestmark = pytest.mark.slow

SUPPORT = Path(__file__).parents[2] / "support"
SCRIPT = SUPPORT / "restarted_training.py"
PATIENCE = 1200.0  # s, on a busy machine


def started(
    log: Path, *arguments: str, nodes: str = "1", ranks: int = 2, endpoint: str = "", host: bool = True
) -> subprocess.Popen[bytes]:
    """torchrun in a session of its own, forking its ranks. Without an endpoint: by itself. `host`: its process has
    torchrun's store."""
    alone = ["--standalone"]
    elastic = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "job", "--nnodes", nodes]
    elastic += ["--rdzv-conf", f"last_call_timeout=15,is_host={int(host)}"]
    options = [*(elastic if endpoint else alone), "--nproc-per-node", str(ranks), "--max-restarts", "12"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, torchruns.__file__, *options, str(SCRIPT), *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def ended(process: subprocess.Popen[bytes], log: Path) -> None:
    try:
        assert process.wait(PATIENCE) == 0, log.read_text(errors="replace")[-6000:]
    finally:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """torchrun and its ranks, which are in sessions of their own."""
    if process.poll() is None:
        found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False)
        for pid in (process.pid, *map(int, found.stdout.split())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def losses(folder: Path) -> list[tuple[int, int, int, float]]:
    """(attempt, ranks, step, loss), in the order in which they were computed."""
    path = folder / "losses"
    rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(int(a), int(n), int(step), float.fromhex(loss)) for a, n, step, loss in rows]


@pytest.mark.timeout(2700)
@pytest.mark.parametrize("n_kills", [5, pytest.param(10, marks=pytest.mark.exhaustive)])
def test_losses_after_kills_are_those_of_an_undisturbed_run(ranks: RankPool, tmp_path: Path, n_kills: int) -> None:
    """At random points of each kind: forwards, backwards, between steps, while saving, after saving began."""
    steps = 2 * n_kills + 6
    (tmp_path / "never").mkdir()
    ranks.run(undisturbed, 2, tmp_path / "never", "never", steps)
    (tmp_path / "anywhere").mkdir()
    log = tmp_path / "anywhere.log"
    ended(started(log, str(tmp_path / "anywhere"), "anywhere", str(steps), str(n_kills)), log)
    wanted = {step: loss for _, _, step, loss in losses(tmp_path / "never")}
    found = losses(tmp_path / "anywhere")
    assert {attempt for attempt, *_ in found} == set(range(n_kills + 1))
    assert {step for _, _, step, _ in found} == set(wanted) == set(range(steps))
    assert [(step, loss) for _, _, step, loss in found if loss != wanted[step]] == []


@pytest.mark.timeout(2700)
def test_a_job_that_loses_a_machine_plans_again_for_the_others(ranks: RankPool, tmp_path: Path) -> None:
    """Two torchruns of two ranks each. The second one is killed with its ranks."""
    endpoint = f"127.0.0.1:{20000 + os.getpid() % 20000}"
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    arguments = (str(tmp_path), "waiting", "16", "0")
    first = started(logs[0], *arguments, nodes="1:2", ranks=2, endpoint=endpoint)
    second = started(logs[1], *arguments, nodes="1:2", ranks=2, endpoint=endpoint, host=False)
    try:
        end = time.monotonic() + PATIENCE
        while not any(n == 4 and step >= 5 for _, n, step, _ in losses(tmp_path)):
            assert time.monotonic() < end, [log.read_text(errors="replace")[-3000:] for log in logs]
            assert first.poll() is None, logs[0].read_text(errors="replace")[-6000:]
            time.sleep(0.2)
        kill(second)
        ended(first, logs[0])
    finally:
        kill(first)
        kill(second)
    found = losses(tmp_path)
    assert {n for _, n, _, _ in found} == {2, 4}
    assert {step for _, _, step, _ in found} == set(range(16))
    (tmp_path / "alone").mkdir()
    ranks.run(undisturbed, 2, tmp_path / "alone", "never without dropout", 16)
    wanted = {step: loss for _, _, step, loss in losses(tmp_path / "alone")}
    for _, _, step, loss in found:
        assert loss == pytest.approx(wanted[step], rel=1e-4)
