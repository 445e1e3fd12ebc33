"""Measurements of ranks on several hosts, made in one process: operators are timed here, links and collectives are
simple formulas."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from autopar.analysis.example import Example
from autopar.costs.measured import passes_of
from cost_models import Collective, Device, DeviceSpec, Link, MeasuredCollectives
from cost_models.measuring.operator_times import GraphTimes
from cost_models.measuring.peak_rates import measure_spec
from cost_models.measuring.process_links import ProcessLinks

INSIDE, ACROSS = Link(1e-6, 1e12), Link(1e-5, 1e10)
_SIZES = (4 << 10, 1 << 20, 16 << 20)


_SPECS: dict[tuple[str, int], DeviceSpec] = {}  # by kind and threads: measured once in a process


class SimulatedRanks:
    """`RankMeasurements`. `asked`: the groups whose collectives were measured."""

    backend = "gloo"
    cores = 64

    def __init__(self, hosts: Sequence[int], devices: Sequence[Device], example: Example | None = None) -> None:
        self.hosts = self.machines = list(hosts)
        self.asked: list[tuple[int, ...]] = []
        self._devices, self._example = devices, example

    def passes(self, ranks: Sequence[int], workers: int, rows: int) -> GraphTimes:
        assert self._example is not None
        return replace(passes_of(self._example, self._devices)(self._devices[ranks[0]], 1, rows, None), workers=workers)

    def spec(self, rank: int) -> DeviceSpec:
        device = self._devices[rank]
        key = device.kind, device.threads
        if key not in _SPECS:
            _SPECS[key] = measure_spec(device)
        return _SPECS[key]

    def links(self) -> ProcessLinks:
        pairs = itertools.permutations(range(len(self.hosts)), 2)
        return ProcessLinks({(a, b): self._link(a, b) for a, b in pairs}, shared=False)

    def _link(self, a: int, b: int) -> Link:
        return INSIDE if self.hosts[a] == self.hosts[b] else ACROSS

    def handling(self) -> float:
        return 1e-6

    def differ(self, known: ProcessLinks) -> float:
        return 1.0

    def collectives(self, ranks: Sequence[int], which: Sequence[Collective]) -> MeasuredCollectives:
        self.asked.append(tuple(ranks))
        across = len({self.hosts[rank] for rank in ranks}) > 1
        times = tuple((ACROSS if across else INSIDE).seconds(size * len(ranks)) for size in _SIZES)
        counts = sorted(Counter(self.hosts[rank] for rank in ranks).values())
        uneven = tuple(counts) if counts[0] != counts[-1] else ()
        return MeasuredCollectives(len(counts), counts[0], _SIZES, dict.fromkeys(which, times), uneven)

    def at_once(self, groups: Sequence[Sequence[int]], nbytes: int) -> float:
        return 0.0
