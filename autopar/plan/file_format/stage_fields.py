"""Fields of plans and stages that formats 3 to 6 of a plan file write alike, read as those of format 2.

recompute, selective, layerwise, keeps_products       "recompute": "full", as `Plan.by_hand` calls it
mesh [2, 4], axes ["data", "tensor"]                  "mesh": {"data": 2, "tensor": 4}
device_kinds ["H100", "H100", ...]                    "device_kinds": "H100", if all are
collective_bytes, collective_time                     sums over "exchanges"

What cannot be read goes into `problems`; `where` is the stage's place, for these.
"""

from __future__ import annotations

import contextlib
from typing import Any

from autopar.plan.file_format.collectives import Collectives
from autopar.plan.file_format.fields import UNREADABLE
from autopar.plan.file_format.short_values import each_device
from autopar.plan.file_format.tables import EXCHANGES
from autopar.plan.file_format.writing import FLAGS, sums
from autopar.plan.recompute import RECOMPUTE, recompute_flags


def with_devices(plan: dict[str, Any]) -> None:
    """Every device of a plan, with its kind."""
    if "devices" in plan:
        plan["devices"] = each_device(plan["devices"])
    if isinstance(plan.get("device_kinds"), str):
        devices = plan.get("devices", [])
        plan["device_kinds"] = [plan["device_kinds"]] * len(devices) if isinstance(devices, list) else UNREADABLE


def with_mode_and_mesh(stage: dict[str, Any], where: str, problems: list[str]) -> dict[str, Any]:
    """A copy of the stage with each device, the flags of its recomputation, and the shape and axes of its mesh."""
    stage = dict(stage)
    if "devices" in stage:
        stage["devices"] = each_device(stage["devices"])
    for flag in FLAGS[1:]:
        if flag in stage:
            problems.append(f"{where}{flag} is unknown; write 'recompute' with one of {', '.join(RECOMPUTE)}")
            del stage[flag]
    name = stage.pop("recompute", "none")
    if isinstance(name, str) and name in RECOMPUTE:
        stage |= {flag: True for flag, on in recompute_flags(name).items() if on}
    else:
        problems.append(f"{where}recompute must be one of {', '.join(RECOMPUTE)}, got {name!r}")
    if isinstance(stage.get("sharding"), dict):
        stage["sharding"] = sharding = dict(stage["sharding"])
        mesh = sharding.get("mesh")
        if isinstance(mesh, dict):
            sharding["mesh"], sharding["axes"] = list(mesh.values()), list(mesh)
        elif "mesh" in sharding:
            problems.append(f"{where}sharding.mesh must be an object from axes to numbers of devices, got {mesh!r}")
            sharding["mesh"], sharding["axes"] = [1], ["unknown"]
    return stage


def with_exchanges(sharding: dict[str, Any], where: str, collectives: Collectives, problems: list[str]) -> None:
    """Put collectives in the place of their numbers, and the sums over them beside."""
    if not isinstance(sharding.get(EXCHANGES), list):
        return
    sharding[EXCHANGES] = collectives.exchanges(sharding[EXCHANGES], f"{where}sharding.{EXCHANGES}", problems)
    # Values that are no numbers are refused by whoever reads the fields.
    with contextlib.suppress(TypeError, OverflowError, ValueError):
        sharding |= {name: value for name, value in sums(sharding).items() if name not in sharding}
