"""The profile of one step from what all ranks recorded, on the clock of rank 0.

On one machine, processes read one clock. The clock of another machine is compared with rank 0's by messages there and
back, between rank 0 and the machine's first rank (Cristian, "Probabilistic clock synchronization", 1989):

```
   first rank of the machine    t0 ---ask---.                 .---> t1
   rank 0                                    '-> T ---answer-'          ahead by (t0 + t1) / 2 - T
```
T lies between t0 and t1, so the result is wrong by at most (t1 - t0) / 2. The fastest of several rounds counts.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from autopar.plan.plan import Plan
from autopar.runtime.ranks.places import numbered
from autopar.runtime.ranks.world import World
from autopar.runtime.step_profile import StepProfile
from autopar.runtime.step_record import StepRecord, step_profile

_ROUNDS = 20


class Ahead(NamedTuple):
    """How a clock compares with rank 0's."""

    seconds: float  # that it shows more
    error: float  # s by which that may be wrong


def profile_of_ranks(world: World, record: StepRecord, plan: Plan, seconds: float, batch_size: int) -> StepProfile:
    """The step of all ranks, the same on each. Collective. `record` and `seconds`: of this rank."""
    ahead = clock_ahead(world)
    records = world.gathered((record.shifted(-ahead.seconds), seconds, ahead.error))
    profile = None
    if world.rank == 0:
        profile = step_profile(
            [theirs for theirs, _, _ in records],
            plan,
            max(taken for _, taken, _ in records),
            batch_size,
            # Two clocks that are both compared with rank 0's may be apart by both errors.
            clock_error=sum(sorted({error for _, _, error in records})[-2:]),
        )
    (profile,) = world.broadcast_objects([profile], 0)
    assert isinstance(profile, StepProfile)
    return profile


def clock_ahead(world: World) -> Ahead:
    """Of this rank's machine. Collective."""
    machines = numbered([place.machine for place in world.places])
    found = Ahead(0.0, 0.0)
    firsts = {machine: machines.index(machine) for machine in machines}
    for machine in sorted(firsts.keys() - {machines[0]}):
        if world.rank in (0, firsts[machine]):
            found = max((_round(world, firsts[machine]) for _ in range(_ROUNDS)), key=lambda one: -one.error)
        if world.rank == 0:
            found = Ahead(0.0, 0.0)
    by_rank: list[Ahead] = world.gathered(found)
    return by_rank[firsts[machines[world.rank]]]


def _round(world: World, first: int) -> Ahead:
    """One message from rank `first` to rank 0 and back."""
    number = torch.zeros(1, dtype=torch.float64)
    if world.rank == 0:
        dist.recv(number, first, group=world.control)
        number[0] = time.perf_counter()
        dist.send(number, first, group=world.control)
        return Ahead(0.0, 0.0)
    start = time.perf_counter()
    dist.send(number, 0, group=world.control)
    dist.recv(number, 0, group=world.control)
    end = time.perf_counter()
    return Ahead((start + end) / 2 - number.item(), (end - start) / 2)
