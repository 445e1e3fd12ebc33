"""Compiled stages on ranks, beside the same plan in one process as it was captured."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cuda_graphs import stand_in
from rank_behaviour import message_of
from rank_cases import MODELS, Job, loss_of, plan_of, relative
from rank_training import gradient_error
from torch import nn
from torch.nn import functional

import autopar
from autopar import Plan


def compiled(job: Job, backend: bool | str, placed: Callable[[Plan], Plan] = lambda plan: plan) -> dict[str, Any]:
    """Errors of three training steps, an accumulated one and an evaluation, and how the stages of this rank run.

    `placed`: gives a plan for CPU workers the devices of this job."""
    n = dist.get_world_size()
    torch.manual_seed(3)
    build, inputs = MODELS[job.model]
    model, x = build().double(), inputs()
    x = x.double() if x.is_floating_point() else x
    original = copy.deepcopy(model)
    plan = plan_of(job, copy.deepcopy(model), x, n)
    assert plan is not None
    threads = autopar.parallelize(original, ["cpu"] * n, plan=plan)
    pm = autopar.parallelize(model, plan=placed(plan), compile=backend, **job.options)
    errors = []
    for seed in range(3):
        losses = []
        for one in (pm, threads):
            one.zero_grad()
            torch.manual_seed(seed)
            losses.append(one.train_step(x, target=x, loss_fn=lambda output, y: loss_of(job.model, output, y)))
        errors += [relative(losses[0].cpu(), losses[1], losses[1].abs().item()), gradient_error(pm, original)]
    losses = []
    for one in (pm, threads):
        one.zero_grad()
        torch.manual_seed(3)
        with one.accumulate():
            one.train_step(x[:8], target=x[:8], loss_fn=lambda output, y: loss_of(job.model, output, y))
        losses.append(one.train_step(x, target=x, loss_fn=lambda output, y: loss_of(job.model, output, y)))
    errors += [relative(losses[0].cpu(), losses[1], losses[1].abs().item()), gradient_error(pm, original)]
    text = pm.code_text
    executable = pm._signatures.newest().executable
    own = {type(one.compute).__name__ for one in executable.replicas if one.slot == executable.slot}
    with torch.no_grad():
        pm.eval(), threads.eval()
        errors += [relative(logits(pm(x)).cpu(), logits(threads(x)), 1.0)]
    return {"errors": errors, "text": text, "own": own}


def recorded(job: Job) -> dict[str, Any]:
    """`compiled`, with a stand-in for CUDA graphs; and how often recordings of this rank were replayed."""
    with pytest.MonkeyPatch.context() as patch:
        graphs = stand_in(patch)
        return {**compiled(job, "graphs"), "replays": sum(graph.replays for graph in graphs)}


def logits(output: Any) -> torch.Tensor:
    found: torch.Tensor = output.logits if hasattr(output, "logits") else output
    return found


def refused() -> str:
    """The message for what ranks cannot compile."""
    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
    plan = autopar.Plan.from_split({"0": 0, "1": 1}, n_microbatches=2)
    return message_of(lambda: autopar.parallelize(model, plan=plan, compile="graphs"))


def searched() -> dict[str, Any]:
    """Errors of a step by a plan that ranks have searched for compiled stages, how they run, and the plan's notes."""
    torch.manual_seed(3)
    model, x = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))), torch.randn(32, 256)
    original = copy.deepcopy(model)
    pm = autopar.parallelize(model, compile="aot_eager", max_replicas=1, n_microbatches=2, cache=False)
    loss = pm.train_step(x, target=x, loss_fn=functional.mse_loss)
    expected = functional.mse_loss(original(x), x)
    expected.backward()
    assert pm.plan is not None
    return {
        "errors": [relative(loss, expected.detach(), 1.0), gradient_error(pm, original)],
        "text": pm.code_text,
        "notes": list(pm.plan.notes),
        "plan": pm.plan.to_json(),
    }
