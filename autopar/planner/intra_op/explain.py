"""Why the operators of a plan have their strategies.

For each operator: the other strategies, their cost next to the neighbours as they are, and the cost of the whole stage
if the operator had to use another strategy and all others were chosen again."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.errors import InfeasibleError, PlanError
from autopar.errors.names import similar
from autopar.hints.module_paths import ancestors
from autopar.plan.display import inside_explained, shown
from autopar.plan.plan import Plan
from autopar.planner.explainers import explainer_of
from autopar.planner.intra_op.constraints import NO_CONSTRAINTS, ShardingConstraints, narrowed
from autopar.planner.intra_op.elimination.choices import Edge, SelectionProblem
from autopar.planner.intra_op.elimination.solve import select
from autopar.planner.intra_op.strategy_search import Sharding, ShardingProblem
from autopar.sharding.stage_sharding import Exchange, strategy_text

# Strategies of an operator with which the whole is chosen anew: the best ones beside its neighbours. Within a limit of
# the memory that takes longer.
_TRIED, _TRIED_WITHIN = 6, 3
_ANEW = 4  # operators of a module for which that is done: those that take longest
_EFFORT = 2e8  # entries (`select`) to prove each of them best within a limit of the memory
_CLOSE = 4  # names that a message suggests


@dataclass(frozen=True)
class Solved:
    """The strategy search problem of a stage, and its solution."""

    problem: ShardingProblem
    found: Sharding
    nodes: Mapping[str, str]  # operator key -> node of the problem's graph that represents it
    memory: float = math.inf  # bytes on each device that the choice had to fit
    constraints: ShardingConstraints = NO_CONSTRAINTS


@dataclass(frozen=True)
class Whole:
    """The cost of all operators of the problem together."""

    seconds: float  # of a micro-batch, with its part of what happens once a step
    exchanged: float  # s of them for collectives between operators
    nbytes: float  # on each device
    proven: bool  # the least seconds that there are


@dataclass(frozen=True)
class Alternative:
    """A strategy that an operator could have, on each device for a micro-batch."""

    strategy: str  # layouts, as in a plan
    seconds: float  # of its kernels, forward and backward, and of what devices exchange within it
    exchanged: float  # s of collectives to its neighbours, while all other operators keep their strategies
    kept: float  # bytes for the backward
    whole: Whole | None  # if the operator has this strategy and all others are chosen again
    fits: bool = True  # not, if nothing with it was found that fits the memory


@dataclass(frozen=True)
class OperatorExplained:
    """One operator of a plan."""

    key: str
    stage: int
    strategy: str | None  # None: every device of the stage does it whole
    exchanges: tuple[Exchange, ...]  # that it causes
    repeated: float | None  # s of a micro-batch that a device does although another one does it, too; None: unknown
    chosen: Alternative | None  # None where the plan's own numbers are all there is
    others: tuple[Alternative, ...]  # by what they cost beside the neighbours
    more: int  # strategies that are not listed
    alike: int = 1  # operators of equal layers, this one among them, that are split alike


@dataclass(frozen=True)
class InsideExplained:
    """`print(plan.explain("encoder.layer.3"))` shows it."""

    plan: Plan
    path: str
    operators: tuple[OperatorExplained, ...]

    def __str__(self) -> str:
        return shown(self)


def operator_explainer(problem_of: Callable[[int], Solved | None]) -> Callable[[Plan, str], InsideExplained]:
    """A function that explains the operators of a plan (`Explainer.operators`).

    `problem_of`: the problem that a stage's strategies were chosen in; None if its operators are not split. It is
    called only for stages that are explained.
    """

    def explain(plan: Plan, path: str) -> InsideExplained:
        found = []
        keys = operators_inside(plan, path)
        for stage in dict.fromkeys(keys.values()):
            mine = [key for key, where in keys.items() if where == stage]
            solved = problem_of(stage) if plan.stages[stage].sharding is not None else None
            found += _explained(plan, stage, mine, solved)
        return InsideExplained(plan, path, tuple(found))

    return explain


@inside_explained.register(Plan)
def explain_inside(plan: Plan, path: str) -> InsideExplained:
    """Explain the strategies of the operators in a module; for a loaded plan, from its own numbers."""
    explain = explainer_of(plan).operators or operator_explainer(lambda stage: None)
    return explain(plan, path)


def operators_inside(plan: Plan, path: str) -> dict[str, int]:
    """The operators of a plan, and their stages, that lie in the module `path`, or the one with this key.

    Raises PlanError for what the plan does not know.
    """
    stage_of = {key: number for number, stage in enumerate(plan.stages) for key in stage.operators}
    if not stage_of:
        raise PlanError(f"'{path}' cannot be explained: the plan names no operators; a plan that was searched does")

    def known_as(key: str) -> list[str]:
        return [*ancestors(key.rpartition("/")[0]), key, key.rpartition("#")[0]]

    found = {key: stage for key, stage in stage_of.items() if path in known_as(key)}
    if not found:
        names = dict.fromkeys(name for key in stage_of for name in known_as(key) if name)
        meant = similar(path, names, most=_CLOSE, alike=0.4)
        raise PlanError(f"the plan has no module and no operator '{path}'{f'; {meant}' if meant else ''}")
    return found


def _explained(plan: Plan, stage: int, keys: Sequence[str], solved: Solved | None) -> list[OperatorExplained]:
    sharding = plan.stages[stage].sharding
    texts = {} if sharding is None else dict(sharding.texts[0])
    exchanges: dict[str, list[Exchange]] = defaultdict(list)
    repeated: dict[str, float] = {}
    repeats_known = sharding is None or bool(sharding.repeated) or sharding.repeated_time == 0
    if sharding is not None:
        repeated = {one.operator: one.seconds for one in sharding.repeated}
        for exchange in sharding.exchanges:
            exchanges[exchange.operator].append(exchange)
    known = _Neighbourhood(solved) if solved is not None else None
    anew = known.longest(keys, _ANEW) if known is not None else []
    found = []
    for key in keys:
        chosen, others, more = known.alternatives(key, key in anew) if known is not None else (None, (), 0)
        again = repeated.get(key, 0.0) if repeats_known else None
        alike = known.copies(key) if known is not None else 1
        caused, text = tuple(exchanges[key]), texts.get(key)
        found.append(OperatorExplained(key, stage, text, caused, again, chosen, tuple(others), more, alike))
    return found


class _Neighbourhood:
    """A solution, and the costs around each of its operators."""

    def __init__(self, solved: Solved) -> None:
        self.solved, self.problem, self.found = solved, solved.problem, solved.found
        self._anew: dict[tuple[str, int], Whole | None] = {}

    @cached_property
    def _option(self) -> dict[int, int]:
        """Variable -> chosen option. Variables of shared tensors are left out: they follow from the others."""
        found = {i: 0 for i, seconds in enumerate(self.problem.seconds) if len(seconds) == 1}
        for name, (variable, options) in self.problem.options.items():
            found[variable] = options.strategies.index(self.found.strategies[name])
        for name, stored in self.problem.stored.items():
            found[stored.variable] = stored.options.index(self.found.stored[name])
        return found

    @cached_property
    def _free(self) -> set[int]:
        """Variables that are not operators; each takes the option that suits its neighbours best."""
        return set(range(len(self.problem.seconds))) - {variable for variable, _ in self.problem.options.values()}

    @cached_property
    def _edges(self) -> dict[int, list[Edge]]:
        found: dict[int, list[Edge]] = defaultdict(list)
        for edge in self.problem.edges:
            for variable in dict.fromkeys((edge.source, edge.target)):
                found[variable].append(edge)
        return found

    def longest(self, keys: Sequence[str], most: int) -> list[str]:
        """The operators that take longest, among those with more than one strategy."""
        seconds = {}
        for key in keys:
            node = self.solved.nodes.get(key, "")
            if node in self.problem.options and len(self.problem.options[node][1].strategies) > 1:
                seconds[key] = self.found.work[node].forward + self.found.work[node].backward
        if any(seconds.values()):
            seconds = {key: s for key, s in seconds.items() if s > 0}  # views are free
        return sorted(seconds, key=lambda key: -seconds[key])[:most]

    def copies(self, key: str) -> int:
        """The number of equal operators that the operator's node in the problem represents."""
        return self.problem.task.copies.get(self.solved.nodes.get(key, ""), 1)

    def alternatives(self, key: str, anew: bool) -> tuple[Alternative | None, list[Alternative], int]:
        """(the chosen strategy, the best others next to the neighbours, the number of strategies not listed).

        `anew`: also compute the cost of the whole stage for each.
        """
        node = self.solved.nodes.get(key)
        if node is None or node not in self.problem.options:
            return None, [], 0
        variable, options = self.problem.options[node]
        exchanged = self.beside(variable)
        chosen, copies = self._option[variable], self.copies(key)

        def alternative(option: int) -> Alternative:
            whole = (self._chosen if option == chosen else self._with(node, option)) if anew else None
            return Alternative(
                strategy_text(options.strategies[option]),
                float(options.seconds[option]),
                float(exchanged[option]) / copies,
                float(self.problem.nbytes[variable][option]) / copies,
                whole,
                whole is not None or not anew,
            )

        allowed = [o for o, one in enumerate(options.strategies) if self.solved.constraints.allows(node, one)]
        costs = options.seconds * copies + exchanged
        others = sorted((o for o in allowed if o != chosen), key=lambda o: (float(costs[o]), o))
        listed = others[: _TRIED if math.isinf(self.solved.memory) else _TRIED_WITHIN]
        return alternative(chosen), [alternative(o) for o in listed], len(others) - len(listed)

    def beside(self, variable: int) -> np.ndarray:
        """[options] s of collectives that an operator causes beside the others as they are. Parameters and inputs that
        it reads, and layouts in which it shares a tensor, are what suits it and their other readers."""
        total = np.zeros(len(self.problem.seconds[variable]))
        around: dict[int, np.ndarray] = {}
        for edge in self._edges[variable]:
            seconds, other = _seen_from(edge, variable)
            around[other] = around.get(other, 0.0) + seconds
        for other, seconds in around.items():
            if other not in self._free:
                total += seconds[:, self._option[other]]
                continue
            rest = self._without(other, variable)
            total += (seconds + rest).min(axis=1) - rest.min()
        return total

    def _without(self, free: int, reader: int) -> np.ndarray:
        """[options of a variable that is not an operator] s towards all its neighbours except one."""
        rest = self.problem.seconds[free].copy()
        for edge in self._edges[free]:
            seconds, other = _seen_from(edge, free)
            if other != reader:
                rest += seconds[:, self._option[other]]
        if free in self._option and math.isfinite(self.solved.memory):  # no more bytes than its chosen option
            nbytes = self.problem.nbytes[free]
            rest = np.where(nbytes <= nbytes[self._option[free]], rest, np.inf)
        return rest

    def _with(self, node: str, option: int) -> Whole | None:
        """The cost of all operators if one has this strategy; None if none fits."""
        if (node, option) not in self._anew:
            problem = self.problem
            choices = SelectionProblem(self._seconds, problem.nbytes, problem.edges, {problem.options[node][0]: option})
            try:
                found = select(choices, self.solved.memory, _EFFORT)
            except InfeasibleError:
                self._anew[node, option] = None
            else:
                work = math.fsum(float(s[o]) for s, o in zip(problem.seconds, found.options, strict=True))
                exchanged = max(0.0, found.seconds - work)
                self._anew[node, option] = Whole(found.seconds, exchanged, found.bytes, found.proven)
        return self._anew[node, option]

    @cached_property
    def _seconds(self) -> list[np.ndarray]:
        """Seconds of every variable's options; infinite where the constraints forbid one."""
        problem = self.problem
        return narrowed(self.solved.constraints, problem.seconds, problem.options, problem.stored_options)

    @cached_property
    def _chosen(self) -> Whole:
        found, copies = self.found, self.problem.task.copies
        work = math.fsum((w.forward + w.backward) * copies.get(node, 1) for node, w in found.work.items())
        return Whole(found.seconds, max(0.0, found.seconds - work), found.nbytes, found.proven)


def _seen_from(edge: Edge, variable: int) -> tuple[np.ndarray, int]:
    """[options of `variable`, options of the other] seconds, and the other."""
    seconds = edge.seconds[edge.out[:, None], edge.into[None, :]]
    return (seconds, edge.target) if edge.source == variable else (seconds.T, edge.source)
