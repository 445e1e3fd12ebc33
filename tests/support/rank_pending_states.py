"""What ranks do between loading a checkpoint and the first call, which reads the rest of it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rank_misuse import raised_by
from torch import nn
from torch.nn import functional

import autopar
from autopar.runtime.checkpoints import save as saving

Optimizers = Callable[[Any], torch.optim.Optimizer]


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 8 * 12, dtype=torch.float64).view(8, 12)


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(12, 12), nn.Tanh()))).double()


def made(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
) -> tuple[Any, torch.optim.Optimizer]:
    """A pipeline over two ranks before its first call; in one process, the model itself."""
    model = layers()
    if not dist.is_initialized():
        return model, optimizer(model)
    plan = autopar.Plan.by_hand(
        model, None, pipeline=2, micro_batch=4, example_args=(batch(),), target=batch(), loss_fn=functional.mse_loss
    )
    pm = autopar.parallelize(model, plan=plan)
    return pm, optimizer(pm)


def steps(model: Any, optimizer: torch.optim.Optimizer, n: int) -> list[float]:
    """The losses of `n` steps."""
    x, found = batch(), []
    for _ in range(n):
        optimizer.zero_grad()
        if isinstance(model, autopar.PipelinedModule):
            loss = model.train_step(x, target=x, loss_fn=functional.mse_loss)
        else:
            loss = functional.mse_loss(model(x), x)
            loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def saved_before_the_first_call(folder: Path) -> dict[str, Any]:
    """Saves between load and the first call, to another directory and to the same, at once and in the background."""
    pm, optimizer = made()
    steps(pm, optimizer, 2)
    autopar.save(folder / "a", pm, optimizer, step=2)
    wanted = steps(pm, optimizer, 3)
    pm, optimizer = made()
    autopar.load(folder / "a", pm, optimizer)
    refused = [
        raised_by(lambda to=to, late=late: autopar.save(folder / to, pm, optimizer, step=2, asynchronous=late))
        for to in ("a", "b")
        for late in (False, True)
    ]
    autopar.save(folder / "model", pm, step=2)  # has all that it saves
    with torch.no_grad():
        pm(batch())
    autopar.save(folder / "a", pm, optimizer, step=2)
    found = [steps(pm, optimizer, 3)]
    pm, optimizer = made()
    for _ in range(2):  # the second in the place of the first
        autopar.load(folder / "a", pm, optimizer)
    found.append(steps(pm, optimizer, 3))
    return {"wanted": wanted, "found": found, "refused": refused, "left": sorted(p.name for p in folder.iterdir())}


def replaced_before_the_first_call(folder: Path, how: str) -> dict[str, Any]:
    """Another checkpoint takes the place of the one that was loaded; or it is deleted."""
    pm, optimizer = made()
    steps(pm, optimizer, 2)
    autopar.save(folder, pm, optimizer, step=2)
    late, its = made()
    autopar.load(folder, late, its)
    steps(pm, optimizer, 1)
    autopar.save(folder, pm, optimizer, step=2)
    if how == "deleted" and not dist.get_rank():
        shutil.rmtree(folder / "step-00000002")
    dist.barrier()
    refused = [raised_by(lambda: steps(late, its, 1)), raised_by(lambda: autopar.save(folder, late, its, step=3))]
    if how == "deleted":
        autopar.save(folder, pm, optimizer, step=2)
    autopar.load(folder, late, its)
    return {"refused": refused, "wanted": steps(pm, optimizer, 3), "found": steps(late, its, 3)}


def saved_in_the_background_before_the_first_call(folder: Path, built_without_values: bool) -> list[list[float]]:
    """The first call of a model that was loaded, while another is being saved: losses that are wanted, and found."""
    pm, optimizer = made()
    steps(pm, optimizer, 2)
    autopar.save(folder / "a", pm, optimizer, step=2)
    if built_without_values:
        with torch.device("meta"):
            model = layers()
        plan = autopar.Plan.by_hand(
            layers(),
            None,
            pipeline=2,
            micro_batch=4,
            example_args=(batch(),),
            target=batch(),
            loss_fn=functional.mse_loss,
        )
        late = autopar.parallelize(model, plan=plan, init_fn=lambda name, tensor: tensor.zero_())
        its = torch.optim.AdamW(late.parameters(), lr=1e-2)
    else:
        late, its = made()
    autopar.load(folder / "a", late, its)
    goes_on, write = threading.Event(), saving._Writing.write

    def slow(self: Any) -> None:
        goes_on.wait()
        write(self)

    with mock.patch.object(saving._Writing, "write", slow):
        started = autopar.save(folder / "b", pm, optimizer, step=2, asynchronous=True)
        timer = threading.Timer(0.5, goes_on.set)
        timer.start()
        found = steps(late, its, 1)
        assert started.done
    return [steps(pm, optimizer, 3), found + steps(late, its, 2)]
