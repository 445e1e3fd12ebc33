"""Seconds of atoms for a partition problem: those of every kind of devices or meshes, one row each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.plan.recompute import Recompute
from autopar.planner.inter_op.atom_times import AtomTimes, Behind, CoreSeconds, OverlappedAtoms, PassSeconds
from autopar.planner.inter_op.problem import Captured, Launches, Overlapping
from cost_models.collectives.overlap import Overlap


def by_kind(times: Sequence[CoreSeconds[np.ndarray]]) -> CoreSeconds[np.ndarray]:
    """What stages run again: cores of attention, or layers."""
    return CoreSeconds(*(np.maximum(of, 0.0) for of in zip(*times, strict=True)))


def captured_of(times: Sequence[AtomTimes]) -> Captured | None:
    """By kind; None where no kind runs compiled stages. Kinds whose stages are never compiled run all of them alike."""
    modes = frozenset[Recompute]().union(*(t.left_alone for t in times))
    if not modes:
        return None
    each = [t.kernels if t.captured is None else t.captured for t in times]
    return Captured(PassSeconds(*(np.maximum(of, 0.0) for of in zip(*each, strict=True))), modes)


def accumulation_of(times: Sequence[AtomTimes]) -> np.ndarray | None:
    """By kind; None where it is not known apart."""
    if not any(np.any(t.accumulation) for t in times):
        return None
    return np.array([np.maximum(t.accumulation, np.zeros(t.once.shape)) for t in times])


def launches_of(times: Sequence[AtomTimes]) -> Launches | None:
    """By kind; None where no kind has times of the host."""
    if not any(t.start or any(each.any() for each in t.host) for t in times):
        return None
    each = PassSeconds(*map(np.array, zip(*(t.host for t in times), strict=True)))
    return Launches(each, np.array([t.start for t in times]))


def overlapping_of(times: Sequence[AtomTimes], overlap: Overlap) -> Overlapping | None:
    """By kind; None where no kind has collectives behind kernels."""
    if not overlap.gradients and all(t.overlapped is None for t in times):
        return None
    nothing = np.zeros(times[0].once.shape)
    none = OverlappedAtoms(PassSeconds(*[nothing] * 3), PassSeconds(*[nothing] * 3), {}, nothing, nothing, 0.0)
    own = [t.overlapped or none for t in times]
    network = PassSeconds(*(np.maximum(each, 0.0) for each in zip(*(one.network for one in own), strict=True)))
    behind = Behind(*map(np.array, ([o.gradients for o in own], [o.parameters for o in own], [o.bucket for o in own])))
    return Overlapping(network, behind, overlap.gradients)
