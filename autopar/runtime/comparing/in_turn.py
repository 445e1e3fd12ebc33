"""Runs plans in turn, in this process. Ranks do the same together (`runtime/ranks/trials.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from autopar.costs.cost_table import Progress
from autopar.costs.rank_costs import RankMeasurements
from autopar.errors import without_warnings
from autopar.plan.plan import Plan
from autopar.runtime.comparing.contestants import ComparedCall, Rounds, contestants, memory_in_turn, places_of
from autopar.runtime.comparing.disturbance import Doubts, SteadySteps, steady_steps
from autopar.runtime.comparing.parameter_copies import keeps_parameters
from autopar.runtime.signatures.bound_signature import RunSettings
from cost_models import Device, bytes_text
from cost_models.hardware.devices import available_memory


class PlansInTurn(Protocol):
    """Runs steps of one call under several plans, each on a copy of the model: the user's stays as it is."""

    @property
    def callers_threads(self) -> int | None:
        """Of operators of a plan that runs the model itself on a CPU; None: as many as a worker has."""

    @property
    def facts(self) -> tuple[Any, ...]:
        """What steps depend on besides the plans, the call and the devices, such as where ranks are."""

    def lacking(self, plans: Mapping[str, Plan]) -> str:
        """Why these plans, which have predictions, cannot run in turn; "" if they can."""

    def steps(
        self,
        plans: Mapping[str, Plan],
        rounds: Rounds,
        progress: Progress,
        doubts: Doubts,
        threads_of: Mapping[str, int],
    ) -> SteadySteps:
        """`threads_of`: threads of operators, of plans that run the model itself with others than the caller's."""


class JobRanks(RankMeasurements, Protocol):
    """All ranks of a job: they measure together, and run plans together."""

    def plans_in_turn(self, settings: RunSettings) -> PlansInTurn: ...


class InThisProcess:
    """`PlansInTurn` of one process."""

    facts: tuple[Any, ...] = ()

    def __init__(self, call: ComparedCall, devices: tuple[Device, ...]) -> None:
        self._call, self._devices = call, devices

    @property
    def callers_threads(self) -> int | None:
        return torch.get_num_threads()

    def lacking(self, plans: Mapping[str, Plan]) -> str:
        shared, model = keeps_parameters(self._call.example), self._call.example.model
        tensors = [*model.buffers(), *(() if shared else model.parameters())]
        copied = sum(t.nbytes for t in tensors if t.device.type == "cpu")
        free = available_memory(torch.device("cpu"))
        if copied > free:  # a copy is made before it moves to its devices
            return f"a copy of the model needs {bytes_text(copied)}, the host has {bytes_text(free)}"
        on_cpu = {d.name for d in self._devices if d.shares_process_memory}
        needed = memory_in_turn(plans.values(), places_of(self._devices), on_cpu if shared else ())
        for device in self._devices:
            place = device.name if device.name in needed else str(device.torch_device)
            free = available_memory(device.torch_device)
            if needed.get(place, 0) > free:
                return f"{len(plans)} plans in turn need {bytes_text(needed[place])}, {place} has {bytes_text(free)}"
        return ""

    def steps(
        self,
        plans: Mapping[str, Plan],
        rounds: Rounds,
        progress: Progress,
        doubts: Doubts,
        threads_of: Mapping[str, int],
    ) -> SteadySteps:
        # What plans would warn of matters for the one that is followed: it will warn by itself.
        with (
            without_warnings(),
            contestants(self._call, plans, self._devices, progress, threads_of=threads_of) as ready,
        ):
            return steady_steps(ready, self._devices, rounds, progress, doubts)
