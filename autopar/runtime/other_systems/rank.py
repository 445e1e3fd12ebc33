"""What each process of other systems does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.runtime.other_systems.pipelining import pipelining_step
from autopar.runtime.other_systems.training_step import TrainingStep

Gradients = dict[str, np.ndarray[Any, Any]]  # by the model's names of its parameters


class SystemRank:
    """Systems by name, each with a model of its own and the same weights."""

    def __init__(self, rank: int) -> None:
        self.rank, self.n = rank, dist.get_world_size()
        self._steps: dict[str, Callable[[], float | None]] = {}
        self._models: dict[str, nn.Module] = {}
        self._build: Callable[[], Any] | None = None

    def load(self, build: Callable[[], Any]) -> None:
        """Take up another training step, which `build` makes anew at every call."""
        self._steps.clear()
        self._models.clear()
        self._build = build

    def training_step(self) -> TrainingStep:
        """With a model of its own."""
        assert self._build is not None, "load comes first"
        step: TrainingStep = self._build()
        return step

    # -- one method a system; each makes a step, called by its name ---------------------------------------------------

    def independent(self, name: str) -> None:
        """The plain model on this rank's part of the batch; ranks exchange nothing."""
        part = self.training_step().part(self.rank, self.n)
        self.add(name, part.model, part.run)

    def ddp(self, name: str) -> None:
        part = self.training_step().part(self.rank, self.n)
        module = nn.parallel.DistributedDataParallel(part.model)
        self.add(name, part.model, self.on_part(module, part))

    def pipelining(self, name: str, schedule: str, n_microbatches: int, cuts: Sequence[int]) -> None:
        step = self.training_step()
        run = pipelining_step(step, self.rank, self.n, schedule, n_microbatches, cuts)
        self.add(name, step.model, run)

    # -- use ----------------------------------------------------------------------------------------------------------

    def step(self, name: str) -> float | None:
        """The mean loss, on a rank that has it."""
        return self._steps[name]()

    def clear(self) -> None:
        for model in self._models.values():
            model.zero_grad(set_to_none=True)

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

    def on_part(self, module: nn.Module, part: TrainingStep) -> Callable[[], float]:
        """A step of a wrapped model on this rank's part of the batch; the mean loss of all parts."""

        def step() -> float:
            loss = part.loss(module(*part.args, **part.kwargs), part.target)
            loss.backward()
            whole = loss.detach() / self.n
            dist.all_reduce(whole)
            return float(whole)

        return step

    def add(self, name: str, model: nn.Module, step: Callable[[], float | None]) -> None:
        self._models[name], self._steps[name] = model, step
