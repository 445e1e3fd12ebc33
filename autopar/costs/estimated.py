"""Estimated costs: a program on a cluster whose devices need not be present. Nothing runs and nothing is allocated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx

from autopar.analysis.batching import Batching
from autopar.analysis.example import LEFT_OUT, Example
from autopar.analysis.node_values import observe
from autopar.analysis.operators import compute_nodes, on_device, requires_grad_nodes
from autopar.capture import torch_private
from autopar.capture.node_names import describe
from autopar.capture.program import Program
from autopar.capture.repeated_layers.fold import fold
from autopar.capture.uncaptured import uncaptured
from autopar.costs import cost_graph
from autopar.costs.cost_graph import CostGraph
from autopar.costs.cost_table import (
    SILENT,
    Calls,
    CostTable,
    HostTimes,
    LossNeedsValues,
    OnWholeBatch,
    Progress,
    Seconds,
)
from autopar.costs.fusion import Fusion
from autopar.costs.recipe import USUAL, Recipe
from autopar.costs.step_rehearsal import StepRehearsal
from autopar.costs.whole_batch import WholeBatch, priced
from autopar.errors import InputError, first_line, warn
from autopar.schedule.micro_batches import largest_size
from cost_models import Cluster, Link
from cost_models.graphs import get_attribute, may_have_gradient, on_meta, private_copy, tensors_in
from cost_models.hardware.device_specs import DeviceSpec, efficiency_of, rates_of
from cost_models.kernels.efficiency_curves import Efficiency
from cost_models.kernels.factorizations import factorizations
from cost_models.kernels.launches import HostCosts, overlapped_seconds
from cost_models.kernels.operator_work import OperatorWork, count, count_call
from cost_models.kernels.roofline import OperatorEstimate, Rates, price
from cost_models.memory.graph_bytes import GraphBytes, measure_bytes
from cost_models.memory.training_memory import usable_memory

META = torch.device("meta")


class _Estimate(NamedTuple):
    """Of one size of the micro-batch on one kind of device."""

    seconds: Seconds
    host: HostTimes | None  # see `CostTable`
    fused: np.ndarray | None  # see `CostTable`


class KnownEstimates(NamedTuple):
    """What was estimated of one captured program under one recipe: other batches and clusters need no more."""

    seconds: dict[tuple[int, tuple[DeviceSpec, ...]], Mapping[str, _Estimate]]  # by samples and kinds of devices
    nbytes: dict[tuple[int, str], GraphBytes]  # by samples and type of the devices
    notes: dict[str, None]  # see `Estimated.notes`


class Estimated:
    """Costs of a program on any cluster (a `CostSource`).

    `leaves`: flat inputs of an example call, on any device. `n_microbatches`: the division of the batch to estimate
    first; others are estimated when they are needed, in the context `apart`. `recipe`: how a step is run; the times of
    kernels are without their launches where these are times of the host.
    """

    def __init__(
        self,
        program: Program,
        batching: Batching,
        leaves: list[Any],
        cluster: Cluster,
        *,
        training: bool,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        target: Any = None,
        target_dims: tuple[int | None, ...] = (),
        n_microbatches: int | None = None,
        recipe: Recipe = USUAL,
        apart: Callable[[], AbstractContextManager[object]] = nullcontext,
        known: KnownEstimates | None = None,
        whole_batch: WholeBatch | None = None,
    ) -> None:
        self.cluster, self.recipe = cluster, recipe
        self._whole_batch = whole_batch
        self._known = known or KnownEstimates({}, {}, {})
        self._apart = apart
        self.cores = None
        types = {spec.name: spec.device_type for spec in cluster.node}
        self.devices = tuple(replace(d, memory=usable_memory(d.memory, types[d.kind])) for d in cluster.devices)
        self._program, self._batching, self._training = program, batching, training
        self._calls = Calls(
            program, [on_meta(x) for x in leaves], loss_fn, torch_private.tree_map(on_meta, target), target_dims
        )
        self._module = on_device(program.graph_module, program.device, META)
        self._n_microbatches = n_microbatches
        self._check_opaque_operators()
        self._folded = fold(self._module)  # equal layers cost the same
        if names := factorizations(self._module.graph):
            self._known.notes[f"predictions count bytes alone for {', '.join(names)}, which take longer"] = None

    def tables(self, progress: Progress) -> tuple[CostTable, ...]:
        """The tables of some sizes; others are estimated on demand, so that every search prices a plan the same."""
        sizes = self._sizes()
        found: list[Mapping[str, _Estimate]] = []
        for row, rows in enumerate(sizes):
            progress(f"estimating {rows} samples", row / len(sizes))
            found.append(self._estimates(rows))
        estimate = cache(self._later)

        def table(kind: str) -> CostTable:
            mine = [one[kind] for one in found]
            forward, backward, loss = (np.array(column) for column in zip(*(one.seconds for one in mine), strict=True))
            later = (lambda rows: estimate(rows)[kind].seconds) if self._batching.splittable else None
            return CostTable(
                kind,
                1,
                self._nodes,
                tuple(sizes),
                forward,
                backward,
                loss,
                host=mine[-1].host,
                fused=mine[-1].fused,
                estimate=later,
            )

        return tuple(table(kind) for kind in self.cluster.specs)

    def _later(self, rows: int) -> Mapping[str, _Estimate]:
        """`_estimates` outside of `estimate_costs`."""
        with self._apart():
            return self._estimates(rows)

    def _estimates(self, rows: int) -> Mapping[str, _Estimate]:
        """A micro-batch of `rows` samples, by device kind."""
        key = (rows, tuple(self.cluster.specs.values()))
        if key not in self._known.seconds:
            self._known.seconds[key] = self._estimated(rows)
        return self._known.seconds[key]

    def _estimated(self, rows: int) -> Mapping[str, _Estimate]:
        inputs = self._calls.inputs(rows)
        work = count(self._folded.module, rows, training=self._training, inputs=inputs)
        of_loss = self._loss(rows)
        if self._fusion is not None:
            self._fusion.look_at(work, inputs)
        found = {}
        for kind, spec in self.cluster.specs.items():
            rates, efficiency = rates_of(spec, self.recipe.host(spec)), efficiency_of(spec)
            priced = {name: self._priced(name, each, rates, efficiency) for name, each in work.items()}
            costs = [priced[self._folded.kept(name)] for name in self._nodes]
            forward = np.array([cost.forward_seconds for cost in costs])
            backward = np.array([cost.backward_seconds for cost in costs])
            shares = None
            if self._fusion is not None:
                shares = self._fusion.shares(rates, efficiency, forward, backward)
                forward, backward = forward * shares[0], backward * shares[1]
            whole = price(of_loss, rates, efficiency)
            loss = np.array([whole.forward_seconds, whole.backward_seconds])
            host = self._host(spec, work, of_loss, self._fusion)
            found[kind] = _Estimate(Seconds(forward, backward, loss), host, shares)
        return found

    def _priced(self, name: str, work: OperatorWork, rates: Rates, efficiency: Efficiency) -> OperatorEstimate:
        try:
            return price(work, rates, efficiency)
        except ValueError as error:  # products of integers
            node = next(node for node in self._folded.module.graph.nodes if node.name == name)
            raise InputError(f"{describe(node)}: {error}; convert the factors to one of these") from None

    @cached_property
    def _nodes(self) -> tuple[str, ...]:
        return tuple(node.name for node in compute_nodes(self._module.graph))

    @cached_property
    def _fusion(self) -> Fusion | None:
        return Fusion(self._module, self._folded, self._graded) if self.recipe.fuses else None

    def whole_batch(self) -> dict[str, OnWholeBatch]:
        """Nothing, with a note, where it needs values."""
        found, notes = priced(self._whole_batch, self._on_whole_batch)
        self._known.notes.update(dict.fromkeys(notes))
        return found

    def _on_whole_batch(self, whole: WholeBatch) -> dict[str, OnWholeBatch]:
        work, found = whole.work(), {}
        for kind, spec in self.cluster.specs.items():
            kernels = price(work, rates_of(spec, self.recipe.host(spec)), efficiency_of(spec))
            costs = self.recipe.loss_host(spec)
            ahead, behind = (0.0, 0.0) if costs is None else _launching(work, costs)
            forward = overlapped_seconds(kernels.forward_seconds, ahead)
            backward = overlapped_seconds(kernels.backward_seconds, behind)
            found[kind] = OnWholeBatch(forward + backward, *whole.memory(spec.device_type))
        return found

    def notes(self) -> tuple[str, ...]:
        return tuple(self._known.notes)

    @cached_property
    def _graded(self) -> set[str]:
        """Operators to whose results a gradient flows."""
        return {node.name for node in requires_grad_nodes(self._module)} if self._training else set()

    def _host(
        self, spec: DeviceSpec, work: Mapping[str, OperatorWork], loss: OperatorWork, fusion: Fusion | None
    ) -> HostTimes | None:
        """What the host takes to launch the kernels of `work`, by node of the folded graph."""
        costs, of_loss = self.recipe.host(spec), self.recipe.loss_host(spec)
        if costs is None or of_loss is None:
            return None
        calls = _launching(loss, of_loss)
        if fusion is not None:
            return HostTimes(*fusion.launches(costs), calls, costs.start)
        launched = self._launched
        kernels = {name: (len(mine.forward), len(mine.backward)) for name, mine in work.items()}
        ahead, behind = np.array([kernels[name] for name in launched.representatives]).reshape(-1, 2).T
        # An uncaptured node dispatches several operators.
        dispatched = np.where(launched.opaque, np.maximum(1, ahead), launched.dispatched)
        nodes = np.where(launched.opaque, np.maximum(1, behind), launched.dispatched) * launched.graded
        forward = dispatched * costs.operator + ahead * costs.kernel
        backward = nodes * costs.node + behind * costs.kernel + launched.summed * costs.accumulation
        return HostTimes(forward, backward, calls, costs.start)

    @cached_property
    def _launched(self) -> _Launched:
        nodes = compute_nodes(self._module.graph)
        return _Launched(
            [self._folded.kept(node.name) for node in nodes],
            np.array([uncaptured(node) is not None for node in nodes], dtype=bool),
            np.array([_dispatched(node) for node in nodes], dtype=int),
            np.array([node.name in self._graded for node in nodes], dtype=int),
            np.array([self._summed(node) if node.name in self._graded else 0 for node in nodes], dtype=int),
        )

    def _summed(self, node: fx.Node) -> int:
        """Parameters that an operator reads, whose gradients are added to those of earlier micro-batches."""
        read = [get_attribute(self._module, str(n.target)) for n in node.all_input_nodes if n.op == "get_attr"]
        return sum(isinstance(value, torch.Tensor) and value.requires_grad for value in read)

    def counted(self) -> GraphBytes:
        batch = max(self._program.batch_size, 1)
        rows = min(batch, 4) if self._batching.splittable else batch
        key = (rows, self.cluster.node[0].device_type)
        if key not in self._known.nbytes:
            try:
                found = measure_bytes(self._module, self._inputs(rows), rows, self._training, key[1])
            except RuntimeError as error:  # of torch, for an operator that needs values
                raise self._of_unknown_size(error) from error
            self._known.nbytes[key] = found
        return self._known.nbytes[key]

    def _of_unknown_size(self, error: RuntimeError) -> InputError:
        needing = (n for n in compute_nodes(self._module.graph) if not _NEED_VALUES.isdisjoint(_tags(n)))
        first = next(needing, None)
        what = "the model" if first is None else describe(first)
        why = str(error) if first is None else "it has no result without values"
        return InputError(
            f"cannot estimate the memory of {what}: {why}. Let the search plan on the devices themselves, where it is "
            "measured, or split the model with Plan.from_split"
        )

    def links(self) -> Mapping[tuple[str, str], Link]:
        return self.cluster.links

    def accumulate(self) -> float:
        """Seconds per byte: two gradients are read and one is written."""
        return 3 / min(spec.bandwidth * spec.bandwidth_efficiency for spec in self.cluster.specs.values())

    def _check_opaque_operators(self) -> None:
        """Raise InputError for uncaptured code that needs values: nothing tells what it costs."""
        if not self._program.uncaptured:
            return
        values = observe(private_copy(self._module, META), self._calls.inputs(max(self._program.batch_size, 1)))
        for node in values:
            operator = uncaptured(node)
            if operator is None:
                continue
            why = operator.needs_values(fx.map_arg(node.args, values.__getitem__))
            if why:
                raise InputError(
                    f"the cost of {describe(node)} cannot be estimated: it runs uncaptured, and not without values "
                    f"({why}). Let the search plan on the devices themselves (parallelize without a plan), where it is "
                    "measured, split the model with Plan.from_split, or make this code fit for torch.export"
                )

    def _sizes(self) -> list[int]:
        batch = max(self._program.batch_size, 1)
        if not self._batching.splittable:
            return [batch]
        if self._n_microbatches is not None:
            return sorted({largest_size(batch, self._n_microbatches), batch})
        return sorted({max(self._batching.least_rows, batch >> shift) for shift in range(batch.bit_length())})

    def _inputs(self, rows: int) -> list[Any]:
        """Inputs of `rows` samples, copied: a view of the example would count the storage of the whole batch."""
        return [x.clone() if isinstance(x, torch.Tensor) else x for x in self._calls.inputs(rows)]

    def _loss(self, rows: int) -> OperatorWork:
        """The kernels of the loss, which runs outside the model; none, with a note, where it needs values."""
        loss = self._calls.loss(rows)
        if loss is None:
            return OperatorWork((), ())
        try:
            with torch.no_grad():
                outputs = private_copy(self._folded.module, META)(*self._inputs(rows))
        except RuntimeError as error:  # of torch, for an operator that needs values
            raise self._of_unknown_size(error) from error
        for tensor in tensors_in(outputs):
            tensor.requires_grad_(self._training and may_have_gradient(tensor))
        try:
            return count_call(lambda *flat: loss(flat), outputs)[1]
        except LossNeedsValues as error:
            why = str(error)
        except RuntimeError as error:  # in its backward
            why = f"its backward needs values: {first_line(error)}"
        self._known.notes[f"{LEFT_OUT}loss, because {why}"] = None
        return OperatorWork((), ())


_NEED_VALUES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


@dataclass(frozen=True)
class _Launched:
    """What the host does for every node, whatever the micro-batch."""

    representatives: list[str]  # the equal node whose work is known
    opaque: np.ndarray  # whether it runs uncaptured
    dispatched: np.ndarray  # operators, unless it is opaque
    graded: np.ndarray  # 1 where a gradient flows to its result
    summed: np.ndarray  # parameters whose gradients are added to earlier ones


def _tags(node: fx.Node) -> Collection[Any]:
    """Of the torch operator that a node calls."""
    return getattr(node.target, "tags", ())


def _launching(work: OperatorWork, costs: HostCosts) -> tuple[float, float]:
    """Seconds of the host to launch the kernels of code outside of the model, forward and backward."""
    ahead, behind = costs.operator + costs.kernel, costs.node + costs.kernel
    return len(work.forward) * ahead, len(work.backward) * behind


def _dispatched(node: fx.Node) -> int:
    """Operators that the host dispatches for a node."""
    name = getattr(node.target, "__name__", "")
    of_python = getattr(node.target, "__module__", "") == "_operator"  # such as taking an item of a list
    return 0 if of_python or name.startswith("sym_") else 1


def estimate_costs(
    example: Example,
    cluster: Cluster,
    recipe: Recipe = USUAL,
    *,
    n_microbatches: int | None = None,
    progress: Progress = SILENT,
    known: KnownEstimates | None = None,
) -> CostGraph:
    """The cost graph of a call on devices that need not be present, from their data sheets.

    `known`: of earlier calls of the same program under the same recipe; it is added to.
    """

    @contextmanager
    def apart() -> Iterator[None]:
        with example.untouched(), torch.device("cpu"):
            yield

    with apart():
        source = Estimated(
            example.program,
            example.batching,
            example.leaves,
            cluster,
            training=example.training,
            loss_fn=example.stage_loss,
            target=example.target,
            target_dims=example.target_dims,
            n_microbatches=n_microbatches,
            recipe=recipe,
            apart=apart,
            known=known,
            whole_batch=WholeBatch.of(example),
        )
        costs = cost_graph.build(
            example.program, example.batching, source, training=example.training, progress=progress
        )
        for note in costs.notes:
            warn(note)
        types = {spec.name: spec.device_type for spec in cluster.node}
        return replace(costs, rehearsal=StepRehearsal.of(example, types))
