"""Plans that run against each other, each on its own copy of the model: their steps in turn, and their peak memory.

The copies share parameters (`parameter_copies.py`), and gradients live for one step, so that all contestants together
hold little more than the one that runs.

A B C   A B C   A B C ...
warm up| these steps count
"""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from autopar.analysis.example import Example
from autopar.analysis.own_loss import own_loss
from autopar.capture import torch_private
from autopar.capture.module_hooks import has_hooks
from autopar.costs.cost_graph import CostGraph
from autopar.costs.cost_table import Progress
from autopar.errors import InputError, issue_again
from autopar.plan.plan import Plan
from autopar.planner.inter_op.config import MeshChoices
from autopar.planner.price_sharded import predict_any
from autopar.planner.search import make_plan
from autopar.planner.search_options import SearchOptions
from autopar.runtime.comparing.comparison import SINGLE
from autopar.runtime.comparing.parameter_copies import ParameterCopies
from autopar.runtime.memory_watch import DeviceContext, MemoryWatch
from autopar.runtime.module import PipelinedModule
from autopar.runtime.signatures.bound_signature import RunSettings
from autopar.runtime.step_recorder import timed
from cost_models import Device
from cost_models.hardware.devices import find_device, operator_threads
from cost_models.measuring.core_waiting import ThreadsWaiting


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

    def clear(self) -> None:
        """No gradients are left."""
        self.model.zero_grad(set_to_none=True)

    def timed(self, devices: Sequence[Device]) -> float:
        return timed_step(self.step, self.clear, devices)


class Racer(Protocol):
    """What takes turns: a contestant, another system, or a plan that runs on ranks."""

    @property
    def name(self) -> str: ...

    def timed(self, devices: Sequence[Device]) -> float:
        """Seconds of a step that starts without gradients, and leaves none."""


@contextmanager
def contestants(
    call: ComparedCall,
    plans: Mapping[str, Plan],
    devices: Sequence[Device],
    progress: Progress,
    *,
    plain: Plan | None = None,
    threads: int | None = None,
    threads_of: Mapping[str, int] = MappingProxyType({}),
) -> Iterator[list[Contestant]]:
    """One contestant per plan. With `plain`, a plan of one stage, the plain model on the first device comes before.

    Every contestant has a copy of the model, so that the user's keeps its gradients and running statistics; the random
    state is put back. `threads`: of operators of the plain model; by default as many as the
    caller has set. A plan that runs the model itself does so with the caller's threads, as it would outside of here, or
    with those that `threads_of` has for its name.
    """
    ready: list[Contestant] = []
    copies = ParameterCopies(call.example)
    callers = torch.get_num_threads()
    with call.example.untouched(), operator_threads(threads or callers), torch.inference_mode(False):
        try:
            if plain is not None:
                ready.append(_plain(plain, call, devices[0], copies))
            for name, plan in plans.items():
                progress(f"preparing {name}", 0.0)
                ready.append(_pipelined(name, plan, call, devices, threads_of.get(name, callers), copies))
            yield ready
        finally:
            for contestant in ready:
                contestant.close()


class Rounds(NamedTuple):
    """How often contestants run in turn, after one round that warms up."""

    least: int  # rounds that count
    seconds: float = 0.0  # more rounds until every contestant has run as long
    budget: float = math.inf  # s: no more rounds after that, if one counts
    finals: int = 0  # more rounds of those that are close to the fastest, with a budget of their own

    def done(self, steps: Sequence[Sequence[float]], elapsed: float) -> float:
        """The part of the rounds that is done. `steps`: seconds of each contestant that count."""
        if not all(steps):
            return 0.0
        if elapsed >= self.budget:
            return 1.0
        ran = min(sum(seconds) for seconds in steps) / self.seconds if self.seconds else 1.0
        return min(1.0, len(steps[0]) / self.least, ran)


class Round(NamedTuple):
    """One turn of every contestant."""

    seconds: tuple[float, ...]  # of each contestant's step
    waited: float | None = None  # s that threads of this process were ready but had no core; None: not reported


def rounds_in_turn(
    contestants: Sequence[Racer], devices: Sequence[Device], rounds: Rounds, progress: Progress, warm_ups: int = 1
) -> list[Round]:
    """The rounds that count."""
    steps: list[list[float]] = [[] for _ in contestants]
    waited: list[float | None] = []
    start, done = time.perf_counter(), 0.0
    with _no_repeated_warnings():
        while done < 1:
            waiting = ThreadsWaiting.now()
            for contestant, seconds in zip(contestants, steps, strict=True):
                progress(f"measuring {contestant.name}", done)
                seconds.append(contestant.timed(devices))
            waited.append(waiting.since())
            counted = [seconds[warm_ups:] for seconds in steps]
            done = rounds.done(counted, time.perf_counter() - start)
    return [Round(*one) for one in zip(zip(*steps, strict=True), waited, strict=True)][warm_ups:]


def steps_in_turn(
    contestants: Sequence[Racer], devices: Sequence[Device], rounds: Rounds, progress: Progress
) -> list[tuple[float, ...]]:
    """For each contestant, the seconds of its steps that count."""
    taken = rounds_in_turn(contestants, devices, rounds, progress)
    return list(zip(*(one.seconds for one in taken), strict=True))


def priced(
    plans: Mapping[str, Plan | None],
    example: Example,
    costs: CostGraph,
    options: SearchOptions,
    meshes: MeshChoices | None = None,
) -> dict[str, Plan]:
    """The plans with their predictions, all from the same costs; None becomes the plan of the search. A plan that runs
    the model itself, and did so when it was chosen, keeps what was measured."""

    def predicted(plan: Plan | None) -> Plan:
        if plan is None:
            return make_plan(costs, options, meshes)
        if runs_in_callers_thread(plan) and plan.measured_step_time is not None:
            return plan  # its step was run; threads of the caller may be more than those that a device has
        return predict_any(plan, example, costs, options.conditions)

    return {name: predicted(plan) for name, plan in plans.items()}


def predicted_memory(plan: Plan, devices: Sequence[Device]) -> dict[str, int]:
    """Bytes at the peak, by place (`MemoryWatch`)."""
    return _peaks(plan, places_of(devices))


def _peaks(plan: Plan, places: Mapping[str, str]) -> dict[str, int]:
    peaks: dict[str, int] = {}  # by device; all stages of a device have the same peak
    for stage in plan.stages:
        if stage.peak_memory is not None or stage.sharding is None:
            peaks |= dict.fromkeys(stage.devices, stage.peak_memory or 0)
    total: Counter[str] = Counter()
    for name, peak in peaks.items():
        total[places[name]] += peak
    return dict(total)


def memory_in_turn(plans: Iterable[Plan], places: Mapping[str, str], shared_on: Collection[str] = ()) -> dict[str, int]:
    """Bytes at the peak of plans that run in turn, by place: of the one that needs most there, beside what the others
    keep. `places`: of devices, by their names. On the devices `shared_on`, parameters are the model's own."""
    known = list(plans)
    peaks = [_peaks(plan, places) for plan in known]
    kept: list[Counter[str]] = []
    for plan in known:
        mine: Counter[str] = Counter()
        for stage in plan.stages:
            for name in stage.devices:
                mine[places[name]] += 0 if name in shared_on else int(stage.parameter_bytes or 0)
        kept.append(mine)
    together = sum(kept, Counter())
    needed: dict[str, int] = {}
    for peak, mine in zip(peaks, kept, strict=True):
        for place, nbytes in peak.items():
            needed[place] = max(needed.get(place, 0), nbytes + together[place] - mine[place])
    return needed


def places_of(devices: Sequence[Device]) -> dict[str, str]:
    """By name of a worker, where its bytes count (`MemoryWatch`)."""
    return {d.name: d.name if d.shares_process_memory else str(d.torch_device) for d in devices}


@contextmanager
def _no_repeated_warnings() -> Iterator[None]:
    """The model's own code has given its warnings when it was captured; the plain model would repeat them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    issue_again(caught)


def timed_step(step: Callable[[], object], clear: Callable[[], None], devices: Sequence[Device]) -> float:
    """Seconds of a step that starts without gradients. `clear()` leaves none."""
    clear()
    _, seconds = timed(step, devices)
    clear()  # the next contestant has gradients of its own
    return seconds


def measured_memory(contestant: Contestant, example: Example, devices: Sequence[Device]) -> dict[str, int]:
    """Bytes at the peak of one more step, by place (`MemoryWatch`). Counting bytes slows this step down."""
    contestant.model.zero_grad(set_to_none=True)
    watch = MemoryWatch([d for d in devices if d.name in contestant.plan.used_devices])
    given = torch_private.tree_leaves((example.args, example.kwargs, example.target))
    batch = [x for x in given if isinstance(x, torch.Tensor)]
    resident = [*contestant.model.parameters(), *contestant.model.buffers(), *batch]
    with watch.step(resident), contestant.device_context(watch), _no_repeated_warnings():
        contestant.step()
    contestant.model.zero_grad(set_to_none=True)
    return watch.peaks


def _plain(plan: Plan, call: ComparedCall, device: Device, copies: ParameterCopies) -> Contestant:
    model = copies.make().to(device.torch_device)
    copies.share(model)
    args, kwargs, target = torch_private.tree_map(
        lambda x: x.to(device.torch_device) if isinstance(x, torch.Tensor) else x,
        (call.example.args, call.example.kwargs, call.example.target),
    )
    example = replace(call.example, args=args, kwargs=kwargs, target=target)
    return Contestant(
        name=SINGLE,
        plan=plan,
        model=model,
        step=lambda: whole_step(model, example),
        device_context=lambda context: context(device.name),
        close=lambda: None,
    )


def _pipelined(
    name: str, plan: Plan, call: ComparedCall, devices: Sequence[Device], threads: int, copies: ParameterCopies
) -> Contestant:
    """`threads`: of operators in the caller's thread, where the plan runs the model itself."""
    example = call.example

    def decide(_: Example) -> Plan:
        raise AssertionError("a contestant follows the plan that it got")

    model = copies.make()
    module = PipelinedModule(model, devices, decide, plan=plan, settings=call.settings)
    # Opaque operators and hooks in a captured graph are those of the user's module.
    if not example.program.uncaptured and not any(map(has_hooks, example.model.modules())):
        module.adopt(example)
    module.prepare(example.args, example.kwargs, loss_fn=example.loss, target=example.target)
    copies.share(model)

    def step() -> None:
        if example.loss is own_loss:
            module.train_step(*example.args, **example.kwargs)
        elif example.loss is not None:
            module.train_step(*example.args, target=example.target, loss_fn=example.loss, **example.kwargs)
        else:
            whole_step(module, example)

    def device_context(context: DeviceContext) -> AbstractContextManager[object]:
        return context(plan.used_devices[0]) if runs_in_callers_thread(plan) else module.device_context(context)

    def step_with_callers_threads() -> None:
        with operator_threads(threads):
            step()

    run = step_with_callers_threads if runs_in_callers_thread(plan) else step
    return Contestant(name, plan, model, run, device_context, module.close)


def runs_in_callers_thread(plan: Plan) -> bool:
    """Whether the plan runs the model itself, with as many threads as the caller has set."""
    return len(plan.used_devices) == 1 and plan.n_microbatches == 1


def runs_as_predicted(plan: Plan, devices: Sequence[Device], callers: int | None) -> bool:
    """Whether the plan's operators run on as many threads as its prediction is for: not those of the model itself on a
    CPU, where the caller has set others than a worker has. `callers`: threads; None: a worker's."""
    device = find_device(devices, plan.used_devices[0])
    others = callers not in (None, device.threads) and device.torch_device.type == "cpu"
    return not (others and runs_in_callers_thread(plan))


def whole_step(model: nn.Module, example: Example) -> None:
    """Forward and, in training, backward from the loss of the whole batch."""
    with torch.set_grad_enabled(example.training):
        output = model(*example.args, **example.kwargs)
        if example.training:
            _loss(output, example).backward()


def _loss(output: Any, example: Example) -> torch.Tensor:
    return without_loss_function(output) if example.loss is None else example.loss(output, example.target)


def without_loss_function(output: Any, target: Any = None) -> torch.Tensor:
    """The output's `.loss`, or else the sum of the means of all outputs with a gradient."""
    own = getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    means = [x.mean() for x in torch_private.tree_leaves(output) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not means:
        raise InputError("the model returns nothing with a gradient; give loss_fn= and target=")
    return torch.stack([m.to(means[0].device) for m in means]).sum()
