"""The split-size curve of PyTorch's model-parallel tutorial: predictions next to measurements."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.sweep import PIPELINE, REPLICAS, Sweep

_LOOKS = {PIPELINE: ("best two-stage pipeline", "tab:blue", "o"), REPLICAS: ("two replicas", "tab:orange", "s")}


def split_size_curve(
    sweep: Sweep,
    title: str,
    plain: Sequence[float],
    ceiling: Sequence[float],
    automatic: Sequence[float],
    auto_microbatches: int,
    path: Path,
) -> None:
    """Step time over the number of micro-batches, to `path`: medians over the rounds, with bars from the first to the
    third quartile.

    Args:
        plain: s, steps of the plain model on one thread, in the rounds of the sweep.
        ceiling: s, steps of independent processes in the same rounds.
        automatic: s, steps of the automatic plan in the same rounds.
        auto_microbatches: of the automatic plan.

    Raises:
        ImportError: without matplotlib.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.add_subplot()
    counts = sorted({point.n_microbatches for point in sweep.points})
    axes.axhline(median(plain), color="0.4", linewidth=1, label="plain model, 1 thread")
    axes.axhspan(*np.percentile(plain, (25, 75)), color="0.4", alpha=0.15, linewidth=0)
    axes.axhline(median(ceiling), color="0.4", linewidth=1, linestyle=":", label="ceiling: independent processes")
    places = [(p.n_microbatches, p.measured) for p in sweep.points if p.shape == PIPELINE]
    axes.plot(*zip(*places, strict=True), ".", color="tab:blue", alpha=0.35, label="every pipeline of the sweep")
    for shape, (label, colour, marker) in _LOOKS.items():
        measured = sweep.best(shape, attrgetter("measured"))
        medians = [point.measured for point in measured.values()]
        spread = np.array([_spread(point.steps) for point in measured.values()]).T
        axes.errorbar(list(measured), medians, spread, color=colour, marker=marker, capsize=3, label=label)
        predicted = sweep.best(shape, attrgetter("predicted"))
        seconds = [point.predicted for point in predicted.values()]
        axes.plot(list(predicted), seconds, "x--", color=colour, alpha=0.8, label=f"{label}, predicted")
    axes.errorbar(
        [auto_microbatches],
        [median(automatic)],
        np.array([_spread(automatic)]).T,
        fmt="*",
        markersize=17,
        capsize=4,
        color="tab:red",
        zorder=3,  # over the curves
        label="automatic plan",
    )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted({*counts, auto_microbatches})))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("micro-batches per step")
    axes.set_ylabel(f"step time (s): median of {len(plain)} rounds, bars: quartiles")
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.25)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def _spread(steps: Sequence[float]) -> tuple[float, float]:
    """From the first quartile to the median, and from there to the third; s."""
    first, middle, third = np.percentile(steps, (25, 50, 75))
    return middle - first, third - middle
