"""The stage partition problem and its solution, as data.

The model is a directed acyclic graph of atoms (operators that may not be separated are one atom). A *cut* is a set of
atoms that is closed under predecessors: all that runs before it. A plan is a chain of cuts, from none to all, and what
lies between two of them is a stage on r replicas of one kind: devices, or meshes of `width` devices each. Micro-batch k
runs on replica k mod r:

         .--> 1 --> 2 --.
    0 --<                >--> 5 --> 6      cuts  {}  {0 3}  {0 1 2 3 4}  all
         '--> 3 --> 4 --'                  stages   0 3   1 2 4     5 6

On a line of atoms the cuts are its prefixes and a stage is an interval.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from autopar.plan.recompute import Recompute
from autopar.planner.inter_op.atom_times import Behind, CoreSeconds, PassSeconds
from autopar.planner.inter_op.checks import check, check_costs
from autopar.planner.inter_op.cut_tables import Tables
from autopar.planner.inter_op.device_kind import DeviceKind
from autopar.planner.inter_op.refused_stages import RefusedStage
from autopar.planner.inter_op.space import Space
from autopar.planner.inter_op.stage_seconds import KnownSeconds, OneKind, StageSeconds


@dataclass(frozen=True)
class Launches:
    """Seconds of the host to launch the kernels of the atoms; a stage's pass takes the longer of both sums."""

    each: PassSeconds[np.ndarray]  # [n_kinds, n] per micro-batch
    start: np.ndarray  # [n_kinds] at the start of each pass

    def only(self, kinds: Sequence[int]) -> Launches:
        return Launches(PassSeconds(*(each[list(kinds)] for each in self.each)), self.start[list(kinds)])


@dataclass(frozen=True)
class Overlapping:
    """Seconds of collectives, where some run behind kernels; see `OverlappedTimes`."""

    network: PassSeconds[np.ndarray]  # [n_kinds, n] of all collectives for one micro-batch
    behind: Behind[np.ndarray]  # [n_kinds, n] once a step; their bucket [n_kinds]
    reductions: bool  # whether gradients are added up over replicas behind the last backward

    def only(self, kinds: Sequence[int]) -> Overlapping:
        chosen = list(kinds)
        network, behind = PassSeconds(*(a[chosen] for a in self.network)), Behind(*(a[chosen] for a in self.behind))
        return Overlapping(network, behind, self.reductions)


@dataclass(frozen=True)
class Captured:
    """Seconds of stages that run as they were captured, where `Problem.forward` .. `weight` are of compiled ones."""

    each: PassSeconds[np.ndarray]  # [n_kinds, n] per micro-batch
    modes: frozenset[Recompute]  # of these stages

    def only(self, kinds: Sequence[int]) -> Captured:
        chosen = list(kinds)
        return Captured(PassSeconds(*(a[chosen] for a in self.each)), self.modes)


@dataclass(frozen=True)
class Problem:
    """What to partition, over which devices, at which number of micro-batches; checked on creation.

    Raises:
        ValueError: a cost is NaN, infinite or negative, an array has the wrong shape, a count is below one.
    """

    space: Space
    forward: np.ndarray  # [n_kinds, n] seconds per micro-batch
    backward: np.ndarray  # [n_kinds, n] seconds per micro-batch; zeros for inference
    n_microbatches: int
    schedule: str  # as in `autopar.schedule.builders`
    kinds: tuple[DeviceKind, ...]
    max_replicas: int  # of one stage
    weight: np.ndarray | None = None  # [n_kinds, n] seconds of `backward` that a split backward may delay
    most_delayed_parts: int = 2  # weight parts that a stage delays into the bubble; 1 where all forwards come first
    captured: Captured | None = None  # of stages that are not compiled; None: all stages run alike
    once: np.ndarray | None = None  # [n_kinds, n] seconds once a step, however many micro-batches and replicas
    # [n_kinds, n] seconds of `backward`, and of `weight`, that the first micro-batch of each replica lacks.
    accumulation: np.ndarray | None = None
    launches: Launches | None = None  # beside `forward`, `backward` and `weight`; None: those contain them
    overlapping: Overlapping | None = None  # None: no collective runs behind kernels
    overhead: float = 0.0  # s of every action of a stage (forward, backward, weight part), beside its operators
    overhead_alone: float | None = None  # the same of the only stage, on one device or mesh; None: as of others
    handling: float = 0.0  # s that a stage takes to send, or to receive, one message, besides what its link takes
    plain: bool = False  # there the only stage is run as the model itself, without overhead, unless it recomputes
    may_recompute: bool = False  # stages may run their forwards again instead of keeping activations
    cores: CoreSeconds[np.ndarray] | None = None  # [n_kinds, n] where stages may do so with cores of attention alone
    blocks: CoreSeconds[np.ndarray] | None = None  # [n_kinds, n] where they may do so with one layer after the other
    sum_counts: bool = True  # False: the objective is the largest stage alone, for one micro-batch after the first
    sends_behind: bool = False  # whether transfers run behind the passes of other micro-batches
    chunks: int = 1  # stages of each device (interleaved); a device then counts as this many, without replicas
    share: float | None = None  # of the batch's bytes that a micro-batch has; default 1 / n_microbatches
    refused: tuple[RefusedStage, ...] = ()  # that the plan must not have
    known: KnownSeconds = field(default_factory=KnownSeconds, repr=False, compare=False)  # shared with other problems

    def __post_init__(self) -> None:
        n = self.space.n_atoms
        check(len(self.kinds) >= 1, "the problem needs at least one kind of device")
        for name in ("forward", "backward", "weight", "once", "accumulation"):
            array = getattr(self, name)
            if array is not None:
                shape = (len(self.kinds), n)
                check(array.shape == shape, f"{name} must have shape {shape}, got {array.shape}")
                check_costs(name, array)
        for name, array in () if self.launches is None else self.launches.each._asdict().items():
            shape = (len(self.kinds), n)
            check(array.shape == shape, f"launches: {name} must have shape {shape}, got {array.shape}")
            check_costs(f"launches: {name}", array)
        for name, array in () if self.captured is None else self.captured.each._asdict().items():
            shape = (len(self.kinds), n)
            check(array.shape == shape, f"captured: {name} must have shape {shape}, got {array.shape}")
            check_costs(f"captured: {name}", array)
        if self.overlapping is not None:
            named = {**self.overlapping.network._asdict(), **self.overlapping.behind._asdict()}
            for name, array in named.items():
                of_kinds = (len(self.kinds), *([n] if name != "bucket" else []))
                check(array.shape == of_kinds, f"overlapping: {name} must have shape {of_kinds}, got {array.shape}")
                check_costs(f"overlapping: {name}", array)
        for groups, seconds in (("cores", self.cores), ("blocks", self.blocks)):
            for name, array in () if seconds is None else seconds._asdict().items():
                shape = (len(self.kinds), n)
                check(array.shape == shape, f"{groups}: {name} must have shape {shape}, got {array.shape}")
                check_costs(f"{groups}: {name}", array)
        check_costs("overhead", self.overhead)
        check_costs("handling", self.handling)
        for name in ("n_microbatches", "max_replicas", "chunks"):
            count = getattr(self, name)
            check(count >= 1, f"{name} must be at least 1, got {count}")
        check(self.chunks == 1 or self.max_replicas == 1, "stages of a device that has several have no replicas")
        for kind in self.kinds:
            check(kind.count >= 1, f"kind {kind.name!r} must have at least 1 device, got {kind.count}")
            check(kind.width >= 1, f"kind {kind.name!r}: a replica has at least 1 device, got {kind.width}")
            check(kind.memory >= 0, f"kind {kind.name!r}: memory must be a number of bytes >= 0, got {kind.memory}")
            for name in ("latency", "seconds_per_byte", "reduce_seconds_per_byte", "send_seconds_per_byte"):
                check_costs(f"kind {kind.name!r}: {name}", getattr(kind, name))
            same = kind.space is None or kind.space.cuts is self.space.cuts
            check(same, f"kind {kind.name!r}: its space has other cuts")
        check(set(self.pools) == set(range(len(set(self.pools)))), f"pools must be 0, 1, .., got {self.pools}")

    @property
    def n_atoms(self) -> int:
        return self.space.n_atoms

    @cached_property
    def pools(self) -> tuple[int, ...]:
        """The pool of every kind, from 0."""
        return tuple(index if kind.pool is None else kind.pool for index, kind in enumerate(self.kinds))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Devices of every pool."""
        return tuple(self.kinds[self.pools.index(pool)].count for pool in range(max(self.pools) + 1))

    def widths(self, counts: Sequence[int]) -> list[list[int]]:
        """The different widths of each pool's kinds that its devices suffice for, ascending."""
        own = list(zip(self.kinds, self.pools, strict=True))
        fitting = {(pool, kind.width) for kind, pool in own if kind.width <= counts[pool]}
        return [sorted(width for p, width in fitting if p == pool) for pool in range(len(counts))]

    def most_groups(self, counts: Sequence[int]) -> int:
        """Replicas of all stages together, at most."""
        return sum(count // own[0] for count, own in zip(counts, self.widths(counts), strict=True) if own)

    def with_room(self, times: float) -> Problem:
        """The problem on devices of so many times the memory."""
        return replace(self, kinds=tuple(replace(kind, memory=times * kind.memory) for kind in self.kinds))

    def only(self, kinds: Collection[int]) -> Problem:
        """The problem with some of its kinds, and the first of each pool that none of them is of."""
        missing = {pool: self.pools.index(pool) for pool in set(self.pools) - {self.pools[kind] for kind in kinds}}
        kept = sorted({*kinds, *missing.values()})
        launches, overlapping = self.launches, self.overlapping
        cores, blocks = (
            None if of is None else CoreSeconds(*(each[kept] for each in of)) for of in (self.cores, self.blocks)
        )
        return replace(
            self,
            kinds=tuple(replace(self.kinds[kind], pool=self.pools[kind]) for kind in kept),
            forward=self.forward[kept],
            backward=self.backward[kept],
            weight=None if self.weight is None else self.weight[kept],
            once=None if self.once is None else self.once[kept],
            accumulation=None if self.accumulation is None else self.accumulation[kept],
            launches=None if launches is None else launches.only(kept),
            overlapping=None if overlapping is None else overlapping.only(kept),
            captured=None if self.captured is None else self.captured.only(kept),
            cores=cores,
            blocks=blocks,
        )

    def tables(self, kind: int) -> Tables:
        """Every quantity of a stage on devices of a kind, for all pairs of cuts."""
        return (self.kinds[kind].space or self.space).tables

    def seconds_of(self, kind: int) -> StageSeconds:
        """Seconds of stages on devices of a kind."""
        launches, overlapping, captured = self.launches, self.overlapping, self.captured
        return self.known.of(
            OneKind(
                replace(self.kinds[kind], copies=1),
                self.kinds[kind].space or self.space,
                self.forward[kind],
                self.backward[kind],
                None if self.weight is None else self.weight[kind],
                None if self.once is None else self.once[kind],
                None if self.accumulation is None else self.accumulation[kind],
                None if captured is None else PassSeconds(*(of[kind] for of in captured.each)),
                frozenset() if captured is None else captured.modes,
                None if launches is None else PassSeconds(*(of[kind] for of in launches.each)),
                0.0 if launches is None else float(launches.start[kind]),
                None if overlapping is None else PassSeconds(*(of[kind] for of in overlapping.network)),
                None if overlapping is None else Behind(*(of[kind] for of in overlapping.behind)),
                overlapping is not None and overlapping.reductions,
                None if self.cores is None else CoreSeconds(*(of[kind] for of in self.cores)),
                None if self.blocks is None else CoreSeconds(*(of[kind] for of in self.blocks)),
            )
        )

    @cached_property
    def least_work(self) -> np.ndarray:
        """[n_kinds, n] seconds of each atom that add up to no more than a micro-batch of any stage takes.

        Of kernels, or of launches where those of the whole model take longer.
        """
        if self.launches is None:
            least = self.forward + self.backward
            if self.captured is not None:
                least = np.minimum(least, self.captured.each.forward + self.captured.each.backward)
            return least
        host = self.launches.each
        return _longer(self.forward, host.forward) + _longer(self.backward, host.backward)

    @cached_property
    def most_delayed(self) -> np.ndarray | float:
        """[n_kinds, n] seconds of each atom that add up to no less than the weight part of any stage's backward."""
        if self.weight is None:
            return 0.0
        longest = self.weight if self.launches is None else np.maximum(self.weight, self.launches.each.weight)
        if self.captured is not None:
            longest = np.maximum(longest, self.captured.each.weight)
        return longest if self.overlapping is None else np.maximum(longest, self.overlapping.network.weight)

    @cached_property
    def most_lacking(self) -> np.ndarray:
        """[n] seconds of each atom that add up to no less than what the first micro-batch of any stage lacks."""
        return np.zeros(self.n_atoms) if self.accumulation is None else self.accumulation.max(axis=0)

    @cached_property
    def n_actions(self) -> int:
        """Of a stage for each micro-batch."""
        if not self.backward.any():
            return 1
        return 2 if self.weight is None else 3

    def overhead_of(self, recompute: int, *, alone: bool) -> float:
        """Seconds of every action of a stage that recomputes, or does not. `alone`: the only one, without replicas."""
        if not alone:
            return self.overhead
        if self.plain and not recompute:
            return 0.0
        return self.overhead if self.overhead_alone is None else self.overhead_alone

    @property
    def bytes_share(self) -> float:
        return 1 / self.n_microbatches if self.share is None else self.share


def _longer(kernels: np.ndarray, launches: np.ndarray) -> np.ndarray:
    """For every kind the row [n] that adds up to more."""
    longer = launches.sum(axis=1, keepdims=True) > kernels.sum(axis=1, keepdims=True)
    return np.where(longer, launches, kernels)
