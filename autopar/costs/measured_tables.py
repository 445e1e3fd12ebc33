"""Measured times of passes -> cost tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.costs.cost_table import CostTable
from cost_models import Device
from cost_models.measuring.operator_times import GraphTimes


def tables_of(measured: Sequence[tuple[Device, GraphTimes]]) -> tuple[CostTable, ...]:
    groups: dict[tuple[str, int], list[GraphTimes]] = {}
    for device, one in measured:
        groups.setdefault((device.kind, one.workers), []).append(one)
    tables = []
    for (kind, workers), group in groups.items():
        times = sorted(group, key=lambda t: t.rows)
        trust = _evened(np.array([t.rows for t in times]), np.array([t.total for t in times]))
        nodes = tuple(times[0].forward)
        tables.append(
            CostTable(
                kind,
                workers,
                nodes,
                tuple(t.rows for t in times),
                trust * np.array([[t.forward[n] for n in nodes] for t in times]),
                trust * np.array([[t.backward[n] for n in nodes] for t in times]),
                trust * np.array([[t.loss_forward, t.loss_backward] for t in times]),
                accumulation=_accumulation(times, nodes),
            )
        )
    return tuple(tables)


def _accumulation(times: Sequence[GraphTimes], nodes: Sequence[str]) -> np.ndarray | None:
    """[nodes] s, which do not depend on the samples: those of the largest size, and no more than its backwards.

    One size, which is measured for every plan of the whole batch: more of them would give a plan another price where
    other numbers of micro-batches were measured, too.
    """
    largest = times[-1].accumulation
    if not largest:
        return None
    return np.array([min(largest.get(n, 0.0), times[-1].backward[n]) for n in nodes])


def _evened(rows: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """[rows, 1] factors that bring the measured totals half-way (geometrically) to the line `a + b rows` through them.

    A search over micro-batch sizes finds the size whose measurement was luckiest; half of a deviation from the line
    is taken for noise, half for the truth. The line is fitted to relative errors.
    """
    if len(rows) < 3:
        return np.ones((len(rows), 1))
    weighted = np.stack([1 / totals, rows / totals], axis=1)
    (a, b), *_ = np.linalg.lstsq(weighted, np.ones(len(rows)), rcond=None)
    line = a + b * rows
    if a < 0 or b <= 0:  # no fixed cost: proportional to the samples
        line = rows * (rows / totals).sum() / ((rows / totals) ** 2).sum()
    return np.asarray(np.sqrt(line / totals))[:, None]
