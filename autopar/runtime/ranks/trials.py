"""Plans that run in turn on all ranks before one is followed (runtime/planning/tuning.py).

```
   rank 0   prepare A, B   step of A   step of B   step of A ...   close      decides what comes next
   rank 1   prepare A, B   step of A   step of B   step of A ...   close      does what rank 0 orders
```
A step takes as long as on the rank where it takes longest, from a moment at which all ranks are ready. An error in a
step is that of a call: it is raised on every rank, or ends the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.analysis.example import Example
from autopar.analysis.own_loss import own_loss
from autopar.capture.module_hooks import has_hooks
from autopar.costs.cost_table import Progress
from autopar.errors import InputError, without_warnings
from autopar.plan.plan import Plan
from autopar.runtime.comparing.contestants import Rounds, memory_in_turn, timed_step, without_loss_function
from autopar.runtime.comparing.disturbance import Doubts, SteadySteps, steady_steps
from autopar.runtime.comparing.parameter_copies import ParameterCopies
from autopar.runtime.initial_values.missing_values import is_hollow
from autopar.runtime.ranks.calls import RankCalls
from autopar.runtime.ranks.signatures import RankSignatures
from autopar.runtime.ranks.world import World
from autopar.runtime.signatures.bound_signature import RunSettings
from autopar.runtime.signatures.captures import CallArguments
from cost_models import Device, bytes_text

TRIAL = "trial"  # the order of rank 0 that names an order for `Trials`


class TrialCalls(RankCalls):
    """Calls that rank 0 orders: all ranks make the same, with the whole batch, and need not compare them."""

    @contextmanager
    def _agreed_call(self, call: CallArguments, what: str) -> Iterator[CallArguments]:
        self._has_gradients = torch.is_grad_enabled()
        yield call


@dataclass(frozen=True)
class _Trial:
    """A plan on this rank's part of a copy of the model."""

    model: nn.Module
    signatures: RankSignatures
    calls: TrialCalls
    call: CallArguments
    training: bool

    def step(self) -> None:
        with torch.set_grad_enabled(self.training):
            if self.call.loss is not None:
                self.calls.train_step(self.call)
                return
            output = self.calls.forward(self.call)
            if self.training:
                without_loss_function(output).backward()

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)


class Trials:
    """This rank's part of all plans that run. Rank 0 orders what all ranks do next."""

    def __init__(self, world: World, devices: Sequence[Device], example: Example) -> None:
        self._world, self._devices, self._example = world, devices, example
        self._ready: dict[str, _Trial] = {}
        self._open = ExitStack()  # what ends with the trials

    def do(self, order: str, *given: Any) -> Any:
        """What the method `order` returns."""
        work: Callable[..., Any] = getattr(self, order)
        return work(*given)

    def has_values(self) -> bool:
        """Whether this rank has values for all of the model's parameters."""
        return not any(p.is_meta or is_hollow(p) for p in self._example.model.parameters())

    def prepare(self, plans: Mapping[str, str], settings: RunSettings) -> None:
        """`plans`: as JSON. Raises PlanError on all ranks for one that they do not run."""
        self._open.enter_context(self._example.untouched())
        self._open.enter_context(torch.inference_mode(False))
        self._open.enter_context(without_warnings())  # the plan that is followed will warn by itself
        copies = ParameterCopies(self._example)
        for name, plan in plans.items():
            self._ready[name] = self._prepared(Plan.from_json(plan), settings, copies, compares=not self._ready)

    def step(self, name: str) -> float:
        """Seconds of a step on this rank."""
        trial = self._ready[name]
        dist.barrier(self._world.control)
        return timed_step(trial.step, trial.clear, [self._devices[self._world.rank]])

    def close(self) -> None:
        """Let go of all copies of the model, if there are any."""
        for trial in self._ready.values():
            trial.signatures.close()
        self._ready.clear()
        self._open.close()

    def _prepared(self, plan: Plan, settings: RunSettings, copies: ParameterCopies, *, compares: bool) -> _Trial:
        """`compares`: ranks compare what they captured, as in a first call; once is enough."""
        example, model = self._example, copies.make()
        signatures = RankSignatures(self._world, model, self._devices, _never_decided, plan, settings)
        signatures.compares = compares
        if not any(map(has_hooks, example.model.modules())):  # hooks in a captured graph are those of the user's module
            signatures.adopt(example)
            signatures.parameters.owns_stages = False
        calls = TrialCalls(self._world, model, self._devices, signatures)
        target = None if example.loss is own_loss else example.target
        call = CallArguments(example.args, example.kwargs, example.loss, target)
        calls.prepare(call)
        return _Trial(model, signatures, calls, call, example.training)


class TrialOrders:
    """Rank 0's orders to the `Trials` of all ranks."""

    def __init__(self, world: World, own: Trials) -> None:
        self._world, self.own = world, own
        self.raised = False  # an order raised, on all ranks: none waits for another one

    def __call__(self, order: str, *given: Any) -> list[Any]:
        """The results, by rank."""
        self._world.broadcast_objects([(TRIAL, order, *given)], 0)
        try:
            return self._world.gathered(self.own.do(order, *given))
        except BaseException:
            self.raised = True
            raise


@dataclass(frozen=True)
class _Racer:
    """A plan that all ranks have ready."""

    name: str
    order: TrialOrders

    def timed(self, devices: Sequence[Device]) -> float:
        return max(self.order("step", self.name))


class PlansOnRanks:
    """`PlansInTurn` of a job, on rank 0. A rank runs operators with a worker's threads, whatever the plan."""

    callers_threads = None

    def __init__(
        self,
        order: TrialOrders,
        facts: tuple[Any, ...],
        devices: Sequence[Device],
        model: nn.Module,
        settings: RunSettings,
    ) -> None:
        self.facts = facts
        self._order, self._devices, self._model, self._settings = order, devices, model, settings

    def lacking(self, plans: Mapping[str, Plan]) -> str:
        lacking = [rank for rank, has in enumerate(self._order("has_values")) if not has]
        if lacking:
            return f"the model has no values yet on rank {', '.join(map(str, lacking))}"
        own = sum(t.nbytes for t in [*self._model.parameters(), *self._model.buffers()])
        needed = memory_in_turn(plans.values(), {device.name: device.name for device in self._devices})
        for rank, device in enumerate(self._devices):
            free = device.memory - own
            if needed.get(device.name, 0) > free:
                return (
                    f"{len(plans)} plans in turn need {bytes_text(needed[device.name])} on rank {rank}, which has "
                    f"{bytes_text(free)} beside the model"
                )
        return ""

    def steps(
        self,
        plans: Mapping[str, Plan],
        rounds: Rounds,
        progress: Progress,
        doubts: Doubts,
        threads_of: Mapping[str, int],
    ) -> SteadySteps:
        """Raises InputError where a rank has no values of the model."""
        if not all(self._order("has_values")):
            raise InputError(
                "tune, candidates and calibrate run the model on the ranks, and it has no values yet: load them before "
                "parallelize, or leave these options out"
            )
        progress("preparing plans on all ranks", 0.0)
        try:
            self._order("prepare", {name: plan.to_json() for name, plan in plans.items()}, self._settings)
            racers = [_Racer(name, self._order) for name in plans]
            return steady_steps(racers, self._devices, rounds, progress, doubts)
        finally:
            if self._order.raised:
                self._order.own.close()
            else:
                self._order("close")


def _never_decided(_: Example) -> Plan:
    raise AssertionError("a trial follows the plan that it got")
