"""Cases priced by `Plan.by_hand`'s own way: what the product predicts for the plans of published runs.

Runs of one model share its capture, and what `SharedWork` keeps.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar import Plan
from autopar.analysis.example import Example, example_ahead, resized
from autopar.errors import AutoparError
from autopar.options import PlanOptions
from autopar.plan.degrees import DEGREES
from autopar.planner.hand_plan.by_hand import plan_by_hand
from autopar.planner.hand_plan.shared_work import SharedWork
from benchmarks.published_runs.cases import Case, Degrees, Options
from benchmarks.published_runs.models import Sizes
from cost_models.memory.training_memory import FRAGMENTATION, WORKSPACE, precision_named, training_memory

_DEFAULTS = {name: one.default for name, one in inspect.signature(Plan.by_hand).parameters.items() if name in DEGREES}


@dataclass(frozen=True)
class Priced:
    """What the product predicts for a case."""

    plan: Plan | None  # None: no plan fits, or the product cannot express it
    degrees: Degrees
    candidates: int  # plans that were priced
    why_not: str = ""
    library_memory: int = 0  # bytes; see `Case`
    reserved: bool = False  # see `Case`

    @property
    def seconds(self) -> float | None:
        """Of a step."""
        return None if self.plan is None else self.plan.predicted_step_time

    @property
    def memory(self) -> float | None:
        """Bytes of tensors on the device that needs most, with what libraries hold, which torch allocates; and with the
        gaps between them, if that is what was published."""
        if self.plan is None:
            return None
        held = max(stage.peak_memory or 0 for stage in self.plan.stages) + WORKSPACE["cuda"] + self.library_memory
        return held * (1 + FRAGMENTATION["cuda"]) if self.reserved else held


class Pricer:
    """Prices cases one after another. `cases`: all of them, so that a model is captured for its largest batch."""

    def __init__(self, cases: Iterable[Case]) -> None:
        self._largest: dict[Sizes, int] = {}
        for case in cases:
            self._largest[case.model] = max(case.batch, self._largest.get(case.model, 0))
        self._captured: dict[tuple[Sizes, int], Example] = {}
        self._shared: dict[tuple[Sizes, int, Options], SharedWork] = {}
        self._models: dict[Sizes, nn.Module] = {}
        self._priced: dict[Any, Priced] = {}

    def price(self, case: Case) -> Priced:
        """The plan that was run, or the fastest of several that fits."""
        if case.not_expressed:
            return Priced(None, case.plans[0], 0, f"a plan cannot say {case.not_expressed}")
        alone = len(case.plans) == 1  # a plan that was run did fit, whatever is predicted
        gaps = 0.0 if case.reserved else FRAGMENTATION["cuda"]
        usable = float("inf") if alone else case.cluster.node[0].memory / (1 + gaps)
        best, refused = Priced(None, case.plans[0] if case.plans else {}, 0, "no plan fits the memory"), ""
        tried, too_large = 0, set[Any]()
        for degrees in case.plans:
            like = tuple(sorted((name, value) for name, value in degrees.items() if name != "micro_batch"))
            if like in too_large or least_memory(case, degrees) > usable:  # so are larger micro-batches, which follow
                continue
            try:
                found = self._known(case, degrees)
            except AutoparError as error:
                refused = refused or str(error)
                continue
            tried += 1
            if (found.memory or 0.0) > usable:
                too_large.add(like)
            elif (found.seconds or 0.0) < (best.seconds or float("inf")):
                best = found
        return replace(best, candidates=tried, why_not="" if best.plan else refused * (not tried) or best.why_not)

    def _known(self, case: Case, degrees: Degrees) -> Priced:
        """Priced once for all columns of a table that may have chosen it."""
        key = (case.model, case.batch, case.cluster, case.options, tuple(sorted(degrees.items())))
        if key not in self._priced:
            plan = self._plan(case, degrees)
            self._priced[key] = Priced(plan, degrees, 1, library_memory=case.library_memory, reserved=case.reserved)
        return self._priced[key]

    def _plan(self, case: Case, degrees: Degrees) -> Plan:
        example, shared = self._call(case)
        return plan_by_hand(example, case.cluster, _plan_options(case.options), _wanted(degrees), shared=shared)

    def _call(self, case: Case) -> tuple[Example, SharedWork]:
        """The call with the samples of the case, and what it shares with others of the model."""
        size, options = self._largest[case.model], case.options
        example = self._capture(case.model, size)
        mine = example if size == case.batch else resized(example, *_inputs(case.model, case.batch))
        if mine is None:  # such as one sample
            mine = example = self._capture(case.model, case.batch)
            size = case.batch
        key = (case.model, size, options)
        if key not in self._shared:
            self._shared[key] = SharedWork(example, _plan_options(options))
        return mine, self._shared[key]

    def _capture(self, model: Sizes, batch: int) -> Example:
        if (model, batch) not in self._captured:
            if model not in self._models:
                self._models[model] = model.build()
            self._captured[model, batch] = example_ahead(self._models[model], *_inputs(model, batch))
        return self._captured[model, batch]


def _plan_options(how: Options) -> PlanOptions:
    return PlanOptions(
        optimizer=how.optimizer,
        launch=how.launch,
        precision=how.precision,
        optimizer_step=how.optimizer_step,
        overlap=how.overlap,
    )


def least_memory(case: Case, degrees: Degrees) -> float:
    """Bytes below which no device of the plan gets: parameters, gradients and states, spread evenly."""
    how, zero = precision_named(case.options.precision or "fp32"), degrees.get("zero", 0)
    states = training_memory(
        [(case.model.parameters() // (degrees["tensor"] * degrees["pipeline"]),)],
        optimizer=case.options.optimizer,
        precision=how,
        zero=zero,
        replicas=degrees["data"],
    )
    return float(states.total)


def _inputs(model: Sizes, batch: int) -> tuple[tuple[torch.Tensor, torch.Tensor], dict[str, Any]]:
    tokens = torch.empty(batch, model.seq, dtype=torch.int64, device="meta")
    return (tokens, tokens), {}


def _wanted(degrees: Degrees) -> Mapping[str, Any]:
    """All arguments of `Plan.by_hand` that are degrees."""
    return _DEFAULTS | dict(degrees)
