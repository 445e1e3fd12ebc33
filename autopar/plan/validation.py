"""Checks of a plan by itself, independent of the model and the devices."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from autopar.hints.module_paths import nearest
from autopar.plan.assumptions import wrong_assumptions
from autopar.plan.placeholders import is_ordinal
from autopar.schedule.builders import INTERLEAVED, SCHEDULES, V_SHAPED, n_ranks, order_in_words
from autopar.sharding.stage_sharding import problems

_MOST_NAMED = 4  # devices of a stage, or operators, that a text lists in full
_OTHER_RULES = ("n_microbatches", "source", "target")  # numbers that have their own lower bound
_FIELDS = "__dataclass_fields__"  # what `dataclasses.is_dataclass` asks for; it takes ten times as long
_LARGEST = 1e18  # s, bytes or pieces: products and sums of larger numbers could overflow a float
_MOST_FLOPS = 1e30  # of a step: a step of 405B parameters on a batch of thousands of sequences takes more than 1e19


def violations(plan: Any) -> list[str]:
    """Everything wrong with a Plan, or with a namespace of its fields; empty if it is valid.

    A field that is None was unreadable in a file, which the reader reports; here it passes.
    """
    checked = _counts(plan), _numbers(plan, ""), _devices(plan), _operators(plan), _split(plan), _transfers(plan)
    return [*itertools.chain(*checked), *wrong_assumptions(plan.assumed)]


def wrong_types(plan: Any) -> list[str]:
    """Fields of a Plan that scripts fill and that have a wrong type; the checks of `violations` assume right ones."""
    found = []
    if type(plan.n_microbatches) is not int:
        found.append(f"n_microbatches must be a whole number, got {plan.n_microbatches!r}")
    if not isinstance(plan.schedule, str):
        found.append(f"schedule must be one of {', '.join(SCHEDULES)}, got {plan.schedule!r}")
    if not isinstance(plan.stages, tuple):
        found.append(f"stages must be a tuple of Stage, got {plan.stages!r}")
    return found


def places(ranks: Iterable[Iterable[str]], schedule: str = "", chunks: int = 1) -> str:
    """The text for the devices of a pipeline, each with `chunks` stages."""
    once = " | ".join(replicas(tuple(names)) for names in ranks)
    if chunks == 1:
        return once
    return f"({once}) and back" if schedule in V_SHAPED else f"({once}) x {chunks}"


def replicas(names: Sequence[str]) -> str:
    """The text for the devices of one stage: all names, or the first and the last of many."""
    if len(names) <= _MOST_NAMED:
        return "+".join(names)
    return f"{names[0]} .. {names[-1]} ({len(names)})"


def _counts(plan: Any) -> Iterator[str]:
    m, batch = plan.n_microbatches, plan.batch_size
    if plan.stages is not None and not plan.stages:
        yield "a plan needs at least one stage"
    if m is not None and m < 1:
        yield f"n_microbatches must be at least 1, got {m}"
    if m is not None and batch is not None and m > max(batch, 1):
        yield f"n_microbatches is {m}, but the batch has {batch} sample{'s' if batch != 1 else ''}; give at most that"
    if plan.schedule is not None and plan.schedule not in SCHEDULES:
        yield f"schedule must be one of {', '.join(SCHEDULES)}, got {plan.schedule!r}"
    if plan.bubble is not None and plan.bubble > 1:
        yield f"bubble is a fraction of at most 1, got {plan.bubble}"


def _numbers(item: Any, where: str) -> Iterator[str]:
    """Seconds, bytes and counts that are negative, infinite, NaN or too large."""
    for name, value in vars(item).items():
        if isinstance(value, tuple):
            for index, part in enumerate(value):
                if hasattr(part, _FIELDS):
                    yield from _numbers(part, f"{where}{name}[{index}].")
        elif hasattr(value, _FIELDS):
            yield from _numbers(value, f"{where}{name}.")
        elif not isinstance(value, (int, float)):
            continue
        elif name not in _OTHER_RULES and not 0 <= value < math.inf:
            yield f"{where}{name} must be a finite number of at least 0, got {value}"
        elif value > (largest := _MOST_FLOPS if name == "flops" else _LARGEST):
            yield f"{where}{name} must be at most {largest:g}, got {value:g}"


def _devices(plan: Any) -> Iterator[str]:
    offered, kinds = plan.devices or (), plan.device_kinds or ()
    for name in _twice(offered):
        yield f"devices lists {name} twice"
    if kinds and plan.devices is not None and len(kinds) != len(offered):
        yield f"device_kinds must name a kind for each of the {len(offered)} devices, got {len(kinds)}"
    known = [(s, stage.devices) for s, stage in enumerate(plan.stages or ()) if stage.devices is not None]
    names_offered = set(offered)
    for s, names in known:
        if not names:
            yield f"stage {s} has no device; every stage needs at least one device"
        for name in _twice(names):
            yield f"stage {s} lists {name} twice"
        sharding = plan.stages[s].sharding
        if sharding is not None and None not in (
            sharding.mesh,
            sharding.axes,
            sharding.strategies,
            sharding.parameters,
            sharding.redistributions,
        ):
            yield from (f"stage {s}: {problem}" for problem in problems(sharding, len(names)))
        absent = [name for name in names if offered and name not in names_offered and not is_ordinal(name)]
        if absent:
            yield f"stage {s} is on {', '.join(absent)}, but the devices are {', '.join(offered)}"
    for s, stage in enumerate(plan.stages or ()):
        if stage.recompute and stage.selective:
            yield f"stage {s} recomputes all of its forward and selectively; choose one"
        elif stage.layerwise and (stage.recompute or stage.selective):
            other = "all of its forward at once" if stage.recompute else "selectively"
            yield f"stage {s} recomputes layer by layer and {other}; choose one"
        if stage.keeps_products and not stage.layerwise:
            yield f"stage {s} keeps products of layers that it recomputes, but it recomputes none; set layerwise"
    groups = [names for _, names in known]
    if plan.schedule in INTERLEAVED:
        if groups and n_ranks(plan.schedule, groups) is None:
            yield f"under {plan.schedule} the stages {order_in_words(plan.schedule)}, here they are {places(groups)}"
        counts = [_replicas(plan.stages[s]) for s, _ in known]
        if len(set(counts)) > 1:
            here = ", ".join(map(str, counts))
            yield f"under {plan.schedule} all stages have the same number of devices, here {here}"
        groups = list(dict.fromkeys(groups))
    shared = _twice(name for names in groups for name in dict.fromkeys(names))
    if shared:
        yield f"devices {', '.join(shared)} serve more than one stage; each device serves one"


def _replicas(stage: Any) -> int:
    """The number of devices of a stage, or of its meshes."""
    mesh = stage.sharding.mesh if stage.sharding is not None else None
    return len(stage.devices) // max(1, math.prod(mesh or ()))


def _operators(plan: Any) -> Iterator[str]:
    stages = plan.stages or ()
    homes: dict[str, list[int]] = defaultdict(list)
    for s, stage in enumerate(stages):
        for key in stage.operators or ():
            homes[key].append(s)
    several = ((tuple(where), key) for key, where in homes.items() if len(where) > 1)
    for where, run in itertools.groupby(several, key=lambda one: one[0]):
        keys = [key for _, key in run]
        times = f"listed {len(where)} times, in stages {', '.join(map(str, where))}"
        if len(keys) < _MOST_NAMED:
            yield from (f"operator {key} is {times}" for key in keys)
        else:
            yield f"{len(keys)} operators, '{keys[0]}' to '{keys[-1]}', are {times}"
    if homes:
        for s, stage in enumerate(stages):
            if stage.operators == ():
                yield f"stage {s} has no operators; leave it out or move some into it"


def _split(plan: Any) -> Iterator[str]:
    if not plan.split or not plan.stages:
        return
    n = len(plan.stages)
    for path, stage in plan.split:
        if not 0 <= stage < n:
            yield f"'{path}' is put on stage {stage}, but there are stages 0..{n - 1}"
    empty = sorted(set(range(n)) - {stage for _, stage in plan.split})
    if empty:
        yield f"no module is put on stage {', '.join(map(str, empty))}; number the stages 0, 1, 2, ..."
    for path in _twice(path for path, _ in plan.split):
        yield f"'{path}' is put on two stages"
    split = dict(plan.split)
    for s, stage in enumerate(plan.stages):
        for key in stage.operators or ():
            path = nearest(key.rpartition("/")[0], split)
            if path is not None and split[path] != s:
                yield f"stage {s} lists operator {key}, but the split puts '{path}' on stage {split[path]}"
                break


def _transfers(plan: Any) -> Iterator[str]:
    for index, link in enumerate(plan.transfers or ()):
        source, target = link.source, link.target
        if source is None or target is None or not plan.stages:
            continue
        if not 0 <= source < target < len(plan.stages):
            yield f"transfers[{index}] goes from stage {source} to {target}, not to a later one of {len(plan.stages)}"
        if link.seconds is not None and (link.backward_seconds or 0.0) > link.seconds:
            yield f"transfers[{index}].backward_seconds is {link.backward_seconds}, of {link.seconds} s both ways"


def _twice(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]
