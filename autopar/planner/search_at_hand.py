"""What a search for devices at hand may shard: the meshes that `max_shards` allows, and why there are none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.analysis.example import Example
from autopar.costs.cost_graph import CostGraph
from autopar.costs.cost_table import SILENT, Progress
from autopar.costs.measured import with_shards
from autopar.costs.rank_costs import RankMeasurements
from autopar.errors import InputError
from autopar.plan.plan import Plan
from autopar.planner.inter_op.config import MeshChoices
from autopar.planner.inter_op.meshes import Meshes, mesh_program_of
from autopar.planner.search_options import SearchOptions
from cost_models import Device

ONE_AFTER_ANOTHER = (
    "devices of one mesh that are the same hardware, such as workers of one CPU, run their shards one after another, "
    "and are priced so: a mesh of them saves memory, not time"
)


@dataclass(frozen=True)
class AtHand:
    """What a search for devices at hand needs beside its options."""

    costs: CostGraph
    meshes: MeshChoices | None  # None: no stage has a mesh
    notes: tuple[str, ...] = ()  # why stages have no meshes


def check_max_shards(max_shards: int | None, devices: Sequence[Device]) -> None:
    """Raise InputError for more shards than there are devices of one kind."""
    kinds = Counter(device.kind for device in devices)
    if max_shards is None or max_shards == 1:
        return
    if max_shards > len(devices):
        raise InputError(f"max_shards={max_shards}, but there are {len(devices)} devices; give at most that")
    if max_shards > max(kinds.values()):
        named = ", ".join(f"{count} of '{kind}'" for kind, count in kinds.items())
        raise InputError(
            f"max_shards={max_shards}, but a mesh has devices of one kind, and there are {named}; give at most "
            f"{max(kinds.values())}"
        )


def shards_at_hand(
    example: Example,
    costs: CostGraph,
    options: SearchOptions,
    max_shards: int | None,
    *,
    cache: bool,
    progress: Progress = SILENT,
    ranks: RankMeasurements | None = None,
) -> AtHand:
    """The meshes of up to `max_shards` devices (None: no mesh) that stages may have, and costs that price them.

    By default, devices at hand form no meshes: one thread launches the kernels of all devices of a mesh,
    workers of one CPU share its cores, and the choice of strategies makes planning take longer. `ranks`: the processes
    of the devices, if each has one.
    """
    if max_shards is None or max_shards == 1:
        return AtHand(costs, None)
    if example.program.uncaptured:
        return AtHand(costs, None, ("no stage has a mesh: code that runs uncaptured cannot be cut into shards",))
    m = options.n_microbatches
    if m is not None and costs.batch_size % m:
        uneven = f"{m} micro-batches do not divide the batch of {costs.batch_size} samples evenly, which meshes need"
        return AtHand(costs, None, (f"no stage has a mesh: {uneven}",))
    costs = with_shards(costs, max_shards, cache=cache, progress=progress, ranks=ranks)
    meshes = Meshes(costs, mesh_program_of(example, options.optimizer), options.memory_limit)
    return AtHand(costs, MeshChoices(meshes, max_shards, progress))


def with_shard_notes(plan: Plan, costs: CostGraph, others: Sequence[str] = ()) -> Plan:
    """`plan` with a note where its meshes gain no time, and with `others`: why it could have none."""
    notes, shards = list(others), costs.shards
    meshes = [stage.devices[: stage.shards] for stage in plan.stages if stage.shards > 1]
    if shards is not None and any(shards.turns(devices) > 1 for devices in meshes):
        notes.append(ONE_AFTER_ANOTHER)
    return replace(plan, notes=(*plan.notes, *notes)) if notes else plan
