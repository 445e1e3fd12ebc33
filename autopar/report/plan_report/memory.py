"""What devices hold, by owner at the peak, and over the time of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.planner.device_memory import OWNERS, DeviceMemory
from autopar.report.document import Band, Block, Curve, Curves, Fold, Paragraph, Section, Table
from autopar.report.plan_report.subject import Subject
from autopar.report.plan_report.summary import devices_text, limit_in_sight, memory_bars, stages_text
from autopar.report.quantities import digits, percent, seconds_text, share_of_text, size_text, ticks

_MOST_PLACES = 16
_MOST_ROWS = 400  # of the curves as a table
_ROOM = 1.05


def memory(subject: Subject) -> Section:
    """Peaks and curves of every place in the pipeline."""
    title, places = "Memory", subject.memory
    if not places:
        text = "The plan does not say what its devices hold: it has no prices, or an older version of autopar wrote it."
        return Section(title, (Paragraph(text),))
    shown = places[:_MOST_PLACES]
    blocks: list[Block] = [memory_bars(shown, "At the peak, by owner")]
    if len(places) > len(shown):
        blocks.append(Paragraph(f"{len(places) - len(shown)} more places of the pipeline are in the table."))
    blocks += [_table(places), _curves(subject, shown), *_as_table(shown), *map(Paragraph, _remarks(places))]
    return Section(title, tuple(blocks))


def _table(places: Sequence[DeviceMemory]) -> Table:
    rows = []
    for one in places:
        owners = [size_text(one.owners[owner]) if one.owners[owner] else "0" for owner in OWNERS]
        free = "-" if one.usable is None else percent(1 - one.peak / one.usable) if one.usable else "-"
        stages = ", ".join(map(str, one.stages))
        rows.append((devices_text(one.devices), stages, size_text(one.peak), size_text(one.usable), free, *owners))
    columns = ("devices", "stages", "peak", "usable", "free", *OWNERS)
    return Table("Bytes on the fullest device of each place in the pipeline", columns, tuple(rows), words=2)


def _curves(subject: Subject, places: Sequence[DeviceMemory]) -> Curves:
    timeline = subject.timeline
    assert timeline is not None, "memory comes from the timeline"
    end = timeline.step_time or 1.0
    highest = [max(nbytes for _, nbytes in one.over_time) for one in places]
    limits = [limit_in_sight(one) for one in places]
    top = _ROOM * max([*highest, *(limit for limit in limits if limit is not None)])
    curves = tuple(
        Curve(
            f"{devices_text(one.devices)}, {stages_text(one.stages)}",
            f"at most {share_of_text(high, one.usable)}",
            tuple(_bands(one, end, top)),
            None if limit is None else limit / top,
        )
        for one, high, limit in zip(places, highest, limits, strict=True)
    )
    names = (*OWNERS[:3], _MOVING)
    description = "Bytes that a device holds over one step: what stays, and activations that come and go."
    limit_name = "usable memory" if any(limit is not None for limit in limits) else ""
    return Curves(
        f"Over the time of a step{_enlarged(places, top)}",
        description,
        names,
        curves,
        ticks(end),
        size_text(top),
        limit_name,
    )


def _enlarged(places: Sequence[DeviceMemory], top: float) -> str:
    """A remark on the title where a limit is too far above the drawing to be shown."""
    far = [one.usable for one in places if one.usable is not None and limit_in_sight(one) is None]
    return (
        f", enlarged: the limit of {size_text(min(far))} is {digits(min(far) / top)} times the height of the chart"
        if far
        else ""
    )


_MOVING = "activations and workspace"


def _bands(one: DeviceMemory, end: float, top: float) -> Iterator[Band]:
    height = 0.0
    for owner, nbytes in one.resident.items():
        height += nbytes
        yield Band(owner, ((0.0, height / top),))
    yield Band(_MOVING, tuple((time / end, nbytes / top) for time, nbytes in one.over_time))


def _remarks(places: Sequence[DeviceMemory]) -> Iterator[str]:
    if any(one.peak != max(nbytes for _, nbytes in one.over_time) for one in places):
        yield (
            "Peaks come from a rehearsal of the step, tensor by tensor; the curves follow the search's formula, which "
            "is a little off. Activations at the peak are what the other owners leave of it."
        )


def _as_table(places: Sequence[DeviceMemory]) -> list[Block]:
    """The curves for those who cannot see them, where they are not too long to be read."""
    rows = tuple(
        (devices_text(one.devices), ", ".join(map(str, one.stages)), seconds_text(time), size_text(nbytes))
        for one in places
        for time, nbytes in one.over_time
    )
    if len(rows) > _MOST_ROWS:
        return []
    columns = ("devices", "stages", "from", "bytes")
    return [Fold("The curves as a table", (Table("Bytes that a device holds, from when on", columns, rows, words=2),))]
