"""Measured costs: which micro-batch sizes to time on which devices, and timing them, unless the cache knows."""

from __future__ import annotations

import hashlib
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np
import torch

from autopar.analysis.batching import Batching
from autopar.analysis.example import Example, untouched
from autopar.analysis.operators import captured_device, on_device, requires_grad_nodes, written_arguments
from autopar.capture import torch_private
from autopar.capture.program import Program
from autopar.capture.repeated_layers.measure_once import ReducedGraph, reduce_graph
from autopar.costs import cost_graph
from autopar.costs.cost_graph import CostGraph
from autopar.costs.cost_table import SILENT, Calls, CostTable, Progress
from autopar.schedule.micro_batches import largest_size
from cost_models import Device, Link, MeasurementCache, measure_links, signature_key
from cost_models.graphs import get_attribute
from cost_models.hardware.devices import operator_threads, usable_cores
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
        self._spread = 0.0  # the largest of all measurements

    def tables(self, progress: Progress) -> tuple[CostTable, ...]:
        program, batching = self._program, self._batching
        jobs = []
        for kind in dict.fromkeys(d.kind for d in self.devices):
            mine = [d for d in self.devices if d.kind == kind]
            jobs += [(mine[0], workers, n) for workers, n in _sizes(mine, program, batching, self._n_microbatches)]
        measuring = _Measuring(program, batching, self._calls, self._training, self._cache)
        found = measuring.run(jobs, progress)
        self._spread = max(times.spread for _, times in found)
        return _tables(found)

    def notes(self) -> tuple[str, ...]:
        """Without the system's count of waiting, how uncertain the measurements are."""
        on_cpu = any(device.torch_device.type == "cpu" for device in self.devices)
        if not on_cpu or waiting_is_known():
            return ()
        return (
            "this system does not report how long threads wait for a core, so other programs' work may count in the "
            f"measured seconds; repeated passes differ by {self._spread:.0%}, and predictions may be off by as much",
        )

    def counted(self) -> GraphBytes:
        batch = max(self._program.batch_size, 1)
        rows = min(batch, 4) if self._batching.splittable else batch
        # Copies: a view of the example would count the storage of its whole batch.
        inputs = [x.clone() if isinstance(x, torch.Tensor) else x for x in self._calls.inputs(rows)]
        return measure_bytes(self._program.graph_module, inputs, rows, self._training)

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
        parts = sorted({max(1, batch // part) for part in (2, 4, 8, 16)}, reverse=True)
    few = [(1, parts[len(parts) // 2])] if together > 1 else []
    return list(
        dict.fromkeys(whole + few + [(together, size) for size in parts])
    )  # each once: one micro-batch is whole


class _Measuring:
    """Times of a program's operators."""

    def __init__(
        self, program: Program, batching: Batching, calls: Calls, training: bool, cache: MeasurementCache | None
    ) -> None:
        self._calls, self._training, self._cache = calls, training, cache
        self._reduced, self._captured = _reduced(program, batching), captured_device(program)
        self._signature = [graph_signature(program), training, _loss_identity(calls.loss_fn, calls.target)]

    def run(self, jobs: Sequence[tuple[Device, int, int]], progress: Progress) -> list[tuple[Device, GraphTimes]]:
        """Times for every (device, busy workers, samples), from the cache or measured and then cached."""
        keys = [signature_key("times", self._signature, d.kind, d.threads, workers, rows) for d, workers, rows in jobs]
        known = self._known(keys, jobs)
        found: list[GraphTimes] = []
        for index, (key, (device, workers, rows)) in enumerate(zip(keys, jobs, strict=True)):
            progress(f"profiling {device.kind}: {rows} samples, {workers} busy", index / len(jobs))
            found.append(known[key] if key in known else self._measure(device, workers, rows))
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

    def _agreed(self, first: GraphTimes, job: tuple[Device, int, int]) -> GraphTimes:
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

    def _known(self, keys: Sequence[str], jobs: Sequence[tuple[Device, int, int]]) -> dict[str, GraphTimes]:
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
        )
        forward, backward = (
            {name: sum(seconds[m] for m in like) / len(like) for name, like in reduced.like.items()}
            for seconds in (times.forward, times.backward)
        )
        return replace(times, forward=forward, backward=backward)


def _tables(measured: Sequence[tuple[Device, GraphTimes]]) -> tuple[CostTable, ...]:
    groups: dict[tuple[str, int], list[GraphTimes]] = {}
    for device, one in measured:
        groups.setdefault((device.kind, one.workers), []).append(one)
    tables = []
    for (kind, workers), group in groups.items():
        times = sorted(group, key=lambda t: t.rows)
        trust = _evened(np.array([t.rows for t in times]), np.array([t.total for t in times]))
        nodes = tuple(times[0].forward)
        tables.append(
            CostTable(
                kind,
                workers,
                nodes,
                tuple(t.rows for t in times),
                trust * np.array([[t.forward[n] for n in nodes] for t in times]),
                trust * np.array([[t.backward[n] for n in nodes] for t in times]),
                trust * np.array([[t.loss_forward, t.loss_backward] for t in times]),
            )
        )
    return tuple(tables)


def _evened(rows: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """[rows, 1] factors that bring the measured totals half-way (geometrically) to the line `a + b rows` through them.

    A search over micro-batch sizes finds the size whose measurement was luckiest; half of a deviation from the line
    is taken for noise, half for the truth. The line is fitted to relative errors.
    """
    if len(rows) < 3:
        return np.ones((len(rows), 1))
    weighted = np.stack([1 / totals, rows / totals], axis=1)
    (a, b), *_ = np.linalg.lstsq(weighted, np.ones(len(rows)), rcond=None)
    line = a + b * rows
    if a < 0 or b <= 0:  # no fixed cost: proportional to the samples
        line = rows * (rows / totals).sum() / ((rows / totals) ** 2).sum()
    return np.asarray(np.sqrt(line / totals))[:, None]


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


def graph_signature(program: Program) -> list[Any]:
    """What the measured times of a program depend on: operators, their connections, shapes and dtypes."""
    lines = []
    for node in program.graph.nodes:
        value = node.meta.get("val")
        shape = [str(s) for s in value.shape] + [str(value.dtype)] if isinstance(value, torch.Tensor) else []
        if node.op == "get_attr":
            tensor = get_attribute(program.graph_module, str(node.target))
            shape = [*map(str, tensor.shape), str(tensor.requires_grad)] if isinstance(tensor, torch.Tensor) else []
        target = node.name if node.op in ("placeholder", "get_attr") else str(node.target)
        lines.append(f"{node.name} {node.op} {target} {node.args} {node.kwargs} {shape}")
    shapes = [f"{i.path} {i.shape and tuple(i.shape)} {i.dtype} {i.batch_dim}" for i in program.inputs]
    text = "\n".join(lines)
    return [hashlib.sha256(text.encode()).hexdigest(), shapes, program.training]


def call_signature(example: Example) -> list[Any]:
    """What the measured steps of a call depend on beside the devices."""
    return [graph_signature(example.program), example.training, _loss_identity(example.loss, example.target)]


def _loss_identity(loss_fn: Any, target: Any) -> list[str]:
    """What the cost of a loss depends on, as far as visible: its code and the shapes of the target."""
    if loss_fn is None:
        return []
    try:
        code = inspect.getsource(loss_fn)
    except (OSError, TypeError):
        code = f"{getattr(loss_fn, '__module__', '')}.{getattr(loss_fn, '__qualname__', type(loss_fn).__qualname__)}"
    shapes = [str(tuple(t.shape)) for t in torch_private.tree_leaves(target) if isinstance(t, torch.Tensor)]
    return [code, repr(loss_fn) if isinstance(loss_fn, torch.nn.Module) else "", *shapes]


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
        source = Measured(
            example.program,
            example.batching,
            example.leaves,
            devices,
            training=example.training,
            loss_fn=example.stage_loss,
            target=example.target,
            target_dims=example.loss_split.target_dims if example.loss_split is not None else (),
            n_microbatches=n_microbatches,
            cache=store,
        )
        return cost_graph.build(example.program, example.batching, source, training=example.training, progress=progress)


@contextmanager
def measurement_cache(wanted: bool) -> Iterator[MeasurementCache | None]:
    """The cache on disk; None if it is not wanted."""
    if not wanted:
        yield None
        return
    with MeasurementCache() as store:
        yield store
