"""Pipelines to simulate, random and uniform."""

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from autopar.schedule.builders import INTERLEAVED, SCHEDULES, make_schedule, possible_chunks
from autopar.schedule.clock import Action, Phase, Transfer
from autopar.schedule.simulate import StageTimes, simulate
from autopar.schedule.table import Schedule
from autopar.schedule.timeline import StageMemory, Timeline

F, B, I, W = Phase.FORWARD, Phase.BACKWARD, Phase.INPUT, Phase.WEIGHT  # noqa: E741

# Whole numbers of seconds, so that sums are exact and compared with ==.
seconds = st.integers(0, 9).map(float)
names = st.sampled_from(SCHEDULES)


def chunk_counts(name: str, ranks: int, most: int = 3) -> list[int]:
    """The stages that a schedule can give each rank, up to `most`."""
    return [chunks for chunks in range(1, most + 1) if possible_chunks(name, ranks, chunks)]


@dataclass(frozen=True)
class Case:
    schedule: Schedule
    stages: list[StageTimes]
    transfers: list[Transfer]
    barrier: float | None = None

    def run(self) -> Timeline:
        return simulate(self.schedule, self.stages, self.transfers, barrier=self.barrier)

    def seconds_of(self, action: Action) -> float:
        times, i = self.stages[action.stage], action.microbatch
        weight = times.weight[i] if times.weight else 0.0
        return {F: times.forward[i], B: times.backward[i], I: times.backward[i] - weight, W: weight}[action.phase]


@st.composite
def cases(draw: st.DrawFn, links: bool = False) -> Case:
    """A schedule with random times; transfers between all neighbours and from some stages to later ones.

    With `links`, some transfers share links, some keep their sender busy, and every action takes time.
    """
    name = draw(names)
    m = draw(st.integers(1, 8))
    p = draw(st.integers(1, 4))
    if name in INTERLEAVED:
        replicas, chunks = [draw(st.integers(1, 2))] * p, draw(st.sampled_from(chunk_counts(name, p)))
    else:
        replicas, chunks = draw(st.lists(st.integers(1, 3), min_size=p, max_size=p)), 1
    schedule = make_schedule(name, m, replicas, chunks=chunks, training=draw(st.booleans()))
    n = schedule.n_stages

    def times(of: st.SearchStrategy[float]) -> tuple[float, ...]:
        return tuple(draw(st.lists(of, min_size=m, max_size=m)))

    least = 1.0 if links else 0.0
    stages = []
    for _ in range(n):
        forward, rest, weight = times(seconds), times(seconds), times(seconds)
        forward, rest, weight = (tuple(t + least for t in part) for part in (forward, rest, weight))
        backward = tuple(a + b for a, b in zip(rest, weight, strict=True))
        split = links or draw(st.booleans())
        stages.append(StageTimes(forward, backward, weight if split else (), draw(seconds), draw(seconds)))
    pairs = [(s, s + 1) for s in range(n - 1)]
    pairs += [(s, t) for s in range(n) for t in range(s + 2, n) if draw(st.booleans())]
    transfers = [Transfer(s, t, times(seconds), times(seconds)) for s, t in pairs]
    if links:
        transfers = [
            replace(t, link=draw(st.sampled_from([None, "a", "b"])), overlap=draw(st.booleans())) for t in transfers
        ]
    return Case(schedule, stages, transfers, draw(st.none() | seconds))


def uniform(
    name: str,
    m: int,
    p: int,
    forward: float,
    backward: float,
    *,
    weight: float = 0.0,
    chunks: int = 1,
    training: bool = True,
    barrier: float | None = None,
) -> Timeline:
    """Equal stages, each device alone in its rank, and transfers that take no time."""
    n = p * chunks
    return simulate(
        make_schedule(name, m, (1,) * p, chunks=chunks, training=training),
        [StageTimes((forward,) * m, (backward,) * m, (weight,) * m)] * n,
        [Transfer(s, s + 1, (0.0,) * m, (0.0,) * m) for s in range(n - 1)],
        memory=[StageMemory(500, 200, 300, (10,) * m, 3)] * n,
        barrier=barrier,
    )
