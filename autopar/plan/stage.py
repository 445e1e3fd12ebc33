"""One stage of a plan, what stages send each other, and plans that were not chosen."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autopar.plan.recompute import Recompute
from autopar.sharding.stage_sharding import StageSharding


@dataclass(frozen=True)
class SizeRatios:
    """Of micro-batches of two sizes, what a smaller one takes, divided by what a larger one takes."""

    forward: float
    backward: float
    weight: float
    again: float  # what recomputation adds to the backward


@dataclass(frozen=True)
class Stage:
    """One stage. Times and bytes are predictions for one micro-batch on one device; None in a plan made by hand.

    Times of a micro-batch are means over those of a step.
    """

    devices: tuple[str, ...]  # names; several are replicas (or meshes): micro-batch i runs on devices[i mod r]
    operators: tuple[str, ...] = ()  # `module.path/operator#k`, in program order
    forward_time: float | None = None  # s
    backward_time: float | None = None  # s, without recomputation
    weight_time: float | None = None  # s: the part of the backward time that computes gradients of parameters
    parameter_bytes: int | None = None
    activation_bytes: int | None = None  # kept for backward, per micro-batch in flight
    peak_memory: int | None = None  # bytes on each device
    sync_time: float | None = None  # s once a step: gradients of replicas, of the mesh and of tied parameters reduced
    optimizer_time: float | None = None  # s once a step, on devices that are not at hand: the optimizer's step
    hidden_time: float | None = None  # s of a micro-batch, with what runs again: collectives that computing hides
    recompute: bool = False  # keeps only its inputs for the backward and runs its forward again before it ("stage")
    selective: bool = False  # keeps all but what the cores of its attentions make, and runs these again
    recompute_time: float | None = None  # s: what recomputation adds to the backward, unless it is of the whole stage
    sharding: StageSharding | None = None  # its devices form meshes that share the operators
    layerwise: bool = False  # keeps what flows between layers, and runs each again before its backward ("full")
    keeps_products: bool = False  # of these layers it keeps every second product, and attention ("selective-op")
    # Beside parameters and activations, on each device, by the search's formula; None: not priced.
    gradient_bytes: int | None = None  # of all its parameters
    optimizer_bytes: int | None = None  # of the optimizer's state
    transient_bytes: int | None = None  # while an action runs
    step_bytes: int | None = None  # while the optimizer steps; None: none, or not known apart
    # s of the backward (its weight part) that the first micro-batch of a replica lacks: adding gradients of parameters
    # to those of earlier micro-batches. None: not known apart.
    accumulation_time: float | None = None
    size_ratios: SizeRatios | None = None  # of its times; None: micro-batches are even, or take as their samples say
    # Bytes on the device that has least, for all its stages. At hand it is what was free when the plan was priced: that
    # changes from moment to moment, makes no other plan, and is not saved.
    usable_memory: int | None = field(default=None, compare=False)

    def within(self, memory_limit: float | None) -> Stage:
        """The stage with no more usable memory on each device than `memory_limit` bytes, if there is a limit."""
        if memory_limit is None or self.usable_memory is None or self.usable_memory <= memory_limit:
            return self
        return replace(self, usable_memory=int(memory_limit))

    @property
    def mode(self) -> Recompute:
        """What it runs again for its backward."""
        if self.recompute:
            return Recompute.STAGE
        if self.layerwise:
            return Recompute.OPERATORS if self.keeps_products else Recompute.FULL
        return Recompute.SELECTIVE if self.selective else Recompute.NONE

    @property
    def shards(self) -> int:
        """Number of devices that work on one micro-batch together."""
        return self.sharding.size if self.sharding is not None else 1

    @property
    def replicas(self) -> int:
        """Number of micro-batches that it works on at once."""
        return len(self.devices) // self.shards


@dataclass(frozen=True)
class StageTransfer:
    """What one stage sends to another for every micro-batch."""

    source: int
    target: int
    forward_bytes: int
    backward_bytes: int
    seconds: float  # both ways
    backward_seconds: float | None = None  # of `seconds`; None: half of it
    blocking: bool = False  # the sender computes nothing meanwhile


@dataclass(frozen=True)
class RunnerUp:
    """A plan that was not chosen."""

    description: str
    step_time: float  # s, predicted
