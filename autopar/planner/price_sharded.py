"""The price of a plan with sharded stages: its strategies become stage configurations, priced like those of the search.

    stage 0   mesh (2, 4), strategies A   --ShardingProblem, A fixed--> configuration --.
    stage 1   mesh (8,),   strategies B   --ShardingProblem, B fixed--> configuration --+--> predict --> Plan
    stage 2   one device                  ------------------------------- device kind --'

So a plan has one price, whether the search found it, a file holds it, or somebody wrote it by hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from autopar.analysis.example import Example
from autopar.capture.repeated_layers.fold import Folded
from autopar.costs.cost_graph import CostGraph
from autopar.errors import PlanError
from autopar.plan.exits.plan_degrees import replica_axes
from autopar.plan.plan import Plan
from autopar.plan.stage import Stage
from autopar.planner.arrangement import Conditions
from autopar.planner.inter_op.mesh_configuration import MeshConfiguration, mesh_configuration
from autopar.planner.inter_op.meshes import MeshProgram, as_measured, mesh_program_of
from autopar.planner.intra_op.regathering import regathered
from autopar.planner.intra_op.sharding_task import GraphFacts
from autopar.planner.intra_op.strategy_search import ShardingProblem
from autopar.planner.intra_op.zero_storage import zero_offences
from autopar.planner.predict import completed, predict, predict_plan
from autopar.sharding.layouts import REPLICATE
from autopar.sharding.mesh import make_mesh
from autopar.sharding.stage_sharding import StageSharding, Stored, strategy_text
from autopar.sharding.strategies import OperatorPlacements, Strategy

_MOST_NAMED = 6  # strategies in a message


def predict_sharded(
    plan: Plan, example: Example, costs: CostGraph, mesh_program: MeshProgram, conditions: Conditions
) -> Plan:
    """`plan` for the example's call on the cluster of `costs`, with its costs filled in.

    Raises PlanError where the plan fits neither, and for strategies that an operator does not have.
    """
    plan = completed(plan, example, costs)
    if costs.batch_size % plan.n_microbatches:
        # A mesh can cut the samples of a micro-batch over all its devices, as it did those of other micro-batches.
        cut = math.lcm(*(math.prod(stage.sharding.mesh) for stage in plan.stages if stage.sharding is not None))
        fewer = [n for n in range(plan.n_microbatches, 0, -1) if costs.batch_size % n == 0]
        right = next((n for n in fewer if costs.batch_size // n % cut == 0), fewer[-1])
        raise PlanError(
            f"{plan.n_microbatches} micro-batches do not divide the batch of {costs.batch_size} samples evenly, which "
            f"sharded stages need; n_microbatches={right} would be right"
        )
    pricing = _Pricing(plan, costs, mesh_program)
    configurations, names = [], []
    for number, stage in enumerate(plan.stages):
        configuration = pricing.configuration(number, stage) if stage.sharding is not None else None
        names.append(pricing.kind(stage) if configuration is None else configuration.name)
        configurations += [configuration] if configuration is not None else []
    on_meshes = replace(costs, configurations=tuple(configurations))
    stage_of = {node.name: stage for node, stage in plan.assign(example.program, example.batching.storages).items()}
    return predict(on_meshes, plan, stage_of, conditions, tuple(names))


def predict_any(plan: Plan, example: Example, costs: CostGraph, conditions: Conditions) -> Plan:
    """`plan` with its costs filled in, sharded or not. Where `costs` price no meshes, or micro-batches are uneven,
    sharded stages keep the plan's own numbers. Raises PlanError like `predict_sharded`."""
    sharded = any(stage.sharding is not None for stage in plan.stages)
    n = 1 if example.batching.obstacle else plan.n_microbatches
    if not sharded or costs.mesh_cluster is None or costs.batch_size % n:
        return predict_plan(plan, example, costs, conditions)
    return predict_sharded(plan, example, costs, mesh_program_of(example, conditions.optimizer), conditions)


def widest_mesh(plans: Iterable[Plan | None]) -> int:
    """Devices of the widest mesh of any stage; 1 if there is none."""
    return max((stage.shards for plan in plans if plan is not None for stage in plan.stages), default=1)


def at_zero(plan: Plan, zero: int, example: Example, costs: CostGraph, mesh_program: MeshProgram) -> Plan:
    """`plan` with parameters, gradients and states as a stage of ZeRO says, and without predictions.

    Stages without replicas stay as they are. Raises PlanError where no stage has replicas along an axis of a mesh.
    """
    plan = completed(plan, example, costs).without_predictions(f"ZeRO is {zero} now")
    if not any(_replica_axes(stage) for stage in plan.stages):
        raise PlanError(
            f"zero={zero} cuts states over replicas, and no stage has any; make the plan with Plan.by_hand(..., "
            f"data=..., zero={zero})"
        )
    pricing = _Pricing(plan, costs, mesh_program, scatters=zero == 2)
    stages = tuple(
        replace(stage, sharding=pricing.at_zero(stage, zero)) if _replica_axes(stage) else stage
        for stage in plan.stages
    )
    return replace(plan, stages=stages)


def _replica_axes(stage: Stage) -> list[int]:
    return replica_axes(stage.sharding) if stage.sharding is not None else []


class _Pricing:
    """The stage configurations of one plan."""

    def __init__(self, plan: Plan, costs: CostGraph, mesh_program: MeshProgram, *, scatters: bool = False) -> None:
        self._alone = alone = Folded(mesh_program.module)  # a plan may do equal layers differently
        self._plan, self._costs = plan, costs
        self._program = mesh_program.program(costs, alone)
        parameters = (stored for stage in plan.stages if stage.sharding for _, stored in stage.sharding.parameters)
        scatters |= any(stored.scattered for stored in parameters)
        self._task = replace(mesh_program.task(costs, alone, plan.n_microbatches), scatters=scatters)
        self._facts = GraphFacts(self._task)
        self._node_of = {operator.key: name for name, operator in costs.operators.items()}

    def kind(self, stage: Stage) -> str:
        """Of the stage's devices."""
        return next(device.kind for device in self._costs.devices if device.name == stage.devices[0])

    def problem(self, stage: Stage) -> ShardingProblem:
        """Of all operators on the stage's mesh."""
        sharding = stage.sharding
        assert sharding is not None
        mesh = make_mesh(sharding.mesh, stage.devices[: sharding.size], sharding.axes)
        task = as_measured(self._task, self._costs, self._alone, self.kind(stage), sharding.size)
        return ShardingProblem(task, mesh, self._facts)

    def at_zero(self, stage: Stage, zero: int) -> StageSharding:
        """The stage's sharding with parameters as a stage of ZeRO says along the axes of replicas, whose dimensions are
        the fastest."""
        sharding, problem = stage.sharding, self.problem(stage)
        assert sharding is not None
        axes = replica_axes(sharding)
        strategies: dict[str, Strategy] = {}
        problems = list(self._strategies(problem, stage, sharding, strategies))
        if problems:
            raise PlanError("\n  ".join(problems))
        named = problem.task.module.named_parameters(remove_duplicate=False)
        trained = {name for name, parameter in named if parameter.requires_grad}
        stored = {name: one for name, one in self._stored(problem, stage, sharding) if name in trained}
        allowed = {}
        for name, now in stored.items():
            options = problem.stored_options[name][1]
            others = np.array([_differs(one, now, axes) for one in options])
            offences = np.where(others == others.min(), zero_offences(options, axes, zero), np.inf)
            allowed[name] = offences == offences.min()
        found = problem.with_allowed(strategies, allowed)
        changed = {name: found.stored[name] for name in stored}
        kept = {name: one for name, one in sharding.parameters if name not in changed}
        chosen = {name: Stored(one.layout, one.state, one.scattered) for name, one in changed.items()}
        cut = {name: one for name, one in chosen.items() if any(c != REPLICATE for c in (*one.layout, *one.state))}
        return replace(sharding, parameters=tuple((kept | cut).items()), redistributions=())

    def configuration(self, number: int, stage: Stage) -> MeshConfiguration:
        """How the devices of stage `number` do all operators: those of stages with such a mesh as the plan says."""
        sharding = stage.sharding
        assert sharding is not None
        problem = self.problem(stage)
        task = problem.task
        like = [(i, s) for i, s in enumerate(self._plan.stages) if _is_like(s.sharding, sharding)]
        like.sort(key=lambda pair: pair[0] != number)  # a parameter that several stages read: as in this one
        strategies: dict[str, Strategy] = {}
        stored: dict[str, Stored] = {}
        problems: list[str] = []
        for _, other in like:
            assert other.sharding is not None
            problems += self._strategies(problem, other, other.sharding, strategies)
            stored = {**dict(self._stored(problem, other, other.sharding)), **stored}
        if problems:
            raise PlanError("\n  ".join(problems))
        found = problem.with_choices(strategies, stored)
        if sharding.regather:
            found = regathered(problem, found)
        return mesh_configuration(
            f"stage {number}", self.kind(stage), self._program, task, self._facts, found, fastest=True
        )

    def _strategies(
        self, problem: ShardingProblem, stage: Stage, sharding: StageSharding, into: dict[str, Strategy]
    ) -> Iterator[str]:
        """Add the strategies of a stage's operators by node; yields what is wrong with them."""
        for key in stage.operators:
            node = self._node_of.get(key, "")
            if node not in problem.options:
                continue
            offered = problem.options[node].costs.strategies
            wanted = sharding.strategy_of.get(key)
            match = next((s for s in offered if _is(s, wanted)), None)
            if match is None:
                named = "; ".join(strategy_text(s) for s in offered[:_MOST_NAMED])
                text = strategy_text(wanted) if wanted is not None else "R .. -> R"
                yield f"{key} has no strategy '{text}' on a mesh of shape {sharding.mesh}; it has {named}"
            else:
                into.setdefault(node, match)

    def _stored(self, problem: ShardingProblem, stage: Stage, sharding: StageSharding) -> Iterator[tuple[str, Stored]]:
        """How the parameters of a stage are stored: those that the plan does not name are whole on every device."""
        whole = (REPLICATE,) * len(sharding.mesh)
        for key in stage.operators:
            node = self._program.nodes.get(self._node_of.get(key, ""))
            for source in node.all_input_nodes if node is not None else ():
                name = str(source.target)
                if source.op == "get_attr" and name in problem.stored:
                    yield name, sharding.stored.get(name, Stored(whole, whole))


def _differs(one: Stored, other: Stored, replicas: Sequence[int]) -> int:
    """The number of mesh axes, without those of replicas, along which parameters or states lie differently."""
    axes = [axis for axis in range(len(other.layout)) if axis not in replicas]
    return sum(a[axis] != b[axis] for axis in axes for a, b in ((one.layout, other.layout), (one.state, other.state)))


def _is_like(sharding: StageSharding | None, other: StageSharding) -> bool:
    return sharding is not None and sharding.mesh == other.mesh


def _is(strategy: Strategy, wanted: OperatorPlacements | None) -> bool:
    """Whether a strategy has these placements; None: every device does the operator whole."""
    if wanted is None:
        return all(code == REPLICATE for side in strategy.placements for layout in side for code in layout)
    return strategy.placements == wanted
