"""What goes wrong on one rank of a job: each function trains on all ranks, and does one wrong thing on one of them."""

from __future__ import annotations

import asyncio
import atexit
import copy
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_cases import SPLITS, mlp
from torch.nn import functional

import autopar
from autopar import Plan
from autopar.capture import export
from autopar.runtime.ranks.faults import heartbeats
from autopar.runtime.ranks.parameters.own import RankParameters
from autopar.runtime.ranks.world import joined

N_STEPS = 6
TIMEOUT = "8"  # s without a sign of life: captures on a busy machine can hold up a beat for some


def fault(what: str) -> None:
    """In this process, now."""
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)  # Python raises between two of its instructions
    if what == "error":
        raise ValueError("a mistake in the model")
    if what == "memory":
        raise MemoryError("no memory left")
    if what == "allocate":
        torch.empty(1 << 60)


def train(what: str, where: str, rank: int, step: int, schedule: str, folder: Path) -> None:
    """Train `N_STEPS` steps; `what` happens on `rank` in `step`. `where`: "forward" or "backward" of its stage, "loss",
    or "between" two calls. stderr of every rank goes to a file of `folder`."""
    n, own = dist.get_world_size(), dist.get_rank()
    os.dup2(os.open(folder / f"rank{own}", os.O_WRONLY | os.O_CREAT), 2)
    os.environ["AUTOPAR_RANK_TIMEOUT"] = TIMEOUT
    torch.manual_seed(0)
    model, x, now = mlp(), torch.randn(8, 12), [-1]
    plan = Plan.from_split(SPLITS["mlp"][n], n_microbatches=4, schedule=schedule)

    def happen(*_: Any) -> None:
        if now[0] == step and own == rank:
            fault(what)

    first = model[12 * rank // n]
    if where == "forward":
        first.register_forward_hook(happen)
    if where == "backward":
        first.register_forward_hook(lambda module, args, output: output.register_hook(happen) and None)
    pm = autopar.parallelize(model, plan=plan, cache=False)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if where == "loss" and not torch.compiler.is_exporting():  # the loss is captured on all ranks
            happen()
        return functional.mse_loss(output, target)

    for now[0] in range(N_STEPS):
        if where == "between":
            happen()
        pm.train_step(x, target=x, loss_fn=loss_fn)


class Faulty:
    """Something that is saved and loaded with the model, and does something wrong once that is switched on."""

    what = ""

    def state_dict(self) -> dict[str, int]:
        fault(self.what)
        return {"value": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        fault(self.what)


def through_a_day(what: str, where: str, rank: int, folder: Path) -> None:
    """`_through_a_day` as a script, which an error ends with its process."""
    os.dup2(os.open(folder / f"rank{dist.get_rank()}", os.O_WRONLY | os.O_CREAT), 2)
    os.environ["AUTOPAR_RANK_TIMEOUT"] = TIMEOUT
    try:
        _through_a_day(what, where, rank, folder)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        atexit._run_exitfuncs()
        os._exit(1)


def _through_a_day(what: str, where: str, rank: int, folder: Path) -> None:
    """Ranks that cut optimizer states capture, train, clip, evaluate, save and load; `what` happens on `rank` in one
    of these: "capture", "place", "first step", "evaluate", "clip", "step", "save", "load", "end"."""
    own = dist.get_rank()
    torch.manual_seed(0)
    model, x, faulty, now = mlp(), torch.randn(8, 12), Faulty(), [""]
    place = RankParameters.place

    def happen(*_: Any) -> None:
        if own == rank and now[0] == where:
            fault(what)

    def placed(*arguments: Any) -> None:
        now[0] = "place"
        happen()
        place(*arguments)
        now[0] = "first step"

    def exported(*arguments: Any) -> Any:
        if now[0] == "capture":
            happen()
        return capturing(*arguments)

    capturing = export._export
    model[0].register_forward_hook(happen)
    plan = Plan.by_hand(copy.deepcopy(model), ["cpu"] * 2, example_args=(x,), data=2, zero=1, micro_batch=2)
    now[0] = "capture"
    export._export = exported
    RankParameters.place = placed  # type: ignore[method-assign]
    pm = autopar.parallelize(model, plan=plan, cache=False)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_pre_hook(happen)
    for _ in range(3):
        pm.train_step(x, target=x, loss_fn=functional.mse_loss)
        now[0] = "clip"
        happen()
        autopar.clip_grad_norm_(pm, 1.0)
        now[0] = "step"
        optimizer.step()
        now[0] = "later"
    now[0] = "evaluate"
    pm.eval()
    with torch.no_grad():
        pm(x)
    for now[0], call in (("save", partial(autopar.save, step=3)), ("load", autopar.load)):
        faulty.what = what if own == rank and now[0] == where else ""
        call(folder / "runs", pm, optimizer, extra={"faulty": faulty})
    pm.train()
    now[0] = "end"
    pm.train_step(x, target=x, loss_fn=functional.mse_loss)


def interrupted_while_waiting(folder: Path) -> None:
    """Ctrl-C on rank 0 while it waits for rank 1, which sleeps. An event loop with signals has ended before, which
    leaves Python without anyone to tell of signals."""
    own = dist.get_rank()
    os.dup2(os.open(folder / f"rank{own}", os.O_WRONLY | os.O_CREAT), 2)
    torch.manual_seed(0)
    model, x = mlp(), torch.randn(8, 12)
    pm = autopar.parallelize(model, plan=Plan.from_split(SPLITS["mlp"][2], n_microbatches=4), cache=False)
    pm.train_step(x, target=x, loss_fn=functional.mse_loss)
    if own == 1:
        time.sleep(600)
    loop = asyncio.new_event_loop()
    loop.add_signal_handler(signal.SIGUSR1, print)
    loop.close()
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    pm.train_step(x, target=x, loss_fn=functional.mse_loss)


def ended_before(call: str) -> None:
    """Rank 1's script ends before the others call `call`."""
    torch.manual_seed(0)
    model, x = mlp(), torch.randn(8, 12)
    pm = autopar.parallelize(model, plan=Plan.from_split(SPLITS["mlp"][2], n_microbatches=4), cache=False)
    pm.train_step(x, target=x, loss_fn=functional.mse_loss)
    if dist.get_rank() == 1:
        atexit._run_exitfuncs()
        os._exit(0)
    if call == "by_hand":
        Plan.by_hand(mlp(), None, example_args=(x,), data=2)
    else:
        autopar.parallelize(mlp())


def waits_apart(folder: Path) -> None:
    """Ranks that wait for each other in different calls."""
    own = dist.get_rank()
    os.dup2(os.open(folder / f"rank{own}", os.O_WRONLY | os.O_CREAT), 2)
    heartbeats.DIFFERENT = 2.0
    world = joined()
    assert world is not None
    with world.watcher.call("both"):
        world.gathered(0)
    with world.watcher.call("other" if own else "one"):
        dist.recv(torch.zeros(1), 1 - own)


def caught_on_all_ranks() -> list[float]:
    """Errors that every rank raises and catches end nothing: losses before and after them."""
    torch.manual_seed(0)
    model, x = mlp(), torch.randn(8, 12)
    pm = autopar.parallelize(model, plan=Plan.from_split(SPLITS["mlp"][2], n_microbatches=4), cache=False)
    losses = []
    for step in range(3):
        losses.append(pm.train_step(x, target=x, loss_fn=functional.mse_loss).item())
        try:
            pm.train_step(x[:, :5] if step else "text", target=x, loss_fn=functional.mse_loss)
        except Exception as error:
            print(type(error), file=sys.stderr)
        else:
            raise AssertionError("no error")
    return losses


def caught_on_one_rank(folder: Path) -> None:
    """Rank 1 lacks memory to place its parameters, catches that, and calls again; rank 0 waits in the call before."""
    own = dist.get_rank()
    os.dup2(os.open(folder / f"rank{own}", os.O_WRONLY | os.O_CREAT), 2)
    os.environ["AUTOPAR_RANK_TIMEOUT"] = TIMEOUT
    torch.manual_seed(0)
    model, x = mlp(), torch.randn(8, 12)
    pm = autopar.parallelize(model, plan=Plan.from_split(SPLITS["mlp"][2], n_microbatches=4), cache=False)
    place = RankParameters.place

    def without_memory(*_: Any) -> None:
        raise MemoryError("no memory left")

    if own == 1:
        RankParameters.place = without_memory  # type: ignore[method-assign]
    try:
        pm(x)
    except MemoryError:
        RankParameters.place = place  # type: ignore[method-assign]
    pm(x)
