"""Where the devices of a plan are, as far as their names say it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from autopar.sharding.stage_sharding import StageSharding
from cost_models.clusters.cluster import node_in_name


def nodes_of(names: Iterable[str]) -> list[int]:
    """The nodes of devices that a plan made ahead names; empty where a name says no node."""
    found = [node_in_name(name) for name in names]
    known = [node for node in found if node is not None]
    return sorted(set(known)) if len(known) == len(found) else []


def reach(groups: Iterable[Sequence[str]]) -> str:
    """Whether devices that talk to each other are in one node: "within a node", "between nodes", or "" if unknown."""
    counts = [len(nodes_of(group)) for group in groups]
    if not counts or min(counts) == 0:
        return ""
    return "between nodes" if max(counts) > 1 else "within a node"


def along_axis(devices: Sequence[str], sharding: StageSharding, axis: str) -> list[tuple[str, ...]]:
    """The devices of each line of a stage's meshes along one axis."""
    place = sharding.axes.index(axis)
    inner = math.prod(sharding.mesh[place + 1 :])
    size = sharding.mesh[place]
    starts = [i for i in range(len(devices)) if (i // inner) % size == 0]
    return [tuple(devices[start + step * inner] for step in range(size)) for start in starts]
