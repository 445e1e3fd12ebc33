"""Names of devices that are not here yet, `NODE.DEVICE:TYPE`. `Plan.on` replaces them by devices that are.

0.3:H100    any device of this type: device 3 of node 0 of a cluster that was planned for ahead (`Cluster.devices`)
0.2:any     the third device offered, of whatever type: in plans made by hand that name no devices
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from autopar.errors.numbers import count
from cost_models.hardware.device_specs import describes

_ANY = "any"
_ORDINAL = re.compile(rf"0\.\d+:{_ANY}")
_CLUSTER_DEVICE = re.compile(rf"\d+\.\d+:(?!{_ANY}$).+")


def ordinal(index: int) -> str:
    """The placeholder of the device offered at this place."""
    return f"0.{index}:{_ANY}"


def is_ordinal(name: str) -> bool:
    return _ORDINAL.fullmatch(name) is not None


def devices_of_type(
    used: Sequence[str],
    every: Sequence[str],
    device_kinds: Mapping[str, str],
    offered: Sequence[str],
    offered_kinds: Sequence[str] | None,
) -> tuple[dict[str, str], str]:
    """A device offered for each cluster device that a plan uses; and a sentence on what is lacking, or "".

    As many devices as the cluster has take their places, so that neighbours stay neighbours: of 2 nodes with 2 devices
    each, 1.0 is the third. Otherwise each gets the first free one of its type, in the cluster's order.

    `every`: the cluster's devices, node by node. `device_kinds`: the types that the plan was made for, by name.
    `offered_kinds`: None where any device will do.
    """
    place = {name: number for number, name in enumerate(every)}
    wanted = [name for name in used if _CLUSTER_DEVICE.fullmatch(name) and name not in offered]
    wanted.sort(key=lambda name: place.get(name, len(place)))
    free = list(zip(offered, offered_kinds or [""] * len(offered), strict=True))
    names: dict[str, str] = {}
    for name, pair in zip(every, free, strict=True) if len(every) == len(offered) else ():
        if name in wanted and _fits(device_kinds.get(name, ""), pair[1]):
            names[name] = pair[0]
    free = [pair for pair in free if pair[0] not in names.values()]
    lacking: list[str] = []
    for name in wanted:
        if name in names:
            continue
        spec = device_kinds.get(name, "")
        fitting = next((pair for pair in free if _fits(spec, pair[1])), None)
        if fitting is None:
            lacking.append(spec)
        else:
            names[name] = fitting[0]
            free.remove(fitting)
    if not lacking:
        return names, ""
    left = ", ".join(f"{name} = '{kind}'" if kind else name for name, kind in free) or "none"
    kinds = ", ".join(sorted(set(lacking)))
    are = "is" if len(lacking) == 1 else "are"
    return names, f"the plan needs {count(len(lacking), 'device')} of kind {kinds} that {are} not offered; free: {left}"


def _fits(spec: str, kind: str) -> bool:
    """Whether a device of `kind` is of the type that a plan was made for; any device is where its kind is not known."""
    return not kind or describes(spec, kind)


def devices_in_order(groups: Sequence[Sequence[str]], offered: Sequence[str], in_turn: bool) -> dict[str, str]:
    """The device of every placeholder `0.i:any`; `groups` are the devices of each stage.

    With `in_turn` (interleaved stages), a plan that uses places 0 to 3 goes round two devices: 0 1 0 1.
    """
    n = len(groups) if goes_round(groups, offered, in_turn) else len(offered)
    return {ordinal(i): offered[i % len(offered)] for i in range(n) if offered}


def goes_round(groups: Sequence[Sequence[str]], offered: Sequence[str], in_turn: bool) -> bool:
    """Whether stages that name no devices share the devices offered, several stages each."""
    free = all(tuple(group) == (ordinal(s),) for s, group in enumerate(groups))
    return in_turn and free and len(offered) < len(groups)
