"""What a partition problem says of the devices: what each kind costs, and how many there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autopar.costs.gradient_reduction import BUCKET, ReductionCurve, SizePosition
from autopar.costs.sends import Lane
from autopar.planner.inter_op.cut_tables import Tables
from autopar.planner.inter_op.space import Space
from cost_models.memory.optimizer_step import OptimizerRates


@dataclass(frozen=True, eq=False)
class Gradients:
    """Bytes of gradients on each device of many stages."""

    nbytes: np.ndarray

    @cached_property
    def position(self) -> SizePosition:
        """Where they lie on all curves."""
        return SizePosition.of(self.nbytes)


@dataclass(frozen=True)
class DeviceKind:
    """Devices that cost the same, or meshes of a pool's devices under one stage configuration.

    Each replica of a stage takes `width` devices of the pool, so stages of several widths share its devices:

        pool of 8     stage 0: 2 replicas of width 2 |0 0'1 1'|   stage 1: 1 replica of width 4 |2 2 2 2|
    """

    name: str
    count: int  # devices of the pool
    memory: float  # usable bytes on each; math.inf for no limit
    latency: float  # seconds a transfer into a device takes before its first byte, at least
    seconds_per_byte: float  # of that transfer, counted to the stage that receives, at least
    reduce_seconds_per_byte: float  # of a replicated stage, once a step, for every replica but the first
    send_seconds_per_byte: float = 0.0  # of a transfer out of the device, once for every value, counted to the sender
    all_reduce: Callable[[int], ReductionCurve] | None = None  # of gradients, by replicas; None: one adds up for all
    exchange: ReductionCurve | None = None  # of gradients of tied parameters, with another stage; None: free
    optimizer: OptimizerRates | None = None  # of the optimizer's step, once a step; None: free
    pool: int | None = None  # kinds of one pool share its devices; None for all kinds: each has its own
    space: Space | None = None  # what stages hold and send here, over the same cuts; None: as in the problem
    width: int = 1  # devices of one replica
    lanes: Callable[[int], Lane] | None = None  # into the device, by replicas; None: always by the fields above
    copies: int = 1  # of the whole pipeline: a stage has as many times its replicas

    def lane(self, replicas: int) -> Lane:
        """The lane of transfers into each device of a stage with `replicas`."""
        return Lane(self.latency, self.seconds_per_byte) if self.lanes is None else self.lanes(replicas * self.copies)

    def of_one_copy(self, copies: int, chunks: int) -> DeviceKind:
        """The same for one of `copies` of the whole pipeline, whose gradients are added up over all copies, and which
        share the cards of their nodes. A device counts once for each of its `chunks` stages."""
        return replace(self, count=max(1, self.count // copies * chunks), copies=copies)

    def reduction(self, replicas: int, nbytes: Gradients) -> np.ndarray:
        """Seconds once a step to add up the gradients of stages with this many replicas."""
        replicas *= self.copies
        if self.all_reduce is not None:
            return self.all_reduce(replicas).at(nbytes.position)
        return (replicas - 1) * self.reduce_seconds_per_byte * nbytes.nbytes

    def bucket(self, replicas: int) -> float:
        """Seconds of a bucket of these gradients."""
        replicas *= self.copies
        if self.all_reduce is not None:
            return self.all_reduce(replicas).bucket
        return (replicas - 1) * self.reduce_seconds_per_byte * BUCKET

    def stepped(self, tables: Tables) -> np.ndarray | float:
        """Seconds once a step of the optimizer, for all stages of `tables`."""
        if self.optimizer is None or tables.stepped is None:
            return 0.0
        return np.asarray(self.optimizer.seconds(tables.stepped))

    def exchanged(self, nbytes: Gradients) -> np.ndarray:
        """Seconds once a step to add up the gradients of parameters that other stages have, too."""
        return np.zeros_like(nbytes.nbytes) if self.exchange is None else self.exchange.at(nbytes.position)
