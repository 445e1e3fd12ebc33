"""What the sections of a plan's report are made from, worked out once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from autopar.costs.history import costs_of, recall
from autopar.costs.prediction_error import Accuracy
from autopar.errors import InputError
from autopar.plan.plan import Plan
from autopar.planner.change import Change
from autopar.planner.device_memory import DeviceMemory, device_memory
from autopar.planner.explain import Explanation, own_explanation
from autopar.planner.other_networks import network_sensitivity
from autopar.planner.predicted_step import PredictedStep, step_of_plan
from autopar.runtime.comparing.comparison import Comparison, Row
from autopar.runtime.step_profile import StepProfile
from autopar.schedule.timeline import Timeline


@dataclass(frozen=True)
class ReportOptions:
    """What a user asks of a report."""

    samples_per_epoch: float | None = None  # samples of the data set
    price_per_device_hour: float | None = None
    currency: str = "$"
    search: bool = False  # search again for what limits and more memory change
    command: str | None = None  # that reproduces it

    def __post_init__(self) -> None:
        for name in ("samples_per_epoch", "price_per_device_hour"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value < math.inf):
                raise InputError(f"{name} must be a finite number above 0, got {value!r}")
        if not isinstance(self.currency, str):
            raise InputError(f'currency must be a text such as "$" or "EUR ", got {self.currency!r}')
        if not isinstance(self.search, bool):
            raise InputError(f"search must be True or False, got {self.search!r}")
        if not (self.command is None or isinstance(self.command, str)):
            raise InputError(f"command must be a text, got {self.command!r}")


@dataclass(frozen=True)
class Subject:
    """A plan, its step, and measured steps where there are some."""

    plan: Plan
    profile: StepProfile | None = None
    wanted: ReportOptions = ReportOptions()
    code: str = ""  # how the code of its stages runs, where they are built
    modules: Sequence[fx.GraphModule] = ()  # of every stage, where they are built
    comparison: Comparison | None = None  # in whose rounds the plan took its turns
    row: Row | None = None  # the plan's steps in these rounds

    @cached_property
    def step(self) -> PredictedStep | None:
        """From the plan's own numbers; None for a plan without predictions."""
        return step_of_plan(self.plan)

    @cached_property
    def timeline(self) -> Timeline | None:
        """The predicted step laid out in time."""
        return None if self.step is None else self.step.timeline()

    @cached_property
    def memory(self) -> tuple[DeviceMemory, ...]:
        return device_memory(self.plan, self.timeline)

    @cached_property
    def fullest(self) -> DeviceMemory | None:
        """The place with the least room left."""
        return max(self.memory, key=lambda one: one.peak / (one.usable or one.peak or 1), default=None)

    @cached_property
    def explanation(self) -> Explanation:
        """From the plan's own numbers, or with further searches where the user asks for them."""
        explained: Explanation = self.plan.explain() if self.wanted.search else own_explanation(self.plan, self.step)
        return explained

    @cached_property
    def on_other_networks(self) -> tuple[Change, ...]:
        """The step on faster and slower networks, priced anew; () unless the user asks for searches."""
        return network_sensitivity(self.plan) if self.wanted.search else ()

    @property
    def profiled_step(self) -> StepProfile | None:
        """The profiled step, where the report's step time is that of this one step."""
        return self.profile if self.row is None else None

    @property
    def measured(self) -> float | None:
        """Seconds of a measured step: the median of the comparison's rounds, the last profiled one, or the median of
        those that tuned the plan."""
        if self.row is not None:
            return self.row.measured
        one = self.profiled_step
        return one.seconds if one is not None else self.plan.measured_step_time

    @property
    def predicted(self) -> float | None:
        """Seconds of the step that `step_time` is for, as predicted before it was measured."""
        one = self.profiled_step
        return one.predicted if one is not None else self.plan.priced_step_time

    @property
    def step_time(self) -> float | None:
        """Seconds: measured, or else predicted."""
        return self.measured if self.measured is not None else self.plan.predicted_step_time

    @property
    def samples(self) -> int | None:
        """Of the step that `step_time` is for."""
        one = self.profiled_step
        return one.batch_size if one is not None else self.plan.batch_size

    @property
    def tokens(self) -> int | None:
        """Of the step that `step_time` is for; None where they are not known."""
        work = self.plan.work
        return work.tokens if work is not None and self.samples == self.plan.batch_size else None

    @property
    def n_devices(self) -> int:
        """Used or not."""
        return len(self.plan.devices) or len(self.plan.used_devices)

    @cached_property
    def accuracy(self) -> Accuracy:
        """Recorded errors of predictions that were made like this one, on devices of the same kinds."""
        kinds = dict(zip(self.plan.devices, self.plan.device_kinds, strict=False))
        used = {kinds[name] for name in self.plan.used_devices if name in kinds}
        source = costs_of(self.plan)
        return Accuracy.of(one for one in recall() if one.costs == source and set(one.device_kinds) == used)
