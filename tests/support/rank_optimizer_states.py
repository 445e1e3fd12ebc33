"""What ranks save and load of optimizers: groups of parameters, states of optimizers outside of torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from custom_optimizers import CUSTOM, Momentum, Slowing
from rank_misuse import raised_by
from rank_pending_states import batch, layers, made, steps
from torch import nn
from torch.nn import functional

import autopar


def custom_states_go_on(folder: Path, name: str) -> list[list[float]]:
    """Losses after a checkpoint of ranks. The first call reads the states; then load does."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return CUSTOM[name](model.parameters())

    pm, optimizer = made(make)
    steps(pm, optimizer, 3)
    autopar.save(folder, pm, optimizer, step=3)
    found = [steps(pm, optimizer, 3)]
    pm, optimizer = made(make)
    autopar.load(folder, pm, optimizer)
    found.append(steps(pm, optimizer, 3))
    autopar.load(folder, pm, optimizer)
    return [*found, steps(pm, optimizer, 3)]


def refused_states(folder: Path) -> list[tuple[str, str, bool]]:
    """Errors of saves that would lose states."""

    def stepped(make: Callable[[nn.Module], torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer]:
        pm, optimizer = made(make)
        steps(pm, optimizer, 1)
        return pm, optimizer

    errors = []
    pm, optimizer = stepped(lambda m: Slowing(m.parameters()))
    optimizer.state["all"]["n"] += dist.get_rank()  # type: ignore[index]
    errors.append(raised_by(lambda: autopar.save(folder, pm, optimizer, step=1)))
    optimizer.state["all"]["n"] = torch.zeros_like(next(iter(pm.parameters())))  # type: ignore[index]
    errors.append(raised_by(lambda: autopar.save(folder, pm, optimizer, step=1)))
    pm, optimizer = stepped(lambda m: Momentum(m.parameters(), "sums", deque))
    errors.append(raised_by(lambda: autopar.save(folder, pm, optimizer, step=1)))
    return errors


def halves(model: nn.Module, order: int) -> torch.optim.Optimizer:
    """Two groups with rates of their own: of the first two layers, and of the last two."""
    parameters = list(layers().parameters()), list(model.parameters())
    if len(parameters[0]) != len(parameters[1]):  # placed: this rank's half
        raise AssertionError("make the optimizer before the first call")
    groups = [{"params": parameters[1][:4], "lr": 1e-3}, {"params": parameters[1][4:], "lr": 1e-2}]
    return torch.optim.AdamW(groups[::order])


def groups_in_another_order(folder: Path, placed_first: bool) -> tuple[list[float], list[float], list[float]]:
    """Losses after a checkpoint, wanted and found, and the rates of the two groups that were found."""
    pm, optimizer = made(lambda m: halves(m, 1))
    steps(pm, optimizer, 2)
    autopar.save(folder, pm, optimizer, step=2)
    wanted = steps(pm, optimizer, 3)
    pm, optimizer = made(lambda m: halves(m, -1))
    if placed_first:
        steps(pm, optimizer, 1)
    autopar.load(folder, pm, optimizer)
    return wanted, steps(pm, optimizer, 3), [group["lr"] for group in optimizer.param_groups]


def names_in_groups(folder: Path, placed_first: bool) -> tuple[list[str], list[str]]:
    """Names that the optimizer's group has of its parameters after a checkpoint, and those of the model."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.named_parameters())

    pm, optimizer = made(make)
    steps(pm, optimizer, 1)
    autopar.save(folder, pm, optimizer, step=1)
    pm, optimizer = made(make)
    if placed_first:
        steps(pm, optimizer, 1)
    autopar.load(folder, pm, optimizer)
    steps(pm, optimizer, 1)
    names = {id(p): name for name, p in pm.named_parameters()}
    (group,) = optimizer.param_groups
    return group["param_names"], [names[id(p)] for p in group["params"]]


def second_optimizer(folder: Path) -> tuple[list[tuple[str, str, bool]], list[list[float]]]:
    """Errors of saves with parts of tensors among the extra values; losses of two optimizers that have a directory
    each, as they go on and after loading."""

    def both(model: Any) -> list[torch.optim.Optimizer]:
        matrices, others = ([p for p in model.parameters() if (p.dim() > 1) == is_one] for is_one in (True, False))
        return [torch.optim.AdamW(matrices, lr=1e-2), torch.optim.SGD(others, lr=0.1, momentum=0.9)]

    def trained(model: Any, optimizers: list[torch.optim.Optimizer], n: int) -> list[float]:
        found = []
        for _ in range(n):
            found.append(model.train_step(batch(), target=batch(), loss_fn=functional.mse_loss).item())
            for one in optimizers:
                one.step()
                one.zero_grad()
        return found

    made_both: list[Any] = []
    pm, first = made(lambda m: made_both.append(both(m)) or made_both[-1][0])
    pair = made_both[-1]
    trained(pm, pair, 2)
    extras: list[dict[str, Any]] = [{"a": 1, "other": pair[1]}, {"mean": [p.detach().clone() for p in pm.parameters()]}]
    errors = [raised_by(lambda extra=extra: autopar.save(folder, pm, first, step=2, extra=extra)) for extra in extras]
    for name, optimizer in zip("ab", pair, strict=True):
        autopar.save(folder / name, pm, optimizer, step=2)
    losses = [trained(pm, pair, 3)]
    pm, _ = made(lambda m: made_both.append(both(m)) or made_both[-1][0])
    pair = made_both[-1]
    for name, optimizer in zip("ab", pair, strict=True):
        autopar.load(folder / name, pm, optimizer)
    return errors, [*losses, trained(pm, pair, 3)]
