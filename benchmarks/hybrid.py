"""Step time and memory of a transformer trained under tensor x pipeline x data parallelism, by the cost models alone.

Kernels come from `hybrid_layers`, their seconds from the device's data sheet and efficiency, collectives from the
networks, and the clock from the pipeline's schedule, laid out action by action.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.schedule.builders import make_schedule
from autopar.schedule.clock import Transfer
from autopar.schedule.simulate import StageTimes, simulate
from benchmarks.hybrid_costs import Stages, memory_of, stages_of
from benchmarks.hybrid_plan import PARTS, Job, Seconds, Split
from cost_models.memory.training_memory import TrainingMemory


@dataclass(frozen=True)
class Step:
    """What a plan is predicted to take."""

    seconds: float
    parts: dict[str, float]  # s, of the device that is busy the longest, by PARTS; they sum up to `seconds`
    memory: TrainingMemory  # of the device that needs the most
    fits: bool


def predict(job: Job, split: Split) -> Step:
    """A step of `job` under `split`.

    The schedule is simulated: O(n log(pipeline)) for n = micro-batches x stages.

    Raises:
        ValueError: the split does not fit the job; all that is wrong.
    """
    if wrong := list(split.problems(job)):
        raise ValueError(f"{split}: " + "; ".join(why for _, why in wrong))
    stages, m = stages_of(job, split), split.microbatches(job.batch)
    name = "interleaved-1f1b" if split.chunks > 1 else "1f1b"
    schedule = make_schedule(name, m, (1,) * split.pipeline, chunks=split.chunks)
    times = [
        StageTimes(
            (one.forward.total,) * m,
            (one.backward.total,) * m,
            finish=finish.parts["gradients"],
            optimizer=finish.parts["optimizer"],
        )
        for one, finish in zip(stages.passes, stages.finishes, strict=True)
    ]
    blocking = job.system.blocking_sends
    sends = [Transfer(s, s + 1, (t,) * m, (t,) * m, overlap=not blocking) for s, t in enumerate(stages.sends)]
    seconds = simulate(schedule, times, sends).step_time
    busiest = max((_busy(stages, split, rank, m, blocking) for rank in range(split.pipeline)), key=lambda s: s.total)
    parts = {part: busiest.parts.get(part, 0.0) for part in PARTS}
    parts["bubble"] = seconds - busiest.total
    memory = memory_of(job, split)
    return Step(seconds, parts, memory, memory.total <= job.spec.memory)


def _busy(stages: Stages, split: Split, rank: int, m: int, blocking: bool) -> Seconds:
    """What a device does in a step: for its stages' micro-batches, results sent on and gradients sent back, the end."""
    total = Seconds()
    for s in range(rank, len(stages.passes), split.pipeline):
        total += stages.passes[s].both.times(m) + stages.finishes[s]
        if blocking:
            total += Seconds({"transfers": m * sum(stages.sends[max(0, s - 1) : s + 1])})
    return total
