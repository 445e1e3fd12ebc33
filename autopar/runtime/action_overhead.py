"""What the runtime itself takes for an action on this machine, measured on stages whose operators are tiny.

A step of two stages, a `Linear(8)` each, takes longer by every further micro-batch:

    the plain model, micro-batches in turn     p                   forward and backward of both operators and the loss
    one worker does all actions                p + 4 alone
    two workers, busy at once                  p / 2 + 2 busy      a worker does the two actions of its stage

A backward of n operators that comes in two parts takes n splitting longer than a whole one.

What one thread does is measured in CPU time, which other programs hardly disturb: the median of many steps counts. Two
workers wake each other, which takes time but no CPU time: of their steps the fastest counts. The results hold for every
model, and are cached like other measurements.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import cache as once
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from autopar.analysis.example import Example
from autopar.capture import torch_private
from autopar.capture.thread_state import neutral_state
from autopar.costs.measured import measurement_cache
from autopar.costs.python_overhead import PythonOverhead
from autopar.errors import without_warnings
from autopar.lower.split_backward import input_part
from autopar.plan.plan import Plan
from autopar.runtime.module import PipelinedModule
from cost_models import Device, parse_devices, signature_key
from cost_models.hardware.devices import operator_threads

_WIDTH, _ROWS = 8, 16
_FEW, _MANY = 2, 10  # micro-batches
_ROUNDS = 30
_OPERATORS = 16  # of a backward in two parts
_LONGEST = 1e-3  # s: what takes longer is no overhead of Python, but a disturbed measurement


def python_overhead(devices: tuple[Device, ...], *, cache: bool) -> PythonOverhead:
    """What Python takes on this machine. Constants where a device is no CPU: its workers also launch kernels.

    Measured once: for all processes with `cache`, for this process without.
    """
    if any(device.torch_device.type != "cpu" for device in devices):
        return PythonOverhead()
    with measurement_cache(cache) as store:
        key = signature_key("python overhead")
        known = store.get(key, _from_json) if store is not None else None
        if known is None:
            known = measured_once()
            if store is not None:
                store.put(key, asdict(known))
    return known


@once
def measured_once() -> PythonOverhead:
    """`python_overhead` of CPU workers, measured."""
    # The user's random numbers stay as they would be.
    with (
        neutral_state({"cpu"}),
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        operator_threads(1),
        without_warnings(),
    ):
        times, splitting = _times(), _splitting()
    plain, alone, busy = (times[name] for name in ("plain", "one worker", "two workers"))
    one = max(0.0, (alone - plain) / 4)
    return PythonOverhead(busy=max(one, (busy - plain / 2) / 2), alone=one, splitting=splitting)


def _times() -> dict[str, float]:
    """Seconds by which a further micro-batch makes a step longer."""
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH))
    x = torch.linspace(-1, 1, _ROWS * _MANY * _WIDTH).reshape(-1, _WIDTH)

    def in_turn(n: int) -> None:
        for part in x[: n * _ROWS].split(_ROWS):
            mse_loss(model(part), part).backward()

    modules = {n: _pipelined(model, n) for n in (_FEW, _MANY)}

    def by_one(n: int) -> None:
        part = x[: n * _ROWS]
        modules[n].train_step(part, target=part, loss_fn=mse_loss)

    def by_two(n: int) -> None:
        with modules[n].device_context(lambda device: nullcontext()):  # which every worker enters for itself
            by_one(n)

    # Should a disturbed step make the runtime use two workers for the next, the CPU time of both counts.
    steps = {"plain": in_turn, "one worker": by_one, "two workers": by_two}
    clocks = {"plain": time.process_time, "one worker": time.process_time, "two workers": time.perf_counter}
    taken: dict[tuple[str, int], list[float]] = {(name, n): [] for name in steps for n in (_FEW, _MANY)}
    try:
        for _ in range(_ROUNDS):
            for (name, n), seconds in taken.items():
                model.zero_grad()
                start = clocks[name]()
                steps[name](n)
                seconds.append(clocks[name]() - start)
    finally:
        for module in modules.values():
            module.close()

    def typical(name: str, n: int) -> float:
        return min(taken[name, n]) if name == "two workers" else median(taken[name, n])

    return {name: max(0.0, typical(name, _MANY) - typical(name, _FEW)) / (_MANY - _FEW) for name in steps}


def _pipelined(model: nn.Module, n_microbatches: int) -> PipelinedModule:
    def decide(example: Example) -> Plan:
        raise AssertionError("the plan is given")

    plan = Plan.from_split({"0": 0, "1": 1}, n_microbatches=n_microbatches)
    return PipelinedModule(model, parse_devices(["cpu", "cpu"]), decide, plan=plan)


def _splitting() -> float:
    """Seconds by which an operator's backward in two parts is longer than a whole one."""
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_OPERATORS)))
    x = torch.linspace(-1, 1, _ROWS * _WIDTH).reshape(-1, _WIDTH).requires_grad_()
    gradient = x.detach()

    def whole(output: torch.Tensor) -> None:
        torch_private.run_backward((output,), (gradient,), False)

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
    if not all(type(s) in (int, float) and 0 <= s < _LONGEST for s in asdict(found).values()):
        raise ValueError(f"cached overheads must be seconds from 0 to {_LONGEST:g}")
    return found
