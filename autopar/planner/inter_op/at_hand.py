"""The search for devices at hand whose stages may have meshes.

1. without meshes    as if no mesh were allowed (`Searching`): its candidates stay, so that no plan gets slower
2. with meshes       stages on single devices and on meshes of any width, for numbers of micro-batches that divide
                     the batch evenly, as meshes need
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.planner.inter_op.candidates import Candidate, Searching
from autopar.planner.inter_op.config import Config, Used
from autopar.planner.inter_op.cut_selection import PartitionResult

_MOST_COUNTS = 8  # numbers of micro-batches with meshes: each takes a choice of strategies for every width and shape


class SearchingAtHand(Searching):
    """All searches for devices at hand, without meshes and with them."""

    _with_meshes = False

    def run(self) -> list[Candidate]:
        candidates = super().run()
        assert self.meshes is not None, "devices without meshes are searched by Searching"
        found: dict[Config, PartitionResult] = {}
        self._with_meshes = True
        for done, m in enumerate(counts := self._counts_of_meshes()):
            self.meshes.progress(f"meshes with {m} micro-batches", done / len(counts))
            self.add_meshes(m, self.meshes.widths)
            for used in self.device_counts():
                for config in self.configs(m, used) if sum(used) > 1 else ():
                    # Also without single devices, if those prove to lack memory.
                    wide = [replace(config, least_width=2)] if config.chunks == 1 else []
                    for one in [config, *wide]:
                        self._search(one, found, self.effort.tolerance)
        return [*candidates, *self._with_moved(self._simulate(found), candidates)]

    def widths(self, m: int) -> list[int]:
        """Without meshes single devices only, also where the costs know meshes from a search before."""
        return super().widths(m) if self._with_meshes else [1]

    def configs(self, m: int, counts: Used) -> Iterator[Config]:
        for config in super().configs(m, counts):
            yield config if self._with_meshes else replace(config, most_width=1)

    def _counts_of_meshes(self) -> list[int]:
        """Numbers of micro-batches that divide the batch: all, or where they are many, evenly chosen ones."""
        if self.options.n_microbatches is not None or self.options.one_microbatch_because:
            return [m for m in self.counts if self.costs.batch_size % m == 0]
        every = [m for m in range(1, self.most_counts() + 1) if self.costs.batch_size % m == 0]
        if len(every) <= _MOST_COUNTS:
            return every
        last = len(every) - 1
        return [every[round(i * last / (_MOST_COUNTS - 1))] for i in range(_MOST_COUNTS)]
