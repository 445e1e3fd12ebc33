"""One plan for all ranks: rank 0 searches, and all ranks measure what it asks for.

    rank 0     plan_at_hand ──> passes? links? collectives? ──> search ──> the plan as JSON
                                  │ order      ^ results                     │
    others     wait ──────────────┴─> measure ─┘  wait ...  ─────────────────┴─> Plan.from_json

Rank 0 knows what the cache on its disk has, so it alone decides what is measured. Every order is one broadcast and one
gather on the control group; an order that fails on a rank fails the plan, on all ranks with the same error.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from autopar.analysis.example import Example
from autopar.costs.measured import passes_of
from autopar.errors import AutoparError
from autopar.plan.plan import Plan
from autopar.runtime.comparing.in_turn import JobRanks, PlansInTurn
from autopar.runtime.ranks.messages.handling import measured_handling
from autopar.runtime.ranks.one_message import on_all_ranks, sendable
from autopar.runtime.ranks.places import Place, cores_of, numbered
from autopar.runtime.ranks.trials import TRIAL, PlansOnRanks, TrialOrders, Trials
from autopar.runtime.ranks.world import World
from autopar.runtime.signatures.bound_signature import RunSettings
from cost_models import Collective, Device, DeviceSpec, MeasuredCollectives, measure_collectives
from cost_models.hardware.devices import synchronize
from cost_models.measuring.operator_times import GraphTimes
from cost_models.measuring.peak_rates import measure_spec
from cost_models.measuring.process_links import (
    LONGEST,
    Messages,
    ProcessLinks,
    measure_process_links,
    measured_pairs,
    probe_process_links,
)


class DecideTogether(Protocol):
    """Makes a plan for a call like the example. `ranks`: the processes of the devices, if each has one."""

    def __call__(self, example: Example, ranks: JobRanks | None = None) -> Plan: ...


_ROUNDS = 3  # of an all-reduce that several groups do at once


def plan_together(world: World, devices: Sequence[Device], example: Example, decide: DecideTogether) -> Plan:
    """What `decide(example, ranks)` returns on rank 0, on all ranks. What it raises there, every rank raises.

    Collective. Rank 0 gets its plan back as it is, with what explains it; the others what JSON keeps of it.
    """
    tasks = _Tasks(world, devices, example)
    if world.rank:
        return _followed(world, tasks)
    asking = _Asking(world, tasks)
    try:
        plan = decide(example, asking)
        last: tuple[Any, ...] = ("plan", plan.to_json())
    except Exception as error:
        if not asking.trials.raised:  # else all ranks have raised, and none waits for an order
            world.broadcast_objects([("failed", sendable(error))], 0)
            on_all_ranks(error)
        raise
    world.broadcast_objects([last], 0)
    return plan


def _followed(world: World, tasks: _Tasks) -> Plan:
    """Do what rank 0 asks for, until it sends the plan."""
    with contextlib.closing(tasks.trials):
        while True:
            ((order, *given),) = world.broadcast_objects([None], 0)
            if order == "plan":
                return Plan.from_json(given[0])
            if order == "failed":
                raise on_all_ranks(given[0])
            if order == TRIAL:
                world.gathered(tasks.trials.do(*given))
            else:
                world.gathered(_attempted(tasks, order, given))


def _attempted(tasks: _Tasks, order: str, given: Sequence[Any]) -> tuple[Any, str]:
    """The result, or the text of the error."""
    try:
        return getattr(tasks, order)(*given), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


class _Asking:
    """Rank 0's `JobRanks`: every rank, this one included, does the task."""

    def __init__(self, world: World, tasks: _Tasks) -> None:
        self._world, self._tasks = world, tasks
        self.trials = TrialOrders(world, tasks.trials)
        self.hosts = numbered([place.host for place in world.places])
        self.machines = numbered([place.machine for place in world.places])
        self.cores = _fewest_cores(world.places)
        self.backend = "nccl" if world.over_nccl else "gloo"

    def passes(self, ranks: Sequence[int], workers: int, rows: int) -> GraphTimes:
        found = [times for times in self._asked("passes", tuple(ranks), workers, rows) if times is not None]
        return sorted(found, key=lambda times: times.total)[(len(found) - 1) // 2]

    def spec(self, rank: int) -> DeviceSpec:
        found: DeviceSpec = self._asked("spec", rank)[rank]
        return found

    def links(self) -> ProcessLinks:
        found: ProcessLinks = self._asked("links", self.hosts)[0]
        return found

    def handling(self) -> float:
        first, second = self._asked("handling")[:2]
        return float(first + second) / 2

    def differ(self, known: ProcessLinks) -> float:
        return float(self._asked("differ", self.hosts, known)[0])

    def collectives(self, ranks: Sequence[int], which: Sequence[Collective]) -> MeasuredCollectives:
        found: MeasuredCollectives = self._asked("collectives", tuple(ranks), tuple(which), self.hosts)[ranks[0]]
        return found

    def at_once(self, groups: Sequence[Sequence[int]], nbytes: int) -> float:
        return max(self._asked("at_once", tuple(map(tuple, groups)), nbytes))

    def plans_in_turn(self, settings: RunSettings) -> PlansInTurn:
        facts = ("ranks", self.backend, self.hosts, self.machines)
        return PlansOnRanks(self.trials, facts, self._tasks.devices, self._tasks.example.model, settings)

    def _asked(self, order: str, *given: Any) -> list[Any]:
        """The results by rank."""
        self._world.broadcast_objects([(order, *given)], 0)
        results = self._world.gathered(_attempted(self._tasks, order, given))
        failed = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(results) if error]
        if failed:
            raise AutoparError(f"measuring the {order} for a plan failed: {'; '.join(failed)}")
        return [result for result, _ in results]


def _fewest_cores(places: Sequence[Place]) -> int:
    """Of the machine that has the fewest for each of its ranks."""
    by_machine = [[place for place in places if place.machine == name] for name in {p.machine for p in places}]
    return len(cores_of(min(by_machine, key=lambda some: len(cores_of(some)) / len(some))))


class _Tasks:
    """What one rank does when it is asked to. All ranks do the same task at the same time."""

    def __init__(self, world: World, devices: Sequence[Device], example: Example) -> None:
        self._world, self.devices, self.example = world, devices, example
        self.trials = Trials(world, devices, example)
        self._passes: Callable[..., GraphTimes] | None = None

    def passes(self, ranks: tuple[int, ...], workers: int, rows: int) -> GraphTimes | None:
        groups = self._world.groups([ranks])
        if self._world.rank not in ranks:
            return None
        if len(ranks) == 1:
            return self._own_passes(workers, rows, None)
        with _Companions(groups[ranks]) as companions:
            return self._own_passes(workers, rows, companions)

    def _own_passes(self, workers: int, rows: int, companions: _Companions | None) -> GraphTimes:
        if self._passes is None:
            self._passes = passes_of(self.example, self.devices)
        return self._passes(self.devices[self._world.rank], workers, rows, companions)

    def spec(self, rank: int) -> DeviceSpec | None:
        return measure_spec(self.devices[rank]) if rank == self._world.rank else None

    def links(self, hosts: Sequence[int]) -> ProcessLinks:
        return measure_process_links(hosts, self._world.control, self._messages(hosts))

    def handling(self) -> float:
        return measured_handling(self._world)

    def differ(self, hosts: Sequence[int], known: ProcessLinks) -> float:
        return probe_process_links(hosts, known, self._world.control, self._messages(hosts))

    def _messages(self, hosts: Sequence[int]) -> Messages:
        """As stages send each other tensors. Collective."""
        world = self._world
        world.connect_pairs(measured_pairs(hosts))
        channel = world.channel()
        return Messages(world.device, lambda x, to: channel.send(x, to, 0), lambda x, of: channel.receive(x, of, 0))

    def collectives(
        self, ranks: tuple[int, ...], which: tuple[Collective, ...], hosts: Sequence[int]
    ) -> MeasuredCollectives | None:
        groups = self._world.groups([ranks])
        if self._world.rank not in ranks:
            return None
        of_ranks = [hosts[rank] for rank in ranks]
        return measure_collectives(groups[ranks], self._world.carrier, which=which, hosts=of_ranks, longest=LONGEST)

    def at_once(self, groups: tuple[tuple[int, ...], ...], nbytes: int) -> float:
        mine = self._world.groups(groups)
        own = next((mine[ranks] for ranks in groups if self._world.rank in ranks), None)
        seconds = []
        for _ in range(_ROUNDS):
            dist.barrier(self._world.control)
            if own is not None:
                seconds.append(measured_all_reduce(own, nbytes, self._world.carrier))
        return sorted(seconds)[len(seconds) // 2] if seconds else 0.0


def measured_all_reduce(group: Any, nbytes: int, device: torch.device) -> float:
    """Seconds of one all-reduce."""
    whole = torch.zeros(nbytes // 4, device=device)
    synchronize(device)
    start = time.perf_counter()
    dist.all_reduce(whole, group=group)
    synchronize(device)
    return time.perf_counter() - start


class _Companions:
    """The other ranks of a machine that run the same passes.

    ```
       rank 0   wait   wait   largest   leaves         each is one collective, with whether the rank has failed
       rank 1   wait   fails: leaves                   rank 0 raises at `largest`, and they meet no more
    ```
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._ended = False  # a rank has failed, and all know

    def __enter__(self) -> _Companions:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if not self._ended:
            self._meet(0.0, failed=error is not None)

    def wait(self) -> None:
        self._meet(0.0)

    def largest(self, value: float) -> float:
        return self._meet(value)

    def _meet(self, value: float, *, failed: bool = False) -> float:
        """The largest value of all. Raises AutoparError where another rank has failed."""
        found = torch.tensor([float(failed), value], dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        some_failed, largest = found.tolist()
        self._ended = bool(some_failed)
        if self._ended and not failed:
            raise AutoparError("another rank could not run the passes that are measured on all at once")
        return float(largest)
