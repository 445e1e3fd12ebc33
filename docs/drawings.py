"""Draws the figures of the concept pages from autopar's own schedules: `python docs/drawings.py`."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import matplotlib.patches
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from autopar.schedule.builders import SPLIT_BACKWARD, make_schedule
from autopar.schedule.clock import Phase, Transfer
from autopar.schedule.simulate import StageTimes, simulate
from autopar.schedule.timeline import Timeline

ASSETS = Path(__file__).parent / "assets"
DEVICES, MICROBATCHES = 4, 8
# Stages of a device.
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved-1f1b": 2, "zb-h1": 1, "interleaved-zb": 2, "zb-v": 2}
COLOURS = {Phase.FORWARD: "#4c8fd6", Phase.BACKWARD: "#e08a3c", Phase.INPUT: "#e08a3c", Phase.WEIGHT: "#5aa469"}
WORDS = {"forward": Phase.FORWARD, "backward": Phase.BACKWARD, "gradients of weights": Phase.WEIGHT}
_GREY = "#808080"  # reads on white and on black


def timeline(name: str, chunks: int) -> Timeline:
    """A step in which a device's forward of a micro-batch takes 1, and its backward 2, half of it for weights."""
    each, m = 1 / chunks, MICROBATCHES
    weight = (each,) * m if name in SPLIT_BACKWARD else ()
    times = [StageTimes((each,) * m, (2 * each,) * m, weight) for _ in range(DEVICES * chunks)]
    sends = [Transfer(s, s + 1, (0.0,) * m, (0.0,) * m) for s in range(len(times) - 1)]
    return simulate(make_schedule(name, m, [1] * DEVICES, chunks=chunks), times, sends)


def draw_step(axes: Axes, step: Timeline, end: float) -> None:
    """One box for each action, with the number of its micro-batch; a device's second stage is paler."""
    for slot, action, start, stop in step.events:
        later = action.stage >= DEVICES
        axes.broken_barh(
            [(start, stop - start)],
            (slot - 0.42, 0.84),
            facecolors=COLOURS[action.phase],
            edgecolors="white",
            linewidth=0.5,
            alpha=0.6 if later else 1.0,
        )
        axes.text((start + stop) / 2, slot, str(action.microbatch), ha="center", va="center", fontsize=6, color="white")
    axes.set(xlim=(0, end), ylim=(DEVICES - 0.5, -0.5), xticks=[], yticks=range(DEVICES))
    axes.set_yticklabels([f"device {slot}" for slot in range(DEVICES)], fontsize=7, color=_GREY)
    axes.tick_params(length=0)
    axes.set_title(f"{step.schedule.name}: idle {step.bubble:.0%}", fontsize=9, loc="left", color=_GREY)
    for side in axes.spines.values():
        side.set_visible(False)


def schedules() -> Figure:
    """All of them, on one axis of time."""
    steps = [timeline(name, chunks) for name, chunks in SCHEDULES.items()]
    figure = Figure(figsize=(9, 9.5), layout="constrained")
    for axes, step in zip(figure.subplots(len(steps)), steps, strict=True):
        draw_step(axes, step, max(other.step_time for other in steps))
    keys = [mpl.patches.Patch(color=COLOURS[phase], label=word) for word, phase in WORDS.items()]
    figure.legend(handles=keys, loc="outside lower left", ncols=3, fontsize=8, frameon=False, labelcolor=_GREY)
    return figure


if __name__ == "__main__":
    mpl.rcParams.update({"svg.hashsalt": "autopar", "svg.fonttype": "none"})  # the same file every time, text as text
    schedules().savefig(ASSETS / "schedules.svg", transparent=True, metadata={"Date": None})
