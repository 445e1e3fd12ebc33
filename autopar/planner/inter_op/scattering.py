"""Which devices of a mesh hold the same of a value, and what they take to gather it from a part on each of them."""

from __future__ import annotations

import math

from autopar.costs.sends import Sent
from autopar.sharding.layouts import REPLICATE, Placements
from autopar.sharding.mesh import Mesh
from cost_models import Cluster


class Scattering:
    """Values on one mesh.

    Devices along an axis with `Replicate()` hold the same. Only lines within a node count, whose network is fast:

        2 nodes, mesh (2, 4), layout (R, R)    0 1 2 3    four devices of each node gather together; the axis
                                               4 5 6 7    between the nodes stays as it is
    """

    def __init__(self, mesh: Mesh, cluster: Cluster, n_microbatches: int) -> None:
        self._mesh, self._cluster, self._m = mesh, cluster, n_microbatches
        self._known: dict[tuple[Placements, float], Sent] = {}

    def of(self, layout: Placements, nbytes: float) -> Sent:
        """Of the whole batch; `nbytes`: on each device."""
        key = (layout, nbytes)
        if key not in self._known:
            self._known[key] = self._of(layout, nbytes)
        return self._known[key]

    def _of(self, layout: Placements, nbytes: float) -> Sent:
        alike = tuple(code == REPLICATE and n > 1 for code, n in zip(layout, self._mesh.shape, strict=True))
        inside = [axis for axis, same in enumerate(alike) if same and self._nodes((axis,)) == 1]
        if not inside or not nbytes:
            return Sent(nbytes)
        axes = tuple(inside) if self._nodes(tuple(inside)) == 1 else (inside[-1],)
        names = self._names(axes)
        node = self._cluster.node_of(names[0])
        here = sum(self._cluster.node_of(name) == node for name in self._mesh.devices)
        seconds = self._cluster.seconds("all_gather", nbytes / self._m, names, max(1, here // len(names)))
        return Sent(nbytes, math.prod(self._mesh.shape[axis] for axis in axes), self._m * seconds)

    def _names(self, axes: tuple[int, ...]) -> list[str]:
        """The first device of the mesh and its next neighbours along the axes."""
        chosen = tuple(slice(None) if axis in axes else 0 for axis in range(len(self._mesh.shape)))
        return [str(name) for name in self._mesh.grid[chosen].ravel()]

    def _nodes(self, axes: tuple[int, ...]) -> int:
        return len({self._cluster.node_of(name) for name in self._names(axes)})
