"""The ranks of a mesh as threads of one process: a stand-in for process groups that notices calls that do not pair."""

from __future__ import annotations

import functools
import operator
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from autopar.lower import process_groups

PATIENCE = 20.0  # s that a rank waits for the others of its group


class RankThreads:
    """Process groups of threads. `log`: for every group and rank, its calls (kind, shape, dtype) in order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: defaultdict[str, defaultdict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
        self._ranks: dict[str, tuple[int, ...]] = {}
        self._barriers: dict[str, threading.Barrier] = {}
        self._given: defaultdict[str, dict[int, Any]] = defaultdict(dict)
        self._own = threading.local()
        patch.setattr(process_groups, "all_reduce", self._all_reduce)
        patch.setattr(process_groups, "all_gather", self._all_gather)
        patch.setattr(process_groups, "reduce_scatter", self._reduce_scatter)
        patch.setattr(process_groups, "all_to_all", self._all_to_all)

    def lines(self, mesh: Sequence[int], device: int, name: str = "mesh") -> tuple[str, ...]:
        """The names of the groups of a device's lines along every axis."""
        numbers = np.arange(int(np.prod(mesh))).reshape(mesh)
        place = list(np.unravel_index(device, mesh))
        found = []
        for axis in range(len(mesh)):
            line = numbers[tuple(slice(None) if a == axis else i for a, i in enumerate(place))]
            found.append(self.group(f"{name} axis {axis} of {line[0]}", line.tolist()))
        return tuple(found)

    def group(self, name: str, ranks: Sequence[int]) -> str:
        if name not in self._ranks:
            self._ranks[name], self._barriers[name] = tuple(ranks), threading.Barrier(len(ranks))
        return name

    def run(self, work: Callable[[int], Any], n: int) -> list[Any]:
        """`work(rank)` on a thread per rank. Raises what the first failing rank raised."""
        results: list[Any] = [None] * n
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            self._own.rank = rank
            try:
                with torch.autograd.set_multithreading_enabled(False):
                    results[rank] = work(rank)
            except BaseException as error:
                errors.append(error)
                for barrier in self._barriers.values():
                    barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * PATIENCE)
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return results

    def _exchanged(self, kind: str, x: torch.Tensor, group: str) -> tuple[list[torch.Tensor], int]:
        assert x.is_contiguous()
        rank, ranks = self._own.rank, self._ranks[group]
        self.log[group][rank].append((kind, tuple(x.shape), x.dtype))
        self._given[group][rank] = (kind, x)
        self._barriers[group].wait(PATIENCE)
        given = [self._given[group][r] for r in ranks]
        assert len({(k, t.shape, t.dtype) for k, t in given}) == 1, [(k, t.shape, t.dtype) for k, t in given]
        tensors = [t.clone() for _, t in given]
        self._barriers[group].wait(PATIENCE)
        return tensors, ranks.index(rank)

    def _all_reduce(self, x: torch.Tensor, operation: str, group: str) -> torch.Tensor:
        tensors, _ = self._exchanged(f"all_reduce {operation}", x, group)
        return functools.reduce({"sum": operator.add, "max": torch.maximum}[operation], tensors)

    def _all_gather(self, x: torch.Tensor, n: int, group: str) -> torch.Tensor:
        tensors, _ = self._exchanged("all_gather", x, group)
        return torch.cat(tensors)

    def _reduce_scatter(self, x: torch.Tensor, n: int, group: str) -> torch.Tensor:
        tensors, place = self._exchanged("reduce_scatter", x, group)
        return functools.reduce(operator.add, tensors).chunk(n)[place].clone()

    def _all_to_all(self, x: torch.Tensor, n: int, group: str) -> torch.Tensor:
        tensors, place = self._exchanged("all_to_all", x, group)
        return torch.cat([t.chunk(n)[place] for t in tensors])
