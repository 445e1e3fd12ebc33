"""Ranks on pretended GPUs, beside the plain model: what each found, and what a GPU would not have done right."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from pretend_nccl import PretendNccl, pretended
from rank_cases import MODELS, Job, loss_of, needs_threads, part_of, plan_of, relative
from torch import nn

import autopar
from autopar.capture.torch_private import tree_leaves


@dataclass(frozen=True)
class OnGpus:
    """What a rank found."""

    losses: list[float]
    error: float  # largest of losses, gradients, parameters, buffers and outputs, relative to the plain model's
    waits: list[str]  # where the host waited for its GPU inside a call, after the first one
    carried: set[str]  # what carried tensors of GPUs
    devices: set[str]  # of losses, outputs, buffers, gradients


def trained(job: Job, data: str = "cpu", *, shared: bool = False) -> OnGpus:
    """Train on ranks with a pretended GPU each, with inputs on the CPU or on the rank's GPU (`data="cuda"`)."""
    with pretended(shared=shared) as nccl:
        found = _trained(job, data, nccl)
        nccl.check()
        return found


def _trained(job: Job, data: str, nccl: PretendNccl) -> OnGpus:
    n = dist.get_world_size()
    torch.manual_seed(3)
    build, inputs = MODELS[job.model]
    model, x = build().double(), inputs()
    model.train(job.model != "frozen cnn")
    x = x.double() if x.is_floating_point() else x
    original = copy.deepcopy(model)
    plan = plan_of(job, copy.deepcopy(model), x, n)
    alone = autopar.parallelize(original, ["cpu"] * n, plan=plan) if needs_threads(job) else original

    def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
        return loss_of(job.model, output, target)

    calls = {"example_args": (x,)} | ({"loss_fn": loss_fn, "target": x} if job.call == "train_step" else {})
    pm = autopar.parallelize(model, plan=plan, **calls, **job.options)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (pm, original))
    losses, errors, waits, devices = [], [0.0], [], set()
    for step in range(job.steps):
        ours.zero_grad()
        theirs.zero_grad()
        torch.manual_seed(step)
        there = x.clone() if data == "cpu" else nccl.gpus.on(x, str(nccl.place))
        nccl.gpus.waits.clear()
        with nccl.recording():
            loss, output = stepped(job, pm, there, loss_fn)
        if step:
            waits += nccl.gpus.waits
        del there
        torch.manual_seed(step)
        wanted, expected = stepped(job, alone, x, loss_fn)
        losses.append(loss.item())
        errors.append(relative(loss, wanted, wanted.abs().item()))
        pairs = list(zip(tree_leaves(output), tree_leaves(expected), strict=True))
        errors += [relative(a.detach(), b.detach(), b.abs().max().item()) for a, b in pairs]
        devices |= {str(one.device) for one in [loss, *(a for a, _ in pairs), *pm.buffers()]}
        errors += gradient_errors(pm, original)
        devices |= {str(p.grad.to_local().device) for p in pm.parameters() if p.grad is not None}
        ours.step()
        theirs.step()
    with torch.no_grad():
        with nccl.recording():
            found = tree_leaves(pm(x))
        errors += [relative(a, b, 1.0) for a, b in zip(found, tree_leaves(alone(x)), strict=True)]
    errors += [
        relative(p.detach().to_local(), part_of(original.get_parameter(name).detach(), p), 1.0)
        for name, p in pm.named_parameters()
    ]
    errors += [relative(b.double(), original.get_buffer(name).double(), 1.0) for name, b in pm.named_buffers()]
    return OnGpus(losses, max(errors), waits, nccl.carried, devices)


def gradient_errors(pm: nn.Module, original: nn.Module) -> list[float]:
    largest = max(p.grad.abs().max().item() for p in original.parameters() if p.grad is not None)
    found = []
    for name, p in pm.named_parameters():
        gradient, whole = p.grad, original.get_parameter(name).grad
        mine = None if whole is None else part_of(whole, p)
        found.append(relative(None if gradient is None else gradient.to_local(), mine, largest))
    return found


def stepped(job: Job, model: nn.Module, x: torch.Tensor, loss_fn: Any) -> tuple[torch.Tensor, Any]:
    """One step's loss and outputs, with gradients."""
    if job.call == "train_step" and isinstance(model, autopar.PipelinedModule):
        return model.train_step(x, target=x, loss_fn=loss_fn), ()
    output = model(x)
    leaf = next(one for one in tree_leaves(output) if isinstance(one, torch.Tensor))
    loss = loss_fn(output, x.to(leaf.device))
    loss.backward()
    return loss.detach(), () if job.call == "train_step" else output
