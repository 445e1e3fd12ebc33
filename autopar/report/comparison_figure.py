"""A comparison as a figure: a line for each row, its median with its interval, and its prediction.

one device  |                              o-|-x
auto        |         x-|-o        :                   o predicted   -|- measured, with interval
torchgpipe  |              --|--   :                   : ceiling
            +--------------------------------- ms
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError, InputError
from autopar.plan.display import drawn
from autopar.planner.cluster_comparison import ClusterComparison
from autopar.report.comparison import verdict_text
from autopar.runtime.comparing.comparison import Comparison
from cost_models.measuring.intervals import Interval

_MEASURED, _PREDICTED, _CEILING = "#1f77b4", "#d95f02", "0.35"


@dataclass(frozen=True)
class _Line:
    name: str
    predicted: float | None  # s
    measured: float | None  # s
    interval: Interval | None = None  # of the measured seconds


@drawn.register
def _comparison(comparison: Comparison, path: Path) -> None:
    lines = [_Line(row.name, row.predicted, row.measured, row.interval) for row in comparison.rows]
    lines += [_Line(row.name, None, row.measured, row.interval) for row in comparison.systems if row.steps]
    step = "training step" if comparison.training else "forward pass"
    title = f"One {step} of {comparison.batch_size} samples on {', '.join(comparison.devices)}"
    rounds = len(comparison.single.steps)
    note = f"{verdict_text(comparison)}\nmedians of {rounds} steps, bars: bootstrap intervals; {comparison.measured_on}"
    ceiling = None if comparison.ceiling is None else comparison.ceiling.measured
    _draw(lines, title, note, path, ceiling)


@drawn.register
def _cluster_comparison(comparison: ClusterComparison, path: Path) -> None:
    lines = [_Line(row.name + ("" if row.fits else " (does not fit)"), row.seconds, None) for row in comparison.rows]
    title = f"One step of {comparison.batch_size} samples on {comparison.cluster}"
    _draw(lines, title, "predicted from data sheets", path, None)


def check_figure(path: Path) -> None:
    """Raise InputError for a file that is no picture, and AutoparError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise AutoparError('the figure needs matplotlib: pip install "autopar[figure]"') from error
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise InputError(f"figure {path}: the name must end in .png, .svg or .pdf")


def _draw(lines: Sequence[_Line], title: str, note: str, path: Path, ceiling: float | None) -> None:
    check_figure(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.8 + 0.4 * len(lines)), layout="constrained")
    axes: Any = figure.add_subplot()
    for place, line in enumerate(lines):
        if line.measured is not None:
            bars = None
            if line.interval is not None:
                below, above = line.measured - line.interval.low, line.interval.high - line.measured
                bars = [[1e3 * max(0.0, below)], [1e3 * max(0.0, above)]]
            label = "measured" if not place else None
            axes.errorbar(1e3 * line.measured, place, xerr=bars, fmt="|", color=_MEASURED, capsize=4, label=label)
        if line.predicted is not None:
            label = "predicted" if not place else None
            axes.plot(1e3 * line.predicted, place, "o", color=_PREDICTED, fillstyle="none", label=label)
    if ceiling is not None:
        axes.axvline(1e3 * ceiling, color=_CEILING, linestyle=":", label="ceiling: independent processes")
    axes.set(yticks=range(len(lines)), yticklabels=[line.name for line in lines], xlabel="ms a step")
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_xlim(0, 1.05 * axes.get_xlim()[1])
    axes.grid(axis="x", alpha=0.3)
    axes.set_title(title, fontsize=11)
    figure.supxlabel(note, fontsize=7, color="0.35", wrap=True)
    figure.legend(loc="outside upper right", frameon=False, fontsize=8, ncols=3)
    figure.savefig(path, dpi=150)
