"""Why no plan fits the memory: what all devices lack together, or the stage that lacks most."""

from __future__ import annotations

import math

from autopar.costs.cost_graph import CostGraph
from autopar.errors import InfeasibleError
from autopar.planner.inter_op.candidates import Searching
from autopar.planner.inter_op.memory_formula import ResidentBytes, all_resident, split_text
from autopar.planner.inter_op.partition import explain_infeasible
from autopar.planner.search_options import SearchOptions
from cost_models import bytes_text
from cost_models.memory.optimizer_step import FUSED


def check_total(costs: CostGraph, options: SearchOptions) -> None:
    """Refuse a cluster whose devices together cannot hold the model once, as a search would find out late.

    Raises InfeasibleError with the bytes.
    """
    if costs.cluster is None:
        return
    weights = {name: weight for operator in costs.operators.values() for name, weight in operator.parameters.items()}
    held = all_resident(weights.values(), options.optimizer, costs.training)
    there = sum(min(device.memory, options.memory_limit or math.inf) for device in costs.devices)
    if held.total <= there:
        return
    n = len(costs.devices)
    raise InfeasibleError(
        f"no plan fits the memory: the model alone needs {bytes_text(held.total)} "
        f"({split_text(held, held.total, options.optimizer)}), {n} {'devices have' if n > 1 else 'device has'} "
        f"{bytes_text(there)} in all; give more memory or devices, or an optimizer with less state"
    )


def no_rehearsed_step_fits(excess: float) -> InfeasibleError:
    return InfeasibleError(
        f"no plan fits the memory: rehearsed, the step of the one that lacks least needs {excess - 1:.1%} more than a "
        "device has; give more memory or devices, a smaller batch, or an optimizer with less state"
    )


def no_plan_fits(searching: Searching) -> InfeasibleError:
    """The error that names the stage and the bytes that it lacks, for the plan that lacks least."""
    costs = searching.costs
    shortest = None
    # Larger micro-batches need no less memory; where that takes long, the smallest ones say what is lacking.
    for m in searching.counts if searching.all_shapes else searching.counts[-1:]:
        problem = searching.problem(m, searching.schedules[0], searching.full)
        try:
            found = explain_infeasible(problem)
        except ValueError as error:
            return InfeasibleError(f"no plan: {error}; give every stage before a pinned one an operator to run")
        if found is not None and (shortest is None or found.needed - found.available < shortest[0]):
            shortest = (found.needed - found.available, found, m, problem)
    if shortest is None:
        return InfeasibleError(
            f"no plan fits the memory under {searching.schedules[0]} with the devices and hints given; "
            "allow another schedule, remove a hint, or give more devices"
        )
    lack, found, m, problem = shortest
    cuts = problem.space.cuts
    inside = (cuts[found.stage.stop] & ~cuts[found.stage.start]).nonzero()[0]
    names = [name for atom in inside for name in searching.atoms.nodes[atom]]
    names.sort(key=lambda name: costs.operators[name].position)
    modules = [p for p in dict.fromkeys(costs.operators[n].module for n in names) if p] or ["the whole model"]
    kind = problem.kinds[found.stage.kind]
    parts = _resident(searching, frozenset(inside.tolist()), kind.name)
    helps = found.passing <= found.available and searching.ahead and searching.options.optimizer in FUSED
    fused = ", or optimizer_step='fused', which needs no temporaries" if helps else ""
    split = split_text(parts, found.needed, searching.options.optimizer, stepping=found.stepping)
    return InfeasibleError(
        f"no plan fits the memory: with {m} micro-batch{'es' if m > 1 else ''}, stage {found.index} ({modules[0]} .. "
        f"{modules[-1]}) on {kind.name} needs {bytes_text(found.needed)}, has {bytes_text(found.available)} ({split}); "
        f"{bytes_text(lack)} are lacking: give more memory or devices, a smaller batch, or an optimizer with less state"
        f"{fused}"
    )


def _resident(searching: Searching, inside: frozenset[int], kind: str) -> ResidentBytes:
    """What a device of the stage with the atoms `inside` holds all the time."""
    weights = [w for shared, w in searching.atoms.of(kind).parameters if not inside.isdisjoint(shared.atoms)]
    return all_resident(weights, searching.options.optimizer, searching.costs.training)
