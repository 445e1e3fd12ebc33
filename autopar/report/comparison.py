"""A comparison of plans and of other systems as text."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.plan.display import shown
from autopar.plan.made_by_hand import BY_HAND
from autopar.plan.plan import Plan
from autopar.report.plan_report.verdict import verdict
from autopar.report.quantities import count, utilisation_note, utilisation_text
from autopar.report.tables import megabytes, milliseconds, paragraph, table
from autopar.runtime.comparing.comparison import Comparison, Row, SystemRow
from cost_models.measuring.intervals import Interval

_FIRST_TO_GO = ("schedule", "peak MB\nmeas-\nured", "peak MB\npredic-\nted", "error")
_FOOT = (
    "interval: of the median, by bootstrap over the steps. error: predicted / measured - 1. peak MB: of the device "
    "with the highest peak, without optimizer state."
)


@shown.register
def _comparison(comparison: Comparison) -> str:
    step = "training step" if comparison.training else "forward pass"
    head = paragraph(
        f"One {step} of {comparison.batch_size} samples on {', '.join(comparison.devices)}, "
        f"median of {len(comparison.single.steps)} steps, plans in turn"
    )
    columns = ["plan", "stages", "micro-\nbatches", "schedule", "predic-\nted ms", "meas-\nured ms", "interval\nms"]
    columns += ["error", "speed-up", "peak MB\npredic-\nted", "peak MB\nmeas-\nured"]
    rows = [_cells(comparison, row) for row in comparison.rows]
    foot = _FOOT
    if all(comparison.utilisation(row) is not None for row in comparison.rows):
        columns.append("MFU")
        for cells, row in zip(rows, comparison.rows, strict=True):
            cells.append(utilisation_text(comparison.utilisation(row) or 0.0))
        foot += f" {utilisation_note(map(comparison.utilisation, comparison.rows))}"
    parts = [head, table(columns, rows, words=2, first_to_go=_FIRST_TO_GO)]
    measured = [row for row in comparison.systems if row.steps]
    if measured:
        names = ["other system", "how", "meas-\nured ms", "interval\nms", "speed-up"]
        parts.append(table(names, [_system_cells(comparison, row) for row in measured], words=2))
    parts += [paragraph(line) for line in plan_lines(comparison)]
    parts += [paragraph(f"{row.name} was not run: {row.refused}") for row in comparison.systems if row.refused]
    if comparison.ceiling is not None:
        parts.append(paragraph(ceiling_text(comparison)))
    if len(comparison.rows) + len(measured) > 1:
        parts.append(paragraph(verdict_text(comparison)))
    if comparison.measured_on:
        parts.append(paragraph(f"measured on {comparison.measured_on}"))
    return "\n\n".join([*parts, paragraph(foot)])


def plan_lines(comparison: Comparison) -> Iterator[str]:
    """What each plan does, and the names that did not run because they are the same plan."""
    for row in comparison.plans:
        yield f"{row.name}: {verdict(row.plan)}{_by_hand(row.plan)}{_threads(comparison, row)}"
    for name, other in comparison.same.items():
        yield f"{name}: the same plan as {other}, which ran for both."


def _threads(comparison: Comparison, row: Row) -> str:
    """That the row ran the model itself with the caller's threads, unlike the first row."""
    if row.threads is None:
        return ""
    how = f" It ran the model itself on {count(row.threads, 'thread')}, as many as the caller has set; "
    return f"{how}'{comparison.single.name}' ran on those of one worker."


def _by_hand(plan: Plan) -> str:
    """That nobody searched for the plan, and for replicas, which kind of data parallelism they are."""
    degrees = next((note for note in plan.notes if note.startswith(BY_HAND)), BY_HAND if plan.split else "")
    if not degrees:
        return ""
    text = f" It was made {degrees.removesuffix(': ')}."
    if any(stage.replicas > 1 for stage in plan.stages):
        text += (
            " Its data parallelism: each replica is a thread of this process with micro-batches of its own, and their "
            'gradients are added once a step; systems=["DDP"] runs DistributedDataParallel.'
        )
    return text


def verdict_text(comparison: Comparison) -> str:
    """The winner in a sentence, or why there is none."""
    verdict = comparison.verdict
    if verdict.interval is None:
        return f"only {verdict.fastest} was run"
    low, high = verdict.interval.low, verdict.interval.high
    ratio = f"{verdict.rival} takes {low:.2f} to {high:.2f} times as long as {verdict.fastest}"
    if verdict.winner is not None:
        return f"winner: {verdict.winner}; {ratio} ({verdict.interval.level:.0%} interval over rounds)"
    if low > 1:
        n = len(comparison.single.steps)
        return f"no winner: {n} steps allow an interval of {verdict.interval.level:.0%} only ({ratio})"
    return f"no winner: the intervals overlap: {ratio} ({verdict.interval.level:.0%} interval over rounds)"


def ceiling_text(comparison: Comparison) -> str:
    """What the machine gave at most while this was measured."""
    row, gain = comparison.ceiling, comparison.ceiling_speed_up
    assert row is not None
    if row.measured is None or gain is None:
        return f"ceiling was not measured: {row.refused}"
    text = f"ceiling: {milliseconds(row.measured)} ms, {gain:.2f}x one device ({row.how}, in the same rounds)"
    if comparison.disturbed:
        text += (
            f". Undisturbed devices give nearly {len(comparison.devices)}x: something else uses the cores, or they "
            "share what bounds this model. Compare plans with the ceiling"
        )
    return text


def _cells(comparison: Comparison, row: Row) -> list[str]:
    single = row is comparison.single
    return [
        row.name,
        row.plan.places,
        "-" if single else str(row.plan.n_microbatches),
        "-" if single else row.plan.schedule,
        milliseconds(row.predicted),
        milliseconds(row.measured),
        _interval(row.interval),
        "-" if row.error is None else f"{row.error:+.1%}",
        f"{comparison.speed_up(row):.2f}x",
        megabytes(max(row.predicted_memory.values(), default=None)),
        megabytes(max(row.measured_memory.values(), default=None)),
    ]


def _system_cells(comparison: Comparison, row: SystemRow) -> list[str]:
    seconds, interval = row.measured, row.interval
    assert seconds is not None
    assert interval is not None
    gain = f"{comparison.single.measured / seconds:.2f}x"
    return [row.name, row.how, milliseconds(seconds), _interval(interval), gain]


def _interval(interval: Interval) -> str:
    return f"{milliseconds(interval.low)}-{milliseconds(interval.high)}"
