"""What rounds measured of plans and of other systems, as blocks of reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.report.comparison import ceiling_text
from autopar.report.document import Bar, Bars, Block, Figure, Part, Points, Section, Table
from autopar.report.quantities import count, largest_text, percent, seconds_text
from autopar.runtime.comparing.comparison import Comparison, Row, SystemRow
from cost_models.measuring.intervals import Interval

ROUNDS = "Beside other ways to run the step"  # title of the section
_TIMES = ("measured", "predicted")


def median_of(row: Row) -> str:
    """What the measured seconds of a row are."""
    return f"median of {count(len(row.steps), 'step')} after warm-up"


def rounds_figures(comparison: Comparison, row: Row) -> Iterator[Figure]:
    """The speed-up of a row, and that of independent processes, over the plain model in the same rounds."""
    alone = f"{comparison.single.name} took {seconds_text(comparison.single.measured)} in the same rounds"
    yield Figure("speed-up over one device", f"{comparison.speed_up(row):.2f}x", alone)
    if comparison.ceiling_speed_up is not None and comparison.ceiling is not None:
        took = f"{seconds_text(comparison.ceiling.measured)}: {comparison.ceiling.how}"
        yield Figure("ceiling of this machine", f"{comparison.ceiling_speed_up:.2f}x", took)


def rounds_section(comparison: Comparison) -> Section:
    """The rounds as a section of another report; a terminal shows them as `print(comparison)` does."""
    return Section(ROUNDS, tuple(rounds_blocks(comparison)), (comparison,))


def rounds_blocks(comparison: Comparison) -> Iterator[Block]:
    """Bars, tables, and what else there is to say."""
    yield _measured_bars(comparison)
    yield _measured_table(comparison)
    measured = [row for row in comparison.systems if row.steps]
    if measured:
        yield _systems_table(comparison, measured)
    remarks = [f"{row.name} was not run: {row.refused}" for row in comparison.systems if row.refused]
    if comparison.ceiling is not None:
        remarks.append(sentence(ceiling_text(comparison)))
    if remarks:
        yield Points(tuple(remarks))


def sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _interval_text(interval: Interval) -> str:
    return f"{seconds_text(interval.low)} to {seconds_text(interval.high)}"


def _measured_table(comparison: Comparison) -> Table:
    rows = tuple(
        (
            row.name,
            row.plan.places,
            seconds_text(row.measured),
            _interval_text(row.interval),
            "-" if row.predicted is None else seconds_text(row.predicted),
            "-" if row.error is None else percent(row.error, "+"),
            f"{comparison.speed_up(row):.2f}x",
            largest_text(row.predicted_memory.values()),
            largest_text(row.measured_memory.values()),
        )
        for row in comparison.rows
    )
    columns = (
        *("plan", "devices", "median step", "interval", "predicted", "error", "speed-up"),
        *("peak predicted", "peak measured"),
    )
    caption = (
        "Plans. Intervals are those of the median, by bootstrap over the steps. Error: predicted / measured - 1. Peaks "
        "are those of the fullest device, without optimizer state."
    )
    return Table(caption, columns, rows, words=2)


def _systems_table(comparison: Comparison, measured: Sequence[SystemRow]) -> Table:
    rows = []
    for row in measured:
        seconds, interval = row.measured, row.interval
        assert seconds is not None
        assert interval is not None
        gain = f"{comparison.single.measured / seconds:.2f}x"
        rows.append((row.name, row.how, seconds_text(seconds), _interval_text(interval), gain))
    columns = ("system", "how", "median step", "interval", "speed-up")
    return Table("Other systems, in the same rounds", columns, tuple(rows), words=2)


def _measured_bars(comparison: Comparison) -> Bars:
    """A bar with its interval for each median, one for each prediction, and a line at the ceiling."""
    ceiling = None if comparison.ceiling is None else comparison.ceiling.measured
    systems = [row for row in (*comparison.systems, comparison.ceiling) if row is not None and row.steps]
    every: list[Row | SystemRow] = [*comparison.rows, *systems]
    ends = [interval.high for row in every if (interval := row.interval) is not None]
    longest = max([*ends, *(row.predicted or 0.0 for row in comparison.rows)]) or 1.0
    limit = None if ceiling is None else ceiling / longest
    bars = [bar for row in comparison.rows for bar in _pair(row, longest, limit)]
    bars += [bar for row in systems for bar in _pair(row, longest, limit)]
    description = "A bar for the median of measured steps, with its interval, and one for the prediction."
    name = "" if ceiling is None else "ceiling: independent processes"
    return Bars("Steps: medians with their intervals, and predictions", description, _TIMES, tuple(bars), name)


def _pair(row: Row | SystemRow, longest: float, limit: float | None) -> list[Bar]:
    measured, interval = row.measured, row.interval
    assert measured is not None
    assert interval is not None
    text = seconds_text(measured)
    ends = interval.low / longest, interval.high / longest
    name = f"{row.name}, measured" if isinstance(row, Row) else row.name
    bars = [
        Bar(name, f"{text} ({_interval_text(interval)})", (Part(_TIMES[0], measured / longest, text),), limit, ends)
    ]
    if isinstance(row, Row) and row.predicted is not None:
        text = seconds_text(row.predicted)
        bars.append(Bar(f"{row.name}, predicted", text, (Part(_TIMES[1], row.predicted / longest, text),), limit))
    return bars
