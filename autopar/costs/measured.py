"""Measured costs: which micro-batch sizes to time on which devices, and timing them, unless the cache knows."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from itertools import permutations
from typing import Any, Self

import torch

from autopar.analysis.batching import Batching
from autopar.analysis.example import Example
from autopar.analysis.operators import on_device
from autopar.capture.program import Program
from autopar.costs import cost_graph
from autopar.costs.cost_graph import CostGraph
from autopar.costs.cost_table import SILENT, Calls, CostTable, LossNeedsValues, OnWholeBatch, Progress
from autopar.costs.measured_tables import tables_of
from autopar.costs.operator_passes import Measuring
from autopar.costs.rank_costs import RankMeasurements, measured_links, rank_costs
from autopar.costs.shard_costs import measure_shards, measure_shards_of_ranks
from autopar.costs.step_rehearsal import StepRehearsal
from autopar.costs.under_autocast import values_under, with_dtypes, with_sizes
from autopar.costs.whole_batch import WholeBatch, priced, why_unknown
from autopar.lower.size_values import values_of_sizes
from autopar.schedule.micro_batches import largest_size
from cost_models import Device, Link, MeasurementCache, measure_links, signature_key
from cost_models.graphs import on_meta
from cost_models.hardware.devices import gpu_of, operator_threads, usable_cores
from cost_models.measuring.autocast import autocasts
from cost_models.measuring.core_waiting import waiting_is_known
from cost_models.measuring.operator_times import Companions, GraphTimes, measure_accumulate
from cost_models.measuring.process_links import ProcessLinks
from cost_models.memory.graph_bytes import GraphBytes, measure_bytes
from cost_models.memory.training_memory import usable_memory

log = logging.getLogger(__name__)


class Measured:
    """Costs of a program measured on devices at hand, or measured before (a `CostSource`).

    They are those under the caller's torch.autocast: of the thread that makes this object.

    `leaves`: the flat inputs of an example call. `n_microbatches`: the number that the caller asks for. `ranks`:
    the processes of the devices, where each has its own; they measure together.
    """

    cluster = None
    recipe = None

    def __init__(
        self,
        program: Program,
        batching: Batching,
        leaves: list[Any],
        devices: Sequence[Device],
        *,
        training: bool,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        target: Any = None,
        target_dims: tuple[int | None, ...] = (),
        n_microbatches: int | None = None,
        cache: MeasurementCache | None = None,
        ranks: RankMeasurements | None = None,
        whole_batch: WholeBatch | None = None,
    ) -> None:
        self._whole_batch = whole_batch
        self.devices = tuple(replace(d, memory=usable_memory(d.memory, d.torch_device.type)) for d in devices)
        self.cores = usable_cores() if all(d.shares_process_memory for d in self.devices) else None
        if ranks is not None and self.cores is not None:
            self.cores = ranks.cores
        self._program, self._batching, self._training = program, batching, training
        self._calls = Calls(program, leaves, loss_fn, target, target_dims)
        self._n_microbatches, self._cache = n_microbatches, cache
        self._autocasts = autocasts(d.torch_device.type for d in self.devices)
        self._spread = 0.0  # the largest of all measurements
        self._too_large: list[tuple[str, int]] = []  # kind of device, samples
        self._left_out: list[str] = []  # notes of what runs on the whole batch and has no price
        self._ranks = ranks
        self.process_links: ProcessLinks | None = None  # of ranks, once they are measured

    @classmethod
    def of(
        cls,
        example: Example,
        devices: Sequence[Device],
        *,
        n_microbatches: int | None = None,
        cache: MeasurementCache | None = None,
        ranks: RankMeasurements | None = None,
    ) -> Self:
        """The costs of an example call."""
        return cls(
            example.program,
            example.batching,
            example.leaves,
            devices,
            training=example.training,
            loss_fn=example.stage_loss,
            target=example.target,
            target_dims=example.target_dims,
            n_microbatches=n_microbatches,
            cache=cache,
            ranks=ranks,
            whole_batch=WholeBatch.of(example),
        )

    def tables(self, progress: Progress) -> tuple[CostTable, ...]:
        program, batching = self._program, self._batching
        jobs = []
        for kind in dict.fromkeys(d.kind for d in self.devices):
            mine = [d for d in self.devices if d.kind == kind]
            if self._ranks is not None:
                mine = [self.devices[rank] for rank in _on_one_machine(self._ranks, self.devices, kind)]
            sizes = _sizes(
                mine, program, batching, self._n_microbatches, self.cores, own_processes=self._ranks is not None
            )
            jobs += [(mine[0], workers, n) for workers, n in sizes]
        measuring = self.measuring()
        found = measuring.run(jobs, progress)
        self._spread = max(times.spread for _, times in found)
        self._too_large = measuring.too_large
        once = {node.name for node in values_of_sizes(program.graph_module)}
        return tables_of([(device, _without(times, once)) for device, times in found])

    def measuring(self) -> Measuring:
        """What times the operators."""
        return Measuring(
            self._program,
            with_dtypes(self._batching, self._under_autocast),
            self._calls,
            self._training,
            self._cache,
            self._autocasts,
            None if self._ranks is None else partial(self._on_ranks, self._ranks),
            {kind: _gpus([d for d in self.devices if d.kind == kind]) for kind in {d.kind for d in self.devices}},
        )

    def _on_ranks(self, ranks: RankMeasurements, device: Device, workers: int, rows: int) -> GraphTimes:
        return ranks.passes(_on_one_machine(ranks, self.devices, device.kind)[:workers], workers, rows)

    def whole_batch(self) -> dict[str, OnWholeBatch]:
        """With the threads of the caller, whose workers wait then."""
        found, notes = priced(self._whole_batch, self._on_whole_batch)
        self._left_out += notes
        return found

    def _on_whole_batch(self, whole: WholeBatch) -> dict[str, OnWholeBatch]:
        found: dict[str, OnWholeBatch] = {}
        for device in self.devices:
            if device.kind in found:
                continue
            autocast = self._autocasts[device.torch_device.type]
            facts = device.kind, torch.get_num_threads(), autocast.signature
            key = signature_key("whole batch", whole.signature, *facts)
            seconds = self._cache.get(key, _seconds_from_json) if self._cache is not None else None
            if seconds is None:
                seconds = whole.seconds(device.torch_device, autocast)
                if self._cache is not None:
                    self._cache.put(key, seconds)
            try:
                memory = whole.memory(autocast.device_type, autocast.dtype)
            except (LossNeedsValues, RuntimeError) as error:
                memory = 0, 0
                self._left_out.append(f"memory leaves out what runs on the whole batch: {why_unknown(error)}")
            found[device.kind] = OnWholeBatch(seconds, *memory)
        return found

    def notes(self) -> tuple[str, ...]:
        """What was not measured; and how uncertain measurements are without the system's count of waiting."""
        notes = [
            f"{rows} samples at once do not fit the memory of {kind}: their seconds are predicted from those of fewer"
            for kind, rows in dict.fromkeys(self._too_large)  # on one GPU, and on several at once
        ]
        notes += dict.fromkeys(self._left_out)
        on_cpu = any(device.torch_device.type == "cpu" for device in self.devices)
        if not on_cpu or waiting_is_known():
            return tuple(notes)
        return (
            *notes,
            "this system does not report how long threads wait for a core, so other programs' work may count in the "
            f"measured seconds; repeated passes differ by {self._spread:.0%}, and predictions may be off by as much",
        )

    def counted(self) -> GraphBytes:
        """On the meta device, by the kernels of the devices at hand and under the caller's autocast, as steps are
        rehearsed; with real tensors where code needs values."""
        rows, inputs = self._few_rows()
        types = {device.torch_device.type for device in self.devices}
        if not self._program.uncaptured and len(types) == 1:
            device_type, meta = types.pop(), torch.device("meta")
            module = on_device(self._program.graph_module, self._program.device, meta)
            autocast = self._autocasts[device_type].dtype
            with contextlib.suppress(RuntimeError):  # torch's for what has no result without values
                own = [on_meta(x) for x in inputs]
                return measure_bytes(module, own, rows, self._training, device_type, autocast)
        derives = bool(self._program.uncaptured)
        counted = measure_bytes(self._program.graph_module, inputs, rows, self._training, derives=derives)
        return with_sizes(counted, self._under_autocast)

    def _few_rows(self) -> tuple[int, list[Any]]:
        """A number of samples, and the flat inputs for them."""
        batch = max(self._program.batch_size, 1)
        rows = min(batch, 4) if self._batching.splittable else batch
        # Copies: a view of the example would count the storage of its whole batch.
        return rows, [x.clone() if isinstance(x, torch.Tensor) else x for x in self._calls.inputs(rows)]

    @cached_property
    def _under_autocast(self) -> dict[str, Any]:
        """By node, what its value for a few samples looks like; nothing where autocast is off."""
        return values_under(self._autocasts, self._program.graph_module, self._few_rows()[1])

    def links(self) -> dict[tuple[str, str], Link]:
        if self._ranks is not None:
            self.process_links = measured_links(self._ranks, self.devices, self._cache)
            names = [device.name for device in self.devices]
            return {(names[a], names[b]): link for (a, b), link in self.process_links.links.items()}
        key = signature_key("links", [(d.name, d.kind, d.threads) for d in self.devices])
        known = (
            self._cache.get(key, partial(_links_from_json, devices=self.devices)) if self._cache is not None else None
        )
        if known is not None:
            return known
        with operator_threads(self.devices[0].threads):
            links = measure_links(self.devices)
        if self._cache is not None:
            self._cache.put(key, [(a, b, link.latency, str(link.bandwidth)) for (a, b), link in links.items()])
        return links

    def accumulate(self) -> float:
        first = self.devices[0]
        key = signature_key("accumulate in turn", first.kind, first.threads)
        known = self._cache.get(key, _seconds_from_json) if self._cache is not None else None
        if known is not None:
            return known
        with operator_threads(first.threads):
            seconds = measure_accumulate(first.torch_device)
        if self._cache is not None:
            self._cache.put(key, seconds)
        return seconds


def _seconds_from_json(value: Any) -> float:
    """Cached seconds; raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"cached times must be finite seconds >= 0, got {value!r}")
    return float(value)


def _links_from_json(value: Any, devices: Sequence[Device]) -> dict[tuple[str, str], Link]:
    """The cached links of every ordered pair of `devices`; raises TypeError or ValueError for anything else."""
    links = {(a, b): Link(_seconds_from_json(latency), float(bandwidth)) for a, b, latency, bandwidth in value}
    if not all(link.bandwidth > 0 for link in links.values()):
        raise ValueError("the cached bandwidths are not above 0")
    if links.keys() != set(permutations([device.name for device in devices], 2)):
        raise ValueError("the cached links are of other devices")
    return links


def _on_one_machine(ranks: RankMeasurements, devices: Sequence[Device], kind: str) -> list[int]:
    """The ranks of a kind of devices on the first machine that has some."""
    mine = [rank for rank, device in enumerate(devices) if device.kind == kind]
    return [rank for rank in mine if ranks.machines[rank] == ranks.machines[mine[0]]]


def _sizes(
    devices: Sequence[Device],
    program: Program,
    batching: Batching,
    n_microbatches: int | None,
    cores: int | None = None,
    *,
    own_processes: bool = False,
) -> list[tuple[int, int]]:
    """Pairs (busy workers, samples) to measure on devices of one kind.

    The whole batch runs on one worker, micro-batches run with all workers busy; of CPU workers that share cores, as
    many as have some of the `cores` of their own (`CostGraph.crowding` prices the others). GPUs wait for each other's
    launches alone, unless they have their `own_processes`: on one of several, all micro-batches are measured as well,
    since launches give the seconds by samples a bend. `n_microbatches`: the number that the caller asks for. It
    adds a size only if that is smaller than all others, so that a plan has one price, whether asked for or found.
    """
    batch = max(program.batch_size, 1)
    whole = [(1, batch)]
    if not batching.splittable or batch == 1:
        return whole
    on_cores = max(1, (cores or usable_cores()) // devices[0].threads)
    if devices[0].shares_process_memory:
        together = min(len(devices), on_cores)
    else:
        together = 1 if own_processes else len(_gpus(devices))
    parts = sorted({max(batching.least_rows, batch // part) for part in (2, 4, 8, 16)}, reverse=True)
    alone = [parts[len(parts) // 2]] if devices[0].shares_process_memory else parts
    few = [(1, size) for size in alone] if together > 1 else []
    if n_microbatches is not None and (size := largest_size(batch, n_microbatches)) < parts[-1]:
        parts.append(size)
    return list(
        dict.fromkeys(whole + few + [(together, size) for size in parts])
    )  # each once: one micro-batch is whole


def _gpus(devices: Sequence[Device]) -> list[Device]:
    """The first worker of every GPU."""
    firsts: dict[str, Device] = {}
    for device in devices:
        if not device.shares_process_memory:
            firsts.setdefault(gpu_of(device.name), device)
    return list(firsts.values())


def _without(times: GraphTimes, names: Set[str]) -> GraphTimes:
    """The times of a pass that finds the values `names`: stages keep what follows from sizes (size_values.py)."""
    forward = {name: 0.0 if name in names else seconds for name, seconds in times.forward.items()}
    return replace(times, forward=forward)


def measure_costs(
    example: Example,
    devices: Sequence[Device],
    *,
    n_microbatches: int | None = None,
    cache: bool = True,
    progress: Progress = SILENT,
    ranks: RankMeasurements | None = None,
) -> CostGraph:
    """The measured cost graph of a call; times in the cache are not measured again. The model is unchanged.

    `n_microbatches`: the number that the caller asks for. `ranks`: the processes of the devices, if each has one.
    """
    with measurement_cache(cache) as store, _apart(example):
        source = Measured.of(example, devices, n_microbatches=n_microbatches, cache=store, ranks=ranks)
        costs = cost_graph.build(
            example.program, example.batching, source, training=example.training, progress=progress
        )
        if ranks is not None and source.process_links is not None:
            progress("collectives between ranks", 1.0)
            of_ranks = rank_costs(ranks, source.devices, source.process_links, store)
            costs = replace(costs, ranks=of_ranks, notes=(*costs.notes, *of_ranks.notes))
        return replace(costs, rehearsal=StepRehearsal.at_hand(example, devices))


def passes_of(
    example: Example, devices: Sequence[Device]
) -> Callable[[Device, int, int, Companions | None], GraphTimes]:
    """`Measuring.passes` of a call, for a process that takes part in what another one measures."""
    with _apart(example):
        measuring = Measured.of(example, devices).measuring()

    def passes(device: Device, workers: int, rows: int, companions: Companions | None) -> GraphTimes:
        with _apart(example):
            return measuring.passes(device, workers, rows, companions)

    return passes


@contextmanager
def _apart(example: Example) -> Iterator[None]:
    """Inside, passes leave the model as it is."""
    # Copies that are made in inference mode could not be written outside of it, where operators are timed.
    with example.untouched(), torch.device("cpu"), torch.inference_mode(False):
        yield


def with_shards(
    costs: CostGraph,
    widest: int,
    *,
    cache: bool = True,
    progress: Progress = SILENT,
    ranks: RankMeasurements | None = None,
) -> CostGraph:
    """`costs` of devices at hand, with what meshes of up to `widest` of them cost: measured unless the cache knows.
    `ranks`: the processes of the devices, if each has one."""
    if widest < 2 or (costs.shards is not None and costs.shards.widest >= widest):
        return costs
    progress(f"collectives of up to {widest} devices", 0.0)
    with measurement_cache(cache) as store:
        if ranks is not None:
            links = measured_links(ranks, costs.devices, store)
            return replace(costs, shards=measure_shards_of_ranks(ranks, costs.devices, links, widest, store))
        return replace(costs, shards=measure_shards(costs.devices, costs.links, widest, store))


@contextmanager
def measurement_cache(wanted: bool) -> Iterator[MeasurementCache | None]:
    """The cache on disk; None if it is not wanted."""
    if not wanted:
        yield None
        return
    with MeasurementCache() as store:
        yield store
