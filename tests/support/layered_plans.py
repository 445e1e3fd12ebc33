"""Plans of equal layers on stages of a tensor-parallel mesh, and edits of plan files."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from autopar import Plan
from autopar.plan.stage import Stage
from autopar.sharding.stage_sharding import StageSharding, Stored
from autopar.sharding.strategies import OperatorPlacements

Data = dict[str, Any]


def layered_plan(n_layers: int = 16, n_stages: int = 4, *, cut: int = 0, other: int | None = None) -> Plan:
    """Equal layers on stages of a tensor-parallel mesh. `cut`: operators by which each stage ends early. `other`: a
    layer with another strategy in one operator."""
    inside = [".norm/pow#0", ".norm/mul#0", "/add#0"]
    inside += [f".mlp.{name}/linear#0" for name in ("gate", "up", "down")] + [".mlp/mul#0", "/add#1"]
    keys = [f"model.layers.{i}{name}" for i in range(n_layers) for name in inside]
    each = len(keys) // n_stages
    ends = [each * s - cut for s in range(1, n_stages)] + [len(keys)]
    held = [tuple(keys[a:b]) for a, b in zip([0, *ends], ends, strict=False)]

    def placements(key: str) -> OperatorPlacements:
        if key == f"model.layers.{other}.mlp.up/linear#0":
            return OperatorPlacements(((-1,), (1,)), ((-2,),))
        return OperatorPlacements(((-1,), (0,)), ((1,),))

    stages = []
    for s, mine in enumerate(held):
        sharding = StageSharding(
            (2,),
            ("tensor",),
            tuple((key, placements(key)) for key in mine if "linear" in key),
            tuple((key.replace("/linear#0", ".weight"), Stored((0,), (0,))) for key in mine if "linear" in key),
        )
        stages.append(Stage((f"cuda:{2 * s}", f"cuda:{2 * s + 1}"), mine, forward_time=0.1, sharding=sharding))
    return Plan(tuple(stages), 4, devices=tuple(f"cuda:{i}" for i in range(2 * n_stages)))


def edited(plan: Plan, edit: Callable[[Data], object]) -> Plan:
    """The plan that its file says after an edit."""
    data = json.loads(plan.to_json())
    edit(data)
    return Plan.from_json(json.dumps(data))


def put(*place: Any) -> Callable[[Data], None]:
    """An edit: the last value is put at the place that the others name."""
    *steps, last, value = place

    def corrupt(data: Any) -> None:
        for step in steps:
            data = data[step]
        data[last] = value

    return corrupt
