"""The first screen: how fast, how full, what holds it back, and how sure that is."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.analysis.example import ABOUT_WHOLE_BATCH
from autopar.costs.history import costs_of
from autopar.plan.plan import ONE_DEVICE, ONE_MICROBATCH
from autopar.planner.change import Change
from autopar.planner.device_memory import OWNERS, DeviceMemory
from autopar.planner.explain import PER_HALF
from autopar.report.document import Bar, Bars, Block, Figure, Figures, Fold, Heading, Paragraph, Part, Points, Section
from autopar.report.explain import bottleneck_text
from autopar.report.measured_rounds import median_of, rounds_figures
from autopar.report.plan_report.how_good import how_good
from autopar.report.plan_report.subject import Subject
from autopar.report.quantities import (
    count,
    digits,
    duration_text,
    flops_text,
    no_data_sheet,
    percent,
    rate_text,
    seconds_text,
    share_of_text,
    size_text,
    utilisation_text,
)

_AMOUNTS = ((1e12, "1T tokens"), (1e9, "1B tokens"), (1e6, "1M tokens"))
_SAMPLES = 1e6  # where neither tokens nor the size of the data set are known
_HOUR = 3600.0
_LONG = 10 * 365.25 * 86400.0  # s: nobody trains for longer, so a smaller amount says more
_WORTH = 0.005  # gains below this share of the step help nobody
_MOST_HELPS = 3
_ROOM = 1.02  # the drawing is this much wider than what it shows
_BARELY = 4  # a limit this many times beyond the peak is not drawn


def summary(subject: Subject) -> Section:
    """The section that a reader sees first."""
    blocks: list[Block] = [Figures(tuple(_figures(subject)))]
    if subject.plan.predicted_step_time is None:
        reasons = [note for note in subject.plan.notes if not note.startswith((*ABOUT_WHOLE_BATCH, ONE_MICROBATCH))]
        why = "; ".join(reasons) or "it was made by hand, and nothing has priced it"
        what = "what it takes and holds" if subject.measured is None else "what its devices hold, and what bounds it,"
        until = "until autopar.plan(model, devices, plan=plan, ...) prices it"
        blocks.append(Paragraph(f"This plan has no predictions ({why}): {what} is unknown {until}.", strong=True))
    blocks += list(_slower(subject))
    if subject.fullest is not None:
        blocks.append(memory_bars((subject.fullest,), "Memory of the fullest device at its peak"))
    blocks += list(_bottleneck(subject))
    sure = tuple(how_sure(subject))
    if sure:
        blocks += [Heading("How sure is this?"), Points(sure)]
    if subject.plan.optimality and how_good(subject.plan):
        blocks.append(Fold("What is proven of the plan", (Paragraph(f"{subject.plan.optimality}."),)))
    return Section("At a glance", tuple(blocks))


def _figures(subject: Subject) -> Iterator[Figure]:
    plan, step = subject.plan, subject.step_time
    yield Figure("step time", seconds_text(step), _step_note(subject))
    if step and subject.samples:
        yield _throughput(subject, step)
    yield _utilisation(subject, step)
    yield _memory(subject)
    yield from _duration(subject, step)
    if subject.row is not None and subject.comparison is not None:
        yield from rounds_figures(subject.comparison, subject.row)
    elif plan.single_device_time is not None and plan.predicted_step_time and subject.n_devices > 1:
        speed_up = plan.single_device_time / plan.predicted_step_time
        note = f"predicted: a step takes {seconds_text(plan.single_device_time)} on {ONE_DEVICE}"
        yield Figure("speed-up over one device", f"{digits(speed_up)}x", note)


def _slower(subject: Subject) -> Iterator[Block]:
    """A sentence about a plan that one device would outrun."""
    alone, step = subject.plan.single_device_time, subject.plan.predicted_step_time
    if alone is not None and step is not None and len(subject.plan.used_devices) > 1 and alone < step:
        other = f"{ONE_DEVICE}, which is predicted to take {seconds_text(alone)} a step"
        yield Paragraph(f"This plan is slower than {other} against {seconds_text(step)}.", strong=True)


def _step_note(subject: Subject) -> str:
    if subject.step_time is None:
        return "not predicted"
    size = count(subject.samples, "sample") if subject.samples else ""
    if subject.measured is None:
        return f"predicted, {size}" if size else "predicted"
    measured = "measured" if subject.row is None else median_of(subject.row)
    if subject.predicted is None:
        return f"{measured}, {size}"
    error = percent(subject.predicted / subject.measured - 1, "+")
    return f"{measured}, {size}; predicted {seconds_text(subject.predicted)} ({error})"


def _throughput(subject: Subject, step: float) -> Figure:
    tokens, samples = subject.tokens, subject.samples or 0
    amount, what = (tokens, "tokens") if tokens else (samples, "samples")
    each = f"{rate_text(amount / step / subject.n_devices, what)} for each of {subject.n_devices} devices"
    note = each if subject.n_devices > 1 else ""
    if tokens:
        note = "; ".join(filter(None, [rate_text(samples / step, "samples"), note]))
    return Figure("throughput", rate_text(amount / step, what), note)


def _utilisation(subject: Subject, step: float | None) -> Figure:
    label, work, plan = "model FLOPs utilisation", subject.plan.work, subject.plan
    if work is None or step is None:
        return Figure(label, "unknown", "the plan is not priced")
    if subject.samples != plan.batch_size:
        return Figure(label, "unknown", f"FLOPs are counted for {count(plan.batch_size or 0, 'sample')} a step")
    if work.flops is None:
        return Figure(label, "unknown", "FLOPs are not counted, because some code runs without a captured graph")
    rate = f"{flops_text(work.flops / step / subject.n_devices)} a device"
    share = work.utilisation(step)
    if share is None:
        return Figure(label, "unknown", f"{no_data_sheet(plan.device_kinds)}; {rate}")
    return Figure(label, utilisation_text(share), rate)


def _memory(subject: Subject) -> Figure:
    fullest = subject.fullest
    if fullest is None:
        return Figure("memory", "unknown", "the plan does not say what devices hold")
    over = fullest.usable is not None and fullest.peak > fullest.usable
    where = f"at the peak of the fullest device, {stages_text(fullest.stages)}"
    return Figure("memory", share_of_text(fullest.peak, fullest.usable), f"does not fit: {where}" if over else where)


def _duration(subject: Subject, step: float | None) -> Iterator[Figure]:
    """The time and the price of an epoch, of 1T tokens, or of 1M samples."""
    wanted, tokens = subject.wanted, subject.tokens
    if not (step and subject.samples):
        return
    if wanted.samples_per_epoch is not None:
        seconds, label = wanted.samples_per_epoch / subject.samples * step, "time per epoch"
        note = f"{digits(wanted.samples_per_epoch)} samples"
    elif tokens:
        times = [(amount / tokens * step, what) for amount, what in _AMOUNTS]
        seconds, what = next((one for one in times if one[0] < _LONG), times[-1])
        label, note = f"time per {what}", "without restarts and evaluations"
    else:
        seconds, label = _SAMPLES / subject.samples * step, "time per 1M samples"
        note = "samples_per_epoch= shows the time of an epoch"
    yield Figure(label, duration_text(seconds), note)
    if wanted.price_per_device_hour is not None:
        hours = seconds / _HOUR * subject.n_devices
        price = f"{wanted.currency}{digits(hours * wanted.price_per_device_hour)}"
        hour = wanted.price_per_device_hour
        each = f"{wanted.currency}{hour:.2f}" if round(hour, 2) == hour else f"{wanted.currency}{hour:g}"
        yield Figure(label.replace("time", "price"), price, f"{digits(hours)} device-hours at {each}")


def memory_bars(places: tuple[DeviceMemory, ...], title: str) -> Bars:
    """One bar for each place, as wide as the memory of its devices: its owners, and the limit."""
    width = _ROOM * max([one.peak for one in places] + [one.usable for one in places if one.usable is not None])
    bars = tuple(
        Bar(
            f"{devices_text(one.devices)}, {stages_text(one.stages)}",
            f"{share_of_text(one.peak, one.usable)}" + (f", {percent(one.peak / one.usable)}" if one.usable else ""),
            tuple(
                Part(owner, nbytes / width if width else 0.0, size_text(nbytes))
                for owner, nbytes in one.owners.items()
                if nbytes
            ),
            None if one.usable is None or not width else one.usable / width,
        )
        for one in places
    )
    drawn = any(bar.limit is not None for bar in bars)
    description = "Bytes by owner."
    return Bars(title, description, OWNERS, bars, "usable memory" if drawn else "")


def limit_in_sight(one: DeviceMemory) -> int | None:
    """The usable bytes, where a drawing over time that shows how bytes come and go can show them, too."""
    return one.usable if one.usable is not None and one.usable <= _BARELY * one.peak else None


def stages_text(stages: tuple[int, ...]) -> str:
    """`stage 0`, `stages 0, 2, 4`."""
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


def devices_text(names: tuple[str, ...]) -> str:
    """`cpu:0`, or the first and the number of many."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _bottleneck(subject: Subject) -> Iterator[Block]:
    explained = subject.explanation
    if explained.bottleneck is None:
        return
    yield Heading("What holds it back?")
    yield Paragraph(bottleneck_text(explained))
    helps = sorted(explained.helps, key=lambda change: change.step_time)
    worth = [change for change in helps if change.gain(subject.plan) > _WORTH][:_MOST_HELPS]
    if worth:
        yield Points(tuple(f"{_helped(change)}: {percent(change.gain(subject.plan))} less" for change in worth))


def _helped(change: Change) -> str:
    whose = "half of its" if change.what.endswith(PER_HALF) else "a"
    return f"with {change.what.removesuffix(PER_HALF)}, {whose} step takes {seconds_text(change.step_time)}"


def how_sure(subject: Subject) -> Iterator[str]:
    """Where the numbers come from, how far such numbers were off before, and what is proven."""
    plan = subject.plan
    if subject.measured is not None:
        rest = "the rest is predicted" if plan.predicted_step_time is not None else "nothing was predicted"
        yield f"The step was measured on these devices; {rest}."
    elif plan.predicted_step_time is not None:
        estimated = costs_of(plan) == "estimated"
        yield (
            "Estimated from data sheets: nothing has run on these devices."
            if estimated
            else "Predicted from operators that were timed on these devices; the step itself has not run."
        )
    if plan.predicted_step_time is not None:
        yield _history(subject)
    if plan.optimality:
        yield f"How good the plan is: {' '.join(how_good(plan)) or f'{plan.optimality}.'}"


def _history(subject: Subject) -> str:
    whole = subject.accuracy.overall
    source = "estimates" if costs_of(subject.plan) == "estimated" else "predictions"
    if whole is None:
        return f"No such {source} for devices of this kind have been compared with measured steps on this machine yet."
    return (
        f"Earlier {source} for devices of this kind were off by {percent(whole.median)} in the median and "
        f"{percent(whole.worst)} at worst, over {count(whole.n, 'measured plan')}."
    )
