"""What plans by hand of one model have in common, worked out once however many are priced.

model ---> layers, folded graph                              once
kinds of devices, batch ---> cost graph                      its kernels once for each micro-batch size
cluster, mesh, micro-batch size ---> strategies to choose    once, whatever the number of micro-batches
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from autopar.analysis.example import Example
from autopar.analysis.operators import operator_keys
from autopar.capture.repeated_layers.fold import Folded, fold
from autopar.costs.cost_graph import CostGraph
from autopar.costs.cost_table import SILENT, Progress
from autopar.costs.estimated import KnownEstimates, estimate_costs
from autopar.costs.recipe import Recipe
from autopar.options import PlanOptions
from autopar.planner.hand_plan.layers import layers_of
from autopar.planner.inter_op.meshes import Subject, subject_of
from autopar.planner.intra_op.sharding_task import GraphFacts, ShardingTask
from autopar.planner.intra_op.strategy_search import ShardingProblem
from autopar.planner.search_options import recipe_of
from autopar.sharding.local_work import LocalWorks
from autopar.sharding.mesh import Mesh
from cost_models import Cluster
from cost_models.hardware.device_specs import DeviceSpec

_MOST_PROBLEMS = 64  # kept at a time


class SharedWork:
    """Of plans by hand for calls of one captured model, on any clusters, under the same options.

    `example`: the call with the most samples; others are `resized` ones of it.
    """

    def __init__(self, example: Example, options: PlanOptions) -> None:
        self._example, self._options = example, options
        self.recipe: Recipe = recipe_of(example, options)
        self._costs: dict[tuple[tuple[DeviceSpec, ...], int], CostGraph] = {}
        self._estimates = KnownEstimates({}, {})
        self._facts: dict[int, GraphFacts] = {}
        self._works = LocalWorks()
        self._problems: dict[tuple[object, ...], tuple[Cluster, ShardingProblem]] = {}

    @cached_property
    def layers(self) -> tuple[str, ...]:
        return layers_of(self._example.model, self._example.program)

    @cached_property
    def subject(self) -> Subject:
        return subject_of(self._example, self._options.optimizer_name)

    @cached_property
    def folded(self) -> Folded:
        return fold(self.subject.module)

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

    def facts(self, task: ShardingTask) -> GraphFacts:
        if task.rows not in self._facts:
            self._facts[task.rows] = GraphFacts(task, self._works)
        return self._facts[task.rows]

    def problem(self, task: ShardingTask, mesh: Mesh, pattern: tuple[object, ...]) -> ShardingProblem:
        """The choice of strategies on a mesh. `pattern`: how its devices lie on nodes; equal ones cost the same."""
        networks = task.cluster.intra_node, task.cluster.inter_node
        key = (task.rows, task.scatters, mesh.shape, mesh.names, pattern, *networks)
        known = self._problems.pop(key, None)
        if known is None or known[0].specs != task.cluster.specs:
            known = task.cluster, ShardingProblem(task, mesh, self.facts(task))
        self._problems[key] = known
        if len(self._problems) > _MOST_PROBLEMS:
            del self._problems[next(iter(self._problems))]
        return known[1].with_microbatches(task, mesh)
