"""Seconds of atoms: the cost table, summed over the operators of each atom."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autopar.costs.cost_graph import CostGraph
from autopar.planner.inter_op.atoms import Atoms


class AtomTimes(NamedTuple):
    """Seconds of every atom for one micro-batch, except for `once`, [n]."""

    forward: np.ndarray
    backward: np.ndarray
    weight: np.ndarray  # the part of `backward` that computes gradients of parameters
    once: np.ndarray  # once a step, however many micro-batches: collectives inside of a mesh


def atom_times(costs: CostGraph, atoms: Atoms, name: str, workers: int, rows: float) -> AtomTimes:
    """Seconds at a micro-batch of `rows` samples; the loss counts to the last atom.

    `name`: a device kind, or a stage configuration. `workers`: devices that are busy at the same time.
    """
    table = costs.table(name, workers)
    forward, backward, loss = table.at(rows)
    share = atoms.weight_shares(costs, table.nodes)
    f, b, w = (atoms.sums(table.nodes, times) for times in (forward, backward, backward * share))
    f[-1] += loss[0]
    b[-1] += loss[1]
    return AtomTimes(f, b, w, atoms.sums(table.nodes, np.zeros(len(table.nodes)) if table.once is None else table.once))
