"""Ranks on GPUs, real or pretended, beside the plain model: what each found, and where a host waited for its GPU."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from pretend_nccl import PretendNccl, pretended
from rank_cases import MODELS, Job, loss_of, needs_threads, part_of, plan_of, relative
from rank_compiled import compiled
from rank_tuning import trained as tuned_and_trained
from rank_tuning import tuned
from torch import nn

import autopar
from autopar import Plan
from autopar.capture.torch_private import tree_leaves
from autopar.runtime.ranks import places
from autopar.runtime.ranks.messages import wire
from autopar.runtime.ranks.world import current, joined

QUIET = 2  # calls at the start in which hosts may wait: the content of the first batches is compared


@dataclass(frozen=True)
class OnGpus:
    """What a rank found."""

    losses: list[float]
    error: float  # largest of losses, gradients, parameters, buffers and outputs, relative to the plain model's
    waits: list[str]  # where the host waited for its GPU inside a call
    carried: set[str]  # what carried tensors of GPUs
    devices: set[str]  # of losses, outputs, buffers, gradients


class RealGpus:
    """In the place of `PretendNccl` where there are GPUs."""

    def __init__(self, *, waits_allowed: bool) -> None:
        self.waits: list[str] = []
        self.carried: set[str] = set()
        self._allowed = waits_allowed

    @property
    def place(self) -> torch.device:
        world = current()
        assert world is not None
        return world.device

    def on(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.place)

    @contextmanager
    def call(self, number: int) -> Iterator[None]:
        """From the third call on, torch raises where a host waits for its GPU."""
        if number >= QUIET and not self._allowed:
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


class PretendedGpus:
    def __init__(self, nccl: PretendNccl) -> None:
        self._nccl = nccl
        self.place, self.carried = nccl.place, nccl.carried
        self.waits: list[str] = []

    def on(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._nccl.gpus.on(tensor, str(self.place))

    @contextmanager
    def call(self, number: int) -> Iterator[None]:
        self._nccl.gpus.waits.clear()
        with self._nccl.recording():
            yield
        if number >= QUIET:
            self.waits += [wait for wait in self._nccl.gpus.waits if not wait.endswith("the caller")]


def trained(job: Job, data: str = "cpu", *, shared: bool = False) -> OnGpus:
    """Train on ranks with a pretended GPU each, with inputs on the CPU or on the rank's GPU (`data="cuda"`).

    `shared`: all ranks share one GPU, over gloo.
    """
    with pretended(shared=shared) as nccl:
        found = _trained(job, data, PretendedGpus(nccl))
        nccl.check()
        return found


def trained_here(job: Job, data: str = "cpu", *, shared: bool = False) -> OnGpus:
    """The same on GPUs that are there. Without `shared`, the ranks' process group has NCCL."""
    with contextlib.nullcontext() if shared else apart():
        return _trained(job, data, RealGpus(waits_allowed=shared))


@contextmanager
def apart() -> Iterator[None]:
    """Where a machine has fewer GPUs than ranks, autopar and NCCL take every rank for a machine of its own. So NCCL
    carries tensors between ranks that share a GPU, over sockets."""
    if torch.cuda.device_count() >= dist.get_world_size():
        yield
        return
    machine, here = f"machine {dist.get_rank()}", places.here
    # NCCL refuses two ranks on one GPU of a host, and compares hosts by this identifier.
    environment = {"NCCL_HOSTID": machine, "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"}
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(places, "here", lambda device: replace(here(device), machine=machine)),
    ):
        yield


def tuned_here(*, shared: bool) -> dict[str, Any]:
    """`tuned` plans of a job whose ranks have GPUs, beside what a first step's loss and gradient should be."""
    with contextlib.nullcontext() if shared else apart():
        found = tuned({"tune": 2, "max_replicas": 1}, [{}] * dist.get_world_size())
        plain, step, models = tuned_and_trained({"tune": 2})
    return {**found, "plain": plain, "step": step, "models": models}


def recorded_here(job: Job, *, shared: bool) -> dict[str, Any]:
    """Errors of steps whose stages are recorded as CUDA graphs, on GPUs that are there."""
    with contextlib.nullcontext() if shared else apart():
        return compiled(job, "graphs", on_gpus)


def _trained(job: Job, data: str, gpus: RealGpus | PretendedGpus) -> OnGpus:
    n = dist.get_world_size()
    torch.manual_seed(3)
    build, inputs = MODELS[job.model]
    model, x = build().double(), inputs()
    model.train(job.model != "frozen cnn")
    x = x.double() if x.is_floating_point() else x
    original = copy.deepcopy(model)
    plan = plan_of(job, copy.deepcopy(model), x, n)
    assert plan is not None
    alone = autopar.parallelize(original, ["cpu"] * n, plan=plan) if needs_threads(job) else original

    def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
        return loss_of(job.model, output, target)

    calls: dict[str, Any] = {"example_args": (x,)} | (
        {"loss_fn": loss_fn, "target": x} if job.call == "train_step" else {}
    )
    pm = autopar.parallelize(model, plan=on_gpus(plan), **calls, **job.options)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (pm, original))
    losses, errors, devices = [], [0.0], set()
    for step in range(QUIET + 1):
        ours.zero_grad()
        theirs.zero_grad()
        torch.manual_seed(step)
        there = x.clone() if data == "cpu" else gpus.on(x)
        with gpus.call(step):
            loss, output = stepped(job, pm, there, loss_fn)
        del there
        torch.manual_seed(step)
        wanted, expected = stepped(job, alone, x, loss_fn)
        losses.append(loss.item())
        errors.append(relative(loss.cpu(), wanted, wanted.abs().item()))
        pairs = list(zip(tree_leaves(output), tree_leaves(expected), strict=True))
        errors += [relative(a.detach().cpu(), b.detach(), b.abs().max().item()) for a, b in pairs]
        devices |= {str(one.device) for one in [loss, *(a for a, _ in pairs), *pm.buffers()]}
        errors += gradient_errors(pm, original)
        devices |= {str(local(p.grad).device) for p in pm.parameters() if p.grad is not None}
        ours.step()
        theirs.step()
    with torch.no_grad():
        with gpus.call(0):
            found = tree_leaves(pm(x))
        errors += [relative(a.cpu(), b, 1.0) for a, b in zip(found, tree_leaves(alone(x)), strict=True)]
    errors += [
        relative(local(p.detach()).cpu(), part_of(original.get_parameter(name).detach(), p), 1.0)
        for name, p in pm.named_parameters()
    ]
    errors += [relative(b.cpu().double(), original.get_buffer(name).double(), 1.0) for name, b in pm.named_buffers()]
    return OnGpus(losses, max(errors), gpus.waits, gpus.carried, devices)


def on_gpus(plan: Plan) -> Plan:
    """A plan for CPU workers, with this job's GPUs in their places."""
    world = joined()
    assert world is not None
    names = [device.name for device in world.devices(())]
    text = plan.to_json()
    for rank, name in enumerate(names):
        text = text.replace(f'"cpu:{rank}"', f'"{name}"')
    return replace(Plan.from_json(text), device_kinds=())


def local(tensor: Any) -> torch.Tensor:
    """What a rank has of a DTensor."""
    found: torch.Tensor = tensor.to_local()
    return found


def gradient_errors(pm: nn.Module, original: nn.Module) -> list[float]:
    largest = max(p.grad.abs().max().item() for p in original.parameters() if p.grad is not None)
    found = []
    for name, p in pm.named_parameters():
        gradient, whole = p.grad, original.get_parameter(name).grad
        mine = None if whole is None else part_of(whole, p)
        found.append(relative(None if gradient is None else local(gradient).cpu(), mine, largest))
    return found


def stepped(job: Job, model: nn.Module, x: torch.Tensor, loss_fn: Any) -> tuple[torch.Tensor, Any]:
    """One step's loss and outputs, with gradients."""
    if job.call == "train_step" and isinstance(model, autopar.PipelinedModule):
        return model.train_step(x, target=x, loss_fn=loss_fn), ()
    output = model(x)
    leaf = next(one for one in tree_leaves(output) if isinstance(one, torch.Tensor))
    loss = loss_fn(output, x.to(leaf.device, non_blocking=True))
    loss.backward()
    return loss.detach(), () if job.call == "train_step" else output


def faults_of(fault: str) -> list[str]:
    """What the oracle says of a training with a seeded fault."""
    sent = wire._Sent
    job = Job("gpt2", "hand tensor=2" if fault == "collectives" else "chain")
    with pretended() as nccl:
        nccl.forgets = fault
        unheld = (lambda read_by, tensor, pending: sent(read_by, None, pending)) if fault == "holding" else sent
        with mock.patch.object(wire, "_Sent", unheld):
            _trained(job, "cpu", PretendedGpus(nccl))
        return list(nccl.gpus.order.faults)


def refusal() -> str:
    """What parallelize says to ranks whose devices do not fit together."""
    try:
        autopar.parallelize(nn.Linear(4, 4))
    except autopar.AutoparError as error:
        return str(error)
    return ""


def refused_sharing() -> str:
    """Two ranks on one pretended GPU that would have to use NCCL."""
    with pretended(), mock.patch.dict(os.environ, LOCAL_RANK="0"):
        return refusal()


def refused_mixture() -> str:
    """Rank 0 has a GPU, and rank 1 has none."""
    with pretended(), mock.patch.object(torch.cuda, "is_available", return_value=dist.get_rank() == 0):
        return refusal()
