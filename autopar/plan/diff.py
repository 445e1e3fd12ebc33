"""The differences between two plans: decisions and predictions."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.errors import InputError
from autopar.errors.names import few
from autopar.hints.module_paths import ancestors, nearest
from autopar.plan.display import compared, shown, step_parts
from autopar.plan.exits.plan_degrees import replica_axes, zero_of
from autopar.plan.plan import ONE_DEVICE, Plan
from autopar.plan.recompute import NAMES
from autopar.plan.stage import Stage

Fact = str | int | bool | None
_ROUNDING = 1e-9  # share of a number
_ASSUMED = "priced for a step with"
_DEGREES = ("stages", "micro-batches", "schedule", "meshes", "ZeRO", "activations gathered again")


@dataclass(frozen=True)
class Setting:
    """A decision that differs."""

    name: str
    before: Fact
    after: Fact

    @property
    def of_recomputation(self) -> bool:
        """Whether it has the numbers of the stages that recompute."""
        return self.name.startswith("recomputed")


@dataclass(frozen=True)
class MovedModule:
    """A module that lies in one stage as a whole in both plans (the largest such module), or an operator."""

    module: str  # "" for the whole model
    before: int  # stage
    after: int
    n_operators: int


@dataclass(frozen=True)
class Recomputed:
    """A module that only one of the plans recomputes: the largest one with a single answer for all its operators."""

    module: str
    now: bool  # the second plan recomputes it
    n_operators: int


@dataclass(frozen=True)
class StageMode:
    """A stage that recomputes differently."""

    stage: int
    before: str  # as `Plan.by_hand` calls it
    after: str


@dataclass(frozen=True)
class Quantity:
    """A predicted or measured quantity of both plans; None where a plan does not have it."""

    name: str
    unit: str  # "s", "bytes" or "" for a fraction
    before: float | None
    after: float | None

    @property
    def ratio(self) -> float | None:
        """after / before."""
        return self.after / self.before if self.before and self.after is not None else None

    @property
    def same(self) -> bool:
        """Whether both plans have it alike, up to the order in which its parts were added up."""
        if self.before is None or self.after is None:
            return self.before is self.after
        return math.isclose(self.before, self.after, rel_tol=_ROUNDING)


@dataclass(frozen=True)
class PlanDiff:
    """`before.diff(after)`; `print(diff)` shows it."""

    settings: tuple[Setting, ...]
    moves: tuple[MovedModule, ...]
    recomputed: tuple[Recomputed, ...]
    only_before: tuple[str, ...]  # operators (or modules of a split) that only the first plan names
    only_after: tuple[str, ...]
    quantities: tuple[Quantity, ...]  # all that at least one plan has, also equal ones
    modes: tuple[StageMode, ...] = ()  # of stages that recompute differently, of plans with equally many stages
    parts: tuple[Quantity, ...] = ()  # of the step on each plan's busiest device, which they add up to

    @property
    def same_decisions(self) -> bool:
        """Whether both run alike: stages, devices, micro-batches, schedule, strategies and recomputation."""
        decided = [setting for setting in self.settings if setting.name != _ASSUMED]
        return not (decided or self.modes or self.moves or self.recomputed or self.only_before or self.only_after)

    @property
    def degrees(self) -> tuple[Setting, ...]:
        """The settings that a plan by hand fixes, with recomputation where the plans have different numbers of stages,
        so that no `modes` say it."""
        named = {setting.name for setting in self.settings}
        return tuple(s for s in self.settings if s.name in _DEGREES or ("stages" in named and s.of_recomputation))

    @property
    def same(self) -> bool:
        """The same decisions with the same predictions."""
        return self.same_decisions and not self.settings and all(q.same for q in self.quantities)

    def to_json(self) -> str:
        """Everything as JSON, in seconds and bytes."""
        data = dataclasses.asdict(self)
        for item, quantity in zip(data["quantities"], self.quantities, strict=True):
            item["ratio"] = quantity.ratio
        return json.dumps({"same": self.same, **data}, indent=1)

    def __str__(self) -> str:
        return shown(self)


@compared.register(Plan)
def diff_plans(before: Plan, after: Plan) -> PlanDiff:
    """What `after` decides and predicts differently from `before`. O(operators x depth of modules).

    Raises InputError where `after` is no plan.
    """
    if not isinstance(after, Plan):
        raise InputError(f"a plan is compared with another Plan, got {type(after).__name__}")
    stages = _stage_of(before, after)
    both = {key: pair for key, pair in stages.items() if None not in pair}
    again = {
        key: (_reruns(before.stages[old]), _reruns(after.stages[new]))
        for key, (old, new) in both.items()
        if old is not None and new is not None
    }
    return PlanDiff(
        tuple(s for s in _settings(before, after) if s.before != s.after),
        tuple(MovedModule(module, old, new, n) for module, (old, new), n in _whole(both)),
        tuple(Recomputed(module, new, n) for module, (_, new), n in _whole(again)),
        tuple(key.rstrip("/") for key, (_, new) in stages.items() if new is None),
        tuple(key.rstrip("/") for key, (old, _) in stages.items() if old is None),
        tuple(q for q in _quantities(before, after) if q.before is not None or q.after is not None),
        tuple(_modes(before, after)),
        tuple(_parts(before, after)),
    )


def _modes(before: Plan, after: Plan) -> Iterator[StageMode]:
    """Of stages that recompute differently; of other numbers of stages, none is a stage of the other plan."""
    if len(before.stages) == len(after.stages):
        for s, (old, new) in enumerate(zip(before.stages, after.stages, strict=True)):
            if old.mode != new.mode:
                yield StageMode(s, NAMES[old.mode], NAMES[new.mode])


def run_alike(a: Plan, b: Plan) -> bool:
    """Whether both do the same. With one stage of whole operators, neither the schedule matters nor whether they are
    listed."""
    if len(a.stages) == len(b.stages) == 1 and not a.stages[0].sharding and not b.stages[0].sharding:
        (one,), (other,) = a.stages, b.stages
        return (one.devices, one.mode, a.n_microbatches) == (other.devices, other.mode, b.n_microbatches)
    return diff_plans(a, b).same_decisions


def repeated_plans(plans: Mapping[str, Plan]) -> dict[str, str]:
    """By the name of a plan that does the same as an earlier one, the name of the first of these."""
    first: dict[str, Plan] = {}
    same: dict[str, str] = {}
    for name, plan in plans.items():
        known = next((other for other in first if run_alike(first[other], plan)), None)
        if known is None:
            first[name] = plan
        else:
            same[name] = known
    return same


def _parts(before: Plan, after: Plan) -> Iterator[Quantity]:
    old, new = step_parts(before), step_parts(after)
    for name in dict.fromkeys((*old, *new)) if old and new else ():
        yield Quantity(name, "s", old[name], new[name])


def _reruns(stage: Stage) -> bool:
    return stage.recompute or stage.layerwise


def _stage_of(before: Plan, after: Plan) -> dict[str, tuple[Any, Any]]:
    """The stage of every operator in both plans, None where a plan does not name it.

    If neither plan lists operators, each module of their splits counts as one operator without a name: `module.path/`.
    """
    plans = (before, after)
    listed = [{key: s for s, stage in enumerate(plan.stages) for key in stage.operators} for plan in plans]
    keys = dict.fromkeys(
        itertools.chain(*listed) if any(listed) else (f"{p}/" for plan in plans for p, _ in plan.split)
    )

    def stage(plan: Plan, named: Mapping[str, int], key: str) -> int | None:
        split = dict(plan.split)
        module = nearest(key.rpartition("/")[0], split)
        if not named and not split and len(plan.stages) == 1:
            return 0  # the plain model
        return named.get(key) if named or module is None else split[module]

    return {key: (stage(before, listed[0], key), stage(after, listed[1], key)) for key in keys}


def _whole(pairs: Mapping[str, tuple[Any, Any]]) -> list[tuple[str, tuple[Any, Any], int]]:
    """(module, pair, number of operators) where the two values differ, in the order of `pairs`.

    Each module is the largest one whose operators all have the same pair; without one, it is the operator's key.
    """
    inside: dict[str, set[tuple[Any, Any]]] = defaultdict(set)
    for key, pair in pairs.items():
        for module in ancestors(key.rpartition("/")[0]):
            inside[module].add(pair)
    count: dict[tuple[str, tuple[Any, Any]], int] = defaultdict(int)
    for key, pair in pairs.items():
        if pair[0] != pair[1]:
            whole = (module for module in ancestors(key.rpartition("/")[0]) if len(inside[module]) == 1)
            count[next(whole, key), pair] += 1
    return [(module, pair, n) for (module, pair), n in count.items()]


def _settings(before: Plan, after: Plan) -> list[Setting]:
    def setting(name: str, of: Any) -> Setting:
        return Setting(name, of(before), of(after))

    return [
        setting("stages", lambda plan: len(plan.stages)),
        setting("devices used", lambda plan: plan.places),
        setting("devices offered", lambda plan: ", ".join(plan.devices) or None),
        setting("kinds of devices", lambda plan: ", ".join(dict.fromkeys(plan.device_kinds)) or None),
        setting("micro-batches", lambda plan: plan.n_microbatches),
        setting("schedule", lambda plan: plan.schedule),
        setting("meshes", _meshes),
        setting("ZeRO", _zero),
        *_sharded(before, after),
        setting("activations gathered again", _regathered),
        setting("recomputed stages", lambda plan: _numbers(s for s, x in enumerate(plan.stages) if x.recompute)),
        setting(
            "recomputed layer by layer", lambda plan: _numbers(s for s, x in enumerate(plan.stages) if x.layerwise)
        ),
        setting(
            "recomputed without products",
            lambda plan: _numbers(s for s, x in enumerate(plan.stages) if x.keeps_products),
        ),
        setting("recomputed attention", lambda plan: _numbers(s for s, x in enumerate(plan.stages) if x.selective)),
        setting("batch size", lambda plan: plan.batch_size),
        setting("training", lambda plan: plan.training),
        setting("model", lambda plan: plan.model),
        setting(_ASSUMED, lambda plan: None if plan.assumed is None else str(plan.assumed)),
    ]


def _meshes(plan: Plan) -> str | None:
    """The meshes of all stages, in order; equal neighbours are counted."""
    texts = [
        " x ".join(f"{name} {n}" for name, n in zip(s.sharding.axes, s.sharding.mesh, strict=True))
        if s.sharding
        else "-"
        for s in plan.stages
    ]
    if not any(stage.sharding for stage in plan.stages):
        return None
    runs = [(text, sum(1 for _ in run)) for text, run in itertools.groupby(texts)]
    if len(runs) == 1:
        return texts[0]
    return " | ".join(f"{text} in {n} stages" if n > 1 else text for text, n in runs)


def _zero(plan: Plan) -> int:
    """The ZeRO stage; 0 without replicas along an axis of a mesh."""
    shardings = [stage.sharding for stage in plan.stages if stage.sharding is not None]
    return max((zero_of(one) for one in shardings if replica_axes(one)), default=0)


def _regathered(plan: Plan) -> str | None:
    return _numbers(s for s, x in enumerate(plan.stages) if x.sharding is not None and x.sharding.regather)


def _sharded(before: Plan, after: Plan) -> Iterator[Setting]:
    """Numbers of operators and parameters with other layouts, and the names of some."""
    for name, place in (("strategies", 0), ("layouts of parameters", 1)):
        old, new = (
            {key: text for stage in plan.stages if stage.sharding for key, text in stage.sharding.texts[place]}
            for plan in (before, after)
        )
        other = [key for key in dict.fromkeys((*old, *new)) if old.get(key) != new.get(key)]
        if other:
            yield Setting(name, f"{len(old)} split", f"{len(new)} split, {len(other)} differently: {few(other)}")


def _quantities(before: Plan, after: Plan) -> list[Quantity]:
    plans = (before, after)
    quantities = [
        Quantity(name, unit, *(getattr(plan, field) for plan in plans))
        for name, unit, field in (
            ("step", "s", "predicted_step_time"),
            ("step, measured", "s", "measured_step_time"),
            (ONE_DEVICE, "s", "single_device_time"),
            ("the whole batch, once", "s", "whole_batch_time"),
            ("bubble", "", "bubble"),
            ("objective", "s", "objective"),
            ("bound", "s", "bound"),
            ("bound on the objective", "s", "searched_bound"),
        )
    ]
    quantities.append(Quantity("largest peak memory", "bytes", *(_largest_peak(plan) for plan in plans)))
    for s in range(max(len(plan.stages) for plan in plans)):
        for name, unit, field in (
            ("forward", "s", "forward_time"),
            ("backward", "s", "backward_time"),
            ("gradient reduction", "s", "sync_time"),
            ("optimizer step", "s", "optimizer_time"),
            ("parameters", "bytes", "parameter_bytes"),
            ("activations", "bytes", "activation_bytes"),
            ("peak memory", "bytes", "peak_memory"),
        ):
            values = (getattr(plan.stages[s], field) if s < len(plan.stages) else None for plan in plans)
            quantities.append(Quantity(f"stage {s} {name}", unit, *values))
    return quantities


def _largest_peak(plan: Plan) -> int | None:
    return max((stage.peak_memory for stage in plan.stages if stage.peak_memory is not None), default=None)


def _numbers(stages: Iterable[int]) -> str | None:
    return ", ".join(map(str, stages)) or None
