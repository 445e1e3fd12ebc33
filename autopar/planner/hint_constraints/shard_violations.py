"""Whether a plan, which may be loaded or written by hand, follows the `shard()` hints on the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from autopar.analysis.operators import operator_keys
from autopar.capture.program import Program
from autopar.errors import PlanError
from autopar.plan.plan import Plan
from autopar.planner.hint_constraints.shard_hints import ResolvedSharding, has_sharding_hints, resolve_sharding
from autopar.planner.intra_op.constraints import AllowedPlacements
from autopar.sharding.layouts import REPLICATE, Placements
from autopar.sharding.stage_sharding import StageSharding, layout_text


def sharding_violations(plan: Plan, stage_of: Mapping[str, int], program: Program, model: nn.Module) -> list[str]:
    """The places where a plan does not follow `shard()` hints.

    `stage_of`: node name -> stage. Operators that the plan does not know, of another capture of the model, are not
    checked. Raises PlanError for hints that do not fit the mesh of the plan.
    """
    if not has_sharding_hints(program, model):
        return []
    known = {key for stage in plan.stages for key in stage.operators}
    keys = {node.name: key for node, key in operator_keys(program).items()}
    found: list[str] = []
    for number, stage in enumerate(plan.stages):
        sharding = stage.sharding or StageSharding((1,), ("device",))
        mine = {n for n, s in stage_of.items() if s == number and (not known or keys[n] in known)}
        mesh = sharding.mesh, sharding.axes
        try:
            resolved = resolve_sharding(program, model, sharding.size, plan.n_microbatches, mesh, frozenset(mine))
        except PlanError:
            if plan.batch_size is not None and plan.batch_size != program.batch_size:
                continue  # planned for another batch size; the run reports what it cannot cut
            raise
        found += _astray(resolved, sharding, {name: keys[name] for name in mine})
    return list(dict.fromkeys(found))


def _astray(resolved: ResolvedSharding, sharding: StageSharding, keys: Mapping[str, str]) -> Iterator[str]:
    """`keys`: of the stage's operators."""
    whole = (REPLICATE,) * len(sharding.mesh)
    for side, wanted_of in enumerate((resolved.constraints.operands, resolved.constraints.results)):
        for name, places in wanted_of.items():
            if name not in keys:
                continue
            layouts = sharding.strategy_of.get(keys[name], ((), ()))[side]
            for place, several in places.items():
                yield from _other(several, layouts[place] if place < len(layouts) else whole, keys[name])
    for name, several in resolved.constraints.stored.items():
        stored = sharding.stored.get(name)
        yield from _other(several, whole if stored is None else stored.layout, name)


def _other(several: Sequence[AllowedPlacements], layout: Placements, name: str) -> Iterator[str]:
    for wanted in several:
        if layout not in wanted.layouts:
            yield f"{wanted.reason}; in the plan, {name} has {layout_text(layout)} there"
