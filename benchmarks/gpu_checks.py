"""What the GPU benchmark promises of one device, each promise measured on one model."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import autopar
from autopar import Cluster, PipelinedModule, Plan
from autopar.runtime.comparing.contestants import predicted_memory
from benchmarks.gpu_models import Subject
from benchmarks.memory import allocated, nbytes
from benchmarks.timing import Step, interleave, ratio
from cost_models import parse_devices
from cost_models.hardware.devices import synchronize
from cost_models.memory.training_memory import FRAGMENTATION, WORKSPACE

N_MICROBATCHES = 4
CARDS = ("A100", "H100", "H200", "B200", "V100", "T4", "L4", "RTX 4090")  # whose data sheets are known

Interval = tuple[float, float]  # start and end


@dataclass(frozen=True)
class Setting:
    """Where and how long everything runs."""

    device: torch.device
    quick: bool
    rounds: int  # of steps in turn: A B A B ...
    seconds: float  # that each round of a system takes at least
    steps: int  # of the long run
    backend: str = "inductor"  # of torch.compile

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"


FULL = (5, 0.5, 100)
QUICK = (2, 0.0, 20)


@dataclass(frozen=True)
class Finding:
    """One promise on one model."""

    model: str
    promise: str
    goal: str
    value: float | None  # in the unit of the goal; None: not measured
    text: str  # the value as shown
    met: bool | None  # None: not measured, or not judged
    note: str = ""  # why not, or how measured


def slots(setting: Setting, count: int) -> list[str]:
    """`count` workers on the one device."""
    return [str(setting.device)] * count


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
    with _closing(autopar.parallelize(work.model, device, tune=0, **subject.call)) as pm:
        systems: dict[str, Step] = {
            "eager": work.step,
            "wrapped": lambda: _call_and_backward(pm, subject),
            "train_step": lambda: _train_step(pm, subject),
        }
        seconds = in_turn(systems, setting, work.clear)
    for name in ("wrapped", "train_step"):
        yield _ratio(subject, f"one device, {name} / eager", seconds[name], seconds["eager"], 1.01)


def compiled(subject: Subject, setting: Setting) -> Iterator[Finding]:
    """The same with both compiled, which takes minutes by itself."""
    work, device = subject.workload, [str(setting.device)]
    plain = torch.compile(work.model, backend=setting.backend)
    options = {**subject.call, "tune": 0, "compile": setting.backend}
    with _closing(autopar.parallelize(work.model, device, **options)) as pm:
        systems: dict[str, Step] = {
            "torch.compile": lambda: _call_and_backward(plain, subject),
            "wrapped": lambda: _call_and_backward(pm, subject),
        }
        seconds = in_turn(systems, setting, work.clear)
    promise = "one device, wrapped, compile=True / torch.compile"
    yield _ratio(subject, promise, seconds["wrapped"], seconds["torch.compile"], 1.01)


# -- two stages, and what was predicted -------------------------------------------------------------------------------


def one_stage_plan(subject: Subject, n_microbatches: int) -> Plan:
    return Plan.from_split({next(iter(subject.split)): 0}, n_microbatches=n_microbatches)


def two_stage_plan(subject: Subject, n_microbatches: int) -> Plan:
    return Plan.from_split(subject.split, n_microbatches=n_microbatches)


def stages(subject: Subject, setting: Setting) -> Iterator[Finding]:
    """Two stages on one device against one stage there with the same micro-batches; predicted and measured steps."""
    work = subject.workload
    plans: dict[str, tuple[Plan, list[str]]] = {}
    for m in (1, N_MICROBATCHES):
        plans[_title(1, m)] = one_stage_plan(subject, m), slots(setting, 1)
        plans[_title(2, m)] = two_stage_plan(subject, m), slots(setting, 2)
    modules = {name: autopar.parallelize(work.model, where, plan=plan) for name, (plan, where) in plans.items()}
    try:
        systems = {name: _stepping(module, subject) for name, module in modules.items()}
        seconds = in_turn(systems, setting, work.clear)
    finally:
        for module in modules.values():
            module.close()
    for m in (1, N_MICROBATCHES):
        promise = f"two stages on one device / one, {_batches(m)}"
        yield _ratio(subject, promise, seconds[_title(2, m)], seconds[_title(1, m)], 1.05)
    for name, (plan, where) in plans.items():
        priced = autopar.plan(work.model, where, plan=plan, optimizer="none", tune=0, **subject.call)
        measured = median(seconds[name])
        yield _prediction(subject, f"step predicted by measured costs, {name}", priced, measured, 0.10)
    yield _by_data_sheet(subject, setting, median(seconds[_title(1, 1)]))


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


# -- memory -----------------------------------------------------------------------------------------------------------


def memory(subject: Subject, setting: Setting) -> Iterator[Finding]:
    """Predicted against measured bytes at the peak of a training step with AdamW."""
    plans = {
        _title(1, 1): (one_stage_plan(subject, 1), slots(setting, 1)),
        _title(1, N_MICROBATCHES): (one_stage_plan(subject, N_MICROBATCHES), slots(setting, 1)),
        _title(2, N_MICROBATCHES): (two_stage_plan(subject, N_MICROBATCHES), slots(setting, 2)),
    }
    for name, (plan, where) in plans.items():
        promise, goal = f"peak memory predicted, {name}", "within 5 %, under by at most 1 %"
        if not setting.is_gpu and name != _title(1, 1):  # its workers' allocations are not those of this thread
            yield _skipped(subject, promise, goal, "only a GPU counts what several threads allocate")
            continue
        optimizer = torch.optim.AdamW(subject.workload.model.parameters())
        priced = autopar.plan(subject.workload.model, where, plan=plan, optimizer=optimizer, tune=0, **subject.call)
        # Plans set the bytes of libraries aside on every device.
        tensors, libraries = (
            sum(predicted_memory(priced, parse_devices(where)).values()),
            WORKSPACE[setting.device.type],
        )
        peak = _peak(subject, setting, plan, where, optimizer)
        error = (tensors + libraries) / peak.allocated - 1
        note = f"{(tensors + libraries) / 1e6:.4g} MB predicted, {peak.allocated / 1e6:.4g} measured"
        if peak.requested:
            note += f", of which {peak.requested / 1e6:.4g} asked for"
        yield Finding(subject.name, promise, goal, error, f"{error:+.1%}", -0.01 <= error <= 0.05, note)
        if peak.reserved:
            aside = libraries + tensors * (1 + FRAGMENTATION[setting.device.type])
            share = peak.reserved / aside
            promise, goal = f"memory taken from the driver / set aside by the plan, {name}", "at most 1"
            note = f"{peak.reserved / 1e6:.4g} MB taken, {aside / 1e6:.4g} set aside"
            yield Finding(subject.name, promise, goal, share, f"{share:.3f}", share <= 1, note)


class _Peak(NamedTuple):
    """Bytes at the peak of a step."""

    allocated: int
    requested: int = 0  # on a GPU: allocated, without what is left over of blocks that were not cut
    reserved: int = 0  # on a GPU: blocks and the gaps between them


def _peak(
    subject: Subject, setting: Setting, plan: Plan, where: Sequence[str], optimizer: torch.optim.Optimizer
) -> _Peak:
    """Of a step whose optimizer has its states. On a GPU, of everything that lies there."""
    work = subject.workload
    if setting.is_gpu:
        torch.cuda.empty_cache()
    with _closing(autopar.parallelize(work.model, list(where), plan=plan)) as pm:

        def step() -> None:
            _train_step(pm, subject)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            step()
        gc.collect()
        if setting.is_gpu:
            synchronize(setting.device)
            torch.cuda.reset_peak_memory_stats(setting.device)
            step()
            synchronize(setting.device)
            found = torch.cuda.memory_stats(setting.device)
            return _Peak(*(found[f"{kind}_bytes.all.peak"] for kind in _Peak._fields))
        states = [value for state in optimizer.state.values() for value in state.values()]
        held = [*work.model.parameters(), *work.model.buffers(), *work.inputs.values(), work.target, *states]
        return _Peak(nbytes(held) + allocated(step)[0])


# -- what runs at once, and what waits --------------------------------------------------------------------------------


def overlap(subject: Subject, setting: Setting) -> Iterator[Finding]:
    """Copies of micro-batches from the host while kernels run, as the profiler's trace has them."""
    promise, goal = "copies overlapped with computing", "some"
    if not setting.is_gpu:
        yield _skipped(subject, promise, goal, "CPU workers share one memory and copy nothing")
        return
    work = subject.workload
    inputs = {name: x.cpu().pin_memory() for name, x in work.inputs.items()}
    with _closing(autopar.parallelize(work.model, slots(setting, 2), plan=two_stage_plan(subject, 8))) as pm:
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
        yield _skipped(subject, promise, goal, "only a GPU can be waited for")
        return
    work = subject.workload
    for n_stages, plan in ((1, one_stage_plan(subject, N_MICROBATCHES)), (2, two_stage_plan(subject, N_MICROBATCHES))):
        title = f"{promise}, {_title(n_stages, N_MICROBATCHES)}"
        with _closing(autopar.parallelize(work.model, slots(setting, n_stages), plan=plan)) as pm:
            for _ in range(3):
                _train_step(pm, subject)
            error = ""
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                _train_step(pm, subject)
            except RuntimeError as raised:
                error = str(raised).partition("\n")[0]
            finally:
                torch.cuda.set_sync_debug_mode(before)
        work.clear()
        yield Finding(subject.name, title, goal, float(bool(error)), "some" if error else "none", not error, error)


def growth(subject: Subject, setting: Setting) -> Iterator[Finding]:
    """Bytes in use after many steps of two stages, less those after the first few. Two samples a step."""
    work = subject.rows(2)
    promise = f"growth of memory over {setting.steps} steps"
    with _closing(autopar.parallelize(work.model, slots(setting, 2), plan=two_stage_plan(subject, 2))) as pm:

        def run(count: int) -> int:
            for _ in range(count):
                pm.train_step(**work.inputs, target=work.target, loss_fn=work.loss)
                work.clear()
            return in_use(setting.device)

        first = run(10)
        grown = run(setting.steps) - first
    yield Finding(subject.name, promise, "0 bytes", float(grown), f"{grown} bytes", grown <= 0)


def in_use(device: torch.device) -> int:
    """Bytes of the tensors on a device."""
    gc.collect()
    if device.type == "cuda":
        synchronize(device)
        return torch.cuda.memory_allocated(device)
    return nbytes(x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter))


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


@contextmanager
def _closing(module: PipelinedModule) -> Iterator[PipelinedModule]:
    try:
        yield module
    finally:
        module.close()


def _call_and_backward(module: Any, subject: Subject) -> None:
    work = subject.workload
    work.loss(module(**work.inputs), work.target).backward()


def _train_step(module: PipelinedModule, subject: Subject) -> None:
    work = subject.workload
    module.train_step(**work.inputs, target=work.target, loss_fn=work.loss)


def _stepping(module: PipelinedModule, subject: Subject) -> Step:
    return lambda: _train_step(module, subject)


def _title(n_stages: int, n_microbatches: int) -> str:
    return f"{n_stages} stage{'s' if n_stages > 1 else ''}, {_batches(n_microbatches)}"


def _batches(count: int) -> str:
    return "1 micro-batch" if count == 1 else f"{count} micro-batches"


def _ratio(subject: Subject, promise: str, mine: Sequence[float], other: Sequence[float], most: float) -> Finding:
    value = ratio(mine, other)
    note = f"{median(mine) * 1e3:.4g} ms, {median(other) * 1e3:.4g} ms"
    return Finding(subject.name, promise, f"at most {most:g}", value, f"{value:.3f}", value <= most, note)


def _skipped(subject: Subject, promise: str, goal: str, why: str) -> Finding:
    return Finding(subject.name, promise, goal, None, "", None, why)
