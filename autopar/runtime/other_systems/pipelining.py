"""torch.distributed.pipelining: which stages a rank has under each of its schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from autopar.runtime.other_systems.training_step import TrainingStep

# By schedule, stages per rank; of "V" schedules, rank r of n has stages r and 2n - 1 - r.
#
#   loop   rank 0: 0 2    rank 1: 1 3          V   rank 0: 0 3    rank 1: 1 2
PER_RANK = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


def stages_of(schedule: str, rank: int, n_ranks: int) -> tuple[int, ...]:
    """The stages of a rank, in their order."""
    if PER_RANK[schedule] == 1:
        return (rank,)
    return (rank, 2 * n_ranks - 1 - rank) if schedule in V_SHAPED else (rank, rank + n_ranks)


def pipelining_step(
    step: TrainingStep, rank: int, n_ranks: int, schedule: str, n_microbatches: int, cuts: Sequence[int]
) -> Callable[[], float | None]:
    """A rank's part of a step, which returns the mean loss where the last stage is. `cuts`: the first block of each
    stage but the first.

    The gradient of a tied parameter is summed over ranks here, as torch.distributed.pipelining does not.
    """
    from torch.distributed.pipelining import PipelineStage, schedules

    assert step.blocks is not None
    mine = stages_of(schedule, rank, n_ranks)
    bounds = list(pairwise([0, *cuts, len(step.blocks)]))
    stages = []
    # Zero-bubble schedules compute gradients of a stage's own parameters alone, so both ends own a tied one.
    ends = [number for number in mine if number in (0, len(bounds) - 1)]
    for number in mine:
        part = step.blocks[slice(*bounds[number])]
        for index, parameter in enumerate(step.tied if number in ends else ()):
            part.register_parameter(f"tied{index}", parameter)
        stages.append(PipelineStage(part, number, len(bounds), torch.device("cpu")))
    made = getattr(schedules, f"Schedule{schedule}")
    # A stage divides its gradients by the number of micro-batches once it is done, also what another stage of the rank
    # has added to a tied one so far: then they are divided here.
    whole = not step.tied
    own = {id(p): p for stage in stages for p in stage.submod.parameters()}.values()
    each = stages if PER_RANK[schedule] > 1 else stages[0]
    run = made(each, n_microbatches, loss_fn=step.block_loss, scale_grads=whole)
    is_first, is_last = 0 in mine, len(bounds) - 1 in mine

    def one() -> float | None:
        losses: list[torch.Tensor] = []
        last = {"target": step.target, "losses": losses} if is_last else {}
        run.step(*((step.input,) if is_first else ()), return_outputs=False, **last)
        for parameter in () if whole else own:
            if parameter.grad is not None:
                parameter.grad.div_(n_microbatches)
        for parameter in step.tied:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
        return torch.stack(losses).mean().item() if losses else None

    return one
