"""A step before it runs: what every stage takes and holds, laid out in time by the simulator.

This is the one place where a predicted step is put together. Its numbers come from the cost graph, for plans that the
search considers, or from a plan's own fields, for plans that were saved or loaded:

    Arrangement x CostGraph --predict.predicted_step--.
                                                       >--> PredictedStep --timeline--> Timeline
    Plan with numbers --step_of_plan------------------'
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autopar.costs.python_overhead import ACTION_OVERHEAD
from autopar.costs.shared_hardware import hardware_of
from autopar.plan.plan import Plan
from autopar.plan.recompute import Recompute
from autopar.plan.stage import SizeRatios, Stage
from autopar.schedule.builders import SPLIT_BACKWARD, make_schedule, ranks_of_stages
from autopar.schedule.clock import Transfer
from autopar.schedule.micro_batches import from_mean, mean_and_ratio, split_sizes
from autopar.schedule.simulate import StageTimes, simulate
from autopar.schedule.timeline import StageMemory, Timeline

ONE_WORKER = "one worker does all actions: operators take hardly longer than Python needs to call them"


@dataclass(frozen=True)
class PredictedStage:
    """What the operators of a stage take, without Python's overhead."""

    forward: tuple[float, ...]  # s of each micro-batch
    backward: tuple[float, ...]  # s of each micro-batch, without a repeated forward
    weight: tuple[float, ...]  # s of each micro-batch: the part of `backward` for gradients of parameters
    recompute: Recompute
    once: float  # s once a step, after the last backward: reducing gradients, gathering parameters
    sends_gradient: bool  # stages before it wait for the gradients of its inputs
    optimizer: float = 0.0  # s once a step, after that: the optimizer's step
    memory: StageMemory | None = None
    again: tuple[float, ...] = ()  # s of each micro-batch: what recomputing attention or layers adds to the backward
    # s of `backward` and `weight` that the first micro-batch of a replica lacks: it adds its gradients to none.
    accumulation: float = 0.0


@dataclass(frozen=True)
class PredictedStep:
    """A step of a pipeline."""

    stages: tuple[PredictedStage, ...]
    transfers: tuple[Transfer, ...]
    schedule: str
    n_microbatches: int
    replicas: tuple[int, ...]  # of each rank
    chunks: int  # stages of each rank
    training: bool
    plain: bool  # the runtime calls the model itself, and nothing adds to its operators
    # s of the caller after all forwards, before all backwards: what runs on the whole batch (`costs/whole_batch.py`).
    # 0: a loss that is not known; None: nothing, and backwards do not wait for all forwards.
    barrier: float | None = None
    overhead: float = ACTION_OVERHEAD  # s of Python for every action, unless `plain`
    handling: float = 0.0  # s of each end of a message between processes, besides what its link takes
    hardware: tuple[int, ...] = ()  # of each slot, a number that slots on one GPU share; (): each has its own
    one_worker: bool = False  # does all actions, because Python takes most of their time

    @property
    def notes(self) -> tuple[str, ...]:
        """What a plan says of how it will run."""
        return (ONE_WORKER,) if self.one_worker else ()

    def timeline(self, *, link_speed: float = 1.0) -> Timeline:
        """Who does what when. `link_speed`: every transfer takes its seconds divided by this."""
        schedule = make_schedule(
            self.schedule, self.n_microbatches, self.replicas, chunks=self.chunks, training=self.training
        )
        transfers = [
            replace(
                t,
                forward=tuple(seconds / link_speed for seconds in t.forward),
                backward=tuple(seconds / link_speed for seconds in t.backward),
            )
            for t in self.transfers
        ]
        memory = [stage.memory for stage in self.stages if stage.memory is not None]
        memory = memory if len(memory) == len(self.stages) else []
        slots = sum(self.replicas)
        return simulate(
            schedule,
            [self._times(number) for number in range(len(self.stages))],
            transfers,
            memory=memory or None,
            barrier=self.barrier,
            hardware=(0,) * slots if slots > 1 and self.one_worker else self.hardware,
        )

    def one_copy(self) -> PredictedStep:
        """The first of as many equal pipelines as the step consists of, whose step takes as long and holds as much.

        Micro-batch k runs on replica k mod r of each stage. So where c divides the micro-batches and the replicas of
        every stage, those with the same k mod c meet no others. The step itself where micro-batches differ or devices
        share hardware.
        """
        copies = math.gcd(self.n_microbatches, *self.replicas)
        times = [of for s in self.stages for of in (s.forward, s.backward, s.weight, s.again)]
        sizes = [s.memory.activation for s in self.stages if s.memory is not None]
        alike = all(len(set(of_microbatches)) <= 1 for of_microbatches in (*times, *sizes))
        if copies == 1 or self.hardware or self.one_worker or not alike:
            return self
        m = self.n_microbatches // copies

        def shorter(stage: PredictedStage) -> PredictedStage:
            memory = stage.memory and replace(stage.memory, activation=stage.memory.activation[:m])
            times = {name: getattr(stage, name)[:m] for name in ("forward", "backward", "weight", "again")}
            return replace(stage, **times, memory=memory)

        return replace(
            self,
            stages=tuple(map(shorter, self.stages)),
            transfers=tuple(replace(t, forward=t.forward[:m], backward=t.backward[:m]) for t in self.transfers),
            n_microbatches=m,
            replicas=tuple(n // copies for n in self.replicas),
        )

    @cached_property
    def _ranks(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return ranks_of_stages(self.schedule, len(self.replicas), self.chunks)

    def _messages(self, number: int) -> int:
        """That an action of a stage sends and receives, from and to other devices; in a backward their gradients."""
        rank = self._ranks
        return sum(number in (t.source, t.target) and rank[t.source] != rank[t.target] for t in self.transfers)

    def _times(self, number: int) -> StageTimes:
        """The seconds of a stage's actions, with the overhead of each and the handling of its messages.

        recompute         backward = forward again + backward, or cores of attention or layers again + backward
        split backward    two actions; where no stage waits for its gradients, all of it runs as the WEIGHT part
        """
        stage = self.stages[number]
        overhead, handling = 0.0 if self.plain else self.overhead, self.handling * self._messages(number)
        split = self.schedule in SPLIT_BACKWARD
        again = stage.again or (0.0,) * len(stage.forward)
        if stage.recompute == Recompute.STAGE:
            again = stage.forward
        first = self.replicas[self._ranks[number]]  # micro-batches from 0 on, one on each replica
        lacks = [stage.accumulation if i < first else 0.0 for i in range(len(stage.backward))]
        backward = [max(0.0, b - n) + f for b, f, n in zip(stage.backward, again, lacks, strict=True)]
        weight = backward
        if stage.sends_gradient:
            weight = [max(0.0, w - n) for w, n in zip(stage.weight, lacks, strict=True)]
        return StageTimes(
            tuple(f + overhead + handling for f in stage.forward),
            tuple(b + overhead * (2 if split else 1) + handling for b in backward),
            tuple(w + overhead for w in weight) if split else (),
            stage.once,
            stage.optimizer,
        )


def step_of_plan(plan: Plan, *, batch_factor: int = 1) -> PredictedStep | None:
    """A step from a plan's own numbers; None where it has none (made by hand).

    `batch_factor`: the batch is this many times as large, in as many times the micro-batches of the same sizes. What
    runs once on the whole batch keeps its seconds: how they grow is not known (`grows_with_the_batch`).
    """
    if any(stage.forward_time is None or stage.backward_time is None for stage in plan.stages):
        return None
    m = plan.n_microbatches
    sizes = split_sizes(plan.batch_size or m, m)
    stages = []
    for number, stage in enumerate(plan.stages):
        forward, backward, weight, again = (each * batch_factor for each in _passes(stage, sizes))
        stages.append(
            PredictedStage(
                forward,
                backward,
                weight,
                stage.mode,
                stage.sync_time or 0.0,
                any(link.target == number and link.backward_bytes for link in plan.transfers),
                stage.optimizer_time or 0.0,
                memory=_memory(stage, [size / sizes[0] for size in sizes] * batch_factor),
                again=again,
                accumulation=stage.accumulation_time or 0.0,
            )
        )
    transfers = []
    for link in plan.transfers:
        back = link.backward_seconds
        if back is None:
            back = link.seconds / 2 if link.backward_bytes else 0.0  # a gradient is as large as its value
        n = m * batch_factor
        each = (link.seconds - back,) * n, (back,) * n
        transfers.append(Transfer(link.source, link.target, *each, overlap=not link.blocking))
    n_groups = sum(stage.replicas for stage in plan.first_stages)  # a mesh is one group, as in `Arrangement`
    return PredictedStep(
        tuple(stages),
        tuple(transfers),
        plan.schedule,
        m * batch_factor,
        tuple(stage.replicas for stage in plan.first_stages),
        plan.chunks,
        plan.training,
        plain=n_groups == 1 and m == 1 and not any(stage.mode for stage in plan.stages),
        barrier=_barrier(plan),
        overhead=ACTION_OVERHEAD * (plan.time_scale or 1.0) if plan.action_time is None else plan.action_time,
        handling=plan.message_time or 0.0,
        hardware=hardware_of(s.devices[i * s.shards] for s in plan.first_stages for i in range(s.replicas)),
        one_worker=plan.one_worker,
    )


def grows_with_the_batch(plan: Plan) -> bool:
    """Whether the step of a larger batch is known: nothing but micro-batches takes time."""
    return not plan.whole_batch_time


def _barrier(plan: Plan) -> float | None:
    return None if plan.whole_batch_time is None and not plan.barrier else plan.whole_batch_time or 0.0


def pass_fields(stage: PredictedStage, sizes: Sequence[int]) -> dict[str, Any]:
    """The fields of a plan's stage that say how long its passes take. `sizes`: samples of each micro-batch."""
    passes = stage.forward, stage.backward, stage.weight, stage.again or (0.0,)
    found = [mean_and_ratio(seconds) for seconds in passes]
    (forward, backward, weight, again), ratios = zip(*found, strict=True)
    return {
        "forward_time": forward,
        "backward_time": backward,
        "weight_time": weight,
        "recompute_time": again if stage.again else None,
        "size_ratios": SizeRatios(*ratios) if len(set(sizes)) > 1 else None,
    }


def _passes(stage: Stage, sizes: Sequence[int]) -> Iterator[tuple[float, ...]]:
    """Seconds of each micro-batch from `pass_fields`: forward, backward, its weight part and what runs again."""
    means = stage.forward_time, stage.backward_time, stage.weight_time, stage.recompute_time
    known = stage.size_ratios
    ratios = (None,) * len(means) if known is None else (known.forward, known.backward, known.weight, known.again)
    return (from_mean(mean or 0.0, sizes, ratio) for mean, ratio in zip(means, ratios, strict=True))


def _memory(stage: Stage, shares: Sequence[float]) -> StageMemory | None:
    """What a device holds for a stage, by the search's formula; None where the plan does not say it all.

    `shares`: of each micro-batch, in the activations of the largest one.
    """
    parameters, gradients, states = stage.parameter_bytes, stage.gradient_bytes, stage.optimizer_bytes
    if stage.activation_bytes is None or stage.transient_bytes is None:
        return None
    if parameters is None or gradients is None or states is None:
        return None
    activations = tuple(int(stage.activation_bytes * share) for share in shares)
    return StageMemory(parameters, gradients, states, activations, stage.transient_bytes, stage.step_bytes or 0)
