"""Which micro-batch sizes to time on which devices, and timing them, or taking the times from the cache."""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar import _torch
from autopar.batching import Batching
from autopar.capture import Program
from autopar.operators import captured_device, on_device, requires_grad_nodes, written_arguments
from cost_models import Device, MeasurementCache, signature_key
from cost_models.graphs import device_of, get_attribute
from cost_models.profiler import GraphTimes, Loss, measure
from cost_models.repeats import ReducedGraph, reduce_graph

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]  # (what is being done, fraction done)

# Operators of the same sort that are timed; the rest take their mean. More tell more about noise and cost more time.
_SAME_MEASURED = 3

# A micro-batch that takes this much more time a sample than its neighbours in size is measured once more.
_SUSPICIOUS = 1.25


@dataclass(frozen=True)
class Calls:
    """Example calls of a program at any number of samples."""

    program: Program
    leaves: list[Any]  # flat inputs of the example
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None
    target: Any = None

    def inputs(self, rows: int) -> list[Any]:
        """The flat inputs of the first `rows` samples."""
        return [
            x if i.batch_dim is None else x.detach().narrow(i.batch_dim, 0, rows)
            for x, i in zip(self.leaves, self.program.inputs, strict=True)
        ]

    def loss(self, rows: int) -> Loss | None:
        """The loss of the first `rows` samples as a function of the flat outputs."""
        program, loss_fn = self.program, self.loss_fn
        if loss_fn is None:
            return None
        part = _torch.tree_map(
            lambda t: t[:rows] if isinstance(t, torch.Tensor) and t.dim() and t.shape[0] == program.batch_size else t,
            self.target,
        )

        def loss(outputs: tuple[Any, ...]) -> torch.Tensor:
            output = _torch.tree_unflatten(list(outputs)[: program.n_outputs], program.out_spec)
            device = device_of(outputs)
            return loss_fn(output, _torch.tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, part))

        return loss


def sizes(
    devices: Sequence[Device], program: Program, batching: Batching, n_microbatches: int | None
) -> list[tuple[int, int]]:
    """(busy workers, samples) to measure on devices of one kind: the whole batch alone, micro-batches with all
    siblings busy. `n_microbatches`: that micro-batch size only."""
    batch = max(program.batch_size, 1)
    whole = [(1, batch)]
    if not batching.splittable or batch == 1:
        return whole
    together = len(devices) if devices[0].shares_process_memory else 1
    if n_microbatches is not None:
        parts = [-(-batch // n_microbatches)]
    else:
        parts = sorted({max(1, batch // part) for part in (2, 4, 8, 16)}, reverse=True)
    few = [(1, parts[len(parts) // 2])] if together > 1 else []
    return whole + few + [(together, size) for size in parts if (together, size) not in whole + few]


class Measuring:
    """Times of a program's operators."""

    def __init__(
        self, program: Program, batching: Batching, calls: Calls, training: bool, cache: MeasurementCache | None
    ) -> None:
        self._calls, self._training, self._cache = calls, training, cache
        self._reduced, self._captured = _reduced(program, batching), captured_device(program)
        self._signature = [graph_signature(program), training, _loss_identity(calls.loss_fn, calls.target)]

    def run(self, jobs: Sequence[tuple[Device, int, int]], progress: Progress) -> list[tuple[Device, GraphTimes]]:
        """Times for every (device, busy workers, samples); what had to be measured is put into the cache."""
        keys = [signature_key("times", self._signature, d.kind, workers, rows) for d, workers, rows in jobs]
        known = self._cache.get_many(keys) if self._cache is not None else {}
        found: list[GraphTimes] = []
        for index, (key, (device, workers, rows)) in enumerate(zip(keys, jobs, strict=True)):
            progress(f"profiling {device.kind}: {rows} samples, {workers} busy", index / len(jobs))
            times = GraphTimes(rows, workers, *known[key]) if key in known else self._measure(device, workers, rows)
            found.append(times)
        for index, (key, (device, _, rows)) in enumerate(zip(keys, jobs, strict=True)):
            times = found[index]
            same = [t for t, (d, w, _) in zip(found, jobs, strict=True) if d is device and w == times.workers]
            if key not in known and _disturbed(times, same):
                progress(f"profiling {device.kind}: {rows} samples again", 1.0)
                found[index] = min(times, self._measure(device, times.workers, rows), key=lambda t: t.total)
        if self._cache is not None:
            self._cache.put_many(
                {
                    key: [t.forward, t.backward, t.loss_forward, t.loss_backward]
                    for key, t in zip(keys, found, strict=True)
                    if key not in known
                }
            )
        return [(device, times) for (device, _, _), times in zip(jobs, found, strict=True)]

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
        return GraphTimes(rows, workers, forward, backward, times.loss_forward, times.loss_backward)


def _disturbed(times: GraphTimes, same: Sequence[GraphTimes]) -> bool:
    """Whether `times` stand out from those at the next smaller and larger size, as a busy machine makes them."""
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
    gradients = {n.name for n in requires_grad_nodes(program)}
    return reduce_graph(program.graph_module, batching.shapes, keep, gradients, _SAME_MEASURED)


def graph_signature(program: Program) -> list[Any]:
    """What the measured times of a program depend on: operators, how they hang together, shapes and dtypes."""
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


def _loss_identity(loss_fn: Any, target: Any) -> list[str]:
    """What the cost of a loss depends on, as far as it can be told: its code and the shapes of the target."""
    if loss_fn is None:
        return []
    try:
        code = inspect.getsource(loss_fn)
    except (OSError, TypeError):
        code = f"{getattr(loss_fn, '__module__', '')}.{getattr(loss_fn, '__qualname__', type(loss_fn).__qualname__)}"
    shapes = [str(tuple(t.shape)) for t in _torch.tree_leaves(target) if isinstance(t, torch.Tensor)]
    return [code, repr(loss_fn) if isinstance(loss_fn, torch.nn.Module) else "", *shapes]
