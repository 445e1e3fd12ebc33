"""Seconds of atoms: the cost table, summed over the operators of each atom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple

import numpy as np

from autopar.costs.cost_graph import CostGraph
from autopar.planner.inter_op.atoms import Atoms
from cost_models.kernels.launches import Seconds, overlapped_seconds


class PassSeconds(NamedTuple, Generic[Seconds]):
    """Seconds of a micro-batch: numbers, or arrays by atom or by stage."""

    forward: Seconds
    backward: Seconds
    weight: Seconds  # the part of `backward` that computes gradients of parameters


def passes(
    kernels: PassSeconds[Seconds], host: PassSeconds[Seconds], start: float | np.ndarray, *, split: bool
) -> PassSeconds[Seconds]:
    """The passes of a stage by the sums of its kernels and of their launches, in the objective and in the simulator.

    `start`: s of the host at the start of each pass. `split`: the backward runs as two passes, the second for the
    gradients of parameters. A repeated forward is a pass of its own, too.
    """
    weight = overlapped_seconds(kernels.weight, host.weight, start)
    if split:
        inputs = kernels.backward - kernels.weight, host.backward - host.weight
        backward = overlapped_seconds(*inputs, start) + weight
    else:
        backward = overlapped_seconds(kernels.backward, host.backward, start)
    return PassSeconds(overlapped_seconds(kernels.forward, host.forward, start), backward, weight)


class AtomTimes(NamedTuple):
    """Seconds of every atom for one micro-batch, except for `once`."""

    kernels: PassSeconds[np.ndarray]  # [n]; of devices whose launches are measured with them, all of it
    host: PassSeconds[np.ndarray]  # [n] of the host, to launch them
    start: float  # of the host, at the start of each pass of a stage
    once: np.ndarray  # [n] once a step, however many micro-batches: collectives inside of a mesh

    def stage(self, inside: Sequence[int], *, split: bool = False) -> PassSeconds[float]:
        """The passes of a stage with the atoms `inside`."""
        atoms = list(inside)
        kernels, host = (PassSeconds(*(float(t[atoms].sum()) for t in times)) for times in (self.kernels, self.host))
        return passes(kernels, host, self.start, split=split)


def atom_times(costs: CostGraph, atoms: Atoms, name: str, workers: int, rows: float) -> AtomTimes:
    """Seconds at a micro-batch of `rows` samples; the loss counts to the last atom.

    `name`: a device kind, or a stage configuration. `workers`: devices that are busy at the same time.
    """
    table = costs.table(name, workers)
    nothing = np.zeros(len(table.nodes))

    def sums(forward: np.ndarray, backward: np.ndarray, loss: tuple[float, float]) -> PassSeconds[np.ndarray]:
        share = atoms.weight_shares(costs, table.nodes)
        f, b, w = (atoms.sums(table.nodes, times) for times in (forward, backward, backward * share))
        f[-1] += loss[0]
        b[-1] += loss[1]
        return PassSeconds(f, b, w)

    host = table.host
    launches = sums(nothing, nothing, (0.0, 0.0)) if host is None else sums(host.forward, host.backward, host.loss)
    once = nothing if table.once is None else table.once
    return AtomTimes(
        sums(*table.at(rows)), launches, 0.0 if host is None else host.start, atoms.sums(table.nodes, once)
    )
