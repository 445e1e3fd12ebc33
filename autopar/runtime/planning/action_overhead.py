"""What the runtime itself takes for an action on this machine, measured on stages whose operators are tiny.

A step of two stages, a `Linear(8)` each, takes longer by every further micro-batch:

    the plain model, micro-batches in turn     p                   forward and backward of both operators and the loss
    one worker does all actions                p + 4 alone
    two workers, busy at once                  p / 2 + 2 busy      a worker does the two actions of its stage

A backward of n operators that comes in two parts takes n splitting longer than a whole one.

What one thread does is measured in CPU time, which other programs hardly disturb: the median of many steps counts. Two
workers wake each other, which takes time but no CPU time: of their steps the fastest counts. The results hold for every
model, and are cached like other measurements.

GPUs have prices of their own, as their workers also launch kernels, record events and copy between devices: the two
workers are those of two GPUs, or of a GPU and the CPU. One worker does all actions of two stages on one GPU. Steps
start when the GPUs are idle; CPU time ends with the last launch, wall time with the last kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, astuple, replace
from functools import cache as once
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from autopar.analysis.example import Example
from autopar.capture import torch_private_autograd
from autopar.capture.thread_state import neutral_state
from autopar.costs.measured import measurement_cache
from autopar.costs.python_overhead import PythonOverhead
from autopar.errors import without_warnings
from autopar.lower.split_backward import input_part
from autopar.plan.plan import Plan
from autopar.runtime.module import PipelinedModule
from cost_models import Device, parse_devices, signature_key
from cost_models.hardware.devices import operator_threads, synchronize

_WIDTH, _ROWS = 8, 16
_FEW, _MANY = 2, 10  # micro-batches
_ROUNDS = 30
_OPERATORS = 16  # of a backward in two parts
_LONGEST = 1e-3  # s: what takes longer is no overhead of Python, but a disturbed measurement


def python_overhead(devices: tuple[Device, ...], *, cache: bool) -> PythonOverhead:
    """What Python takes on this machine for an action of workers of these devices.

    Measured once: for all processes with `cache`, for this process without.
    """
    gpus = _gpus_among(devices)
    with measurement_cache(cache) as store:
        key = signature_key("python overhead", *(device.kind for device in gpus))
        known = store.get(key, _from_json) if store is not None else None
        if known is None:
            known = measured_once(gpus)
            if store is not None and _is_sound(known):
                store.put(key, asdict(known))
    return known


def _gpus_among(devices: Sequence[Device]) -> tuple[Device, ...]:
    """The workers that Python is measured on: () for CPU workers alone, else two of `devices` with hardware of their
    own, the first a GPU; one where there is a single GPU and nothing else."""
    different = {device.torch_device: device for device in reversed(devices)}
    ordered = sorted(different.values(), key=lambda device: (device.torch_device.type == "cpu", devices.index(device)))
    if not ordered or ordered[0].torch_device.type == "cpu":
        return ()
    # Their free memory changes, but no result.
    return tuple(replace(device, name=_name(device), memory=0) for device in ordered[:2])


def _name(device: Device) -> str:
    return "cpu:0" if device.torch_device.type == "cpu" else str(device.torch_device)


@once
def measured_once(gpus: tuple[Device, ...] = ()) -> PythonOverhead:
    """`python_overhead`, measured: of CPU workers, or of what `_gpus_among` finds."""
    # The user's random numbers stay as they would be.
    with (
        neutral_state({"cpu", *(device.torch_device.type for device in gpus)}),
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        operator_threads(1),
        without_warnings(),
    ):
        times, splitting = _times(gpus), _splitting()
    plain = times["plain"]
    one = max(0.0, (times["one worker"] - plain) / 4)
    busy = max(one, (times["two workers"] - plain / 2) / 2) if "two workers" in times else one
    return PythonOverhead(busy=busy, alone=one, splitting=splitting)


def _times(gpus: tuple[Device, ...]) -> dict[str, float]:
    """Seconds by which a further micro-batch makes a step longer. One GPU alone has no "two workers"."""
    place = gpus[0].torch_device if gpus else torch.device("cpu")
    cpu_x = torch.linspace(-1, 1, _ROWS * _MANY * _WIDTH).reshape(-1, _WIDTH)
    x = cpu_x.to(place)
    plain = _model().to(place)
    models: list[nn.Module] = [plain]

    def in_turn(n: int) -> None:
        for part in x[: n * _ROWS].split(_ROWS):
            mse_loss(plain(part), part).backward()

    with ExitStack() as stack:

        def modules_on(devices: Sequence[Device]) -> dict[int, PipelinedModule]:
            modules = {}
            for n in (_FEW, _MANY):
                models.append(_model())
                modules[n] = _pipelined(models[-1], devices, n)
                stack.callback(modules[n].close)
                example = cpu_x[: n * _ROWS]
                modules[n].prepare((example,), {}, target=example, loss_fn=mse_loss)
            return modules

        # Should a disturbed step make the runtime use two workers for the next, the CPU time of both counts.
        one = modules_on(_slots_of(gpus[0]) if gpus else parse_devices(["cpu", "cpu"]))
        steps = {"plain": in_turn, "one worker": _train_steps(one, x, _as_it_is)}
        if len(gpus) != 1:
            steps["two workers"] = _train_steps(modules_on(gpus) if gpus else one, x, _by_every_worker)
        taken: dict[tuple[str, int], list[float]] = {(name, n): [] for name in steps for n in (_FEW, _MANY)}
        for _ in range(_ROUNDS):
            for (name, n), seconds in taken.items():
                for model in models:
                    model.zero_grad()
                seconds.append(_seconds_of(partial(steps[name], n), gpus, until_idle=name == "two workers"))

    def typical(name: str, n: int) -> float:
        return min(taken[name, n]) if name == "two workers" else median(taken[name, n])

    return {name: max(0.0, typical(name, _MANY) - typical(name, _FEW)) / (_MANY - _FEW) for name in steps}


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH))


def _pipelined(model: nn.Module, devices: Sequence[Device], n_microbatches: int) -> PipelinedModule:
    def decide(example: Example) -> Plan:
        raise AssertionError("the plan is given")

    names = [device.name for device in devices]
    plan = Plan.from_split({"0": 0, "1": 1}, n_microbatches=n_microbatches, devices=names)
    return PipelinedModule(model, devices, decide, plan=plan)


def _slots_of(gpu: Device) -> tuple[Device, Device]:
    """Two slots of a GPU, whose actions one worker does."""
    return gpu, replace(gpu, name=f"{gpu.name}#1")


_How = Callable[[PipelinedModule], AbstractContextManager[Any]]


def _train_steps(modules: Mapping[int, PipelinedModule], x: torch.Tensor, how: _How) -> Callable[[int], None]:
    """A step of n micro-batches for every n of `modules`."""

    def step(n: int) -> None:
        part = x[: n * _ROWS]
        with how(modules[n]):
            modules[n].train_step(part, target=part, loss_fn=mse_loss)

    return step


def _as_it_is(module: PipelinedModule) -> AbstractContextManager[None]:
    return nullcontext()


def _by_every_worker(module: PipelinedModule) -> AbstractContextManager[None]:
    """Every worker must enter it for itself, so that none does the actions of both."""
    return module.device_context(lambda device: nullcontext())


def _seconds_of(step: Callable[[], None], gpus: Sequence[Device], *, until_idle: bool) -> float:
    """Of the wall until the GPUs are idle, or CPU seconds until the step is launched."""
    synchronize(*gpus)
    clock = time.perf_counter if until_idle else time.process_time
    start = clock()
    step()
    if until_idle:
        synchronize(*gpus)
    return clock() - start


def _splitting() -> float:
    """Seconds by which an operator's backward in two parts is longer than a whole one."""
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_OPERATORS)))
    x = torch.linspace(-1, 1, _ROWS * _WIDTH).reshape(-1, _WIDTH).requires_grad_()
    gradient = x.detach()

    def whole(output: torch.Tensor) -> None:
        torch_private_autograd.run_backward((output,), (gradient,), False)

    def in_parts(output: torch.Tensor) -> None:
        _, weights = input_part([(output, gradient)], [x])
        weights.run(False)

    taken: dict[Callable[[torch.Tensor], None], list[float]] = {whole: [], in_parts: []}
    for _ in range(_ROUNDS):
        for backward, seconds in taken.items():
            model.zero_grad()
            output = model(x)
            start = time.thread_time()
            backward(output)
            seconds.append(time.thread_time() - start)
    return max(0.0, median(taken[in_parts]) - median(taken[whole])) / _OPERATORS


def _from_json(value: Any) -> PythonOverhead:
    """The cached overhead. Raises TypeError or ValueError for anything else."""
    found = PythonOverhead(**value)
    if not _is_sound(found):
        raise ValueError(f"cached overheads must be seconds from 0 to {_LONGEST:g}")
    return found


def _is_sound(found: PythonOverhead) -> bool:
    """Whether other processes may rely on it: it was not measured while something else kept the machine busy."""
    return all(type(s) in (int, float) and 0 <= s < _LONGEST for s in astuple(found))
