"""Plans that run against each other, each on its own copy of the model: their steps in turn, and their peak memory.

A B C   A B C   A B C ...
warm up| these steps count
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from autopar.analysis.example import Example, untouched
from autopar.analysis.own_loss import own_loss
from autopar.capture import torch_private
from autopar.capture.module_hooks import has_hooks, without_hooks
from autopar.costs.cost_graph import CostGraph
from autopar.costs.cost_table import Progress
from autopar.errors import InputError, issue_again
from autopar.plan.plan import Plan
from autopar.planner.predict import predict_plan
from autopar.planner.search import make_plan
from autopar.planner.search_options import SearchOptions
from autopar.runtime.bound_signature import RunSettings
from autopar.runtime.memory_watch import DeviceContext, MemoryWatch
from autopar.runtime.module import PipelinedModule
from autopar.runtime.step_recorder import timed
from cost_models import Device
from cost_models.hardware.devices import operator_threads


@dataclass(frozen=True)
class ComparedCall:
    """The call that every contestant's step makes."""

    example: Example
    settings: RunSettings


@dataclass(frozen=True)
class Contestant:
    """A plan (or the plain model) on a copy of the model."""

    name: str
    plan: Plan  # with its predictions
    model: nn.Module  # the copy
    step: Callable[[], object]
    device_context: Callable[[DeviceContext], AbstractContextManager[object]]  # see PipelinedModule.device_context
    close: Callable[[], None]


@contextmanager
def contestants(
    call: ComparedCall,
    plans: Mapping[str, Plan],
    devices: Sequence[Device],
    progress: Progress,
    *,
    plain: Plan | None = None,
    threads: int | None = None,
) -> Iterator[list[Contestant]]:
    """One contestant per plan. With `plain`, a plan of one stage, the plain model on the first device comes before.

    Every contestant has a deep copy of the model, so that the user's keeps its parameters, gradients and running
    statistics; the random state is put back. `threads`: of operators in the caller's thread, where a plan runs the
    model itself; by default as many as the caller has set.
    """
    ready: list[Contestant] = []
    own_threads = operator_threads(threads or torch.get_num_threads())
    with untouched(call.example.model), own_threads, torch.inference_mode(False):
        try:
            if plain is not None:
                ready.append(_plain(plain, call, devices[0]))
            for name, plan in plans.items():
                progress(f"preparing {name}", 0.0)
                ready.append(_pipelined(name, plan, call, devices))
            yield ready
        finally:
            for contestant in ready:
                contestant.close()


class Rounds(NamedTuple):
    """How often contestants run in turn, after one round that warms up."""

    least: int  # rounds that count
    seconds: float = 0.0  # more rounds until every contestant has run as long
    budget: float = math.inf  # s: no more rounds after that, if one counts

    def done(self, steps: Sequence[Sequence[float]], elapsed: float) -> float:
        """The part of the rounds that is done. `steps`: seconds of each contestant, the warm-up included."""
        counted = [seconds[1:] for seconds in steps]
        if not all(counted):
            return 0.0
        if elapsed >= self.budget:
            return 1.0
        ran = min(sum(seconds) for seconds in counted) / self.seconds if self.seconds else 1.0
        return min(1.0, len(counted[0]) / self.least, ran)


def steps_in_turn(
    contestants: Sequence[Contestant], devices: Sequence[Device], rounds: Rounds, progress: Progress
) -> list[tuple[float, ...]]:
    """For each contestant, the seconds of its steps that count."""
    steps: list[list[float]] = [[] for _ in contestants]
    start, done = time.perf_counter(), 0.0
    with _no_repeated_warnings():
        while done < 1:
            for contestant, seconds in zip(contestants, steps, strict=True):
                progress(f"measuring {contestant.name}", done)
                seconds.append(timed_step(contestant, devices))
            done = rounds.done(steps, time.perf_counter() - start)
    return [tuple(seconds[1:]) for seconds in steps]


def priced(
    plans: Mapping[str, Plan | None], example: Example, costs: CostGraph, options: SearchOptions
) -> dict[str, Plan]:
    """The plans with their predictions, all from the same costs; None becomes the plan of the search."""
    return {
        name: make_plan(costs, options) if plan is None else predict_plan(plan, example, costs, options.conditions)
        for name, plan in plans.items()
    }


def predicted_memory(plan: Plan, devices: Sequence[Device]) -> dict[str, int]:
    """Bytes at the peak, by place (`MemoryWatch`)."""
    places = {d.name: d.name if d.shares_process_memory else str(d.torch_device) for d in devices}
    peaks: dict[str, int] = {}  # by device; all stages of a device have the same peak
    for stage in plan.stages:
        if stage.peak_memory is not None or stage.sharding is None:
            peaks |= dict.fromkeys(stage.devices, stage.peak_memory or 0)
    total: Counter[str] = Counter()
    for name, peak in peaks.items():
        total[places[name]] += peak
    return dict(total)


@contextmanager
def _no_repeated_warnings() -> Iterator[None]:
    """The model's own code has given its warnings when it was captured; the plain model would repeat them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    issue_again(caught)


def timed_step(contestant: Contestant, devices: Sequence[Device]) -> float:
    """Seconds of a step that starts without gradients."""
    contestant.model.zero_grad(set_to_none=True)
    _, seconds = timed(contestant.step, devices)
    return seconds


def measured_memory(contestant: Contestant, devices: Sequence[Device]) -> dict[str, int]:
    """Bytes at the peak of one more step, by place (`MemoryWatch`). Counting bytes slows this step down."""
    contestant.model.zero_grad(set_to_none=True)
    watch = MemoryWatch([d for d in devices if d.name in contestant.plan.used_devices])
    resident = [*contestant.model.parameters(), *contestant.model.buffers()]
    with watch.step(resident), contestant.device_context(watch), _no_repeated_warnings():
        contestant.step()
    return watch.peaks


def _plain(plan: Plan, call: ComparedCall, device: Device) -> Contestant:
    model = without_hooks(copy.deepcopy(call.example.model)).to(device.torch_device)
    args, kwargs, target = torch_private.tree_map(
        lambda x: x.to(device.torch_device) if isinstance(x, torch.Tensor) else x,
        (call.example.args, call.example.kwargs, call.example.target),
    )
    example = replace(call.example, args=args, kwargs=kwargs, target=target)
    return Contestant(
        name="one device",
        plan=plan,
        model=model,
        step=lambda: _whole_step(model, example),
        device_context=lambda context: context(device.name),
        close=lambda: None,
    )


def _pipelined(name: str, plan: Plan, call: ComparedCall, devices: Sequence[Device]) -> Contestant:
    example = call.example

    def decide(_: Example) -> Plan:
        raise AssertionError("a contestant follows the plan that it got")

    model = without_hooks(copy.deepcopy(example.model))
    module = PipelinedModule(model, devices, decide, plan=plan, settings=call.settings)
    # Opaque operators and hooks in a captured graph are those of the user's module.
    if not example.program.uncaptured and not any(map(has_hooks, example.model.modules())):
        module.adopt(example)
    module.prepare(example.args, example.kwargs, loss_fn=example.loss, target=example.target)

    def step() -> None:
        if example.loss is own_loss:
            module.train_step(*example.args, **example.kwargs)
        elif example.loss is not None:
            module.train_step(*example.args, target=example.target, loss_fn=example.loss, **example.kwargs)
        else:
            _whole_step(module, example)

    def device_context(context: DeviceContext) -> AbstractContextManager[object]:
        runs_in_this_thread = len(plan.used_devices) == 1 and plan.n_microbatches == 1
        return context(plan.used_devices[0]) if runs_in_this_thread else module.device_context(context)

    return Contestant(name, plan, model, step, device_context, module.close)


def _whole_step(model: nn.Module, example: Example) -> None:
    """Forward and, in training, backward from the loss of the whole batch."""
    with torch.set_grad_enabled(example.training):
        output = model(*example.args, **example.kwargs)
        if example.training:
            _loss(output, example).backward()


def _loss(output: Any, example: Example) -> torch.Tensor:
    """That of the loss function; without one, the output's `.loss`, or else the sum of the means of all outputs with a
    gradient."""
    if example.loss is not None:
        return example.loss(output, example.target)
    own = getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    means = [x.mean() for x in torch_private.tree_leaves(output) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not means:
        raise InputError("the model returns nothing with a gradient; give loss_fn= and target=")
    return torch.stack([m.to(means[0].device) for m in means]).sum()
