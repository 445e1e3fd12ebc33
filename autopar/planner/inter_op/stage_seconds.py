"""Seconds of a stage's work, for every pair of cuts: each micro-batch's passes, and what happens once a step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from autopar.plan.recompute import Recompute
from autopar.planner.inter_op.atom_times import (
    Behind,
    CoreSeconds,
    PassSeconds,
    in_one_part,
    passes,
    seconds_once,
    with_cores,
)
from autopar.planner.inter_op.device_kind import DeviceKind, Gradients
from autopar.planner.inter_op.space import Space

# Pairs of cuts of all kinds whose seconds are kept at once: each takes some 200 bytes.
_MOST_PAIRS = 3_000_000
_MOST_REPLICAS = 8  # numbers of replicas whose reductions are kept at once, for each kind


@dataclass(frozen=True, eq=False)
class OneKind:
    """All that the seconds of stages on devices of one kind depend on. The arrays are rows of those in `Problem`."""

    kind: DeviceKind  # of one pipeline: copies of it count among the replicas
    space: Space
    forward: np.ndarray  # [n]
    backward: np.ndarray
    weight: np.ndarray | None
    once: np.ndarray | None
    accumulation: np.ndarray | None
    captured: PassSeconds[np.ndarray] | None
    captured_modes: frozenset[Recompute]
    host: PassSeconds[np.ndarray] | None
    start: float  # s of the host at the start of each pass
    network: PassSeconds[np.ndarray] | None
    behind: Behind[np.ndarray] | None
    reductions: bool  # whether gradients are added up over replicas behind the last backward
    cores: CoreSeconds[np.ndarray] | None
    blocks: CoreSeconds[np.ndarray] | None

    @cached_property
    def content(self) -> Hashable:
        """Equal for equal kinds: their number, memory and name make no difference. Spaces are equal if they are one."""
        others = {name: _content(value) for name, value in vars(self).items() if name not in ("kind", "space")}
        kind = replace(self.kind, name="", count=1, memory=0.0, pool=None, space=None, lanes=None)
        return (kind, id(self.space), *others.values())


def _content(value: Any) -> Hashable:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return tuple(map(_content, value)) if isinstance(value, tuple) else value


class StageSeconds:
    """Seconds of stages on one kind of devices, without sends; computed when first read, and kept."""

    def __init__(self, of: OneKind) -> None:
        self.of = of
        self._pairs = of.space.tables.pairs
        self._known_passes: dict[int, PassSeconds[np.ndarray]] = {}
        self._known_lacking: dict[int, np.ndarray] = {}
        self._known_reduced: OrderedDict[int, np.ndarray] = OrderedDict()  # by replicas

    @property
    def n_pairs(self) -> int:
        return len(self._pairs.start)

    def passes(self, recompute: int = Recompute.NONE) -> PassSeconds[np.ndarray]:
        """Seconds of a micro-batch, [n_pairs]; the weight part counts only where the backward is split. `recompute`:
        what the backward runs again as it gets there; a whole forward is a pass of its own."""
        of, split = self.of, self.of.weight is not None
        alone = of.captured is not None and recompute in of.captured_modes
        if recompute == Recompute.STAGE and not alone:
            recompute = Recompute.NONE
        if recompute not in self._known_passes:
            forward, backward, weights = of.forward, of.backward, of.weight
            if of.captured is not None and alone:
                forward, backward = of.captured.forward, of.captured.backward
                weights = of.captured.weight if split else None
            weight = np.zeros(()) if weights is None else self._between(weights)
            known = PassSeconds(self._between(forward), self._between(backward), weight)
            network = None if of.network is None else self._network
            full = recompute == Recompute.FULL
            groups = of.blocks if full else of.cores if recompute == Recompute.SELECTIVE else None
            host = self._host
            if groups is not None:
                again = CoreSeconds(*map(self._between, groups))
                known, host, network = with_cores(known, host, network, again)
            if of.host is not None or network is not None:
                known = passes(known, host, of.start, network, split=split)
            if full:
                known = in_one_part(known)
            self._known_passes[recompute] = known
        return self._known_passes[recompute]

    def lacking(self, recompute: int) -> np.ndarray:
        """Seconds that the first micro-batch of a replica takes less, [n_pairs]: its gradients are added to none."""
        assert self.of.accumulation is not None
        if recompute not in self._known_lacking:
            taken = self.passes(recompute)
            most = taken.backward if self.of.weight is None else taken.weight
            self._known_lacking[recompute] = np.minimum(self._between(self.of.accumulation), most)
        return self._known_lacking[recompute]

    def reduced(self, replicas: int) -> np.ndarray:
        """Seconds once a step to add up gradients over replicas, in all copies of the pipeline, whatever stages run
        again, [n_pairs]."""
        known = self._known_reduced
        if replicas not in known:
            reduction = self.of.kind.reduction(replicas, self._gradients)
            if self.of.behind is not None:
                reduction = self._not_hidden(replicas, reduction)
            known[replicas] = reduction
            if len(known) > _MOST_REPLICAS:
                known.popitem(last=False)
        return known[replicas]

    @cached_property
    def once(self) -> np.ndarray:
        """Seconds once a step, whatever the replicas: collectives of the mesh, gradients of tied parameters, and the
        optimizer's step. [n_pairs]"""
        tables, kind = self.of.space.tables, self.of.kind
        own = tables.once + kind.exchanged(Gradients(tables.tied_gradients)) + kind.stepped(tables)
        return np.asarray(own if self.of.once is None else own + self._between(self.of.once))

    @cached_property
    def meanwhile(self) -> np.ndarray:
        """Seconds of the last backwards of earlier stages, which run while a stage does what happens once a step,
        [n_pairs]: without what they delay, and as if one stage on this kind had all their atoms."""
        first, before = self._pairs.start == 0, np.zeros(len(self._pairs.number))
        taken = self.passes()
        backward = taken.backward if self.of.weight is None else taken.backward - taken.weight
        before[self._pairs.stop[first]] = backward[first]
        return np.asarray(before[self._pairs.start])

    def _not_hidden(self, replicas: int, reduction: np.ndarray) -> np.ndarray:
        """What adding up gradients over replicas takes longer, with the collectives of a mesh, than the passes that
        these run behind. `reduction`: s for it alone."""
        behind = self._behind
        if self.of.reductions:
            bucket = behind.bucket + self.of.kind.bucket(replicas)
            behind, reduction = behind._replace(gradients=behind.gradients + reduction, bucket=bucket), np.zeros(())
        return reduction + seconds_once(behind, self.passes(), self._network, split=self.of.weight is not None)

    @property
    def _host(self) -> PassSeconds[np.ndarray]:
        """Seconds of the host to launch the kernels of a micro-batch, [n_pairs]."""
        if self.of.host is None:
            nothing = np.zeros(self.n_pairs)
            return PassSeconds(nothing, nothing, np.zeros(()) if self.of.weight is None else nothing)
        return PassSeconds(*map(self._between, self.of.host))

    @cached_property
    def _network(self) -> PassSeconds[np.ndarray]:
        """Seconds of all collectives of a micro-batch, [n_pairs]."""
        assert self.of.network is not None
        return PassSeconds(*map(self._between, self.of.network))

    @cached_property
    def _behind(self) -> Behind[np.ndarray]:
        """Seconds once a step of the collectives of a mesh behind its passes, [n_pairs]."""
        assert self.of.behind is not None
        gradients, parameters, bucket = self.of.behind
        return Behind(self._between(gradients), self._between(parameters), bucket)

    @cached_property
    def _gradients(self) -> Gradients:
        return Gradients(self.of.space.tables.gradients)

    def _between(self, weights: np.ndarray) -> np.ndarray:
        """Sum of `weights` [n] over the atoms between every pair of cuts."""
        before = self.of.space.cut_blocks.cuts_as_numbers @ weights
        return np.maximum(before[self._pairs.stop] - before[self._pairs.start], 0.0)


class KnownSeconds:
    """Seconds of stages by kind, for all problems of one search, which differ in schedules and numbers of devices.

    Where they take too much memory, those that were not read for longest are forgotten.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, StageSeconds] = OrderedDict()
        self._n_pairs = 0

    def of(self, kind: OneKind) -> StageSeconds:
        if kind.content not in self._known:
            new = self._known[kind.content] = StageSeconds(kind)
            self._n_pairs += new.n_pairs
            while self._n_pairs > _MOST_PAIRS and len(self._known) > 1:
                self._n_pairs -= self._known.popitem(last=False)[1].n_pairs
        self._known.move_to_end(kind.content)
        return self._known[kind.content]
