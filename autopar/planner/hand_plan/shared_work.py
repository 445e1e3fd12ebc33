"""What plans by hand of one model have in common, worked out once however many are priced.

model ---> layers, folded graph                              once
kinds of devices, batch ---> cost graph                      its kernels once for each micro-batch size
cluster, mesh, micro-batch size ---> strategies to choose    once, whatever the number of micro-batches
    degrees ---> what these do not allow                     once, as well
    degrees, micro-batches ---> the chosen strategies        once, on whichever devices that lie alike
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from autopar.analysis.example import Example
from autopar.analysis.operators import operator_keys
from autopar.capture.repeated_layers.fold import Folded, fold
from autopar.costs.cost_graph import CostGraph
from autopar.costs.cost_table import SILENT, Progress
from autopar.costs.estimated import KnownEstimates, estimate_costs
from autopar.costs.model_flops import ByPeak, model_flops
from autopar.costs.recipe import Recipe
from autopar.options import PlanOptions
from autopar.plan.degrees import Degrees
from autopar.planner.hand_plan.cut_sizes import CutSizes
from autopar.planner.hand_plan.layers import layers_of
from autopar.planner.hand_plan.mesh_strategies import Allowed, Penalties, by_degrees, penalties
from autopar.planner.inter_op.meshes import MeshProgram, mesh_program_of
from autopar.planner.intra_op.regathering import regathered
from autopar.planner.intra_op.sharding_task import GraphFacts, ShardingTask
from autopar.planner.intra_op.strategy_search import Sharding, ShardingProblem
from autopar.planner.search_options import recipe_of
from autopar.sharding.local_work import LocalWorks
from autopar.sharding.mesh import Mesh
from cost_models import Cluster
from cost_models.hardware.device_specs import DeviceSpec

_MOST_PROBLEMS = 64  # kept at a time
_MOST_CHOICES = 64  # kept of each

_Wanted = tuple[Allowed, tuple[tuple[str, int | None], ...]]  # what strategies are allowed, and `batch_dims`


@dataclass(frozen=True)
class _KnownProblem:
    """Strategies to choose, and choices among them."""

    cluster: Cluster
    problem: ShardingProblem
    penalties: dict[_Wanted, Penalties] = field(default_factory=dict)
    choices: dict[tuple[_Wanted, int], tuple[Sharding, tuple[str, ...]]] = field(default_factory=dict)


class SharedWork:
    """Of plans by hand for calls of one captured model, on any clusters, under the same options.

    `example`: the call with the most samples; others are `resized` ones of it.
    """

    def __init__(self, example: Example, options: PlanOptions) -> None:
        self._example, self._options = example, options
        self.recipe: Recipe = recipe_of(example, options)
        self._costs: dict[tuple[tuple[DeviceSpec, ...], int], CostGraph] = {}
        self._estimates = KnownEstimates({}, {}, {})
        self._flops: dict[int, ByPeak] = {}
        self._facts: dict[int, GraphFacts] = {}
        self._works = LocalWorks()
        self._problems: dict[tuple[object, ...], _KnownProblem] = {}

    @cached_property
    def layers(self) -> tuple[str, ...]:
        return layers_of(self._example.model, self._example.program)

    @cached_property
    def mesh_program(self) -> MeshProgram:
        return mesh_program_of(self._example, self._options.optimizer_name)

    @cached_property
    def folded(self) -> Folded:
        return fold(self.mesh_program.module)

    @cached_property
    def keys(self) -> Mapping[str, str]:
        """Node -> what a plan calls its operator."""
        return {node.name: key for node, key in operator_keys(self._example.program).items()}

    def costs(self, example: Example, cluster: Cluster, n_microbatches: int, progress: Progress = SILENT) -> CostGraph:
        """The cost graph of a call on a cluster."""
        key = (tuple(cluster.specs.values()), example.program.batch_size)
        if key not in self._costs:
            self._costs[key] = estimate_costs(
                example, cluster, self.recipe, n_microbatches=n_microbatches, progress=progress, known=self._estimates
            )
        known = self._costs[key]
        if known.cluster == cluster:
            return known
        memory = {device.kind: device.memory for device in known.devices}
        devices = tuple(replace(device, memory=memory[device.kind]) for device in cluster.devices)
        return replace(known, devices=devices, links=cluster.links, cluster=cluster)

    def flops(self, example: Example) -> ByPeak:
        """What a step of a call needs."""
        samples = example.program.batch_size
        if samples not in self._flops:
            self._flops[samples] = model_flops(example)
        return self._flops[samples]

    def cut_sizes(self, example: Example, cluster: Cluster) -> CutSizes:
        """The sizes of the model that tensor parallelism cuts, seen from a call."""
        rows = max(1, example.program.batch_size)
        module = self.folded.module
        task = ShardingTask(module, self.mesh_program.inputs(rows), rows, cluster, training=example.training)
        return CutSizes(task, self.facts(task), example.batching.batch_dims, self.keys, self.folded.representatives)

    def facts(self, task: ShardingTask) -> GraphFacts:
        if task.rows not in self._facts:
            self._facts[task.rows] = GraphFacts(task, self._works)
        return self._facts[task.rows]

    def strategies(
        self,
        task: ShardingTask,
        mesh: Mesh,
        pattern: tuple[object, ...],
        degrees: Degrees,
        batch_dims: Mapping[str, int | None],
    ) -> tuple[Sharding, tuple[str, ...]]:
        """The strategies that the degrees allow on a mesh, and notes about operators that do not follow them.

        `pattern`: how the mesh's devices lie on nodes; equal ones cost the same. `batch_dims`: node -> the dimension
        that counts samples.
        """
        known = self._problem(task, mesh, pattern)
        wanted = Allowed.by(degrees), tuple(batch_dims.items())
        key = wanted, task.n_microbatches
        if key not in known.choices:
            if wanted not in known.penalties:
                _keep(known.penalties, wanted, penalties(known.problem, degrees, batch_dims, self.keys))
            problem = known.problem.with_microbatches(task, mesh)
            found, notes = by_degrees(problem, known.penalties[wanted])
            _keep(known.choices, key, (regathered(problem, found) if degrees.sequence_parallel else found, notes))
        found, notes = known.choices[key]
        return _on(found, mesh), notes

    def _problem(self, task: ShardingTask, mesh: Mesh, pattern: tuple[object, ...]) -> _KnownProblem:
        """The choice of strategies on a mesh, for some number of micro-batches."""
        networks = task.cluster.intra_node, task.cluster.inter_node
        key = (task.rows, task.scatters, mesh.shape, mesh.names, pattern, *networks)
        known = self._problems.pop(key, None)
        if known is None or known.cluster.specs != task.cluster.specs:
            known = _KnownProblem(task.cluster, ShardingProblem(task, mesh, self.facts(task)))
        self._problems[key] = known
        if len(self._problems) > _MOST_PROBLEMS:
            del self._problems[next(iter(self._problems))]
        return known


def _keep(known: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep a value, in the place of the oldest one where there are too many."""
    if len(known) >= _MOST_CHOICES:
        del known[next(iter(known))]
    known[key] = value


def _on(found: Sharding, mesh: Mesh) -> Sharding:
    """The same choice on other devices."""
    return replace(found, mesh=mesh, keeping=None if found.keeping is None else replace(found.keeping, mesh=mesh))
