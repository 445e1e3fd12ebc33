"""Measured costs: which micro-batch sizes to time on which devices, and timing them, unless the cache knows."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from itertools import permutations
from typing import Any, Self

import torch

from autopar.analysis.batching import Batching
from autopar.analysis.example import Example, untouched
from autopar.analysis.operators import on_device, requires_grad_nodes, written_arguments
from autopar.capture.program import Program
from autopar.capture.repeated_layers.measure_once import ReducedGraph, reduce_graph
from autopar.costs import cost_graph
from autopar.costs.call_signature import graph_signature, loss_signature
from autopar.costs.cost_graph import CostGraph
from autopar.costs.cost_table import SILENT, Calls, CostTable, Progress
from autopar.costs.measured_tables import tables_of
from autopar.costs.shard_costs import measure_shards
from autopar.costs.step_rehearsal import StepRehearsal
from autopar.costs.under_autocast import values_under, with_dtypes, with_sizes
from autopar.errors import InfeasibleError
from autopar.lower.size_values import values_of_sizes
from autopar.schedule.micro_batches import largest_size
from cost_models import Device, Link, MeasurementCache, measure_links, signature_key
from cost_models.graphs import on_meta
from cost_models.hardware.devices import operator_threads, usable_cores
from cost_models.measuring.autocast import Autocast, autocasts
from cost_models.measuring.core_waiting import waiting_is_known
from cost_models.measuring.operator_times import GraphTimes, measure, measure_accumulate
from cost_models.measuring.repeats import until_two_agree
from cost_models.memory.graph_bytes import GraphBytes, measure_bytes
from cost_models.memory.training_memory import usable_memory

log = logging.getLogger(__name__)

# Equal operators that are timed; the rest get their mean. More of them average out noise and cost more time.
_SAME_MEASURED = 3

# Passes that take less than this many seconds are over before a disturbance is: they are measured at two different
# times, and again until two measurements agree, up to this many.
_SHORT = 0.05
_MEASUREMENTS = 4

# A micro-batch that takes this much more time a sample than its neighbours in size is measured once more.
_SUSPICIOUS = 1.25


class Measured:
    """Costs of a program measured on devices at hand, or measured before (a `CostSource`).

    They are those under the caller's torch.autocast: of the thread that makes this object.

    `leaves`: the flat inputs of an example call. `n_microbatches`: measure this division of the batch only.
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
    ) -> None:
        self.devices = tuple(replace(d, memory=usable_memory(d.memory, d.torch_device.type)) for d in devices)
        self.cores = usable_cores() if all(d.shares_process_memory for d in self.devices) else None
        self._program, self._batching, self._training = program, batching, training
        self._calls = Calls(program, leaves, loss_fn, target, target_dims)
        self._n_microbatches, self._cache = n_microbatches, cache
        self._autocasts = autocasts(d.torch_device.type for d in self.devices)
        self._spread = 0.0  # the largest of all measurements
        self._too_large: list[tuple[str, int]] = []  # kind of device, samples

    @classmethod
    def of(
        cls,
        example: Example,
        devices: Sequence[Device],
        *,
        n_microbatches: int | None = None,
        cache: MeasurementCache | None = None,
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
        )

    def tables(self, progress: Progress) -> tuple[CostTable, ...]:
        program, batching = self._program, self._batching
        jobs = []
        for kind in dict.fromkeys(d.kind for d in self.devices):
            mine = [d for d in self.devices if d.kind == kind]
            jobs += [(mine[0], workers, n) for workers, n in _sizes(mine, program, batching, self._n_microbatches)]
        measuring = _Measuring(
            program,
            with_dtypes(batching, self._under_autocast),
            self._calls,
            self._training,
            self._cache,
            self._autocasts,
        )
        found = measuring.run(jobs, progress)
        self._spread = max(times.spread for _, times in found)
        self._too_large = measuring.too_large
        once = {node.name for node in values_of_sizes(program.graph_module)}
        return tables_of([(device, _without(times, once)) for device, times in found])

    def notes(self) -> tuple[str, ...]:
        """What was not measured; and how uncertain measurements are without the system's count of waiting."""
        notes = [
            f"{rows} samples at once do not fit the memory of {kind}: their seconds are predicted from those of fewer"
            for kind, rows in self._too_large
        ]
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
        counted = measure_bytes(self._program.graph_module, inputs, rows, self._training)
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
        key = signature_key("accumulate", first.kind, first.threads)
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


def _sizes(
    devices: Sequence[Device], program: Program, batching: Batching, n_microbatches: int | None
) -> list[tuple[int, int]]:
    """Pairs (busy workers, samples) to measure on devices of one kind.

    The whole batch runs on one worker, micro-batches run with all workers busy; of CPU workers that share cores, as
    many as have a core of their own (`CostGraph.crowding` prices the others). `n_microbatches`: measure this division
    of the batch only.
    """
    batch = max(program.batch_size, 1)
    whole = [(1, batch)]
    if not batching.splittable or batch == 1:
        return whole
    on_cores = max(1, usable_cores() // devices[0].threads)
    together = min(len(devices), on_cores) if devices[0].shares_process_memory else 1
    if n_microbatches is not None:
        parts = [largest_size(batch, n_microbatches)]
    else:
        parts = sorted({max(batching.least_rows, batch // part) for part in (2, 4, 8, 16)}, reverse=True)
    few = [(1, parts[len(parts) // 2])] if together > 1 else []
    return list(
        dict.fromkeys(whole + few + [(together, size) for size in parts])
    )  # each once: one micro-batch is whole


_Job = tuple[Device, int, int]  # device, busy workers, samples


class _Measuring:
    """Times of a program's operators, under `autocasts` by device type."""

    def __init__(
        self,
        program: Program,
        batching: Batching,
        calls: Calls,
        training: bool,
        cache: MeasurementCache | None,
        autocasts: Mapping[str, Autocast],
    ) -> None:
        self._calls, self._training, self._cache, self._autocasts = calls, training, cache, autocasts
        self._reduced, self._captured = _reduced(program, batching), program.device
        self._signature = [graph_signature(program), training, loss_signature(calls.loss_fn, calls.target)]
        self.too_large: list[tuple[str, int]] = []  # kind of device, samples that its memory does not hold

    def run(self, jobs: Sequence[_Job], progress: Progress) -> list[tuple[Device, GraphTimes]]:
        """Times for every (device, busy workers, samples), from the cache or measured and then cached.

        Sizes that the memory of a GPU does not hold are left out. Raises InfeasibleError where it holds none.
        """
        keys = [
            signature_key("times", self._signature, d.kind, d.threads, workers, rows, self._autocast_of(d).signature)
            for d, workers, rows in jobs
        ]
        known = self._known(keys, jobs)
        measured: dict[str, tuple[_Job, GraphTimes]] = {}
        for index, (key, job) in enumerate(zip(keys, jobs, strict=True)):
            device, workers, rows = job
            progress(f"profiling {device.kind}: {rows} samples, {workers} busy", index / len(jobs))
            times = known[key] if key in known else self._measured_if_it_fits(device, workers, rows)
            if times is not None:
                measured[key] = job, times
        self._check_every_kind(jobs, [job for job, _ in measured.values()])
        keys, jobs, found = list(measured), [job for job, _ in measured.values()], [t for _, t in measured.values()]
        for index, (key, job) in enumerate(zip(keys, jobs, strict=True)):
            if key not in known and found[index].total < _SHORT:
                progress(f"profiling {job[0].kind}: {job[2]} samples again", 1.0)
                found[index] = self._agreed(found[index], job)
        for index, (key, (device, _, rows)) in enumerate(zip(keys, jobs, strict=True)):
            times = found[index]
            same = [t for t, (d, w, _) in zip(found, jobs, strict=True) if d is device and w == times.workers]
            if key not in known and _disturbed(times, same):
                progress(f"profiling {device.kind}: {rows} samples again", 1.0)
                found[index] = min(times, self._measure(device, times.workers, rows), key=lambda t: t.total)
        if self._cache is not None:
            self._cache.put_many({k: t.to_json() for k, t in zip(keys, found, strict=True) if k not in known})
        return [(device, times) for (device, _, _), times in zip(jobs, found, strict=True)]

    def _measured_if_it_fits(self, device: Device, workers: int, rows: int) -> GraphTimes | None:
        try:
            return self._measure(device, workers, rows)
        except torch.OutOfMemoryError as error:
            log.info("%d samples do not fit the memory of %s: %s", rows, device.kind, error)
            self.too_large.append((device.kind, rows))
        # Here the error is gone, and with it the tensors of the pass: the next size finds their memory.
        if device.torch_device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def _check_every_kind(self, wanted: Sequence[_Job], measured: Sequence[_Job]) -> None:
        kinds = {device.kind for device, _, _ in measured}
        for kind, _ in self.too_large:
            if kind not in kinds:
                least = min(rows for device, _, rows in wanted if device.kind == kind)
                raise InfeasibleError(
                    f"the memory of {kind} does not hold a pass of {least} samples, so nothing can be measured there; "
                    "free some of it, or plan ahead with a Cluster.preset(...) and pass that plan"
                )

    def _agreed(self, first: GraphTimes, job: _Job) -> GraphTimes:
        """Times that a second measurement confirms; without such, the lowest."""
        device, workers, rows = job
        again = partial(self._measure, device, workers, rows)
        times, agreed = until_two_agree(first, again, lambda t: t.total, _MEASUREMENTS)
        if not agreed:
            log.info(
                "%d measurements of %d samples on %s disagree; keeping the lowest, %.3g ms",
                _MEASUREMENTS,
                rows,
                device.kind,
                times.total * 1e3,
            )
        return times

    def _known(self, keys: Sequence[str], jobs: Sequence[_Job]) -> dict[str, GraphTimes]:
        """The cached times of those of `keys` that have some, for the numbers of workers and samples of their jobs."""
        if self._cache is None:
            return {}
        known = self._cache.get_many(keys, partial(GraphTimes.from_json, nodes=self._reduced.like.keys()))
        wanted = {key: (workers, rows) for key, (_, workers, rows) in zip(keys, jobs, strict=True)}
        return {key: times for key, times in known.items() if (times.workers, times.rows) == wanted[key]}

    def _measure(self, device: Device, workers: int, rows: int) -> GraphTimes:
        log.info("profiling %s: %d samples, %d busy", device.kind, rows, workers)
        reduced = self._reduced

        def inputs(rows: int) -> list[Any]:
            made = [
                shape.make(rows, device.torch_device).requires_grad_(gradient and self._training)
                for shape, gradient in reduced.stand_ins
            ]
            return [*self._calls.inputs(rows), *made]

        times = measure(
            on_device(reduced.module, self._captured, device.torch_device),
            inputs,
            self._calls.loss,
            rows,
            device,
            workers=workers,
            training=self._training,
            n_outputs=reduced.n_outputs,
            autocast=self._autocast_of(device),
        )
        forward, backward = (
            {name: sum(seconds[m] for m in like) / len(like) for name, like in reduced.like.items()}
            for seconds in (times.forward, times.backward)
        )
        return replace(times, forward=forward, backward=backward)

    def _autocast_of(self, device: Device) -> Autocast:
        return self._autocasts[device.torch_device.type]


def _without(times: GraphTimes, names: Set[str]) -> GraphTimes:
    """The times of a pass that finds the values `names`: stages keep what follows from sizes (size_values.py)."""
    forward = {name: 0.0 if name in names else seconds for name, seconds in times.forward.items()}
    return replace(times, forward=forward)


def _disturbed(times: GraphTimes, same: Sequence[GraphTimes]) -> bool:
    """Whether `times` are much longer per sample than at the next smaller and larger size, as on a busy machine."""
    ordered = sorted(same, key=lambda t: t.rows)
    place = ordered.index(times)
    beside = [t.total / t.rows for t in ordered[max(0, place - 1) : place + 2] if t is not times]
    return bool(beside) and times.total / times.rows > _SUSPICIOUS * min(beside)


def _reduced(program: Program, batching: Batching) -> ReducedGraph:
    """The graph to time: every operator that repeats at most `_SAME_MEASURED` times."""
    writes = {a for node in program.graph.nodes for a in written_arguments(node)}
    aliases = {s for node in writes for s in batching.storages.get(node.name, ())}
    touched = {n.name for n in program.graph.nodes if batching.storages.get(n.name, frozenset()) & aliases}
    keep = touched | {n.name for n in program.graph.nodes if written_arguments(n)}
    gradients = {n.name for n in requires_grad_nodes(program.graph_module)}
    return reduce_graph(program.graph_module, batching.shapes, keep, gradients, _SAME_MEASURED)


def measure_costs(
    example: Example,
    devices: Sequence[Device],
    *,
    n_microbatches: int | None = None,
    cache: bool = True,
    progress: Progress = SILENT,
) -> CostGraph:
    """The measured cost graph of a call; times in the cache are not measured again. The model is unchanged.

    `n_microbatches`: measure this division of the batch only.
    """
    # Copies that are made in inference mode could not be written outside of it, where operators are timed.
    outside = torch.inference_mode(False)
    with measurement_cache(cache) as store, untouched(example.model), torch.device("cpu"), outside:
        source = Measured.of(example, devices, n_microbatches=n_microbatches, cache=store)
        costs = cost_graph.build(
            example.program, example.batching, source, training=example.training, progress=progress
        )
        types = {device.kind: device.torch_device.type for device in devices}
        return replace(costs, rehearsal=StepRehearsal.of(example, types, autocasts(types.values())))


def with_shards(costs: CostGraph, widest: int, *, cache: bool = True, progress: Progress = SILENT) -> CostGraph:
    """`costs` of devices at hand, with what meshes of up to `widest` of them cost: measured unless the cache knows."""
    if widest < 2 or (costs.shards is not None and costs.shards.widest >= widest):
        return costs
    progress(f"collectives of up to {widest} devices", 0.0)
    with measurement_cache(cache) as store:
        return replace(costs, shards=measure_shards(costs.devices, costs.links, widest, store))


@contextmanager
def measurement_cache(wanted: bool) -> Iterator[MeasurementCache | None]:
    """The cache on disk; None if it is not wanted."""
    if not wanted:
        yield None
        return
    with MeasurementCache() as store:
        yield store
