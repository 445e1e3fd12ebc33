"""Plans with one decision changed: a module on another stage, other micro-batches, schedule or recomputation.

What a change returns is a decision without predictions; the planner prices it (`planner/pricers.py`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from autopar.errors import PlanError
from autopar.errors.names import near, with_checked_names
from autopar.hints.module_paths import ancestors, nearest
from autopar.plan.degrees import check_zero
from autopar.plan.display import priced_like
from autopar.plan.file_format.folding import Layer, layer_of
from autopar.plan.recompute import NAMES, Recompute, recompute_by_stage, recompute_flags
from autopar.sharding.stage_sharding import StageSharding

if TYPE_CHECKING:
    from autopar.plan.plan import Plan
    from autopar.plan.stage import Stage

_RANGE = re.compile(r"(.*?)(\d+)-(\d+)")


class PlanChanges:
    """What changes a plan; `Plan` has these methods."""

    @with_checked_names
    def move(self, path: str, stage: int) -> Plan:
        """The plan with a module, or an operator, on another stage, with its price.

        What enclosing modules do between, such as residual sums, moves along.

        A plan that this process planned or priced is priced again, for the same model, call and devices. A plan that
        was loaded loses its predictions, and a note says so.

        Args:
            path: of a module (`model.layers.8`, or its end if that is unique, `layers.8`), of layers in a row
                (`model.layers.8-11`), or an operator's key (`model.layers.8.mlp/mul#0`).

        Raises:
            PlanError: no operator runs there (the message has similar names), there is no such stage, or values would
                flow to an earlier stage.
        """
        plan = cast("Plan", self)
        found: Plan = priced_like(plan, moved(plan, path, stage))
        return found

    @with_checked_names
    def with_(
        self,
        *,
        n_microbatches: int | None = None,
        schedule: str | None = None,
        recompute: str | Mapping[int, str] | None = None,
        zero: int | None = None,
    ) -> Plan:
        """The plan with other decisions, with its price as for `move`.

        Args:
            recompute: "none", "selective", "full", "selective-op" or "stage", as for `by_hand`; or by stage:
                {0: "full"}.
            zero: what is cut over replicas, as for `by_hand`: 0 nothing, 1 the optimizer's state, 2 gradients as well,
                3 parameters as well. It needs a plan that this process planned or priced. Replicas of a whole stage
                become a mesh: each then does a part of every micro-batch, and without `n_microbatches` there are fewer
                micro-batches. Ranks of torchrun store parts; one process at hand has one optimizer, whose states stay
                whole. Nothing is predicted of a changed plan under torchrun, or of a plan by hand for devices at hand.

        Raises:
            PlanError: decisions that contradict each other; all are listed. For `zero`, a plan without replicas, or
                whose micro-batches they cannot share out.
        """
        plan = cast("Plan", self)
        decisions: dict[str, Any] = {"n_microbatches": n_microbatches, "schedule": schedule, "recompute": recompute}
        try:
            other = changed(plan, **decisions)
            check_zero(zero)
        except PlanError:
            _refuse_all(plan, decisions, zero)
            raise
        found: Plan = priced_like(plan, other, zero=zero, n_microbatches=n_microbatches)
        return found


def _refuse_all(plan: Plan, decisions: Mapping[str, Any], zero: int | None) -> None:
    """Raise PlanError with everything that is wrong with several decisions, each by itself."""
    problems = []
    checks: list[Callable[[], object]] = [partial(changed, plan, **{name: value}) for name, value in decisions.items()]
    checks.append(partial(check_zero, zero))
    for check in checks:
        try:
            check()
        except PlanError as error:
            problems.append(str(error))
    if problems:
        raise PlanError("\n".join(problems)) from None


def changed(
    plan: Plan,
    *,
    n_microbatches: int | None = None,
    schedule: str | None = None,
    recompute: str | Mapping[int, str] | None = None,
) -> Plan:
    """The plan with these decisions; the same object if all of them are its own. Raises PlanError."""
    changes: dict[str, Any] = {}
    if n_microbatches is not None and (type(n_microbatches) is not int or n_microbatches != plan.n_microbatches):
        changes["n_microbatches"] = n_microbatches
    if schedule is not None and schedule != plan.schedule:
        changes["schedule"] = schedule
    stages = tuple(_recomputing(plan.stages, recompute)) if recompute is not None else plan.stages
    if stages != plan.stages:
        changes["stages"] = stages
    if not changes:
        return plan
    what = [f"{name} is {value}" for name, value in changes.items() if name != "stages"]
    what += [f"recompute is {_modes(stages)}"] if "stages" in changes else []
    return replace(plan.without_predictions(f"{' and '.join(what)} now"), **_decided(plan, changes))


def _modes(stages: Sequence[Stage]) -> str:
    """What stages run again: one name for all, or those of stages that run anything again."""
    names = {number: NAMES[Recompute(stage.mode)] for number, stage in enumerate(stages)}
    if len(set(names.values())) == 1:
        return repr(names[0])
    return str({number: name for number, name in names.items() if name != NAMES[Recompute.NONE]})


def _decided(plan: Plan, changes: dict[str, Any]) -> dict[str, Any]:
    """Without the predictions that changed stages still have."""
    if "stages" not in changes:
        return changes
    alone = replace(plan, stages=changes["stages"]).without_predictions("")
    return {**changes, "stages": alone.stages}


def _recomputing(stages: Sequence[Stage], wanted: str | Mapping[int, str]) -> Iterator[Stage]:
    names = recompute_by_stage(wanted, len(stages))
    for number, stage in enumerate(stages):
        flags: dict[str, Any] = recompute_flags(names[number]) if number in names else {}
        yield replace(stage, **flags) if flags else stage


def moved(plan: Plan, path: str, stage: int) -> Plan:
    """The plan with a module, layers in a row or an operator on another stage; see `Plan.move`."""
    n = len(plan.stages)
    if not isinstance(path, str):
        raise PlanError(f"path must be the path of a module or the key of an operator, got {path!r}")
    if type(stage) is not int or not 0 <= stage < n:
        raise PlanError(f"there is no stage {stage!r}: stages are 0..{n - 1}")
    alone = plan.without_predictions(f"'{path}' was moved to stage {stage}")
    listed = {key: s for s, one in enumerate(plan.stages) for key in one.operators}
    if not listed:
        return _moved_in_split(alone, path, stage)
    keys = _keys_at(path, listed)
    if all(listed[key] == stage for key in keys):
        return plan
    now = listed | dict.fromkeys(_with_those_between(keys, list(listed), listed, stage), stage)
    held = [tuple(key for key in listed if now[key] == s) for s in range(n)]
    emptied = _emptied(now, path, n)
    if emptied:
        raise PlanError(emptied)
    _check_order(listed, now, path, stage, n)
    stages = tuple(
        replace(one, operators=mine, sharding=_sharding_of(alone.stages, s, mine))
        for s, (one, mine) in enumerate(zip(alone.stages, held, strict=True))
    )
    # The stages list all operators: a split would contradict them, or say the same.
    return replace(alone, stages=stages, split=())


def _emptied(stage_of: Mapping[str, int], path: str, n_stages: int) -> str:
    """What is wrong with a move of `path` after which stages have no operators; "" if all have some."""
    empty = sorted(set(range(n_stages)) - set(stage_of.values()))
    if not empty:
        return ""
    rest = n_stages - len(empty)
    fewer = f"plan with {rest} stage{'s' if rest > 1 else ''}"
    # What comes first and last can only be on the first and the last stage: others cannot take its place there.
    between = empty[0] > 0 and empty[-1] < n_stages - 1
    advice = f"move others there first, or {fewer}" if between else f"{fewer} instead"
    return f"stage {', '.join(map(str, empty))} would have no operators without '{path}'; {advice}"


def _moved_in_split(plan: Plan, path: str, stage: int) -> Plan:
    split = dict(plan.split)
    above = nearest(path, split)
    inside = [name for name in split if path in ancestors(name)]
    if above is None and not inside:
        raise PlanError(f"the plan has no module or operator '{path}'{near(path, split)}")
    moved_split = {name: s for name, s in split.items() if name not in inside} | {path: stage}
    return plan if moved_split == split else replace(plan, split=tuple(moved_split.items()))


# -- names ------------------------------------------------------------------------------------------------------------


def _keys_at(path: str, listed: Collection[str]) -> set[str]:
    """The operators at `path`. Raises PlanError with similar names."""
    if path in listed:
        return {path}
    paths = _layers_in(path)
    modules = {ancestor for key in listed for ancestor in ancestors(key.rpartition("/")[0])}
    named = {_whole_path(one, path, modules, listed) for one in paths}
    return {key for key in listed if not named.isdisjoint(ancestors(key.rpartition("/")[0]))}


def _layers_in(path: str) -> list[str]:
    """`a.8`, `a.9` for `a.8-9`."""
    match = _RANGE.fullmatch(path)
    if match is None:
        return [path]
    first, last = int(match[2]), int(match[3])
    if first > last:
        raise PlanError(f"'{path}': a range of layers goes from the lower number to the higher")
    return [f"{match[1]}{number}" for number in range(first, last + 1)]


def _whole_path(path: str, asked: str, modules: set[str], listed: Collection[str]) -> str:
    """The module at `path`, or the only one whose path ends so."""
    if path in modules:
        return path
    ending = sorted(module for module in modules if module.endswith(f".{path}"))
    if len(ending) == 1:
        return ending[0]
    if ending:
        raise PlanError(f"several modules are called '{path}': {', '.join(ending[:4])}; give the whole path")
    inside = f" (in '{asked}')" if asked != path else ""
    names = listed if "/" in path else sorted(modules - {""})
    raise PlanError(f"no operator of the plan runs in '{path}'{inside}{near(path, names)}")


def _with_those_between(keys: set[str], order: Sequence[str], listed: Mapping[str, int], stage: int) -> set[str]:
    """The operators with those of enclosing modules that must come along, such as residual sums.

        stage 0 | layers.2 | add        stage 1 | layers.3 | add | layers.4 | add
                                                  `---- move to stage 0 ---'
    They lie between what moves, right before it on the way to an earlier stage, and right behind it to a later one.
    """
    modules = {key.rpartition("/")[0] for key in keys}
    around = {above for module in modules for above in ancestors(module)} - modules
    places = [place for place, key in enumerate(order) if key in keys]
    first, last = places[0], places[-1]

    def encloses(place: int) -> bool:
        return order[place].rpartition("/")[0] in around

    while first > 0 and encloses(first - 1) and listed[order[first - 1]] > stage:
        first -= 1
    while last + 1 < len(order) and encloses(last + 1) and listed[order[last + 1]] < stage:
        last += 1
    return keys | {order[place] for place in range(first, last + 1) if encloses(place)}


# -- order ------------------------------------------------------------------------------------------------------------


def _check_order(before: Mapping[str, int], after: Mapping[str, int], path: str, stage: int, n_stages: int) -> None:
    """Raise PlanError where layers that came one after the other would not any more.

    Whether other operators still come after their inputs is known to those who have the model.
    """
    then, now = _stages_of_layers(before), _stages_of_layers(after)
    for parent, stages in then.items():
        for (i, first), (j, second) in itertools.pairwise(sorted(now[parent].items())):
            if max(first) > min(second) and max(stages[i]) <= min(stages[j]):
                together = _between(parent, stages, now[parent], stage)
                keys = _with_those_between(_keys_at(together, before), list(before), before, stage)
                alone = _emptied({**before, **dict.fromkeys(keys, stage)}, together, n_stages)
                advice = f"move the layers between as well: plan.move('{together}', stage={stage})"
                raise PlanError(
                    f"'{path}' cannot be on stage {stage}: '{Layer(parent, i)}' would be on stage {max(first)} and "
                    f"'{Layer(parent, j)}', which follows it, on stage {min(second)}, but values only flow to later "
                    f"stages; {alone or advice}"
                )


def _stages_of_layers(stage_of: Mapping[str, int]) -> dict[str, dict[int, set[int]]]:
    """By parent and number, the stages that a layer is on."""
    found: dict[str, dict[int, set[int]]] = {}
    for key, stage in stage_of.items():
        layer = layer_of(key, 0)
        if layer is not None:
            found.setdefault(layer.parent, {}).setdefault(layer.number, set()).add(stage)
    return found


def _between(parent: str, then: Mapping[int, set[int]], now: Mapping[int, set[int]], stage: int) -> str:
    """The smallest range of layers that can move together; `then` and `now` by number."""
    numbers = [i for i in now if now[i] != then[i]]
    first, last = min(numbers), max(numbers)
    if stage < min(min(then[i]) for i in numbers):  # those before must come along
        first = min([first, *(i for i in then if i < first and max(then[i]) > stage)])
    else:
        last = max([last, *(i for i in then if i > last and min(then[i]) < stage)])
    return f"{Layer(parent, first)}-{last}"


# -- strategies -------------------------------------------------------------------------------------------------------


def _sharding_of(stages: Sequence[Stage], number: int, operators: Sequence[str]) -> StageSharding | None:
    """What stage `number` decides of its operators, where those that it gets keep their strategies.

    Raises PlanError for a strategy on a mesh of another shape.
    """
    own = stages[number].sharding
    if own is None:
        return None
    held = set(operators)
    others = [s.sharding for i, s in enumerate(stages) if i != number and s.sharding is not None]
    strategies = dict(own.strategies)
    parameters = dict(own.parameters)
    modules = {key.rpartition("/")[0] for key in held}
    gone = {key.rpartition("/")[0] for key in stages[number].operators} - modules
    parameters = {name: one for name, one in parameters.items() if name.rpartition(".")[0] not in gone}
    for other in others:
        for key, strategy in other.strategies:
            if key in held and other.mesh != own.mesh:
                raise PlanError(
                    f"{key} is cut over a mesh of {_mesh(other)}, and stage {number} has one of {_mesh(own)}; plan "
                    "again, or give the stages equal meshes"
                )
            if key in held:
                strategies.setdefault(key, strategy)
        if other.mesh == own.mesh:
            parameters |= {
                name: stored
                for name, stored in other.parameters
                if name not in parameters and name.rpartition(".")[0] in modules
            }
    order = {key: place for place, key in enumerate(operators)}
    mine = sorted((item for item in strategies.items() if item[0] in held), key=lambda item: order[item[0]])
    redistributions = [
        one
        for sharding in (own, *(other for other in others if other.mesh == own.mesh))
        for one in sharding.redistributions
        if (one.reader or one.tensor) in held and ("/" not in one.tensor or one.tensor in held)
    ]
    return replace(
        own,
        strategies=tuple(mine),
        parameters=tuple(parameters.items()),
        redistributions=tuple(dict.fromkeys(redistributions)),
    )


def _mesh(sharding: StageSharding) -> str:
    return " x ".join(f"{name} {size}" for name, size in zip(sharding.axes, sharding.mesh, strict=True))
