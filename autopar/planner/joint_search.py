"""The plan for a cluster: stages on single devices and on meshes of any width, in one search (`inter_op.ahead`)."""

from __future__ import annotations

from autopar.costs.cost_graph import CostGraph
from autopar.costs.cost_table import SILENT, Progress
from autopar.plan.plan import Plan
from autopar.planner.inter_op.config import MeshChoices
from autopar.planner.inter_op.meshes import Meshes, MeshProgram
from autopar.planner.search import make_plan
from autopar.planner.search_options import SearchOptions


def plan_jointly(
    costs: CostGraph,
    options: SearchOptions,
    mesh_program: MeshProgram,
    *,
    max_shards: int | None = None,
    progress: Progress = SILENT,
) -> Plan:
    """The fastest plan that `options` allow on single devices and meshes. `costs`: of single devices.

    `max_shards`: the most devices in a mesh. Every stage has its own number of devices, mesh shape, strategies,
    replicas and recomputation. Raises InputError and InfeasibleError like `make_plan`.
    """
    meshes = Meshes(costs, mesh_program, options.memory_limit)
    return make_plan(costs, options, MeshChoices(meshes, max_shards, progress))
