"""The split-size curve of PyTorch's model-parallel tutorial, with what was predicted beside what was measured."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

from benchmarks.sweep import PIPELINE, REPLICAS, Sweep

_LOOKS = {PIPELINE: ("best pure pipeline", "tab:blue", "o"), REPLICAS: ("two replicas", "tab:orange", "s")}


def split_size_curve(sweep: Sweep, title: str, single: float, auto_microbatches: int, path: Path) -> None:
    """Step time over the number of micro-batches, to `path`.

    The curves are of the fastest steps in the sweep; the star is the median of steps measured again.

    Args:
        single: s, the plain model's step on one thread.
        auto_microbatches: what the automatic plan chose.

    Raises:
        ImportError: without matplotlib.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.add_subplot()
    counts = sorted({point.n_microbatches for point in sweep.points})
    axes.axhline(single, color="0.4", linewidth=1, label="plain model, 1 thread")
    places = [(p.n_microbatches, p.measured) for p in sweep.points if p.shape == PIPELINE]
    axes.plot(*zip(*places, strict=True), ".", color="tab:blue", alpha=0.35, label="every pipeline of the sweep")
    for shape, (label, colour, marker) in _LOOKS.items():
        measured, predicted = (sweep.best(shape, attrgetter(kind)) for kind in ("measured", "predicted"))
        axes.plot(list(measured), list(measured.values()), color=colour, marker=marker, label=label)
        axes.plot(
            list(predicted), list(predicted.values()), "x--", color=colour, alpha=0.8, label=f"{label}, predicted"
        )
    automatic = sweep.finals[0].measured
    axes.plot([auto_microbatches], [automatic], "*", markersize=17, color="tab:red", label="automatic plan")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted({*counts, auto_microbatches})))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("micro-batches in a step")
    axes.set_ylabel("step time (s)")
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.25)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
