"""Trainings of models whose later calls read parameters that the first call did not, beside the plain model."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path

import torch
from collective_log import CollectiveLog, logged
from rank_cases import MODELS, SPLITS, Job
from rank_training import gradient_error, parameter_error, ready
from torch import nn
from torch.nn import functional

import autopar
from autopar import AutoparError


class Tasks(nn.Module):
    """A body and one head per task. A call runs one head, and in training also an auxiliary head."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)
        self.heads = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.aux = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor, task: int = 0) -> torch.Tensor:
        hidden = torch.tanh(self.b(torch.tanh(self.a(x))))
        out = self.heads[task](hidden)
        return out + 0.1 * self.aux(hidden) if self.training else out


MODELS["tasks"] = Tasks, lambda: torch.randn(8, 12)
SPLITS["tasks"] = {2: {"a": 0, "b": 1}}


def alternating(job: Job, folder: Path, first_eval: bool) -> list[float]:
    """Errors of losses, clipped gradients and parameters over steps of different tasks; then of a checkpoint."""
    original, pm, x = ready(job)
    if first_eval:
        with torch.no_grad():
            assert torch.allclose(pm.eval()(x), original.eval()(x))
        pm.train(), original.train()
    ours, theirs = (torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (pm, original))
    errors = []
    for task in (0, 1, 2, 1, 0):
        for model in (pm, original):
            loss = functional.mse_loss(model(x, task=task), x.cos())
            loss.backward()
            if model is original:
                autopar.clip_grad_norm_(pm, 0.05)
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        errors.append(gradient_error(pm, original))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        errors.append(parameter_error(pm, original))
    autopar.save(folder, pm, ours, step=1)
    _, other, _ = ready(job)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    other(x)
    again = torch.optim.AdamW(other.parameters(), lr=1e-2)
    autopar.load(folder, other, again)
    for model, optimizer in ((other, again), (original, theirs)):
        functional.mse_loss(model(x, task=2), x.cos()).backward()
        optimizer.step()
    return [*errors, parameter_error(other, original)]


def accumulated(job: Job) -> list[float]:
    """Errors of gradients that accumulate() adds up over tasks whose heads some calls are the first to read."""
    original, pm, x = ready(job)
    pm(x)
    errors = []
    for tasks in ((0, 1), (2, 0)):
        with pm.accumulate():
            functional.mse_loss(pm(x, task=tasks[0]), x.cos()).backward()
        functional.mse_loss(pm(x, task=tasks[1]), x.cos()).backward()
        for task in tasks:
            functional.mse_loss(original(x, task=task), x.cos()).backward()
        errors.append(gradient_error(pm, original))
        pm.zero_grad(), original.zero_grad()
    return errors


def joined_inside(job: Job) -> float:
    """The error of gradients of one backward inside accumulate() through two calls, the second the first to read a
    head."""
    original, pm, x = ready(job)
    for model, inside in ((pm, pm.accumulate()), (original, contextlib.nullcontext())):
        with inside:
            first, second = (functional.mse_loss(model(x, task=task), x.cos()) for task in (0, 1))
            (first + second).backward()
        functional.mse_loss(model(x, task=2), x.cos()).backward()
    return gradient_error(pm, original)


def exchanged(job: Job) -> CollectiveLog:
    """What a rank began in steps of other heads than the first call's."""
    with logged() as log:
        _, pm, x = ready(job)
        for task in (0, 1, 0, 2):
            pm.train_step(x, task=task, target=x, loss_fn=functional.mse_loss)
            pm.zero_grad()
    return log


def sharing_a_norm(job: Job) -> float:
    """The error of a second model that shares a module without parameters with a placed one."""
    x = ready(job)[2]
    norm = nn.LayerNorm(12, elementwise_affine=False)
    pairs = [nn.Sequential(nn.Linear(12, 12), norm, nn.Linear(12, 12)).double() for _ in range(2)]
    found = []
    for model in pairs:
        plain = copy.deepcopy(model)
        plan = autopar.Plan.from_split({"0": 0, "1": 1, "2": 1}, n_microbatches=2)
        found.append((autopar.parallelize(model, plan=plan)(x) - plain(x)).abs().max().item())
    return max(found)


def copied(job: Job) -> str:
    """The error of a copy of a placed model."""
    _, pm, x = ready(job)
    pm(x)
    try:
        autopar.parallelize(copy.deepcopy(pm.unwrap()))
    except AutoparError as error:
        return str(error)
    return ""


def refused(job: Job) -> str:
    """The error of a training call after an evaluation, which the ranks go on after."""
    original, pm, x = ready(job)
    original.eval(), pm.eval()
    with torch.no_grad():
        pm(x)
        try:
            pm.train()(x)
        except AutoparError as error:
            assert torch.allclose(pm.eval()(x), original(x))
            return str(error)
    return ""


def out_of_order(job: Job) -> str:
    """The error of a backward of a call that began before gradients of other parameters waited."""
    _, pm, x = ready(job)
    first = pm(x)
    with pm.accumulate():
        pm(x, task=1).sum().backward()
    try:
        first.sum().backward()
    except AutoparError as error:
        return str(error)
    return ""


def placed_again(job: Job) -> list[str]:
    """The errors of another plan for a placed model, of a change of its plan, and of a model with its module."""
    _, pm, x = ready(job)
    plan = autopar.Plan.by_hand(pm.unwrap(), None, example_args=(x,), data=2)
    pm(x)
    model = pm.unwrap()
    attempts = (
        lambda: autopar.parallelize(model),
        lambda: plan.with_(zero=1),
        lambda: autopar.parallelize(nn.Sequential(model.a, nn.Linear(12, 2).double()))(x),
    )
    errors = []
    for attempt in attempts:
        try:
            attempt()
        except AutoparError as error:
            errors.append(str(error))
    return errors
