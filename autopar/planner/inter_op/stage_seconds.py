"""Seconds of a stage's work, for every pair of cuts: each micro-batch's passes, and what happens once a step."""

from __future__ import annotations

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
from autopar.planner.inter_op.device_kind import Gradients
from autopar.planner.inter_op.problem import Problem
from autopar.planner.inter_op.stage_tables import Mode


class StageSeconds:
    """Seconds of a problem's stages, without sends; computed when first read, and kept."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._pairs = problem.space.tables.pairs
        self._known_gradients: dict[int, Gradients] = {}
        self._known_once: dict[int, np.ndarray] = {}
        self._known_passes: dict[tuple[int, int], PassSeconds[np.ndarray]] = {}
        self._known_networks: dict[int, PassSeconds[np.ndarray]] = {}
        self._known_behind: dict[int, Behind[np.ndarray]] = {}
        self._known_reduced: dict[int, np.ndarray] = {}  # by replicas, of one kind
        self._reduced_kind = -1

    def passes(self, kind: int, recompute: int = Recompute.NONE) -> PassSeconds[np.ndarray]:
        """Seconds of a micro-batch, [n_pairs]; the weight part counts only where the backward is split. `recompute`:
        what the backward runs again as it gets there; a whole forward is a pass of its own."""
        problem, split = self.problem, self.problem.weight is not None
        alone = problem.captured is not None and recompute in problem.captured.modes
        if recompute == Recompute.STAGE and not alone:
            recompute = Recompute.NONE
        if (kind, recompute) not in self._known_passes:
            forward, backward, weights = problem.forward, problem.backward, problem.weight
            if problem.captured is not None and alone:
                forward, backward = problem.captured.each.forward, problem.captured.each.backward
                weights = problem.captured.each.weight if split else None
            weight = np.zeros(()) if weights is None else self._between(weights[kind])
            known = PassSeconds(self._between(forward[kind]), self._between(backward[kind]), weight)
            nothing, launches = np.zeros_like(known.forward), problem.launches
            host, start = PassSeconds(nothing, nothing, np.zeros_like(weight)), 0.0
            if launches is not None:
                host = PassSeconds(*(self._between(each[kind]) for each in launches.each))
                start = launches.start[kind]
            network = None if problem.overlapping is None else self._network(kind)
            full = recompute == Recompute.FULL
            groups = problem.blocks if full else problem.cores if recompute == Recompute.SELECTIVE else None
            if groups is not None:
                again = CoreSeconds(*(self._between(of[kind]) for of in groups))
                known, host, network = with_cores(known, host, network, again)
            if launches is not None or network is not None:
                known = passes(known, host, start, network, split=split)
            if full:
                known = in_one_part(known)
            self._known_passes[kind, recompute] = known
        return self._known_passes[kind, recompute]

    def lacking(self, mode: Mode) -> np.ndarray:
        """Seconds that the first micro-batch of a replica takes less, [n_pairs]: its gradients are added to none."""
        assert self.problem.accumulation is not None
        passes = self.passes(mode.kind, mode.recompute)
        most = passes.backward if self.problem.weight is None else passes.weight
        return np.minimum(self._between(self.problem.accumulation[mode.kind]), most)

    def reduced(self, kind: int, replicas: int) -> np.ndarray:
        """Seconds once a step to add up gradients over replicas, whatever stages run again, [n_pairs]."""
        if self._reduced_kind != kind:  # the modes of a kind follow each other
            self._known_reduced, self._reduced_kind = {}, kind
        if replicas not in self._known_reduced:
            reduction = self.problem.kinds[kind].reduction(replicas, self._gradients(kind))
            if self.problem.overlapping is not None:
                reduction = self._not_hidden(kind, replicas, reduction)
            self._known_reduced[replicas] = reduction
        return self._known_reduced[replicas]

    def once(self, kind: int) -> np.ndarray:
        """Seconds once a step, whatever the replicas: collectives of the mesh, gradients of tied parameters, and the
        optimizer's step."""
        if kind not in self._known_once:
            tables, of_kind = self.problem.tables(kind), self.problem.kinds[kind]
            own = tables.once + of_kind.exchanged(Gradients(tables.tied_gradients)) + of_kind.stepped(tables)
            if self.problem.once is not None:
                own = own + self._between(self.problem.once[kind])
            self._known_once[kind] = own
        return self._known_once[kind]

    def _not_hidden(self, kind: int, replicas: int, reduction: np.ndarray) -> np.ndarray:
        """What adding up gradients over replicas takes longer, with the collectives of a mesh, than the passes that
        these run behind. `reduction`: s for it alone."""
        overlapping = self.problem.overlapping
        assert overlapping is not None
        behind = self._behind(kind)
        if overlapping.reductions:
            bucket = behind.bucket + self.problem.kinds[kind].bucket(replicas)
            behind, reduction = behind._replace(gradients=behind.gradients + reduction, bucket=bucket), np.zeros(())
        split = self.problem.weight is not None
        return reduction + seconds_once(behind, self.passes(kind), self._network(kind), split=split)

    def _network(self, kind: int) -> PassSeconds[np.ndarray]:
        """Seconds of all collectives of a micro-batch, [n_pairs]."""
        if kind not in self._known_networks:
            assert self.problem.overlapping is not None
            each = self.problem.overlapping.network
            self._known_networks[kind] = PassSeconds(*(self._between(array[kind]) for array in each))
        return self._known_networks[kind]

    def _behind(self, kind: int) -> Behind[np.ndarray]:
        """Seconds once a step of the collectives of a mesh behind its passes, [n_pairs]."""
        if kind not in self._known_behind:
            assert self.problem.overlapping is not None
            gradients, parameters, bucket = self.problem.overlapping.behind
            parts = self._between(gradients[kind]), self._between(parameters[kind])
            self._known_behind[kind] = Behind(*parts, bucket[kind])
        return self._known_behind[kind]

    def _gradients(self, kind: int) -> Gradients:
        if kind not in self._known_gradients:
            self._known_gradients[kind] = Gradients(self.problem.tables(kind).gradients)
        return self._known_gradients[kind]

    def _between(self, weights: np.ndarray) -> np.ndarray:
        """Sum of `weights` [n] over the atoms between every pair of cuts."""
        before = self.problem.space.cuts_as_numbers @ weights
        return np.maximum(before[self._pairs.stop] - before[self._pairs.start], 0.0)
