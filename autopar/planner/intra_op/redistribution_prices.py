"""What it costs to move tensors between layouts on one mesh: in each micro-batch, and once a step."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from autopar.costs.gradient_reduction import BUCKET
from autopar.planner.intra_op.redistributions import (
    ParameterTables,
    TensorOrigin,
    TensorUse,
    needed_redistributions,
)
from autopar.planner.intra_op.sharding_task import ShardingTask
from autopar.sharding.mesh import Mesh
from autopar.sharding.redistribution import RedistributionTable
from autopar.sharding.strategy_costs import Ends
from cost_models import Collective
from cost_models.graphs import may_have_gradient


class _UseKey(NamedTuple):
    """All that the seconds of an edge depend on."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    origin: TensorOrigin
    outs: tuple[Any, ...]
    ins: tuple[Ends, ...]
    gradient: bool
    constant: bool


class RedistributionPrices:
    """Redistributions of one task's tensors on one mesh, priced. Equal tensors and equal edges are priced once."""

    def __init__(self, task: ShardingTask, mesh: Mesh) -> None:
        self._task, self._mesh = task, mesh
        self._tables: dict[tuple[tuple[int, ...], int, bool], RedistributionTable] = {}
        self._once_tables: dict[tuple[tuple[int, ...], int, bool], RedistributionTable] = {}
        self._use_seconds: dict[tuple[_UseKey, int], tuple[np.ndarray, np.ndarray | None]] = {}

    def table_of(self, value: torch.Tensor, itemsize: int | None = None) -> RedistributionTable:
        key = (tuple(value.shape), itemsize or value.element_size(), may_have_gradient(value))
        if key not in self._tables:
            shape, itemsize, partial = key
            self._tables[key] = RedistributionTable(shape, itemsize, self._mesh.shape, self._price, partial=partial)
        return self._tables[key]

    def parameter_tables_of(self, value: torch.Tensor) -> ParameterTables:
        once, gradient = self._once_table_of(value, value.element_size()), self._task.gradient_itemsize(value)
        return ParameterTables(once, self._once_table_of(value, gradient), self.table_of(value, gradient))

    def _once_table_of(self, value: torch.Tensor, itemsize: int) -> RedistributionTable:
        """Of what happens once a step, to all parameters together."""
        key = (tuple(value.shape), itemsize, may_have_gradient(value))
        if key not in self._once_tables:
            shape, itemsize, partial = key
            self._once_tables[key] = RedistributionTable(
                shape, itemsize, self._mesh.shape, self._price_in_bucket, partial=partial
            )
        return self._once_tables[key]

    def _price(self, collective: Collective, nbytes: float, axis: int) -> float:
        return self._mesh.seconds(collective, nbytes, axis, self._task.cluster)

    def _price_in_bucket(self, collective: Collective, nbytes: float, axis: int) -> float:
        """Its part of the seconds of a bucket, in which it travels with other parameters."""
        bucket = max(nbytes, BUCKET)
        return nbytes / bucket * self._price(collective, bucket, axis)

    def seconds_of(self, use: TensorUse, value: torch.Tensor, times: int) -> tuple[np.ndarray, np.ndarray | None]:
        """[layouts made, layouts read] seconds of a micro-batch, and once a step, `times` over."""
        key = _UseKey(tuple(value.shape), value.dtype, use.origin, use.outs, use.ins, use.gradient, use.constant)
        if (key, 1) not in self._use_seconds:
            self._use_seconds[key, 1] = self._cost(use)
        if (key, times) not in self._use_seconds:
            seconds, once = self._use_seconds[key, 1]
            self._use_seconds[key, times] = seconds * times, None if once is None else once * times
        return self._use_seconds[key, times]

    def _cost(self, use: TensorUse) -> tuple[np.ndarray, np.ndarray | None]:
        """[layouts made, layouts read] seconds of a micro-batch with its part of those once a step, and once a step."""
        number, seconds = use.table.number, use.table.seconds
        if use.origin == "activation":
            made, layout = (np.array([number[pair[0]] for pair in ends]) for ends in (use.outs, use.ins))
            forward: np.ndarray = seconds[made[:, None], layout]
            if not use.gradient:  # integers, for example
                return forward, None
            wanted, gradient = (np.array([number[pair[1]] for pair in ends]) for ends in (use.outs, use.ins))
            return forward + seconds[gradient, wanted[:, None]], None
        each, once = np.zeros((2, len(use.outs), len(use.ins)))
        for i, out in enumerate(use.outs):
            for j, into in enumerate(use.ins):
                for needed in needed_redistributions(use, out, into, self._task.training):
                    sums = once if needed.once else each
                    sums[i, j] += use.table_of(needed).between(needed.before, needed.after)
        return each + once / self._task.n_microbatches, once if use.origin == "parameter" else None
