"""The costs of every strategy of an operator: seconds of its kernels on a part and of the collectives inside of it, and
bytes that a device keeps for the backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx

from autopar.analysis.rules.notation import Rule
from autopar.analysis.rules.table import bind
from autopar.sharding.layouts import PARTIAL, Placements, parts
from autopar.sharding.local_work import LocalWorks, WholeCall
from autopar.sharding.mesh import Mesh
from autopar.sharding.parallel_operators.operators import collectives
from autopar.sharding.strategies import Strategy, repeated, strategies
from cost_models import Cluster
from cost_models.graphs import may_have_gradient, tensors_in
from cost_models.kernels.efficiency_curves import Efficiency
from cost_models.kernels.kernel import Kernel
from cost_models.kernels.operator_work import OperatorWork
from cost_models.kernels.roofline import Rates, kernel_seconds

Ends = tuple[Placements, Placements]  # layouts of a tensor where it is made or read, and of its gradient there


class WholeSeconds(NamedTuple):
    """Measured seconds of a whole operator on one device, for one micro-batch."""

    forward: float
    backward: float


Place = int | None
"""A tensor of an operator: i >= 0 is the i-th operand of its rule, -1 - j the j-th result, None one made inside."""


def kept_layout(strategy: Strategy, place: Place) -> Placements | None:
    """The layout in which each device keeps a tensor for the backward; None for one made inside."""
    if place is None:
        return None
    return strategy.inputs[place] if place >= 0 else strategy.outputs[-1 - place]


def kept_share(strategy: Strategy, place: Place, mesh: Sequence[int]) -> float:
    """The fraction that each device keeps of a tensor: what it has of it, or of one made inside its part of the work.

    linear  S0R RS0 -> S0S1 on 2 x 4    keeps its input, 1/2 of it, although it has 1/4 of the weight
    """
    layout = kept_layout(strategy, place)
    return strategy.share if layout is None else 1 / parts(layout, mesh)


@dataclass(frozen=True, eq=False)
class StrategyCosts:
    """The strategies of one operator and their costs. Equal operators share one object."""

    strategies: tuple[Strategy, ...]
    seconds: np.ndarray  # [strategies] forward and backward of one micro-batch, with the collectives within
    forward: np.ndarray  # [strategies] of `seconds`
    mesh: tuple[int, ...]  # shape
    ruled: bool  # the operator has a rule; without one, every device does all of it

    def kept(self, place: Place) -> np.ndarray:
        """[strategies] fraction that each device has of a tensor that is kept for the backward (`kept_share`)."""
        return np.array([kept_share(strategy, place, self.mesh) for strategy in self.strategies])

    @cached_property
    def inputs(self) -> list[tuple[Ends, ...]]:
        """By operand: the layouts that occur, with those of its gradient."""
        count = len(self.strategies[0].inputs)
        return [tuple(dict.fromkeys((s.inputs[i], s.gradient_in(i)) for s in self.strategies)) for i in range(count)]

    @cached_property
    def outputs(self) -> list[tuple[Ends, ...]]:
        """By result: the layouts that occur, with those of its gradient."""
        count = len(self.strategies[0].outputs)
        return [tuple(dict.fromkeys((s.outputs[i], s.gradient_out(i)) for s in self.strategies)) for i in range(count)]

    @cached_property
    def input_labels(self) -> list[np.ndarray]:
        """By operand: [strategies] position of the strategy's layouts in `inputs`."""
        return [
            np.array([known.index((s.inputs[i], s.gradient_in(i))) for s in self.strategies])
            for i, known in enumerate(self.inputs)
        ]

    @cached_property
    def output_labels(self) -> list[np.ndarray]:
        return [
            np.array([known.index((s.outputs[i], s.gradient_out(i))) for s in self.strategies])
            for i, known in enumerate(self.outputs)
        ]


@dataclass(frozen=True)
class OperatorWithRule:
    """An operator of a graph with its rule."""

    node: fx.Node
    rule: Rule | None
    operands: tuple[Any, ...]
    results: tuple[torch.Tensor, ...]  # on meta
    signature: str  # the same for equal operators

    def place(self, of_node: Place) -> Place:
        """A tensor of the node, counted among `node.all_input_nodes`, counted among `operands`.

        An operand that the rule does not know is whatever the work has of it, like what is made inside.
        """
        if of_node is None or of_node < 0:
            return of_node if of_node is None or -of_node <= len(self.results) else None
        operand = self.node.all_input_nodes[of_node]
        return next((i for i, one in enumerate(self.operands) if one is operand), None)


def with_rule(node: fx.Node, values: Mapping[fx.Node, Any], work: OperatorWork) -> OperatorWithRule:
    """An operator with its rule, if it has one; `values`: tensors (on meta) of all nodes."""
    rule = bind(node, lambda n: values[n])
    results = tuple(tensors_in(values[node]))
    if rule is None or len(rule.outputs) != len(results):
        rule = None
        operands = tuple(n for n in node.all_input_nodes if isinstance(values[n], torch.Tensor))
    else:
        operands = rule.operands
    described_rule = (str(node.target), None if rule is None else str(rule), rule and sorted(rule.sizes.items()), work)
    described = [_described(values.get(o) if isinstance(o, fx.Node) else o) for o in operands]
    return OperatorWithRule(node, rule, operands, results, repr((described_rule, described)))


class StrategyCostTable:
    """Strategies and costs of the operators of one graph on one mesh; equal operators get the same object."""

    def __init__(
        self,
        mesh: Mesh,
        cluster: Cluster,
        rates: Rates,
        efficiency: Efficiency,
        *,
        training: bool,
        trained: Callable[[fx.Node], bool] = lambda node: True,
        works: LocalWorks | None = None,
        measured: Mapping[str, WholeSeconds] | None = None,
        turns: int = 1,
    ) -> None:
        """`trained`: whether a gradient flows to what a node makes. `works`: shared by tables of other meshes.
        `measured`: of whole operators, by signature. `turns`: devices of the mesh that compute one after another."""
        self._trained, self._works = trained, works or LocalWorks()
        self._devices, self._mesh, self._cluster = mesh, mesh.shape, cluster
        self._rates, self._efficiency, self._training = rates, efficiency, training
        self._whole, self._turns = measured or {}, turns
        self._known: dict[str, StrategyCosts] = {}

    def of(self, ruled: OperatorWithRule, values: Mapping[fx.Node, Any], work: OperatorWork) -> StrategyCosts:
        """The strategies of an operator; `values`: tensors (on meta) of all nodes."""
        if ruled.signature not in self._known:
            self._known[ruled.signature] = self._options(ruled, values, work)
        return self._known[ruled.signature]

    def _options(self, ruled: OperatorWithRule, values: Mapping[fx.Node, Any], work: OperatorWork) -> StrategyCosts:
        rule, operands, results = ruled.rule, ruled.operands, ruled.results
        whole = repeated(len(operands), len(results), len(self._mesh))
        found = [whole] if rule is None else self._possible(strategies(rule, self._mesh), operands, values, results)
        sizes = [_nbytes(values.get(o)) if isinstance(o, fx.Node) else 0 for o in operands]
        outcome = [_nbytes(t) for t in results]
        call = WholeCall(ruled.node, operands, values, self._trained, work)
        both = np.array([self._seconds(one, call, sizes, outcome) for one in found], dtype=float)
        if ruled.signature in self._whole:
            both = self._as_measured(both, work, self._whole[ruled.signature])
        both *= self._turns
        if rule is not None:
            tensors = [values.get(o) if isinstance(o, fx.Node) else None for o in operands]
            both += [self._within(one, rule, tensors) for one in found]
        return StrategyCosts(tuple(found), both.sum(axis=1), both[:, 0], tuple(self._mesh), rule is not None)

    def _possible(
        self,
        every: Sequence[Strategy],
        operands: Sequence[Any],
        values: Mapping[fx.Node, Any],
        results: Sequence[torch.Tensor],
    ) -> list[Strategy]:
        """The strategies that leave no integers and booleans PARTIAL, which are not summed."""
        tensors = [values.get(o) if isinstance(o, fx.Node) else None for o in operands]

        def adds(layouts: Sequence[Placements], of: Sequence[Any]) -> bool:
            return all(
                PARTIAL not in layout or (isinstance(t, torch.Tensor) and may_have_gradient(t))
                for layout, t in zip(layouts, of, strict=True)
            )

        return [s for s in every if adds(s.inputs, tensors) and adds(s.outputs, results)]

    def _as_measured(self, both: np.ndarray, work: OperatorWork, whole: WholeSeconds) -> np.ndarray:
        """[strategies, 2] seconds of shards: the measured seconds of the whole operator, times the ratio of shard to
        whole by the model of kernels. A shard takes no less than the launches of its kernels."""
        found = np.zeros_like(both)
        for column, (kernels, seconds) in enumerate(((work.forward, whole.forward), (work.backward, whole.backward))):
            modelled = self._kernel_seconds(kernels)
            ratio = both[:, column] / modelled if modelled else np.ones(len(both))
            least = min(seconds, len(kernels) * self._rates.launch)
            found[:, column] = np.maximum(seconds * ratio, least)
        return found

    def _kernel_seconds(self, kernels: Sequence[Kernel]) -> float:
        return sum(kernel_seconds(kernel, self._rates, self._efficiency) for kernel in kernels)

    def _within(self, one: Strategy, rule: Rule, operands: Sequence[Any]) -> tuple[float, float]:
        """Seconds, forward and backward, of the collectives inside of a parallel operator."""
        seconds = [0.0, 0.0]
        for inner in collectives(one, rule, operands, self._mesh):
            seconds[inner.backward] += self._devices.seconds(inner.collective, inner.nbytes, inner.axis, self._cluster)
        return seconds[0], seconds[1] if self._training else 0.0

    def _moved(self, one: Strategy, sizes: Sequence[int], outcome: Sequence[int]) -> float:
        """The fraction of the bytes of operands and results that each device has."""
        pairs = [*zip(one.inputs, sizes, strict=True), *zip(one.outputs, outcome, strict=True)]
        total = sum(nbytes for _, nbytes in pairs)
        return sum(nbytes / parts(layout, self._mesh) for layout, nbytes in pairs) / total if total else 1.0

    def _seconds(
        self, one: Strategy, call: WholeCall, sizes: Sequence[int], outcome: Sequence[int]
    ) -> tuple[float, float]:
        """Forward and backward."""
        work = self._local_work(one, call, sizes, outcome)
        return self._kernel_seconds(work.forward), self._kernel_seconds(work.backward) if self._training else 0.0

    def _local_work(self, one: Strategy, call: WholeCall, sizes: Sequence[int], outcome: Sequence[int]) -> OperatorWork:
        """What each device computes: a share of the whole where all tensors are cut alike and nothing is multiplied."""
        work = call.work
        both = [*zip(one.inputs, sizes, strict=True), *zip(one.outputs, outcome, strict=True)]
        cut = {parts(layout, self._mesh) for layout, nbytes in both if nbytes}
        if one.share == 1 and cut <= {1}:
            return work
        if len(cut) > 1 or any(kernel.flops for kernel in (*work.forward, *work.backward)):
            local = self._works.of(call, one, self._mesh, training=self._training)
            if local is not None:
                return local
        share = self._moved(one, sizes, outcome)
        forward, backward = ([_cut(k, one.share, share) for k in kernels] for kernels in (work.forward, work.backward))
        return OperatorWork(tuple(forward), tuple(backward))


def _cut(kernel: Kernel, share: float, bytes_share: float) -> Kernel:
    """A kernel on a part of the work. Its reads and writes shrink like all bytes of the operator, `bytes_share`."""
    return replace(
        kernel,
        flops=int(kernel.flops * share),
        read=int(kernel.read * bytes_share),
        written=int(kernel.written * bytes_share),
    )


def _nbytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    return type(value).__name__
