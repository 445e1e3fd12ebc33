"""Seconds by operator and micro-batch size, and the interface of their sources: measured or estimated."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from autopar.analysis.checked_loss import check_trains, computed_loss
from autopar.analysis.loss_functions import title_of
from autopar.analysis.loss_objects import restored
from autopar.capture import torch_private
from autopar.capture.program import Program
from autopar.costs.recipe import Recipe
from autopar.errors import InputError, first_line
from cost_models import Cluster, Device, Link
from cost_models.graphs import Loss, device_of
from cost_models.kernels.beside_meta import BesideMeta
from cost_models.memory.graph_bytes import GraphBytes

Progress = Callable[[str, float], None]  # (what is being done: its first word names the phase, fraction done or NaN)


def SILENT(what: str, done: float) -> None:
    """A progress callback that shows nothing."""


class Seconds(NamedTuple):
    """Of all operators for one micro-batch."""

    forward: np.ndarray  # [nodes]
    backward: np.ndarray  # [nodes]
    loss: np.ndarray  # [2] forward and backward


class OnWholeBatch(NamedTuple):
    """What a step does once on the whole batch, forward and backward."""

    seconds: float
    nbytes: int  # at its highest moment, beside the outputs that it starts from
    outputs: int  # bytes of these outputs, of the whole batch


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
class OverlappedTimes:
    """Seconds of collectives that a mesh does behind kernels, and of those that share the network with them.

    What gradients and parameters take once a step is not in `CostTable.once`. The slowdown of kernels by what is hidden
    for every micro-batch is in their seconds.
    """

    network: tuple[np.ndarray, np.ndarray]  # [nodes] s of all collectives of a forward, and of a backward
    hidden: tuple[np.ndarray, np.ndarray]  # [nodes] s of those that run behind kernels
    gradients: np.ndarray  # [nodes] s once a step, behind the last backward
    parameters: np.ndarray  # [nodes] s once a step, behind the first forward
    bucket: float  # s of a bucket of either


class GatheringTimes(NamedTuple):
    """Seconds in which the backward gathers activations again that the mesh keeps as shards.

    They are among the backward's, and those of operators that run again for their backward fall away: the gathers of
    their second forward serve.
    """

    taken: np.ndarray  # [nodes] s that the backward takes longer
    host: np.ndarray  # [nodes] s of launches
    network: np.ndarray  # [nodes] s of the collectives
    hidden: np.ndarray  # [nodes] s of those that run behind kernels


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
    overlapped: OverlappedTimes | None = None  # None: no collective runs behind kernels
    # [2, nodes] fractions of their kernels' seconds, forward and backward, that operators take as part of fused
    # kernels; `forward` and `backward` are already those. None: nothing is fused.
    fused: np.ndarray | None = None
    # [nodes] s of `backward` that compute gradients of parameters, at the only size; None: the operators' shares of it.
    weight: np.ndarray | None = None
    gathering: GatheringTimes | None = None  # None: no activation is gathered again
    # [nodes] s of `forward`, and of `backward`, in which collectives run and nothing else does; None: no collectives.
    collectives: tuple[np.ndarray, np.ndarray] | None = None
    # [nodes] s of `backward` that the first micro-batch of a step lacks on every replica: there are no gradients of
    # parameters yet to which it could add its own. None: nothing.
    accumulation: np.ndarray | None = None
    # By a number of samples that is not among `rows`: forward [nodes], backward [nodes], loss [2]. None: interpolate.
    estimate: Callable[[int], Seconds] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.rows or any(b <= a for a, b in zip((0, *self.rows), self.rows, strict=False)):
            raise ValueError(f"a cost table needs one or more ascending micro-batch sizes > 0, got {self.rows}")

    def slower(self, factor: float, workers: int) -> CostTable:
        """The table of devices that are slower by `factor`, because `workers` of them share their hardware."""
        forward, backward, loss = (factor * array for array in (self.forward, self.backward, self.loss))
        assert self.estimate is None, "estimated devices share no hardware"
        return CostTable(
            self.kind,
            workers,
            self.nodes,
            self.rows,
            forward,
            backward,
            loss,
            self.once,
            self.host,
            self.overlapped,
            self.fused,
            None if self.weight is None else factor * self.weight,
            None if self.gathering is None else self.gathering._replace(taken=factor * self.gathering.taken),
            self.collectives,
            None if self.accumulation is None else factor * self.accumulation,
        )

    def at(self, rows: float) -> tuple[np.ndarray, np.ndarray, tuple[float, float]]:
        """(forward [nodes], backward [nodes], loss) at a micro-batch of `rows` samples.

        Linear between the sizes that are known or can be estimated, and beyond them along the nearest two. But a sample
        of fewer than were measured takes no less time than one of the smallest size, apart from the accumulation of
        gradients; and more samples than were measured take no less time than the largest size.
        """
        if self.estimate is not None and not (len(self.rows) == 1 and rows == self.rows[0]):
            return self._estimated(rows)
        fixed = 0.0 if self.accumulation is None else np.minimum(self.accumulation, self.backward.min(axis=0))
        forward, loss = (_interpolate(self.rows, a, rows) for a in (self.forward, self.loss))
        backward = fixed + _interpolate(self.rows, self.backward - fixed, rows)
        return forward, backward, (float(loss[0]), float(loss[1]))

    def _estimated(self, rows: float) -> tuple[np.ndarray, np.ndarray, tuple[float, float]]:
        """Exact for a whole number of samples; a mean size lies between the next smaller and larger ones."""
        below = max(1, math.floor(rows))
        weight = rows - below
        found = self._exactly(below)
        if weight:
            pairs = zip(found, self._exactly(below + 1), strict=True)
            found = Seconds(*(np.maximum(low * (1 - weight) + high * weight, 0.0) for low, high in pairs))
        return found.forward, found.backward, (float(found.loss[0]), float(found.loss[1]))

    def _exactly(self, rows: int) -> Seconds:
        if rows in self.rows:
            at = self.rows.index(rows)
            return Seconds(self.forward[at], self.backward[at], self.loss[at])
        assert self.estimate is not None, "only called for tables that can estimate"
        return self.estimate(rows)


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

    def whole_batch(self) -> Mapping[str, OnWholeBatch]:
        """By device kind, what a step does once on the whole batch; {}: nothing, as far as is known."""

    def notes(self) -> tuple[str, ...]:
        """What a plan has to say about the seconds, once they are known."""

    def counted(self) -> GraphBytes:
        """Bytes of one pass, operator by operator."""

    def links(self) -> Mapping[tuple[str, str], Link]:
        """The link of every ordered pair of device names."""

    def accumulate(self) -> float:
        """Seconds per byte of adding one gradient to another in place."""


class LossNeedsValues(InputError):
    """A loss function fails on tensors without values."""


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
        """The loss of the first `rows` samples as a function of the flat outputs.

        On outputs without values it raises LossNeedsValues where the user's code fails, and leaves no trace in the
        objects that this refers to.
        """
        program, loss_fn = self.program, self.loss_fn
        if loss_fn is None:
            return None
        leaves, spec = torch_private.tree_flatten(self.target)
        pairs = zip(leaves, self.target_dims or (None,) * len(leaves), strict=True)
        part = torch_private.tree_unflatten(
            [leaf if dim is None else leaf.narrow(dim, 0, rows) for leaf, dim in pairs], spec
        )

        beside = BesideMeta()  # of all micro-batches: gradients of what the loss trains add up

        def loss(outputs: tuple[Any, ...]) -> torch.Tensor:
            output = torch_private.tree_unflatten(list(outputs)[: program.n_outputs], program.out_spec)
            device = device_of(outputs)
            target = torch_private.tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, part)
            without_values = device.type == "meta"
            function = partial(_without_values, loss_fn, beside) if without_values else loss_fn
            checked = computed_loss(function, output, target, loss_fn)
            # An output that needs a gradient is differentiated next, from the loss.
            wanted = any(isinstance(x, torch.Tensor) and x.requires_grad for x in outputs)
            check_trains(checked.requires_grad or not wanted, loss_fn)
            return checked

        return loss


def _without_values(
    loss_fn: Callable[[Any, Any], torch.Tensor], beside: BesideMeta, output: Any, target: Any
) -> torch.Tensor:
    """The loss of tensors on the meta device, wherever the tensors are that `loss_fn` holds itself."""
    try:
        with restored(loss_fn), beside:
            return loss_fn(output, target)
    except InputError:
        raise  # of a model's own loss
    except Exception as error:
        why = f"{title_of(loss_fn)} cannot be called on tensors without values"
        raise LossNeedsValues(f"{why}: {first_line(error)}") from error


def _interpolate(rows: tuple[int, ...], values: np.ndarray, at: float) -> np.ndarray:
    """[nodes] seconds of `at` samples, from those of `rows` samples ([rows, nodes])."""
    proportional: np.ndarray = values[0] * (at / rows[0])
    if len(rows) == 1:
        return proportional
    upper = min(max(int(np.searchsorted(rows, at)), 1), len(rows) - 1)
    low, high = rows[upper - 1], rows[upper]
    weight = (at - low) / (high - low)
    line = values[upper - 1] * (1 - weight) + values[upper] * weight
    # Passes of few samples often find more in the caches. The line through such sizes soon falls below zero.
    least = proportional if at < low else values[-1] if at > high else 0.0
    return np.asarray(np.maximum(line, least))
