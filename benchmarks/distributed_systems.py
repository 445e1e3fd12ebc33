"""One training step on two processes, each by a system of its own: autopar's ranks, and what torch has.

Every system has its own copy of the model, with the same weights, in each process. A process serves requests (see
`peer_systems.Ranks`), so that all systems take turns.

    autopar, PLAN            rank 0 | rank 1 by a plan                    both have the whole batch
    pipelining, SCHEDULE     torch.distributed.pipelining, cut by time    the first stage has it, the last one targets
    DDP, FSDP2               DistributedDataParallel, fully_shard         each has half the batch
    tensor parallel          parallelize_module, columns and rows         both have the whole batch
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar import Plan
from benchmarks.peer_models import Builder, Subject
from benchmarks.peer_systems import STAGES, Gradients

# By the name of torch.distributed.pipelining's schedule: the stages of rank r of two.
PIPELINES: dict[str, Callable[[int], tuple[int, ...]]] = {
    "1F1B": lambda r: (r,),
    "Interleaved1F1B": lambda r: (r, r + 2),
    "InterleavedZeroBubble": lambda r: (r, r + 2),
    "ZBVZeroBubble": lambda r: (r, 3 - r),
}
AUTOPAR, THREADS = "autopar, processes", "autopar, threads"
DATA, SHARDED, TENSOR = "DDP", "FSDP2", "tensor parallel by hand"
PLANS = ("automatic", "pipeline", "replicas", "tensor")


def make_plan(kind: str, subject: Subject, n_microbatches: int, devices: Any = None) -> Plan:
    """A plan of one kind, with its prediction. `devices`: None for ranks. Raises AutoparError where there is none."""
    workload = subject.workload
    given: dict[str, Any] = {
        "example_kwargs": workload.inputs,
        "target": workload.target,
        "loss_fn": workload.loss,
    }
    if kind == "automatic":
        return autopar.plan(workload.model, devices, **given)
    if kind == "pipeline":
        return autopar.plan(workload.model, devices, max_replicas=1, n_microbatches=n_microbatches, **given)
    if kind == "replicas":
        names = [f"cpu:{i}" for i in range(STAGES)]
        plan = Plan.from_split({"": 0}, devices=[names], n_microbatches=STAGES)
    else:
        plan = Plan.by_hand(workload.model, devices, tensor=STAGES, data=1, **given)
    return autopar.plan(workload.model, devices, plan=plan, **given)


def train_step(module: autopar.PipelinedModule, subject: Subject) -> Callable[[], float]:
    workload = subject.workload
    return lambda: module.train_step(**workload.inputs, target=workload.target, loss_fn=workload.loss).item()


class SystemRank:
    """The requests that each of the two processes serves."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._steps: dict[str, Callable[[], float | None]] = {}
        self._models: dict[str, nn.Module] = {}
        self._groups: list[Any] = []
        os.environ["LOCAL_WORLD_SIZE"] = str(STAGES)

    def load(self, build: Builder) -> None:
        """Take up another subject."""
        self._steps.clear()
        self._models.clear()
        self._build = build

    # -- one method a system; each makes a step, called by its name ---------------------------------------------------

    def plan(self, kind: str, n_microbatches: int) -> str:
        """What the ranks plan together, as JSON."""
        return make_plan(kind, self._build(), n_microbatches).to_json()

    def autopar(self, name: str, plan: str) -> None:
        """`plan`: as JSON."""
        subject = self._build()
        module = autopar.parallelize(subject.workload.model, plan=Plan.from_json(plan))
        self._add(name, module, train_step(module, subject))

    def pipelining(self, name: str, schedule: str, n_microbatches: int, cuts: Sequence[int]) -> None:
        """`cuts`: the first block of each stage but the first."""
        from torch.distributed.pipelining import PipelineStage, schedules

        subject = self._build()
        mine = PIPELINES[schedule](self._rank)
        bounds = list(itertools.pairwise([0, *cuts, len(subject.blocks)]))
        stages = []
        for number in mine:
            part = subject.blocks[slice(*bounds[number])]
            # Gradients of a stage's own parameters alone become means; of one that two stages of a rank have, once.
            first = next((one for one in mine if one in (0, len(bounds) - 1)), None)
            for index, parameter in enumerate(subject.tied if number == first else ()):
                part.register_parameter(f"tied{index}", parameter)
            stages.append(PipelineStage(part, number, len(bounds), torch.device("cpu")))
        made = getattr(schedules, f"Schedule{schedule}")
        run = made(stages if len(bounds) > STAGES else stages[0], n_microbatches, loss_fn=subject.loss)

        def step() -> float | None:
            losses: list[torch.Tensor] = []
            last = {"target": subject.workload.target, "losses": losses} if len(bounds) - 1 in mine else {}
            run.step(*((subject.input,) if 0 in mine else ()), return_outputs=False, **last)
            for parameter in subject.tied:  # as torch.distributed.pipelining does not
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
            return torch.stack(losses).mean().item() if losses else None

        self._add(name, subject.workload.model, step)

    def ddp(self, name: str) -> None:
        subject = self._build()
        module = nn.parallel.DistributedDataParallel(subject.workload.model)
        self._add(name, module.module, self._on_half(module, subject))

    def fsdp(self, name: str) -> None:
        """fully_shard of every layer that repeats, and of the model."""
        from torch.distributed.fsdp import fully_shard

        subject = self._build()
        model = subject.workload.model
        mesh = init_device_mesh("cpu", (STAGES,))
        for layers in (m for m in model.modules() if isinstance(m, nn.ModuleList)):
            for layer in layers:
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self._add(name, model, self._on_half(model, subject))

    def tensor_parallel(self, name: str) -> None:
        """Of a BERT: attention by heads, the two products behind it by columns and rows."""
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        subject = self._build()
        mesh = init_device_mesh("cpu", (STAGES,))
        net: Any = subject.workload.model
        columns = ("attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense")
        rows = ("attention.output.dense", "output.dense")
        how = {**{path: ColwiseParallel() for path in columns}, **{path: RowwiseParallel() for path in rows}}
        for layer in net.bert.encoder.layer:
            parallelize_module(layer, mesh, copy.copy(how))
        workload = subject.workload

        def step() -> float:
            loss = workload.loss(net(**workload.inputs), workload.target)
            loss.backward()
            return float(loss.item())

        self._add(name, net, step)

    # -- use ----------------------------------------------------------------------------------------------------------

    def step(self, name: str) -> float | None:
        """The mean loss, on a rank that has it."""
        return self._steps[name]()

    def clear(self) -> None:
        for model in self._models.values():
            model.zero_grad(set_to_none=True)

    def bytes_sent(self, name: str) -> int:
        """Bytes of tensors that this rank sends to the other one in a step, point to point."""
        sent: list[int] = []
        isend = dist.isend

        def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            sent.append(tensor.nbytes if tensor.is_floating_point() else 0)
            return isend(tensor, *args, **kwargs)

        with patch.object(dist, "isend", counted):
            self._steps[name]()
        return sum(sent)

    def gradients(self, name: str, names: Sequence[str]) -> Gradients:
        """Whole gradients of those of the parameters `names` that this rank has, by the model's names."""
        parameters = dict(self._models[name].named_parameters())
        found: Gradients = {}
        for one in names:
            gradient = parameters[one].grad if one in parameters else None
            if isinstance(gradient, DTensor):
                gradient = gradient.full_tensor()
            if gradient is not None:
                found[one] = np.array(gradient.numpy())
        return found

    def _on_half(self, module: nn.Module, subject: Subject) -> Callable[[], float]:
        """A step on this rank's half of the batch; the mean loss over both."""
        workload = subject.workload
        inputs = {name: tensor.chunk(STAGES)[self._rank] for name, tensor in workload.inputs.items()}
        target = workload.target.chunk(STAGES)[self._rank]

        def step() -> float:
            loss = workload.loss(module(**inputs), target)
            loss.backward()
            whole = loss.detach() / STAGES
            dist.all_reduce(whole)
            return float(whole)

        return step

    def _add(self, name: str, model: nn.Module, step: Callable[[], float | None]) -> None:
        self._models[name], self._steps[name] = model, step
