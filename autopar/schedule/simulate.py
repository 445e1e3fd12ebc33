"""Schedule x seconds x transfers -> Timeline: when every forward and backward runs, and what every slot holds then.

The clock is that of an asynchronous pipeline (`autopar.schedule.clock.execute`): a slot runs its actions in order, one
at a time, each as soon as what it needs has arrived. After a stage's last backward its slots finish it together:

    action ... action | reduction | optimizer
    ------------------+-----------+----------> s
    the last of the stage's slots has run its actions
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from autopar.schedule.clock import Action, ExecutedSchedule, Phase, Transfer, execute
from autopar.schedule.table import Schedule, phased
from autopar.schedule.timeline import Finish, StageMemory, Timeline

__all__ = ["StageMemory", "StageTimes", "Timeline", "Transfer", "simulate"]

_ROUNDING = 1 + 1e-9  # a part that is a sum of many floats may come out larger than the whole by this factor


@dataclass(frozen=True)
class StageTimes:
    """Seconds on one slot of a stage; backward, weight, finish and optimizer count in training only."""

    forward: tuple[float, ...]  # s, of each micro-batch
    backward: tuple[float, ...]  # s, of each micro-batch, all of it
    weight: tuple[float, ...] = ()  # s, of each micro-batch: the part of backward that a WEIGHT runs; empty: none
    finish: float = 0.0  # s, once a step on all slots of the stage after its last backward: gradient reduction
    optimizer: float = 0.0  # s, once a step on every slot of the stage, after that


def simulate(
    schedule: Schedule,
    stages: Sequence[StageTimes],
    transfers: Sequence[Transfer],
    *,
    memory: Sequence[StageMemory] | None = None,
    barrier: float | None = None,
    hardware: Sequence[int] = (),
) -> Timeline:
    """Lay one step out in time.

    `stages[s]` and `memory[s]` belong to stage s. Stages depend on each other only through `transfers`, so list also
    those that take no time. With `barrier`, `phased(schedule)` runs, and no backward starts before `barrier` seconds
    after the last forward of all slots: the caller computes the loss on the whole batch in between. A step without
    backwards ends then. `hardware`: for each slot, a number that slots on the same hardware have in common, which then
    works for one of them at a time.

    O(n log(slots)) for n actions and transfers of micro-batches, and a sort.

    Raises ValueError for sizes or stage numbers that do not fit the schedule, negative times, and a schedule that
    deadlocks.
    """
    problems = list(_misfits(schedule, stages, transfers, memory, barrier, hardware))
    if problems:
        raise ValueError("\n".join(problems))
    if barrier is not None:
        schedule = phased(schedule)
    ran = execute(schedule.actions, _durations(schedule, stages), transfers, barrier, hardware)
    if ran.stuck:
        raise ValueError(f"the {schedule.name} schedule deadlocks:\n  " + "\n  ".join(ran.stuck))
    by_start = attrgetter("start", "slot")
    return Timeline(
        schedule=schedule,
        events=tuple(sorted(ran.events, key=by_start)),
        sends=tuple(sorted(ran.sends, key=by_start)),
        finishes=tuple(
            sorted(_finishes(schedule, stages, ran, hardware, barrier or 0.0), key=attrgetter("slot", "start"))
        ),
        stage_memory=None if memory is None else tuple(memory),
        hardware=tuple(hardware),
        on_whole_batch=barrier or 0.0,
    )


def _durations(schedule: Schedule, stages: Sequence[StageTimes]) -> Callable[[Action], float]:
    """Seconds of an action."""
    nothing = (0.0,) * schedule.n_microbatches
    seconds = {Phase.FORWARD: [times.forward for times in stages]}
    if schedule.training:
        weights = [times.weight or nothing for times in stages]
        seconds[Phase.BACKWARD] = [times.backward for times in stages]
        seconds[Phase.WEIGHT] = weights
        seconds[Phase.INPUT] = [
            tuple(max(0.0, whole - part) for whole, part in zip(times.backward, weight, strict=True))
            for times, weight in zip(stages, weights, strict=True)
        ]
    return lambda action: seconds[action.phase][action.stage][action.microbatch]


def _finishes(
    schedule: Schedule,
    stages: Sequence[StageTimes],
    ran: ExecutedSchedule,
    hardware: Sequence[int],
    barrier: float,
) -> Iterator[Finish]:
    """What each slot does for its stages after its actions.

    The slots of a stage reduce its gradients together, once the last of them is free. A slot with several stages, or
    hardware with several slots, starts with the stage whose backwards ended first.
    """
    place = hardware or range(schedule.n_slots)  # of a slot
    free = dict.fromkeys(place, 0.0)
    through = [0.0] * schedule.n_stages
    for slot, action, _, end in ran.events:
        free[place[slot]] = max(free[place[slot]], end)
        through[action.stage] = max(through[action.stage], end)
    for send in ran.sends:
        if not send.transfer.overlap:
            free[place[send.slot]] = max(free[place[send.slot]], send.end)
    earliest = max(through) + barrier if barrier and not schedule.training else 0.0
    for stage in sorted(range(schedule.n_stages), key=lambda s: (through[s], -s)):
        slots, times = schedule.slots_of(stage), stages[stage]
        start = max(earliest, *(free[place[slot]] for slot in slots))
        reduced = start + (times.finish if schedule.training else 0.0)
        end = reduced + (times.optimizer if schedule.training else 0.0)
        for slot in slots:
            free[place[slot]] = end
            yield Finish(slot, stage, start, reduced, end)


def _misfits(
    schedule: Schedule,
    stages: Sequence[StageTimes],
    transfers: Sequence[Transfer],
    memory: Sequence[StageMemory] | None,
    barrier: float | None,
    hardware: Sequence[int],
) -> Iterator[str]:
    p, m = schedule.n_stages, schedule.n_microbatches
    phases = ("forward", "backward") if schedule.training else ("forward",)
    if len(stages) != p:
        yield f"times of {len(stages)} stages for a schedule of {p}"
    if memory is not None and len(memory) != p:
        yield f"memory of {len(memory)} stages for a schedule of {p}"
    if hardware and len(hardware) != schedule.n_slots:
        yield f"hardware of {len(hardware)} slots for a schedule of {schedule.n_slots}"
    if barrier is not None and not barrier >= 0:
        yield f"barrier is {barrier} s: it cannot be negative"
    for t in transfers:
        if not 0 <= t.source < t.target < p:
            yield f"transfer from stage {t.source} to {t.target}: it goes from an earlier to a later of {p} stages"
    timed: list[tuple[str, StageTimes | Transfer]] = [(f"stage {stage}", times) for stage, times in enumerate(stages)]
    timed += [(f"transfer {t.source} -> {t.target}", t) for t in transfers]
    for what, times in timed:
        for phase in phases:
            seconds = getattr(times, phase)
            if len(seconds) != m:
                yield f"{what} has {len(seconds)} {phase} times for {m} micro-batches"
            yield from (f"{what} has a {phase} time of {t} s: it cannot be negative" for t in seconds if not t >= 0)
    for stage, times in enumerate(stages):
        for name in ("finish", "optimizer"):
            if not getattr(times, name) >= 0:
                yield f"stage {stage} has {getattr(times, name)} s of {name}: it cannot be negative"
        if times.weight and schedule.training:
            if len(times.weight) != m:
                yield f"stage {stage} has {len(times.weight)} weight times for {m} micro-batches"
            elif not all(0 <= w <= b * _ROUNDING for w, b in zip(times.weight, times.backward, strict=False)):
                yield f"stage {stage} has a weight time that is no part of its backward"
    for stage, sizes in enumerate(memory or ()):
        if len(sizes.activation) != m:
            yield f"stage {stage} has {len(sizes.activation)} activation sizes for {m} micro-batches"
