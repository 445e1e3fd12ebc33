"""What the GPU benchmark promises of one device, each promise measured on one model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import autopar
from autopar import Cluster, PipelinedModule, Plan
from benchmarks.gpu_memory import growth, memory
from benchmarks.gpu_models import Subject
from benchmarks.gpu_setting import (
    N_MICROBATCHES,
    Finding,
    Setting,
    batches,
    closing,
    one_stage_plan,
    skipped,
    slots,
    title,
    train_step,
    two_stage_plan,
)
from benchmarks.timing import Step, interleave, ratio
from cost_models.hardware.devices import synchronize

CARDS = ("A100", "H100", "H200", "B200", "V100", "T4", "L4", "RTX 4090")  # whose data sheets are known

Interval = tuple[float, float]  # start and end


def in_turn(
    systems: dict[str, Step], setting: Setting, clear: Step, places: Sequence[str] = ()
) -> dict[str, tuple[float, ...]]:
    """For every system, seconds per step in each round. A round of a system repeats its step for
    `setting.seconds`; the host waits only at its end, for the device or for all `places`."""
    devices = [torch.device(place) for place in dict.fromkeys(places)] or [setting.device]

    def repeated(step: Step, count: int) -> Step:
        def run() -> None:
            for _ in range(count):
                clear()
                step()
            synchronize(*devices)

        return run

    once = interleave({name: repeated(step, 1) for name, step in systems.items()}, 1)
    longest = max(seconds for (seconds,) in once.values())
    count = max(1, round(setting.seconds / longest))
    found = interleave({name: repeated(step, count) for name, step in systems.items()}, setting.rounds)
    clear()
    return {name: tuple(s / count for s in seconds) for name, seconds in found.items()}


# -- one device wrapped -----------------------------------------------------------------------------------------------


def wrapped(subject: Subject, setting: Setting) -> Iterator[Finding]:
    """The module wrapped for one device, against the model as it is."""
    work, device = subject.workload, [str(setting.device)]
    with closing(autopar.parallelize(work.model, device, tune=0, **subject.call)) as pm:
        systems: dict[str, Step] = {
            "eager": work.step,
            "wrapped": lambda: _call_and_backward(pm, subject),
            "train_step": lambda: train_step(pm, subject),
        }
        seconds = in_turn(systems, setting, work.clear)
    for name in ("wrapped", "train_step"):
        yield _ratio(subject, f"one device, {name} / eager", seconds[name], seconds["eager"], 1.01)


def compiled(subject: Subject, setting: Setting) -> Iterator[Finding]:
    """The same with both compiled, which takes minutes by itself."""
    work, device = subject.workload, [str(setting.device)]
    plain = torch.compile(work.model, backend=setting.backend)
    options = {**subject.call, "tune": 0, "compile": setting.backend}
    with closing(autopar.parallelize(work.model, device, **options)) as pm:
        systems: dict[str, Step] = {
            "torch.compile": lambda: _call_and_backward(plain, subject),
            "wrapped": lambda: _call_and_backward(pm, subject),
        }
        seconds = in_turn(systems, setting, work.clear)
    promise = "one device, wrapped, compile=True / torch.compile"
    yield _ratio(subject, promise, seconds["wrapped"], seconds["torch.compile"], 1.01)


# -- two stages, and what was predicted -------------------------------------------------------------------------------


def stages(subject: Subject, setting: Setting) -> Iterator[Finding]:
    """Two stages on one device against one stage there with the same micro-batches; predicted and measured steps."""
    work = subject.workload
    plans: dict[str, tuple[Plan, list[str]]] = {}
    for m in (1, N_MICROBATCHES):
        plans[title(1, m)] = one_stage_plan(subject, m), slots(setting, 1)
        plans[title(2, m)] = two_stage_plan(subject, m), slots(setting, 2)
    modules = {name: autopar.parallelize(work.model, where, plan=plan) for name, (plan, where) in plans.items()}
    try:
        systems = {name: _stepping(module, subject) for name, module in modules.items()}
        seconds = in_turn(systems, setting, work.clear)
    finally:
        for module in modules.values():
            module.close()
    for m in (1, N_MICROBATCHES):
        promise = f"two stages on one device / one, {batches(m)}"
        yield _ratio(subject, promise, seconds[title(2, m)], seconds[title(1, m)], 1.05)
    for name, (plan, where) in plans.items():
        priced = autopar.plan(work.model, where, plan=plan, optimizer="none", tune=0, **subject.call)
        measured = median(seconds[name])
        yield _prediction(subject, f"step predicted by measured costs, {name}", priced, measured, 0.10)
    yield _by_data_sheet(subject, setting, median(seconds[title(1, 1)]))


def _by_data_sheet(subject: Subject, setting: Setting, measured: float) -> Finding:
    promise, goal = "step predicted by data-sheet costs", "within 20 %"
    sheet = data_sheet(torch.cuda.get_device_name(setting.device)) if setting.is_gpu else "cpu"
    if sheet is None:
        return Finding(subject.name, promise, goal, None, "", None, "no data sheet of this card is known")
    cluster = Cluster.preset(f"1x{sheet}")
    plan = one_stage_plan(subject, 1)
    priced = autopar.plan(subject.workload.model, cluster, plan=plan, optimizer="none", **subject.call)
    return _prediction(subject, promise, priced, measured, 0.20, f"data sheet of {sheet}")


def data_sheet(card: str) -> str | None:
    """The name of the card's data sheet: "NVIDIA A100-SXM4-80GB" is an A100-80."""
    for name in CARDS:
        if re.search(rf"\b{name}\b", card):  # not the L4 of an L40
            if name == "A100":
                return "A100-80" if "80GB" in card else "A100-40"
            return name.replace(" ", "")
    return None


def _prediction(
    subject: Subject, promise: str, plan: Plan, measured: float, tolerance: float, note: str = ""
) -> Finding:
    goal = f"within {tolerance:.0%}".replace("%", " %")
    if plan.predicted_step_time is None:
        return Finding(subject.name, promise, goal, None, "", None, "no prediction")
    error = plan.predicted_step_time / measured - 1
    times = f"{plan.predicted_step_time * 1e3:.4g} ms predicted, {measured * 1e3:.4g} measured"
    met = abs(error) <= tolerance
    return Finding(subject.name, promise, goal, error, f"{error:+.1%}", met, ", ".join(filter(None, (times, note))))


# -- what runs at once, and what waits --------------------------------------------------------------------------------


def overlap(subject: Subject, setting: Setting) -> Iterator[Finding]:
    """Copies of micro-batches from the host while kernels run, as the profiler's trace has them."""
    promise, goal = "copies overlapped with computing", "some"
    if not setting.is_gpu:
        yield skipped(subject, promise, goal, "CPU workers share one memory and copy nothing")
        return
    work = subject.workload
    inputs = {name: x.cpu().pin_memory() for name, x in work.inputs.items()}
    with closing(autopar.parallelize(work.model, slots(setting, 2), plan=two_stage_plan(subject, 8))) as pm:
        for _ in range(3):
            pm.train_step(**inputs, target=work.target, loss_fn=work.loss)
        synchronize(setting.device)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            pm.train_step(**inputs, target=work.target, loss_fn=work.loss)
            synchronize(setting.device)
    work.clear()
    copies, kernels = copies_and_kernels(trace.events())
    if not copies:
        yield Finding(subject.name, promise, goal, None, "", False, "the trace has no copy from the host")
        return
    total = sum(end - start for start, end in copies)
    share = overlapped(copies, kernels) / total
    note = f"of {total:.0f} us of copies in the trace of a step, 8 micro-batches from pinned memory"
    yield Finding(subject.name, promise, goal, share, f"{share:.0%}", share > 0, note)


def copies_and_kernels(events: Iterable[Any]) -> tuple[list[Interval], list[Interval]]:
    """From a profiler's events, when a GPU copied from or to another place, and when it computed; in microseconds."""
    copies, kernels = [], []
    for event in events:
        if event.device_type != DeviceType.CUDA:
            continue
        interval = (float(event.time_range.start), float(event.time_range.end))
        if any(direction in event.name for direction in ("HtoD", "DtoH", "PtoP")):
            copies.append(interval)
        elif not event.name.startswith(("Memcpy", "Memset", "autopar")) and not getattr(event, "is_user_annotation", 0):
            kernels.append(interval)
    return copies, kernels


def overlapped(copies: Sequence[Interval], kernels: Sequence[Interval]) -> float:
    """The time of the copies during which a kernel runs."""
    busy: list[list[float]] = []
    for start, end in sorted(kernels):
        if busy and start <= busy[-1][1]:
            busy[-1][1] = max(busy[-1][1], end)
        else:
            busy.append([start, end])
    return sum(max(0.0, min(end, last) - max(start, first)) for start, end in copies for first, last in busy)


def no_wait(subject: Subject, setting: Setting) -> Iterator[Finding]:
    """A step in which every wait of the host for the GPU is an error."""
    promise, goal = "no host synchronisation in a step", "none"
    if not setting.is_gpu:
        yield skipped(subject, promise, goal, "only a GPU can be waited for")
        return
    work = subject.workload
    for n_stages, plan in ((1, one_stage_plan(subject, N_MICROBATCHES)), (2, two_stage_plan(subject, N_MICROBATCHES))):
        of_plan = f"{promise}, {title(n_stages, N_MICROBATCHES)}"
        with closing(autopar.parallelize(work.model, slots(setting, n_stages), plan=plan)) as pm:
            for _ in range(3):
                train_step(pm, subject)
            error = ""
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                train_step(pm, subject)
            except RuntimeError as raised:
                error = str(raised).partition("\n")[0]
            finally:
                torch.cuda.set_sync_debug_mode(before)
        work.clear()
        yield Finding(subject.name, of_plan, goal, float(bool(error)), "some" if error else "none", not error, error)


# -- shared -----------------------------------------------------------------------------------------------------------

PARTS: tuple[Callable[[Subject, Setting], Iterator[Finding]], ...] = (
    memory,  # first: what others leave behind would count
    wrapped,
    stages,
    overlap,
    no_wait,
    growth,
    compiled,
)


def _call_and_backward(module: Any, subject: Subject) -> None:
    work = subject.workload
    work.loss(module(**work.inputs), work.target).backward()


def _stepping(module: PipelinedModule, subject: Subject) -> Step:
    return lambda: train_step(module, subject)


def _ratio(subject: Subject, promise: str, mine: Sequence[float], other: Sequence[float], most: float) -> Finding:
    value = ratio(mine, other)
    note = f"{median(mine) * 1e3:.4g} ms, {median(other) * 1e3:.4g} ms"
    return Finding(subject.name, promise, f"at most {most:g}", value, f"{value:.3f}", value <= most, note)
