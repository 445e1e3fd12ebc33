"""The meshes of devices on which DTensors of one model lie: one for the ranks of a stage, with its replicas.

```
   stage 0 on ranks 0, 1 (mesh 2)      rank 0, 1    (2,)   its parameters, and what no stage reads
   stage 1 on ranks 2 | 3 (replicas)   rank 2, 3    (2,)   the same
   nothing on rank 4                   rank 4       (1,)   what no stage reads
```
torch computes nothing of DTensors on different meshes, or of DTensors and plain tensors, so that all parameters of a
rank are on its one mesh.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch.distributed.device_mesh import DeviceMesh

from autopar.plan.plan import Plan
from autopar.runtime.ranks.parameters.holders import StageGrid
from autopar.runtime.ranks.world import World


class StageMeshes:
    """By the ranks of stages. Empty until a plan is placed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._by_grid: dict[StageGrid, DeviceMesh] = {}
        self._own: DeviceMesh | None = None

    def make(self, plan: Plan, stages: Sequence[StageGrid]) -> None:
        """Collective."""
        for stage, grid in zip(plan.stages, stages, strict=True):
            if grid not in self._by_grid:
                axes = grid.ordered(stage.sharding.axes) if stage.sharding is not None else ()
                names = (*(("replica",) if len(grid.ranks) > 1 else ()), *axes) or ("device",)
                self._by_grid[grid] = self._world.mesh(grid.grid, names)
        first = {rank: self._by_grid[grid] for grid in reversed(stages) for rank in grid.all}
        for rank in range(self._world.size):
            mesh = first[rank] if rank in first else self._world.mesh(np.array([rank]), ("device",))
            if rank == self._world.rank:
                self._own = mesh

    def of(self, grid: StageGrid) -> DeviceMesh:
        return self._by_grid[grid]

    @property
    def own(self) -> DeviceMesh:
        """That of this rank's stages; of the rank alone, if it has none."""
        assert self._own is not None, "a plan is placed"
        return self._own

    def lines(self, grid: StageGrid) -> tuple[str, ...]:
        """The names of the process groups of this rank's lines along the axes of a stage's mesh."""
        mesh = self._by_grid[grid]
        first = mesh.ndim - len(grid.mesh)
        return tuple(mesh.get_group(first + grid.order.index(axis)).group_name for axis in range(len(grid.mesh)))

    def __len__(self) -> int:
        """Of stages."""
        return len(self._by_grid)
