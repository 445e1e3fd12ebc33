"""The solution of a sharding problem as data of a plan's stage, by names that survive another capture of the model."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from autopar.analysis.operators import compute_nodes
from autopar.capture.program import is_getitem
from autopar.planner.intra_op.redistributions import OUTPUT, ChosenUse, Collective, TensorUse
from autopar.planner.intra_op.sharding_task import GraphFacts, ShardingTask
from autopar.planner.intra_op.strategy_search import Sharding, ShardingProblem
from autopar.sharding.layouts import REPLICATE
from autopar.sharding.parallel_operators.operators import collectives
from autopar.sharding.stage_sharding import (
    Exchange,
    Passage,
    Repeated,
    StageSharding,
    Stored,
    TensorRedistribution,
    totals,
)
from autopar.sharding.strategies import OperatorPlacements


@dataclass(frozen=True)
class StageOperators:
    """The operators of one stage, and the nodes of a problem's graph that represent them.

    In a problem of a folded graph (`capture.folding`), one node represents the equal nodes of several layers.
    """

    nodes: Sequence[fx.Node]  # of the whole graph, in its order
    keys: Mapping[str, str]  # node of the whole graph -> operator key
    represented_by: Callable[[str], str] = lambda name: name  # node, parameter or input -> that in the problem

    def name_of(self, tensor: fx.Node) -> str:
        """What a plan calls a tensor: the key of its operator, or the name of a parameter or an input."""
        return self.keys.get(tensor.name, _item(tensor))


def _item(tensor: fx.Node) -> str:
    """What a problem calls a tensor that an operator reads (`TensorUse.item`)."""
    return str(tensor.target) if tensor.op in ("get_attr", "placeholder") else tensor.name


def stage_sharding(
    task: ShardingTask,
    facts: GraphFacts,
    found: Sharding,
    operators: StageOperators,
    run_again: Container[str] = (),
) -> StageSharding:
    """The part of a solution that belongs to the operators of one stage.

    It leaves out operators that every device does whole and parameters that every device has whole. `run_again`: nodes
    of the whole graph that run again for their backward, and gather what they read in that run.
    """
    return _StageSolution(task, facts, found, operators, run_again).build()


def whole_graph_sharding(problem: ShardingProblem, found: Sharding, keys: Mapping[str, str]) -> StageSharding:
    """The solution for a graph that is one stage and not folded. `keys`: node name -> operator key."""
    operators = StageOperators([node for node in compute_nodes(problem.task.module.graph) if node.name in keys], keys)
    return stage_sharding(problem.task, problem.facts, found, operators)


def times(found: Sharding, n_microbatches: int) -> tuple[float, float, float]:
    """Seconds of a micro-batch forward and backward, and of what happens once per step."""
    forward = [work.forward for work in found.work.values()]
    forward += [one.seconds for one in found.collectives if not (one.backward or one.once)]
    once = math.fsum(one.seconds for one in found.collectives if one.once)
    total = math.fsum(forward)
    return total, max(0.0, found.seconds - total - once / n_microbatches), once


def exchanges_within(task: ShardingTask, facts: GraphFacts, found: Sharding) -> Iterator[Exchange]:
    """Every collective inside of an operator that devices do together, by the problem's names."""
    nodes = {node.name: node for node in task.module.graph.nodes}
    for name, strategy in found.strategies.items():
        ruled = facts.with_rule(nodes[name])
        if not strategy.special or ruled.rule is None:
            continue
        operands = [facts.values.get(o) if isinstance(o, fx.Node) else None for o in ruled.operands]
        for inner in collectives(strategy, ruled.rule, operands, found.mesh.shape):
            if inner.backward and not task.training:
                continue
            seconds = found.mesh.seconds(inner.collective, inner.nbytes, inner.axis, task.cluster)
            axis = found.mesh.names[inner.axis]
            yield Exchange(inner.collective, axis, name, name, round(inner.nbytes), seconds, inner.backward)


class _StageSolution:
    def __init__(
        self,
        task: ShardingTask,
        facts: GraphFacts,
        found: Sharding,
        operators: StageOperators,
        run_again: Container[str],
    ) -> None:
        self._task, self._facts, self._found, self._operators = task, facts, found, operators
        self._run_again = run_again

    def build(self) -> StageSharding:
        exchanges = tuple(e for node in self._operators.nodes for e in self._exchanges(node))
        repeated = tuple(self._repeated())
        nbytes, seconds, again = totals(
            ((one.nbytes, one.seconds) for one in exchanges if not one.once), (one.seconds for one in repeated)
        )
        return StageSharding(
            self._found.mesh.shape,
            self._found.mesh.names,
            tuple(self._strategies()),
            tuple(self._parameters()),
            tuple(dict.fromkeys(one for node in self._operators.nodes for one in self._redistributions(node))),
            exchanges,
            int(nbytes),
            seconds,
            again,
            repeated,
            regather=self._found.keeping is not None,
        )

    def _represented_by(self, node: fx.Node) -> str:
        return self._operators.represented_by(node.name)

    def _strategies(self) -> Iterator[tuple[str, OperatorPlacements]]:
        for node in self._operators.nodes:
            strategy = self._found.strategies.get(self._represented_by(node))
            sides = () if strategy is None else (*strategy.inputs, *strategy.outputs)
            if strategy is not None and any(code != REPLICATE for placements in sides for code in placements):
                yield self._operators.keys[node.name], strategy.placements

    def _parameters(self) -> Iterator[tuple[str, Stored]]:
        read = (n for node in self._operators.nodes for n in node.all_input_nodes if n.op == "get_attr")
        for name in dict.fromkeys(str(node.target) for node in read):
            stored = self._found.stored.get(self._operators.represented_by(name))
            if stored is not None and any(code != REPLICATE for code in (*stored.layout, *stored.state)):
                yield name, Stored(stored.layout, stored.state, stored.scattered)

    def _repeated(self) -> Iterator[Repeated]:
        """The seconds that each device would not need if no two devices did the same."""
        for node in self._operators.nodes:
            work = self._found.work.get(self._represented_by(node))
            if work is not None:
                seconds = (work.forward + work.backward) * (1 - round(1 / work.share) / self._found.mesh.size)
                if seconds > 0:
                    yield Repeated(self._operators.keys[node.name], seconds)

    # -- collectives --------------------------------------------------------------------------------------------------

    @cached_property
    def _caused_by(self) -> Mapping[str, Sequence[Collective]]:
        """By node of the problem: the collectives of what it reads, and of what the graph returns of it."""
        caused: dict[str, list[Collective]] = defaultdict(list)
        for one in self._found.collectives:
            caused[one.reader if one.reader != OUTPUT else one.tensor].append(one)
        return caused

    @cached_property
    def _within(self) -> Mapping[str, Sequence[Exchange]]:
        within: dict[str, list[Exchange]] = defaultdict(list)
        for exchange in exchanges_within(self._task, self._facts, self._found):
            within[exchange.operator].append(exchange)
        return within

    def _exchanges(self, node: fx.Node) -> Iterator[Exchange]:
        """The collectives of one operator, as often as they happen."""
        key = self._operators.keys[node.name]
        names = {self._operators.represented_by(_item(n)): self._maker(n) for n in node.all_input_nodes}
        runs_again = node.name in self._run_again
        for one in self._caused_by.get(self._represented_by(node), ()):
            if one.reader != OUTPUT and one.item not in names:
                continue  # of the layer that represents this one, which reads the tensor before the first layer
            if one.regathered_for and runs_again:
                continue
            tensor = key if one.reader == OUTPUT else names[one.item]
            for step in one.steps:
                if step.collective is not None:
                    axis = self._found.mesh.names[step.axis]
                    ends = (key, tensor, round(step.nbytes), step.seconds)
                    again = runs_again and not (one.backward or one.once)
                    yield Exchange(step.collective, axis, *ends, one.backward, one.once, again)
        for exchange in self._within.get(self._represented_by(node), ()):
            yield replace(exchange, operator=key, tensor=key, again=runs_again and not exchange.backward)

    def _maker(self, tensor: fx.Node) -> str:
        """Of an item of a list, the operator that made the list."""
        source = tensor.args[0] if is_getitem(tensor) else None
        if isinstance(source, fx.Node) and isinstance(source.meta.get("val"), (list, tuple)):
            return self._operators.name_of(source)
        return self._operators.name_of(tensor)

    # -- redistributions ----------------------------------------------------------------------------------------------

    @cached_property
    def _uses(self) -> Mapping[tuple[str, str], Sequence[ChosenUse]]:
        """By (item, reader) in the problem. Outputs are read by `OUTPUT`."""
        found: dict[tuple[str, str], list[ChosenUse]] = defaultdict(list)
        for chosen in self._found.uses:
            if not chosen.use.shared:
                found[chosen.use.item, chosen.use.reader].append(chosen)
        return found

    @cached_property
    def _passages(self) -> Mapping[TensorUse, Passage]:
        return {chosen.use: chosen.passage for chosen in self._found.uses}

    @cached_property
    def _readers(self) -> set[tuple[str, str]]:
        """(tensor of the whole graph, reader in the problem) inside of the stage."""
        return {(n.name, self._represented_by(node)) for node in self._operators.nodes for n in node.all_input_nodes}

    def _redistributions(self, node: fx.Node) -> Iterator[TensorRedistribution]:
        """The steps of all tensors that an operator reads, and those to the caller of what it makes."""
        key = self._operators.keys[node.name]
        for tensor in node.all_input_nodes:
            yield from self._between(tensor, self._represented_by(node), key)
        yield from self._between(node, OUTPUT, "")

    def _between(self, tensor: fx.Node, reader: str, key: str) -> Iterator[TensorRedistribution]:
        for chosen in self._uses.get((self._operators.represented_by(_item(tensor)), reader), ()):
            via, own = chosen.use.via, chosen.passage
            shared = Passage(own.forward[:1], own.backward[-1:])
            # The steps that readers share run in the stage of the first of them. A later stage receives the tensor
            # whole and starts where they end.
            if via is not None and (tensor.name, via.reader) in self._readers:
                shared = self._passages[via]
            if shared.moves or own.moves:
                yield TensorRedistribution(self._operators.name_of(tensor), key, shared, own)
