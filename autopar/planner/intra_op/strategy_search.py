"""One strategy for every operator of a graph on a mesh, so that kernels and collectives take the least time.

ShardingTask --strategy_graph--> variables and edges --elimination--> Sharding --solution--> StageSharding of a plan
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from autopar.errors import InfeasibleError, PlanError
from autopar.planner.intra_op.constraints import NO_CONSTRAINTS, ShardingConstraints, narrowed
from autopar.planner.intra_op.elimination.beam import TOLERANCE
from autopar.planner.intra_op.elimination.choices import Edge, Selection, SelectionProblem, cost
from autopar.planner.intra_op.elimination.envelope import EnvelopePoint, Prices
from autopar.planner.intra_op.elimination.solve import select
from autopar.planner.intra_op.redistributions import (
    ChosenUse,
    Collective,
    Moved,
    collectives_of,
    gathered_bytes,
    needed_once,
)
from autopar.planner.intra_op.sharding_task import GraphFacts, ShardingTask
from autopar.planner.intra_op.strategy_graph import OptionCosts, PricedUse, StoredChoice, StrategyGraph
from autopar.sharding.layouts import Placements, parts
from autopar.sharding.mesh import Mesh
from autopar.sharding.stage_sharding import Stored, stored_text
from autopar.sharding.strategies import Strategy
from autopar.sharding.strategy_costs import StrategyCosts
from cost_models import bytes_text


@dataclass(frozen=True)
class KeptShard:
    """What a device keeps in place of a tensor that was gathered."""

    layout: Placements
    made: bool  # the layout in which its maker made it; otherwise it is a copy


@dataclass(frozen=True)
class ChosenCosts:
    """What an operator costs with its chosen strategy, per micro-batch on each device."""

    forward: float  # s
    backward: float  # s
    share: float  # of its work


@dataclass(frozen=True)
class Sharding:
    """The chosen strategies of a task on a mesh."""

    mesh: Mesh
    strategies: Mapping[str, Strategy]  # by node
    stored: Mapping[str, Stored]  # by name of the parameter or input
    collectives: tuple[Collective, ...]
    seconds: float  # of one micro-batch, with its share of what happens once per step
    each: float  # s of one micro-batch without that share
    nbytes: float  # on each device: parameters, gradients, optimizer's state, what is kept for the backward
    bound: float  # s: no choice is faster
    proven: bool
    width: int  # of the elimination
    unruled: tuple[str, ...]  # operators that every device does, because they have no rule
    work: Mapping[str, ChosenCosts]  # by node
    uses: tuple[ChosenUse, ...] = field(compare=False)  # the steps of every tensor for every reader
    resident: float = 0.0  # bytes of `nbytes` that do not depend on the micro-batches in flight
    gathered: Mapping[str, float] = field(default_factory=dict)  # by node: `gathered_bytes` of all that it reads
    stepping: float = 0.0  # s once a step: the optimizer's kernels
    working: float = 0.0  # bytes beside `nbytes` on each device while an operator runs, at most
    # By (tensor that is read, node that keeps it, layout in which that reads it); empty: gathered tensors are kept.
    kept: Mapping[tuple[str, str, Placements], KeptShard] = field(default_factory=dict)
    keeping: Sharding | None = None  # the same choices if gathered tensors are kept, where they are not

    @property
    def once(self) -> float:
        """Seconds once a step."""
        return math.fsum([self.stepping, *(one.seconds for one in self.collectives if one.once)])

    @property
    def most_gathered(self) -> float:
        """Bytes beside `nbytes` on each device while the operator with the largest gathered parameters runs."""
        return max(self.gathered.values(), default=0.0)


def choose(
    task: ShardingTask,
    mesh: Mesh,
    *,
    memory: float = float("inf"),
    fixed: Mapping[str, Strategy] | None = None,
    constraints: ShardingConstraints = NO_CONSTRAINTS,
) -> Sharding:
    """The fastest strategies on `mesh` that need at most `memory` bytes on each device.

    `fixed`: strategies that operators must have. `constraints`: layouts that their tensors must have. Raises
    InfeasibleError where nothing fits the memory, PlanError where the constraints leave an operator no strategy.
    """
    return ShardingProblem(task, mesh).solve(memory, fixed or {}, constraints)


class ShardingProblem(StrategyGraph):
    """The variables and edges of one graph on one mesh, and their best choices."""

    def __init__(self, task: ShardingTask, mesh: Mesh, facts: GraphFacts | None = None) -> None:
        super().__init__(task, mesh, facts)
        self._priced: dict[tuple[OptionCosts, float], OptionCosts] = {}

    def with_microbatches(self, task: ShardingTask, mesh: Mesh) -> ShardingProblem:
        """The same choice for another number of micro-batches of the same size, on other devices that lie alike.

        A micro-batch has its part of what happens once a step; nothing else depends on their number.
        """
        if task is self.task and mesh is self.mesh:
            return self
        more = 1 / task.n_microbatches - 1 / self.task.n_microbatches
        kept = ("_all", "_edges_without_gathers")
        other = copy.copy(self)
        other.__dict__ = {name: value for name, value in vars(self).items() if name not in kept}
        other.task, other.mesh, other._priced = task, mesh, {}
        if more:
            variables: dict[OptionCosts, OptionCosts] = {}  # equal ones stay one object
            for one in self.variables:
                if one not in variables:
                    again = one if one.once is None else replace(one, seconds=one.seconds + more * one.once)
                    variables[one] = again
            other.variables = [variables[one] for one in self.variables]
            other.uses = self._uses_with(more)
        return other

    def _uses_with(self, more: float) -> list[PricedUse]:
        """The uses, with `more` of what they do once a step in every micro-batch."""
        known: dict[int, np.ndarray] = {}  # equal edges share their arrays
        found = []
        for priced in self.uses:
            edge, once = priced.edge, priced.once
            if once is None:
                found.append(priced)
                continue
            if id(once) not in known:
                known[id(once)] = edge.seconds + more * once
            found.append(priced._replace(edge=replace(edge, seconds=known[id(once)])))
        return found

    def priced(self, price: float, constraints: ShardingConstraints = NO_CONSTRAINTS) -> Sharding:
        """The fastest strategies under `constraints` if every byte on a device costs `price` seconds.

        By duality no choice that needs as few bytes is faster. This takes no longer than a search without a limit.
        """
        unbound = [self._with_price(variable, price).seconds for variable in self.variables]
        seconds = narrowed(constraints, unbound, self.options, self.stored_options)
        return self.with_penalties(seconds, self.edges)

    def _with_price(self, costs: OptionCosts, price: float) -> OptionCosts:
        if (costs, price) not in self._priced:
            self._priced[costs, price] = OptionCosts(costs.seconds + price * costs.nbytes, costs.nbytes)
        return self._priced[costs, price]

    def solve(
        self, memory: float, fixed: Mapping[str, Strategy], constraints: ShardingConstraints = NO_CONSTRAINTS
    ) -> Sharding:
        """See `choose`."""
        found = self._within(memory, fixed, constraints, self.edges)
        if found.nbytes + found.most_gathered <= memory:
            return found
        fitting = [*self._with_room(found, memory, fixed, constraints)]
        with contextlib.suppress(InfeasibleError):
            fitting.append(self._within(memory, fixed, constraints, self._edges_without_gathers))
        if not fitting:
            raise InfeasibleError(
                f"no choice of options fits into {bytes_text(memory)}: the parameters of an operator, gathered, take "
                f"{bytes_text(found.most_gathered)} beside {bytes_text(found.nbytes)}"
            )
        best = min(fitting, key=lambda one: one.seconds)
        bound = min(found.bound, best.seconds)
        return replace(best, bound=bound, proven=bound >= best.seconds * (1 - TOLERANCE))

    def _with_room(
        self, found: Sharding, memory: float, fixed: Mapping[str, Strategy], constraints: ShardingConstraints
    ) -> Iterator[Sharding]:
        """The fastest strategies that leave as much of `memory` as they gather, if there are any."""
        with contextlib.suppress(InfeasibleError):
            while found.nbytes + found.most_gathered > memory:  # each time with less memory
                found = self._within(max(0.0, memory - found.most_gathered), fixed, constraints, self.edges)
            yield found

    @cached_property
    def _edges_without_gathers(self) -> list[Edge]:
        """The edges, without the choices that gather a parameter for an operator."""
        allowed: dict[tuple[object, ...], np.ndarray] = {}
        found = []
        for edge, use, _ in self.uses:
            key = (use.outs, use.ins, use.nbytes, id(edge.seconds))
            if use.constant and key not in allowed:
                gathers = [[gathered_bytes(use, out, into) > 0 for into in use.ins] for out in use.outs]
                allowed[key] = np.where(gathers, np.inf, edge.seconds)
            found.append(replace(edge, seconds=allowed[key]) if use.constant else edge)
        return found

    def _within(
        self,
        memory: float,
        fixed: Mapping[str, Strategy],
        constraints: ShardingConstraints,
        edges: Sequence[Edge],
    ) -> Sharding:
        """The fastest strategies that need at most `memory` bytes, gathered parameters aside."""
        kept = {}
        for name, strategy in fixed.items():
            variable, costs = self.options[name]
            kept[variable] = costs.strategies.index(strategy)
        seconds = narrowed(constraints, self.seconds, self.options, self.stored_options)
        return self._solution(select(SelectionProblem(seconds, self.nbytes, edges, kept), memory))

    def with_choices(self, strategies: Mapping[str, Strategy], stored: Mapping[str, Stored]) -> Sharding:
        """The solution with these strategies of operators and these layouts of parameters; the rest is the fastest.

        Raises PlanError for a parameter that cannot be stored so.
        """
        allowed_storages = {}
        for name, wanted in stored.items():
            options = self.stored_options[name][1]
            # Of a parameter with several readers, plans leave open in which placements its gradients are added up.
            allowed = [
                (o.layout, o.state, o.scattered) == (wanted.layout, wanted.state, wanted.scattered) for o in options
            ]
            if not any(allowed):
                texts = "; ".join(dict.fromkeys(map(stored_text, options)))
                raise PlanError(f"parameter {name} cannot be stored as '{stored_text(wanted)}'; it can as {texts}")
            allowed_storages[name] = np.array(allowed)
        return self.with_allowed(strategies, allowed_storages)

    def with_allowed(self, strategies: Mapping[str, Strategy], storages: Mapping[str, np.ndarray]) -> Sharding:
        """The fastest solution with these strategies of operators.

        `storages`: by parameter, for each of its options whether the solution may have it.
        """
        fixed = {}
        for name, strategy in strategies.items():
            variable, costs = self.options[name]
            fixed[variable] = costs.strategies.index(strategy)
        seconds = self.seconds
        for name, allowed in storages.items():
            variable = self.stored_options[name][0]
            seconds[variable] = np.where(allowed, seconds[variable], np.inf)
        choices = SelectionProblem(seconds, self.nbytes, self.edges, fixed)
        return self._solution(select(choices, float("inf")))

    def with_penalties(self, seconds: Sequence[np.ndarray], edges: Sequence[Edge]) -> Sharding:
        """The fastest choice where options and edges cost what is given; its seconds are the problem's own."""
        found = select(SelectionProblem(seconds, self.nbytes, edges), float("inf"))
        taken, nbytes = cost(self._all, found.options)
        return self._solution(replace(found, seconds=taken, bytes=nbytes, bound=taken if found.proven else 0.0))

    def prices(self, rounds: int, effort: float = math.inf) -> Prices:
        """The best options at any price of bytes: those of `OptionCosts.kinds`.

        rounds: micro-batches that a mesh runs in a step: what it does once a step counts to each with a part.
        """
        more = 1 / rounds - 1 / self.task.n_microbatches
        seconds = [one.seconds if one.once is None else one.seconds + more * one.once for one in self.variables]
        edges = [use.edge for use in self._uses_with(more)] if more else self.edges
        return Prices(SelectionProblem(seconds, [one.kinds for one in self.variables], edges), effort)

    @cached_property
    def _all(self) -> SelectionProblem:
        return SelectionProblem(self.seconds, self.nbytes, self.edges)

    def solution_of(self, point: EnvelopePoint, prices: Prices) -> Sharding:
        """The solution with the options of a point. By duality no choice that needs as few bytes is faster."""
        seconds, nbytes = cost(self._all, point.options)
        bound = seconds if prices.exact else 0.0
        return self._solution(Selection(point.options, seconds, nbytes, bound, prices.width, prices.exact))

    def _solution(self, found: Selection) -> Sharding:
        option = found.options
        collectives: list[Collective] = []
        uses = []
        for edge, use, _ in self.uses:
            out = use.outs[edge.out[option[edge.source]]]
            into = use.ins[edge.into[option[edge.target]]]
            collectives += collectives_of(use, out, into, self.task.training)
            uses.append(ChosenUse(use, out, into, self.task.training))
        for name, stored in self.stored.items():
            collectives += self._once(name, stored, stored.options[option[stored.variable]])
        held = ((one, option[i]) for i, one in enumerate(self.variables) if one.resident)
        resident = math.fsum(float(one.nbytes[chosen]) for one, chosen in held)
        stepping = math.fsum(one.times * one.stepping[option[one.variable]] for one in self.stored.values())
        once = math.fsum([stepping, *(one.seconds for one in collectives if one.once)])
        return Sharding(
            self.mesh,
            {name: costs.strategies[option[v]] for name, (v, costs) in self.options.items()},
            {name: one.options[option[one.variable]] for name, one in self.stored.items()},
            tuple(collectives),
            found.seconds,
            found.seconds - once / self.task.n_microbatches,
            found.bytes,
            found.bound,
            found.proven,
            found.width,
            tuple(name for name, (_, costs) in self.options.items() if not costs.ruled),
            {name: _chosen_costs(costs, option[v]) for name, (v, costs) in self.options.items()},
            tuple(uses),
            resident,
            self._gathered(option),
            stepping,
            self.working(option),
        )

    def working(self, options: Sequence[int]) -> float:
        """Bytes on each device while an operator runs, at most, with what it gathers: see `GraphFacts.transient`."""
        gathered = self._gathered(options)
        running = (of[options[variable]] + gathered.get(name, 0.0) for name, variable, of in self._transient)
        return float(max(running, default=0.0))

    @cached_property
    def _transient(self) -> list[tuple[str, int, np.ndarray]]:
        """(node, its variable, [options] bytes on each device while it runs)."""
        shares: dict[StrategyCosts, np.ndarray] = {}
        found = []
        for name, (variable, costs) in self.options.items():
            if costs not in shares:
                cut = (parts(one.outputs[0], self.mesh.shape) if one.outputs else 1 for one in costs.strategies)
                shares[costs] = 1 / np.array(list(cut))
            found.append((name, variable, self.facts.transient(name) * shares[costs]))
        return found

    def _gathered(self, options: Sequence[int]) -> dict[str, float]:
        """By operator: `gathered_bytes` of all that it reads."""
        found: dict[str, float] = defaultdict(float)
        for edge, use, _ in self.uses:
            if use.constant:
                out = use.outs[edge.out[options[edge.source]]]
                if nbytes := gathered_bytes(use, out, use.ins[edge.into[options[edge.target]]]):
                    found[use.reader] += nbytes
        return dict(found)

    def _once(self, name: str, stored: StoredChoice, chosen: Stored) -> Iterator[Collective]:
        """The collectives once a step that the readers of a parameter share; they are listed with the first reader."""
        for needed in needed_once(chosen):
            steps = stored.tables.once_of(needed).path(needed.before, needed.after)
            if any(step.collective for step in steps):
                item, reader = stored.readers[0]
                moves: Moved = "gradient" if needed.backward else "parameter"
                yield Collective(
                    name, item, reader, needed.backward, True, stored.times, steps, shared=True, moves=moves
                )


def _chosen_costs(costs: StrategyCosts, chosen: int) -> ChosenCosts:
    forward = float(costs.forward[chosen])
    backward = float(costs.seconds[chosen]) - forward
    return ChosenCosts(forward, backward, costs.strategies[chosen].share)
