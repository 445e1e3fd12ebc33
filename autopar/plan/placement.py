"""A plan on the devices at hand: names of devices in the place of placeholders, or all that stands against it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from autopar.errors import InputError, PlanError
from autopar.plan.placeholders import devices_in_order, devices_of_type, goes_round, is_ordinal
from autopar.schedule.builders import INTERLEAVED

if TYPE_CHECKING:
    from autopar.plan.plan import Plan
    from autopar.plan.stage import Stage


def placed_on(plan: Plan, offered: Sequence[str], kinds: Sequence[str] | None) -> Plan:
    """See `Plan.on`."""
    if isinstance(offered, str) or not isinstance(offered, Sequence) or not all(isinstance(n, str) for n in offered):
        raise InputError(f"devices must be a list of their names, such as ['cuda:0', 'cuda:1'], got {offered!r}")
    made_for = dict(zip(plan.devices, plan.device_kinds, strict=False))
    names, lacking = devices_of_type(plan.used_devices, plan.devices, made_for, offered, kinds)
    if lacking:
        raise PlanError(lacking)
    if names:
        made_for = {}  # those devices are not here
    here = made_for if kinds is None else dict(zip(offered, kinds, strict=True))
    problems = [*_too_few(plan, offered), *_unknown(plan, offered, names), *_other_types(plan, made_for, here)]
    if problems:
        raise PlanError("; ".join(problems))
    names |= _ordinals(plan, offered)
    stages = tuple(_renamed(stage, names) for stage in plan.stages)
    device_kinds = tuple(here[n] for n in offered) if all(n in here for n in offered) else ()
    return replace(plan, stages=stages, devices=tuple(offered), device_kinds=device_kinds)


def _ordinals(plan: Plan, offered: Sequence[str]) -> dict[str, str]:
    return devices_in_order([stage.devices for stage in plan.stages], offered, plan.schedule in INTERLEAVED)


def _too_few(plan: Plan, offered: Sequence[str]) -> Iterator[str]:
    n_stages, n_used = len(plan.stages), len(plan.used_devices)
    if goes_round([stage.devices for stage in plan.stages], offered, plan.schedule in INTERLEAVED):
        if not offered or n_stages % len(offered):
            yield f"{n_stages} stages cannot go round {len(offered)} devices evenly: {', '.join(offered)}"
    elif n_used > len(offered):
        yield f"the plan uses {n_used} devices, but {len(offered)} are given: {', '.join(offered)}"


def _unknown(plan: Plan, offered: Sequence[str], names: Mapping[str, str]) -> Iterator[str]:
    known = {*offered, *names, *_ordinals(plan, offered)}
    short = len(plan.used_devices) > len(offered)  # already reported, so leave out placeholders without a device
    unknown = [name for name in plan.used_devices if name not in known and not (short and is_ordinal(name))]
    if unknown:
        yield f"the plan uses {', '.join(unknown)}, but the devices are {', '.join(offered)}"


def _renamed(stage: Stage, names: Mapping[str, str]) -> Stage:
    """The stage on devices of other names; the same object where none changes."""
    devices = tuple(names.get(name, name) for name in stage.devices)
    return stage if devices == stage.devices else replace(stage, devices=devices)


def _other_types(plan: Plan, made_for: Mapping[str, str], here: Mapping[str, str]) -> Iterator[str]:
    other = [n for n in plan.used_devices if n in made_for and n in here and made_for[n] != here[n]]
    if other:
        types = ", ".join(f"{n} = '{made_for[n]}', which here is '{here[n]}'" for n in other)
        yield f"the plan was made for {types}; plan again, or take device_kinds out of the plan"
