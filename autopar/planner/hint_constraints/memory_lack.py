"""The strategies of a stage under hints, or an error that says how much memory the stage lacks, and for what."""

from __future__ import annotations

from autopar.errors import InfeasibleError
from autopar.planner.inter_op.memory_formula import ResidentBytes, resident_bytes, split_text
from autopar.planner.intra_op.constraints import ShardingConstraints
from autopar.planner.intra_op.strategy_search import Sharding, ShardingProblem
from autopar.sharding.layouts import parts
from cost_models import bytes_text

_ONLY_BYTES = 1e3  # s per byte: a price of memory beside which no kernel counts


def fitting(problem: ShardingProblem, memory: float, constraints: ShardingConstraints, where: str) -> Sharding:
    """The fastest strategies under `constraints` that need at most `memory` bytes on each device.

    `where`: what the error calls the stage. Raises InfeasibleError where nothing fits the memory.
    """
    try:
        return problem.solve(memory, {}, constraints)
    except InfeasibleError as error:
        least = problem.priced(_ONLY_BYTES, constraints)
        if least.nbytes <= memory:
            raise InfeasibleError(f"{where}, sharded by the hints: {error}") from error
        held = split_text(_resident(problem, least), least.nbytes, problem.task.optimizer)
        raise InfeasibleError(
            f"nothing fits the memory: {where}, sharded by the hints, needs {bytes_text(least.nbytes)} on each device, "
            f"has {bytes_text(memory)} ({held}): give more memory or devices, a smaller batch, hints that split more, "
            "or an optimizer with less state"
        ) from error


def _resident(problem: ShardingProblem, found: Sharding) -> ResidentBytes:
    """What a device holds all the time."""
    held = []
    for tensor, value in problem.facts.values.items():
        if tensor.op != "get_attr" or str(tensor.target) not in found.stored:
            continue
        stored, trained = found.stored[str(tensor.target)], tensor.name in problem.facts.trained
        cut = parts(stored.layout, problem.mesh.shape), parts(stored.state, problem.mesh.shape)
        weight = problem.task.weight(value, trained, *cut)
        held.append(resident_bytes(weight, problem.task.optimizer, problem.task.training))
    return ResidentBytes.sum_of(held)
