"""The seconds of a program's operators on devices at hand, from the cache or timed within whole passes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from autopar.analysis.batching import Batching
from autopar.analysis.operators import on_device, requires_grad_nodes, written_arguments
from autopar.capture.program import Program
from autopar.capture.repeated_layers.measure_once import ReducedGraph, reduce_graph
from autopar.costs.call_signature import graph_signature, loss_signature
from autopar.costs.cost_table import Calls, Progress
from autopar.errors import InfeasibleError
from cost_models import Device, MeasurementCache, signature_key
from cost_models.measuring.autocast import Autocast
from cost_models.measuring.operator_times import Companions, GraphTimes, measure
from cost_models.measuring.repeats import until_two_agree

log = logging.getLogger(__name__)

# Equal operators that are timed; the rest get their mean. More of them average out noise and cost more time.
_SAME_MEASURED = 3

# Passes that take less than this many seconds are over before a disturbance is: they are measured at two different
# times, and again until two measurements agree, up to this many.
_SHORT = 0.05
_MEASUREMENTS = 4

# A micro-batch that takes this much more time a sample than its neighbours in size is measured once more.
_SUSPICIOUS = 1.25


_Job = tuple[Device, int, int]  # device, busy workers, samples


class Measuring:
    """Times of a program's operators, under `autocasts` by device type.

    `elsewhere(device, workers, samples)`: makes passes in the processes of the devices; None: in threads of this one.
    `gpus`: by kind, the different GPUs of this process, each with a thread of its own; CPU workers are not among them.
    """

    def __init__(
        self,
        program: Program,
        batching: Batching,
        calls: Calls,
        training: bool,
        cache: MeasurementCache | None,
        autocasts: Mapping[str, Autocast],
        elsewhere: Callable[[Device, int, int], GraphTimes] | None = None,
        gpus: Mapping[str, Sequence[Device]] = MappingProxyType({}),
    ) -> None:
        self._elsewhere, self._gpus = elsewhere, gpus
        self._calls, self._training, self._cache, self._autocasts = calls, training, cache, autocasts
        self._reduced, self._captured = _reduced(program, batching), program.device
        self._signature = [graph_signature(program), training, loss_signature(calls.loss_fn, calls.target)]
        self._has_tail = batching.tail is not None
        if self._has_tail:
            self._signature.append("tail")
        self.too_large: list[tuple[str, int]] = []  # kind of device, samples that its memory does not hold

    def run(self, jobs: Sequence[_Job], progress: Progress) -> list[tuple[Device, GraphTimes]]:
        """Times for every (device, busy workers, samples), from the cache or measured and then cached.

        Sizes that the memory of a GPU does not hold are left out. Raises InfeasibleError where it holds none.
        """
        keys = [
            signature_key(
                "times" if workers == 1 or self._elsewhere is None else "times of processes",
                *(self._signature, d.kind, d.threads, workers, rows, self._autocast_of(d).signature),
            )
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
        return (self._elsewhere or self.passes)(device, workers, rows)

    def passes(self, device: Device, workers: int, rows: int, companions: Companions | None = None) -> GraphTimes:
        """Times of this process, while `workers` threads of it, or its companions, make the same passes."""
        log.info("profiling %s: %d samples, %d busy", device.kind, rows, workers)
        reduced = self._reduced
        others = self._gpus.get(device.kind, ())[1:workers] if companions is None else ()

        def module_on(place: torch.device) -> fx.GraphModule:
            return on_device(reduced.module, self._captured, place)

        def inputs(rows: int) -> list[Any]:
            made = [
                shape.make(rows, device.torch_device).requires_grad_(gradient and self._training)
                for shape, gradient in reduced.stand_ins
            ]
            return [*self._calls.inputs(rows), *made]

        times = measure(
            module_on(device.torch_device),
            inputs,
            self._calls.loss,
            rows,
            device,
            workers=workers,
            training=self._training,
            n_outputs=reduced.n_outputs,
            all_outputs=self._has_tail,
            autocast=self._autocast_of(device),
            companions=companions,
            beside=[(module_on(gpu.torch_device), gpu.torch_device) for gpu in others],
        )
        forward, backward, accumulation = (
            {name: sum(seconds.get(m, 0.0) for m in like) / len(like) for name, like in reduced.like.items()}
            for seconds in (times.forward, times.backward, times.accumulation)
        )
        accumulation = {name: seconds for name, seconds in accumulation.items() if seconds}
        return replace(times, forward=forward, backward=backward, accumulation=accumulation)

    def _autocast_of(self, device: Device) -> Autocast:
        return self._autocasts[device.torch_device.type]


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
