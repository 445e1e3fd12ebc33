"""What runs one micro-batch of a stage: a single device, or a mesh; and how a mesh may do that."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from autopar.costs.cost_table import CostTable
from autopar.costs.operator_cost import OperatorCost
from autopar.sharding.stage_sharding import StageSharding


@dataclass(frozen=True)
class DeviceGroup:
    """Devices of one kind that work on a micro-batch together: one device, or the devices of a mesh.

    A stage runs on one group, or on several that are replicas of each other:

        stage of 2 replicas on meshes of 2    group (cuda:0, cuda:1)  micro-batches 0, 2, ..
                                              group (cuda:2, cuda:3)  micro-batches 1, 3, ..
    """

    devices: tuple[str, ...]  # names; of a mesh in its own order
    kind: str  # of each device
    memory: int  # bytes, on the device that has least

    @property
    def first(self) -> str:
        """The device whose links are taken for those of the group: n-th devices of two groups talk to each other."""
        return self.devices[0]


@dataclass(frozen=True)
class StageConfiguration(ABC):
    """How a group of several devices may run a stage: what operators take and hold on each of its devices."""

    name: str
    kind: str  # device kind
    n_microbatches: int  # its costs are for the batch divided into this many
    table: CostTable  # s per operator, collectives included, at the one micro-batch size; and once a step
    operators: Mapping[str, OperatorCost]  # like `CostGraph.operators`, with the bytes of each device

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Devices along each axis of the mesh."""

    @property
    def width(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.shape)

    @abstractmethod
    def sharding(self, nodes: Sequence[str], run_again: Container[str] = ()) -> StageSharding:
        """The strategies of the operators `nodes` of the cost graph, which make a stage, as a plan states them.

        `run_again`: those that run again for their backward.
        """
