"""Comparisons of plans as reports: measured ones, and those predicted for a cluster."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.plan.diff import PlanDiff
from autopar.plan.display import reported
from autopar.planner.cluster_comparison import ClusterComparison, PlannedRow
from autopar.report.cluster_comparison import ALIKE, described, gained
from autopar.report.comparison import plan_lines, verdict_text
from autopar.report.document import (
    Bar,
    Bars,
    Block,
    Code,
    Figure,
    Figures,
    Fold,
    Paragraph,
    Part,
    Points,
    Report,
    Section,
    Table,
)
from autopar.report.made_with import command_block, software
from autopar.report.measured_rounds import rounds_blocks, rounds_figures, sentence
from autopar.report.plan_report.verdict import verdict
from autopar.report.quantities import (
    count,
    flops_text,
    no_data_sheet,
    percent,
    rate_text,
    seconds_text,
    share_of_text,
    utilisation_text,
)
from autopar.runtime.comparing.comparison import Comparison, Row

_PARTS = ("computing", "communication", "waiting")


@reported.register
def cluster_comparison_report(comparison: ClusterComparison, command: str | None = None) -> Report:
    """Predicted steps of several plans, and what makes the difference."""
    step = "training step" if comparison.training else "forward pass"
    fastest = comparison.fastest
    others = [row for row in comparison.rows if row is not fastest]
    figures = [
        Figure("fastest that fits" if fastest.fits else "fastest, but none fits", fastest.name, verdict(fastest.plan)),
        Figure("its step", seconds_text(fastest.seconds), f"predicted, {count(comparison.batch_size, 'sample')}"),
        Figure("its throughput", rate_text(fastest.throughput, _unit(fastest))),
        Figure("its model FLOPs utilisation", utilisation_text(fastest.utilisation), "of all devices, used or not"),
    ]
    blocks: list[Block] = [Figures(tuple(figures)), _cluster_table(comparison), _cluster_bars(comparison)]
    if comparison.missing:
        blocks.append(Points(tuple(f"{name} has no row: {why}" for name, why in comparison.missing)))
    if others:
        blocks.append(Points(tuple(f"{fastest.name} against {row.name}: {gained(row, fastest)}" for row in others)))
    assumed = {str(row.plan.assumed) for row in comparison.rows if row.plan.assumed is not None}
    if len(assumed) > 1:  # prices that do not compare plans alone
        texts = tuple(f"{row.name}: priced for a step with {row.plan.assumed}" for row in comparison.rows)
        blocks += [Paragraph("The plans are priced for different ways to run a step:", strong=True), Points(texts)]
    sections = [Section("Comparison", tuple(blocks)), _plans(comparison.rows)]
    if others:
        folds = tuple(
            Fold(f"How {fastest.name} differs from {row.name}", (_diff(comparison.difference(row.name)),))
            for row in others
        )
        sections.append(Section("Differences", folds, ()))
    sources = "Estimated from data sheets: nothing has run on these devices."
    sections.append(_environment(sources, command))
    return Report(
        f"{count(len(comparison.rows), 'plan')} for a {step} on {comparison.cluster}",
        _cluster_verdict(comparison),
        tuple(sections),
        ("estimated from data sheets",),
    )


_AGAIN = "autopar.compare(model, devices, plans, example_args=...)"


def _environment(numbers: str, command: str | None) -> Section:
    """`numbers`: where they come from."""
    made = Paragraph(f"This report was made with {software()}.")
    return Section("Environment", (Paragraph(numbers), made, command_block(command, _AGAIN)))


def _cluster_verdict(comparison: ClusterComparison) -> str:
    fastest = comparison.fastest
    rivals = sorted((row for row in comparison.rows if row is not fastest and row.fits), key=lambda row: row.seconds)
    if not fastest.fits:
        return "No plan fits the memory of the devices."
    if not rivals:
        return f"{fastest.name} is the only plan that fits: {seconds_text(fastest.seconds)} a step."
    gain = rivals[0].seconds / fastest.seconds if fastest.seconds else 1.0
    if gain <= 1 + ALIKE:
        return (
            f"{fastest.name} and {rivals[0].name} are predicted to be about equally fast; no plan that fits is faster."
        )
    return f"{fastest.name} is predicted to be {gain:.2f}x as fast as {rivals[0].name}, the next best that fits."


def _unit(row: PlannedRow) -> str:
    return "tokens" if row.tokens else "samples"


def _cluster_table(comparison: ClusterComparison) -> Table:
    rows = tuple(
        (
            row.name,
            "yes" if row.fits else "no",
            seconds_text(row.seconds),
            rate_text(row.throughput, _unit(row)),
            utilisation_text(row.utilisation),
            share_of_text(row.memory, row.usable),
            percent(row.bubble),
            seconds_text(row.communication),
        )
        for row in comparison.rows
    )
    columns = ("plan", "fits", "step", "throughput", "MFU", "memory", "bubble", "exposed communication")
    caption = "Predicted from data sheets. Memory is that of the fullest device."
    place = comparison.rows.index(comparison.fastest)
    return Table(caption, columns, rows, words=2, accents=(place,))


def _cluster_bars(comparison: ClusterComparison) -> Bars:
    longest = max(row.seconds for row in comparison.rows) or 1.0
    bars = []
    for row in comparison.rows:
        waiting = row.bubble * row.seconds
        exposed = min(row.communication, row.seconds - waiting)
        parts = dict(zip(_PARTS, (row.seconds - waiting - exposed, exposed, waiting), strict=True))
        drawn = tuple(Part(name, s / longest, seconds_text(s)) for name, s in parts.items() if s > 0)
        bars.append(Bar(row.name, seconds_text(row.seconds), drawn))
    return Bars("What a step consists of", "Seconds of a step by what devices do.", _PARTS, tuple(bars))


def _plans(rows: tuple[PlannedRow, ...]) -> Section:
    cells = tuple((row.name, verdict(row.plan), described(row.plan)) for row in rows)
    return Section("Plans", (Table("What the plans do", ("plan", "in short", "stages"), cells, words=3),))


def _diff(difference: PlanDiff) -> Code:
    return Code("", str(difference))


@reported.register
def comparison_report(comparison: Comparison, command: str | None = None) -> Report:
    """Measured steps of several plans and of other systems, beside predictions and the ceiling of the machine."""
    step = "training step" if comparison.training else "forward pass"
    rounds = len(comparison.single.steps)
    fastest = min(comparison.rows, key=lambda row: row.measured)
    figures = [
        Figure("shortest median step of these plans", seconds_text(fastest.measured), fastest.name),
        Figure("rounds", f"{rounds}", "everything took its turn in each"),
        *_utilisation(comparison, fastest),
        *rounds_figures(comparison, fastest),
    ]
    blocks: list[Block] = [Figures(tuple(figures)), *rounds_blocks(comparison)]
    measured = [row for row in comparison.systems if row.steps]
    sections = [Section("Comparison", tuple(blocks)), Section("Plans", (Points(tuple(plan_lines(comparison))),))]
    where = comparison.measured_on or ", ".join(comparison.devices)
    sections.append(_environment(f"Measured on {where}.", command))
    return Report(
        f"{count(len(comparison.rows) + len(measured), 'way', 'ways')} to run a {step} of "
        f"{count(comparison.batch_size, 'sample')} on {', '.join(comparison.devices)}",
        sentence(verdict_text(comparison)),
        tuple(sections),
        ("measured", count(rounds, "round"), *(("the machine was busy",) if comparison.disturbed else ())),
    )


def _utilisation(comparison: Comparison, fastest: Row) -> Iterator[Figure]:
    work = comparison.work
    if work is None or work.flops is None:
        return
    share = comparison.utilisation(fastest)
    rate = f"{flops_text(work.flops / fastest.measured / len(comparison.devices))} a device"
    why = "" if share is not None else f"{no_data_sheet(comparison.device_kinds)}; "
    yield Figure("its model FLOPs utilisation", "unknown" if share is None else utilisation_text(share), f"{why}{rate}")
