"""What shards cost on devices at hand: collectives measured as the runtime does them, shares of measured operators.

One process runs all shards of a stage, and one thread calls them, so that

    collectives       are the runtime's own functions (`lower.collectives`), timed among the devices
    kernels           of devices on one piece of hardware, such as workers of one CPU, run one after another (`turns`)
    launches          of all devices of a mesh of GPUs come one after another from one thread (`launch_seconds`)
    whole parameters  lie on the first device of a mesh of GPUs, for the optimizer; workers of a CPU share their memory

Where every device has a process of its own, none waits for another, and collectives are those between processes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from autopar.costs.rank_costs import RankMeasurements, rank_costs
from autopar.lower.collectives import MOVES
from cost_models import (
    Cluster,
    Collective,
    Device,
    DeviceSpec,
    Link,
    MeasuredCollectives,
    MeasurementCache,
    Network,
    signature_key,
)
from cost_models.hardware.devices import operator_threads, synchronize
from cost_models.hardware.toml_tables import fields_of
from cost_models.measuring.peak_rates import measure_spec
from cost_models.measuring.process_links import ProcessLinks

SIZES = (16 << 10, 256 << 10, 2 << 20, 16 << 20)
"""Bytes of the tensors that collectives are measured with."""

ROUNDS, WARM_UP_ROUNDS = 5, 2

_DIMS: dict[Collective, Any] = {"all_reduce": None, "all_gather": 0, "reduce_scatter": 0, "all_to_all": (1, 0)}


@dataclass(frozen=True)
class ShardCosts:
    """What meshes of devices at hand are priced by."""

    cluster: Cluster  # the devices, their links, and the collectives of as many of them as a mesh may have
    widest: int  # devices of a mesh, at most
    separate: bool = False  # every device computes in a process of its own

    def turns(self, names: Sequence[str]) -> int:
        """How many of these devices compute one after another, because they are the same hardware."""
        if self.separate:
            return 1
        place = {device.name: device.torch_device for device in self.cluster.devices}
        return max(Counter(place[name] for name in names).values())

    def launch_seconds(self, kind: str) -> float:
        """Seconds in which the thread of a stage launches a kernel; 0 on a CPU, which runs it meanwhile."""
        spec = self.cluster.specs[kind]
        return 0.0 if spec.device_type == "cpu" else spec.launch

    def holds_whole_parameters(self, kind: str) -> bool:
        """Whether a mesh's first device holds whole parameters, gradients and optimizer states."""
        return not self.separate and self.cluster.specs[kind].device_type != "cpu"

    def beside(self, parts: int, state_parts: int) -> int:
        """`Weight.beside` of a parameter that stages read in `parts` shards: a process stores the part whose state it
        updates in memory of its own, where that is finer."""
        return state_parts if self.separate and state_parts > parts else 0


def measure_shards_of_ranks(
    ranks: RankMeasurements,
    devices: Sequence[Device],
    links: ProcessLinks,
    widest: int,
    cache: MeasurementCache | None = None,
) -> ShardCosts:
    """What meshes of up to `widest` devices cost, each in a process of its own."""
    first_ranks = {device.kind: rank for rank, device in reversed(list(enumerate(devices)))}
    specs = {
        kind: _known_spec(devices[rank], cache, partial(ranks.spec, rank)) for kind, rank in sorted(first_ranks.items())
    }
    found = rank_costs(ranks, devices, links, cache, specs=specs, which=tuple(_DIMS))
    return ShardCosts(found.cluster, widest, separate=True)


def measure_shards(
    devices: Sequence[Device],
    links: Mapping[tuple[str, str], Link],
    widest: int,
    cache: MeasurementCache | None = None,
) -> ShardCosts:
    """What meshes of up to `widest` of the devices cost; `links` are those measured between them."""
    specs = {device.kind: _known_spec(device, cache) for device in {d.kind: d for d in devices}.values()}
    latency = max((link.latency for link in links.values()), default=0.0)
    rate = min((link.bandwidth for link in links.values()), default=math.inf)
    network = Network("measured", latency, rate, sources=dict.fromkeys(("latency", "line_rate"), "measured"))
    measured = tuple(_known_collectives(devices, n, cache) for n in range(2, widest + 1))
    node = tuple(specs[device.kind] for device in devices)
    return ShardCosts(Cluster(node, 1, network, network, tuple(devices), links, measured), widest)


def _known_spec(
    device: Device, cache: MeasurementCache | None, measure: Callable[[], DeviceSpec] | None = None
) -> DeviceSpec:
    """`measure`: where the device is another process's."""
    key = signature_key("spec", device.kind, device.threads)
    known = None if cache is None else cache.get(key, lambda value: DeviceSpec(device.kind, **value))
    if known is None:
        known = measure_spec(device) if measure is None else measure()
        if cache is not None:
            cache.put(key, fields_of(known))
    return replace(known, memory=max(1, device.memory))


def _known_collectives(devices: Sequence[Device], n: int, cache: MeasurementCache | None) -> MeasuredCollectives:
    """Of groups of `n` devices of one kind; the slowest kind counts."""
    kinds = Counter(device.kind for device in devices)
    groups = [[d for d in devices if d.kind == kind][:n] for kind, count in kinds.items() if count >= n]
    names = [[(d.name, d.kind, d.threads) for d in group] for group in groups]
    key = signature_key("collectives in a process", names, SIZES)
    known = None if cache is None else cache.get(key, partial(_from_json, n=n))
    if known is not None:
        return known
    each = [_measured(group) for group in groups]
    times: dict[Collective, tuple[float, ...]] = {
        name: tuple(max(column) for column in zip(*(one[name] for one in each), strict=True)) for name in _DIMS
    }
    if cache is not None:
        cache.put(key, times)
    return MeasuredCollectives(1, n, SIZES, times, in_turn=True)


def _from_json(value: Any, n: int) -> MeasuredCollectives:
    """Cached times. Raises KeyError, TypeError or ValueError for anything else."""
    times: dict[Collective, tuple[float, ...]] = {name: tuple(map(float, value[name])) for name in _DIMS}
    if not all(math.isfinite(seconds) for of in times.values() for seconds in of):
        raise ValueError("cached times of collectives must be finite")
    return MeasuredCollectives(1, n, SIZES, times, in_turn=True)


def _measured(group: Sequence[Device]) -> dict[Collective, tuple[float, ...]]:
    """Median seconds of every collective among the devices, at each of the sizes."""
    found: dict[Collective, tuple[float, ...]] = {}
    with operator_threads(group[0].threads), torch.inference_mode(False), torch.no_grad():
        for collective in _DIMS:
            found[collective] = tuple(_seconds(collective, group, nbytes) for nbytes in SIZES)
    return found


def _seconds(collective: Collective, group: Sequence[Device], nbytes: int) -> float:
    n = len(group)
    own = nbytes // n if collective == "all_gather" else nbytes  # bytes on each device before
    rows = max(1, own // (4 * n * n))
    parts = [torch.ones(rows * n, n, device=device.torch_device) for device in group]
    samples = []
    for turn in range(WARM_UP_ROUNDS + ROUNDS):
        start = time.perf_counter()
        MOVES[collective](parts, axis=0, dim=_DIMS[collective], mesh=(n,))
        synchronize(*group)
        if turn >= WARM_UP_ROUNDS:
            samples.append(time.perf_counter() - start)
    return statistics.median(samples)
