"""Whether the process of another rank lives: seen at once where it ran on this machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from autopar.runtime.ranks.faults import heartbeats
from autopar.runtime.ranks.faults.failure import Failure, Position
from autopar.runtime.ranks.faults.heartbeats import GONE, KILLED, Heartbeats
from autopar.runtime.ranks.faults.processes import has_gone, own_process
from autopar.runtime.ranks.faults.watcher import Watcher

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere nothing says so")

_SAYS_WHICH = (
    "from autopar.runtime.ranks.faults.processes import own_process; print(own_process(), flush=True); input()"
)


@pytest.fixture
def other() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Another process, and how it calls itself."""
    command = [sys.executable, "-c", _SAYS_WHICH]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.kill()


def wait_until_gone(process: subprocess.Popen[str], name: str) -> None:
    """Killed, and not yet waited for by its parent."""
    process.kill()
    while not has_gone(name):
        pass


def test_a_killed_process_has_gone_before_its_parent_knows(other: tuple[subprocess.Popen[str], str]) -> None:
    process, name = other
    assert name != own_process()
    assert not has_gone(name)
    assert not has_gone(own_process())
    wait_until_gone(process, name)
    process.wait()
    assert has_gone(name)


def test_nothing_is_claimed_of_another_machine_or_without_a_name(other: tuple[subprocess.Popen[str], str]) -> None:
    process, name = other
    wait_until_gone(process, name)
    boot, space, *rest = name.split()
    assert not has_gone(" ".join(["another", space, *rest]))
    assert not has_gone(" ".join([boot, "pid:[1]", *rest]))
    assert not has_gone("")


def beating(rank: int, store: dist.Store, process: str, monkeypatch: pytest.MonkeyPatch) -> Heartbeats:
    """The heartbeats of a rank of three in that process."""
    with monkeypatch.context() as patch:
        patch.setattr(heartbeats, "own_process", lambda: process)
        return Heartbeats(rank, 3, store, 120.0)


def test_of_several_ranks_the_one_whose_process_ended_is_named_at_once(
    other: tuple[subprocess.Popen[str], str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    process, name = other
    store = dist.HashStore()
    first = Watcher(0, 3, store, -1, 5.0, lambda: True)
    beating(1, store, name, monkeypatch).beat(Position())
    beating(2, store, own_process(), monkeypatch).beat(Position())
    wait_until_gone(process, name)
    with first.call("train_step"):
        error = first.lost(RuntimeError("Connection closed by peer"))
    assert f"rank 1 failed: {KILLED}" in str(error)
    assert "looks for the rank" not in capfd.readouterr().err


def test_a_call_ends_that_waits_for_a_rank_whose_process_is_gone_while_its_connections_are_open(
    other: tuple[subprocess.Popen[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that the rank had forked holds them open."""
    process, name = other
    store = dist.HashStore()
    beating(2, store, name, monkeypatch).beat(Position(3, "train_step"))
    wait_until_gone(process, name)
    first = beating(0, store, own_process(), monkeypatch)
    for inside in (False, True):
        first.beat(Position(3, "train_step" if inside else ""))
        for _ in range(int(GONE) + 2):
            first.listen(1.0)
        assert (first.known() is not None) == inside
    assert first.known() == Failure(2, KILLED, Position(3, "train_step"), 0, is_last_beat=True)
