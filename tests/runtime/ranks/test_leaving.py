"""Process groups that autopar started are destroyed when a script ends."""

from __future__ import annotations

import ctypes
import hashlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launched import Ended, Program, launched
from rank_pool import free_port

from autopar.runtime.ranks.faults.failure import Position
from autopar.runtime.ranks.faults.leaving import all_ended, gloo_lets_go, gloo_threads
from autopar.runtime.ranks.faults.watcher import Watcher

# Handlers run in the reverse order: the first one registered sees what is left in the end.
SCRIPT = """
import atexit, os, signal, sys
import torch.distributed as dist

users, rank = "users" in sys.argv, int(os.environ["RANK"])

def left():
    names = len(dist.distributed_c10d._world.pg_names) if dist.is_initialized() else 0
    print(f"groups {names}", flush=True)

atexit.register(left)
import autopar, torch
from torch import nn

if users:
    dist.init_process_group("gloo")
    own = dist.new_group([0, 1])
torch.manual_seed(0)
model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.ones(4, 4)
plan = autopar.Plan.from_split({"": 0}, devices=[["cpu:0", "cpu:1"]], n_microbatches=2)
pm = autopar.parallelize(model, plan=plan, cache=False)
pm.train_step(x, target=x, loss_fn=nn.functional.mse_loss)
if "killed" in sys.argv:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    import time
    time.sleep(2)
if "wrong" in sys.argv:
    try:
        pm(torch.ones(4, 5))
    except Exception:
        pass
"""


CASES = ("own", "users", "killed", "wrong")


@pytest.fixture(scope="module")
def ranks_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], list[Ended]]]:
    """What became of the two ranks of a case. The ranks of all cases run together."""
    world = {"CUDA_VISIBLE_DEVICES": "", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    programs = []
    for case in CASES:
        port = {"MASTER_PORT": str(free_port())}
        for rank in ("0", "1"):
            programs.append(Program(SCRIPT, (case,), {**world, **port, "RANK": rank, "LOCAL_RANK": rank}))
    with launched(tmp_path_factory.mktemp("leaving"), programs) as running:
        yield lambda case: [running.ended(2 * CASES.index(case) + rank, within=150) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "groups"),
    [
        ("own", 0),
        ("users", 2),  # the default one, and the user's
    ],
)
def test_groups_that_autopar_started_are_destroyed_in_the_end(
    ranks_of: Callable[[str], list[Ended]], case: str, groups: int
) -> None:
    for ended in ranks_of(case):
        assert ended.returncode == 0, ended.output
        assert f"groups {groups}\n" in ended.output


@pytest.mark.slow
def test_a_rank_that_died_stops_no_other_from_ending(ranks_of: Callable[[str], list[Ended]]) -> None:
    first, second = ranks_of("killed")
    assert second.returncode < 0
    assert first.returncode == 0, first.output
    assert "groups 0\n" in first.output


@pytest.mark.slow
def test_groups_stay_after_a_call_that_failed(ranks_of: Callable[[str], list[Ended]]) -> None:
    for ended in ranks_of("wrong"):
        assert ended.returncode == 0, ended.output
        assert "groups 0\n" not in ended.output


def test_ranks_wait_for_each_other_only_as_long_as_all_may_come() -> None:
    store = dist.HashStore()
    first, second = (Watcher(rank, 2, store, -1, 60.0, lambda: True) for rank in range(2))
    first.heartbeats.end(Position())
    assert not all_ended(first, 0.0)
    second.heartbeats.end(Position())
    assert all_ended(first, 0.0)
    second.failed(ValueError("a mistake"))
    assert not first.went_well()


ON_LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are looked up in /proc")


@ON_LINUX
def test_a_script_ends_after_gloo_has_let_go_of_its_tensors() -> None:
    """A thread that frees a tensor while the interpreter ends aborts the process."""
    started, freed = threading.Event(), []

    def works() -> None:
        set_name = 15  # PR_SET_NAME
        ctypes.CDLL(None).prctl(set_name, b"pt_gloo_runloop", 0, 0, 0)
        started.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)  # without the interpreter's lock
        freed.append(True)

    thread = threading.Thread(target=works)
    thread.start()
    started.wait()
    assert not gloo_lets_go(0.01)
    assert gloo_lets_go(60.0)
    assert freed
    thread.join()


@ON_LINUX
def test_torch_names_its_gloo_threads_as_expected(tmp_path: Path) -> None:
    before = len(gloo_threads())
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(1))
        assert len(gloo_threads()) > before
    finally:
        dist.destroy_process_group()
    assert len(gloo_threads()) == before
