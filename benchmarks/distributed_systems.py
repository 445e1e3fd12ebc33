"""One training step on two processes, each by a system of its own: autopar's ranks, and what torch has.

Every system has its own copy of the model, with the same weights, in each process. A process serves requests
(`autopar/runtime/other_systems/processes.py`), so that all systems take turns.

    autopar, PLAN            rank 0 | rank 1 by a plan                    both have the whole batch
    pipelining, SCHEDULE     torch.distributed.pipelining, cut by time    the first stage has it, the last one targets
    DDP, FSDP2               DistributedDataParallel, fully_shard         each has half the batch
    tensor parallel          parallelize_module, columns and rows         both have the whole batch
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import Plan
from autopar.runtime.other_systems.rank import SystemRank
from autopar.runtime.other_systems.training_step import TrainingStep
from benchmarks.peer_models import Subject

STAGES = 2
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


class BenchmarkRank(SystemRank):
    """The requests that each of the two processes serves; what `load` gets builds a `Subject`."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        os.environ["LOCAL_WORLD_SIZE"] = str(STAGES)

    def subject(self) -> Subject:
        """With a model of its own."""
        assert self._build is not None, "load comes first"
        subject: Subject = self._build()
        return subject

    def training_step(self) -> TrainingStep:
        return self.subject().training_step

    # -- one method a system; each makes a step, called by its name ---------------------------------------------------

    def plan(self, kind: str, n_microbatches: int) -> str:
        """What the ranks plan together, as JSON."""
        return make_plan(kind, self.subject(), n_microbatches).to_json()

    def autopar(self, name: str, plan: str) -> None:
        """`plan`: as JSON."""
        subject = self.subject()
        module = autopar.parallelize(subject.workload.model, plan=Plan.from_json(plan))
        self.add(name, module, train_step(module, subject))

    def fsdp(self, name: str) -> None:
        """fully_shard of every layer that repeats, and of the model."""
        from torch.distributed.fsdp import fully_shard

        subject = self.subject()
        model = subject.workload.model
        mesh = init_device_mesh("cpu", (STAGES,))
        for layers in (m for m in model.modules() if isinstance(m, nn.ModuleList)):
            for layer in layers:
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.add(name, model, self.on_part(model, subject.training_step.part(self.rank, self.n)))

    def tensor_parallel(self, name: str) -> None:
        """Of a BERT: attention by heads, the two products behind it by columns and rows."""
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        subject = self.subject()
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

        self.add(name, net, step)

    # -- use ----------------------------------------------------------------------------------------------------------

    def bytes_sent(self, name: str) -> int:
        """Bytes that this rank sends to the other one in a step, point to point."""
        sent: list[int] = []
        isend = dist.isend

        def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            sent.append(tensor.nbytes)
            return isend(tensor, *args, **kwargs)

        with patch.object(dist, "isend", counted):
            self._steps[name]()
        return sum(sent)
