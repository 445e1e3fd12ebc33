"""What devices send each other in a step: by link and collective, exposed and hidden behind computing."""

from __future__ import annotations

from collections import defaultdict

from autopar.plan.plan import Plan
from autopar.planner.communication import exposed_communication, hidden_communication
from autopar.report.document import Block, Fold, Paragraph, Section, Table
from autopar.report.plan_report.subject import Subject
from autopar.report.plan_report.summary import devices_text
from autopar.report.quantities import percent, seconds_text, size_text
from autopar.report.sharding import CollectiveLine, collective_lines
from autopar.report.stage_devices import along_axis, reach

_UNKNOWN = "-"
_MOST_LINES = 60


def communication(subject: Subject) -> Section:
    """Transfers between stages, collectives inside them, and what of it devices wait for."""
    plan, title = subject.plan, "Communication"
    if plan.predicted_step_time is None:
        return Section(title, (Paragraph("The plan has no predictions, so what devices send is not known."),))
    lines = collective_lines(plan)
    waits = any(exposed_communication(plan)) or any(hidden_communication(plan))
    blocks: list[Block] = []
    if plan.transfers:
        blocks.append(_transfers(plan))
    if lines:
        blocks.append(_by_link(plan, lines))
    if waits:
        blocks.append(_exposed(plan))
    if not blocks:
        return Section(title, (Paragraph("Nothing: one device does everything."),))
    if lines:
        rows = tuple(
            (line.collective, line.axis, line.when, line.reader, f"{line.often:,}", *_amount(plan, line))
            for line in lines[:_MOST_LINES]
        )
        columns = ("collective", "axis", "when", "read by", "per step", "bytes", "time", "of the step")
        left = f", the {_MOST_LINES} longest of {len(lines)}" if len(lines) > _MOST_LINES else ""
        table = Table(f"Collectives of a step{left}", columns, rows, words=4)
        blocks.append(Fold("Every collective, by the operators that read its result", (table,)))
    return Section(title, tuple(blocks))


def _amount(plan: Plan, line: CollectiveLine) -> tuple[str, str, str]:
    step = plan.predicted_step_time or 0.0
    return size_text(line.nbytes), seconds_text(line.seconds), percent(line.seconds / step) if step else _UNKNOWN


def _transfers(plan: Plan) -> Table:
    rows = []
    for link in plan.transfers:
        pairs = zip(plan.stages[link.source].devices, plan.stages[link.target].devices, strict=False)
        rows.append(
            (
                f"stage {link.source} to {link.target}",
                reach(pairs) or _UNKNOWN,
                "the sender waits" if link.blocking else "behind computing",
                size_text(link.forward_bytes),
                size_text(link.backward_bytes),
                seconds_text(link.seconds),
            )
        )
    columns = ("transfer", "link", "sent", "forward", "backward", "both ways")
    return Table("Between stages, for one micro-batch", columns, tuple(rows), words=3)


def _by_link(plan: Plan, lines: list[CollectiveLine]) -> Table:
    """Collectives of the same kind along the same axis, summed over operators."""
    links = _links(plan)
    sums: dict[tuple[str, str, str, str], list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for line in lines:
        total = sums[links.get(line.axis, _UNKNOWN), line.axis, line.collective, line.when]
        for place, value in enumerate((line.often, line.nbytes, line.seconds)):
            total[place] += value
    step = plan.predicted_step_time or 0.0
    rows: tuple[tuple[str, ...], ...] = tuple(
        (*key, f"{often:,.0f}", size_text(nbytes), seconds_text(seconds), percent(seconds / step) if step else _UNKNOWN)
        for key, (often, nbytes, seconds) in sorted(sums.items(), key=lambda item: -item[1][2])
    )
    columns: tuple[str, ...] = ("link", "axis", "collective", "when", "per step", "bytes", "time", "of the step")
    if plan.ranks > 1:  # sums over stages that work at the same time
        columns, rows = columns[:-1], tuple(row[:-1] for row in rows)
    over = ", summed over stages" if plan.ranks > 1 else ""
    return Table(f"Collectives of a step, by link{over}: exposed or hidden", columns, rows, words=4)


def _links(plan: Plan) -> dict[str, str]:
    """Mesh axis -> the links along it, as far as names of devices say it."""
    found: dict[str, set[str]] = defaultdict(set)
    for stage in plan.stages:
        for axis in stage.sharding.axes if stage.sharding is not None else ():
            assert stage.sharding is not None
            found[axis].add(reach(along_axis(stage.devices, stage.sharding, axis)) or _UNKNOWN)
    return {axis: " and ".join(sorted(reaches)) for axis, reaches in found.items()}


def _exposed(plan: Plan) -> Table:
    step = plan.predicted_step_time or 0.0
    pairs = zip(exposed_communication(plan), hidden_communication(plan), strict=True)
    rows = tuple(
        (
            devices_text(plan.stages[rank].devices),
            ", ".join(map(str, plan.stages_of(rank))),
            seconds_text(exposed),
            percent(exposed / step) if step else _UNKNOWN,
            seconds_text(hidden),
            seconds_text(sum(plan.stages[s].sync_time or 0.0 for s in plan.stages_of(rank))),
        )
        for rank, (exposed, hidden) in enumerate(pairs)
    )
    columns = ("devices", "stages", "exposed", "of the step", "hidden", "exposed once a step")
    return Table(
        "Collectives and sums of gradients in a step, on each device: exposed, or hidden behind computing",
        columns,
        rows,
        words=2,
    )
