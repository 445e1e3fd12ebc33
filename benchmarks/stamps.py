"""What it costs a step that the runtime stamps its actions: the start and end of each, its waits, sends and losses.

A B C   C A B   B A C ...        A  train_step(...)                     reads no clock
warm up | these rounds count     B  the same, inside of a recorder      stamps every action
                                 C  train_step(..., profile=True)       stamps, and makes a StepProfile
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import autopar
from autopar import Plan
from autopar.runtime.step_recorder import StepRecorder
from benchmarks.kept import Kept
from benchmarks.models import Workload, gpt
from benchmarks.output import Rounds, Table
from benchmarks.timing import Step, interleave, ratio
from cost_models import parse_devices
from cost_models.measuring.intervals import Interval, paired_ratio_interval

PLAIN, STAMPED, PROFILED = "train_step", "stamped", "profile=True"
MICROBATCHES = 8  # 2 stages x 8 x (forward and backward) = 32 actions
DEVICES = ["cpu", "cpu"]


@dataclass(frozen=True)
class Stamps:
    """Steps with and without stamps, in the same rounds."""

    rounds: Rounds

    def ratio(self, name: str) -> float:
        """The median, over rounds, of the step's seconds over those of the step that reads no clock."""
        return ratio(self.rounds.seconds[name], self.rounds.seconds[PLAIN])

    def interval(self, name: str) -> Interval:
        """Of this median."""
        return paired_ratio_interval(self.rounds.seconds[name], self.rounds.seconds[PLAIN])

    def table(self) -> Table:
        rows = []
        for name, seconds in self.rounds.seconds.items():
            found = self.interval(name)
            cells = (
                ("", "") if name == PLAIN else (_more(self.ratio(name)), f"{_more(found.low)} to {_more(found.high)}")
            )
            rows.append((name, f"{median(seconds) * 1e3:.2f}", *cells))
        n, level = len(self.rounds.seconds[PLAIN]), self.interval(STAMPED).level
        return Table(
            f"Stamps of the runtime: {self.rounds.what}",
            ("", "step, ms", "longer than without", f"interval of {level:.0%}"),
            tuple(rows),
            f"Medians of {n} rounds; ratios are those of two steps of one round. The interval is that of the median "
            "ratio, by bootstrap. Its spread also has what disturbed only one of both steps.",
        )

    def data(self) -> dict[str, Any]:
        return {
            name: {"ratio": self.ratio(name), "interval": asdict(self.interval(name))} for name in (STAMPED, PROFILED)
        }


def measure_stamps(quick: bool, rounds: int, kept: Kept) -> Stamps:
    """On two stages of a GPT-2-like model. `quick`: a tiny one."""
    workload = gpt(quick)
    what = f"{workload.title}, 2 stages, {MICROBATCHES} micro-batches"
    return Stamps(Rounds(what, interleave(_steps(workload), rounds, workload.clear, kept)))


def _steps(workload: Workload) -> dict[str, Step]:
    half = len(workload.model.transformer.h) // 2  # type: ignore[union-attr, arg-type]
    plan = Plan.from_split({"transformer.wte": 0, f"transformer.h.{half}": 1}, n_microbatches=MICROBATCHES)
    # Without the cache, profiled steps do not go into the history of predictions either.
    module = autopar.parallelize(workload.model, DEVICES, plan=plan, cache=False)
    devices = parse_devices(DEVICES)

    def step(profile: bool = False) -> object:
        return module.train_step(**workload.inputs, target=workload.target, loss_fn=workload.loss, profile=profile)

    def stamped() -> None:
        with module.recording(StepRecorder(devices)):
            step()

    return {PLAIN: step, STAMPED: stamped, PROFILED: lambda: step(profile=True)}


def _more(times: float) -> str:
    return f"{times - 1:+.2%}"
