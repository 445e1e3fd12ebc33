"""Seconds by operator and micro-batch size, and the interface of their sources: measured or estimated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from autopar.capture import torch_private
from autopar.capture.program import Program
from autopar.costs.recipe import Recipe
from cost_models import Cluster, Device, Link
from cost_models.graphs import Loss, device_of
from cost_models.memory.graph_bytes import GraphBytes

Progress = Callable[[str, float], None]  # (what is being done, fraction done)


def SILENT(what: str, done: float) -> None:
    """A progress callback that shows nothing."""


@dataclass(frozen=True)
class HostTimes:
    """Seconds in which the host launches the kernels of operators, whatever the size of the micro-batch.

    Kernels and launches overlap: see `cost_models.kernels.launches`.
    """

    forward: np.ndarray  # [nodes] s
    backward: np.ndarray  # [nodes] s
    loss: tuple[float, float]  # s, forward and backward
    start: float = 0.0  # s at the start of each pass of a stage


@dataclass(frozen=True)
class CostTable:
    """Times of all operators on one kind of device with `workers` of its siblings busy, at several batch sizes.

    Raises:
        ValueError: the sizes do not ascend.
    """

    kind: str
    workers: int
    nodes: tuple[str, ...]
    rows: tuple[int, ...]  # micro-batch sizes with known times, ascending
    forward: np.ndarray  # [rows, nodes] s
    backward: np.ndarray  # [rows, nodes] s
    loss: np.ndarray  # [rows, 2] s, forward and backward
    once: np.ndarray | None = None  # [nodes] s once a step, however many micro-batches; None: nothing
    host: HostTimes | None = None  # of the launches; None: the times above contain them
    # [2, nodes] fractions of their kernels' seconds, forward and backward, that operators take as part of fused
    # kernels; `forward` and `backward` are already those. None: nothing is fused.
    fused: np.ndarray | None = None

    def __post_init__(self) -> None:
        if not self.rows or any(b <= a for a, b in zip((0, *self.rows), self.rows, strict=False)):
            raise ValueError(f"a cost table needs one or more ascending micro-batch sizes > 0, got {self.rows}")

    def slower(self, factor: float, workers: int) -> CostTable:
        """The table of devices that are slower by `factor`, because `workers` of them share their hardware."""
        forward, backward, loss = (factor * array for array in (self.forward, self.backward, self.loss))
        return CostTable(
            self.kind, workers, self.nodes, self.rows, forward, backward, loss, self.once, self.host, self.fused
        )

    def at(self, rows: float) -> tuple[np.ndarray, np.ndarray, tuple[float, float]]:
        """(forward [nodes], backward [nodes], loss) at a micro-batch of `rows` samples.

        Linear between the measured sizes, and beyond them along the nearest two; never below zero.
        """
        forward, backward, loss = (_interpolate(self.rows, a, rows) for a in (self.forward, self.backward, self.loss))
        return forward, backward, (float(loss[0]), float(loss[1]))


class CostSource(Protocol):
    """Where the costs of a program come from: measurements on present devices, or estimates for any."""

    @property
    def devices(self) -> tuple[Device, ...]: ...

    @property
    def cores(self) -> int | None:
        """CPU cores that the devices share; None: every device has hardware of its own."""

    @property
    def recipe(self) -> Recipe | None:
        """How a step is run, where that is not measured."""

    @property
    def cluster(self) -> Cluster | None:
        """The networks over which replicas reduce their gradients; None for workers of one process."""

    def tables(self, progress: Progress) -> tuple[CostTable, ...]:
        """Seconds on every device kind, at several micro-batch sizes."""

    def notes(self) -> tuple[str, ...]:
        """What a plan has to say about the seconds, once they are known."""

    def counted(self) -> GraphBytes:
        """Bytes of one pass, operator by operator."""

    def links(self) -> Mapping[tuple[str, str], Link]:
        """The link of every ordered pair of device names."""

    def accumulate(self) -> float:
        """Seconds per byte of adding one gradient to another in place."""


@dataclass(frozen=True)
class Calls:
    """Example calls of a program at any number of samples."""

    program: Program
    leaves: list[Any]  # flat inputs of the example
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None
    target: Any = None
    # Of every flat target leaf the dimension that counts samples, or None; (): no target is split.
    target_dims: tuple[int | None, ...] = ()

    def inputs(self, rows: int) -> list[Any]:
        """The flat inputs of the first `rows` samples."""
        return [
            x if i.batch_dim is None else x.detach().narrow(i.batch_dim, 0, rows)
            for x, i in zip(self.leaves, self.program.inputs, strict=True)
        ]

    def loss(self, rows: int) -> Loss | None:
        """The loss of the first `rows` samples as a function of the flat outputs."""
        program, loss_fn = self.program, self.loss_fn
        if loss_fn is None:
            return None
        leaves, spec = torch_private.tree_flatten(self.target)
        pairs = zip(leaves, self.target_dims or (None,) * len(leaves), strict=True)
        part = torch_private.tree_unflatten(
            [leaf if dim is None else leaf.narrow(dim, 0, rows) for leaf, dim in pairs], spec
        )

        def loss(outputs: tuple[Any, ...]) -> torch.Tensor:
            output = torch_private.tree_unflatten(list(outputs)[: program.n_outputs], program.out_spec)
            device = device_of(outputs)
            return loss_fn(
                output, torch_private.tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, part)
            )

        return loss


def _interpolate(rows: tuple[int, ...], values: np.ndarray, at: float) -> np.ndarray:
    if len(rows) == 1:
        return np.asarray(values[0] * (at / rows[0]))
    upper = min(max(int(np.searchsorted(rows, at)), 1), len(rows) - 1)
    low, high = rows[upper - 1], rows[upper]
    weight = (at - low) / (high - low)
    return np.maximum(values[upper - 1] * (1 - weight) + values[upper] * weight, 0.0)
