"""Links: the seconds it takes to hand a tensor from one device to another, measured by size."""

from __future__ import annotations

import itertools
import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
import torch

from cost_models.hardware.devices import Device, synchronize

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
"""Bytes of the tensors that a link is measured with: latency decides the small ones, bandwidth the large ones."""

HAND_OFF_ROUNDS = 100  # a hand-off takes microseconds
COPY_ROUNDS = 9  # a copy of the largest tensor takes tens of milliseconds between GPU and pageable memory
WARM_UP_ROUNDS = 3  # first touches: allocator pools, CUDA contexts, peer access

AGREEMENT = 1.5
"""Measurements of a link agree with it up to this factor: caches and protocols change with the size, beside noise."""

NEGLIGIBLE = 0.05  # a hand-off that grows by less than this share of a memory copy's time copies nothing


@dataclass(frozen=True)
class Link:
    """A one-way connection that takes latency + bytes / bandwidth (the alpha-beta or Hockney model)."""

    latency: float  # s
    bandwidth: float  # bytes/s; math.inf where tensors are handed over by reference

    def __post_init__(self) -> None:
        if not (0 <= self.latency < math.inf and self.bandwidth > 0):
            raise ValueError(f"{self} needs a finite latency >= 0 s and a bandwidth > 0 bytes/s")

    def seconds(self, nbytes: float) -> float:
        """Seconds to hand over one tensor of `nbytes` bytes."""
        return self.latency + nbytes / self.bandwidth


def measure_links(devices: Sequence[Device]) -> dict[tuple[str, str], Link]:
    """The measured link (source name, target name) of every ordered pair of distinct devices.

    Pairs on the same hardware are measured once, in about a second: all CPU workers share one link, and each ordered
    pair of GPUs has its own, as their wiring may differ.
    """
    measured: dict[tuple[str, torch.device, str, torch.device], Link] = {}
    links = {}
    for source, target in itertools.permutations(devices, 2):
        pair = (source.kind, source.torch_device, target.kind, target.torch_device)
        if pair not in measured:
            measured[pair] = measure_link(source, target)
        links[source.name, target.name] = measured[pair]
    return links


def measure_link(source: Device, target: Device, sizes: Sequence[int] = SIZES) -> Link:
    """The link from `source` to `target`, fitted to the median seconds of handing over tensors of `sizes` bytes.

    Workers on the same memory pass a reference between two threads; the bandwidth is infinite if the times
    agree. Otherwise the tensor is copied with `Tensor.to`, and the clock stops when both devices are idle.

    Raises:
        ValueError: fewer than two different sizes.
    """
    tensors = [torch.ones(size, dtype=torch.uint8, device=source.torch_device) for size in sizes]
    if source.torch_device != target.torch_device:
        return fit_link(sizes, _copy_seconds(tensors, target.torch_device))
    link = fit_link(sizes, _hand_off_seconds(tensors))
    largest = max(tensors, key=torch.Tensor.numel)
    if largest.numel() / link.bandwidth < NEGLIGIBLE * _memory_copy_seconds(largest):
        return Link(link.latency, math.inf)
    return link


def fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> Link:
    """The link closest to `seconds[k]` > 0 for `sizes[k]` bytes, in relative terms, over the measurements k that agree:

        minimise  sum_k ((latency + sizes[k] / bandwidth) / seconds[k] - 1)^2   with latency, 1 / bandwidth >= 0.

    Relative errors, because absolute ones would leave the latency to the noise of the largest tensor. Measurements that
    do not agree: networks let a few kilobytes pass at once and slow down afterwards, which says nothing about their
    bandwidth. Those agree that lie within a factor of AGREEMENT of one link: of those through two measurements, or
    through one without a latency or with infinite bandwidth, that with the least sum of |log(predicted / measured)|.

    Raises:
        ValueError: fewer than two different sizes, which leave latency and bandwidth undetermined.
    """
    if len(set(sizes)) < 2:
        raise ValueError(f"a link needs measurements at two or more sizes, got {tuple(sizes)}")
    nbytes, measured = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    lines = [(t, 0.0) for t in measured] + [(0.0, t / n) for n, t in zip(nbytes, measured, strict=True)]
    for i, j in itertools.combinations(range(len(sizes)), 2):
        slope = (measured[j] - measured[i]) / (nbytes[j] - nbytes[i]) if sizes[i] != sizes[j] else 0.0
        lines.append((measured[i] - slope * nbytes[i], slope))
    missed = [np.abs(np.log((a + b * nbytes) / measured)) for a, b in lines if a >= 0 and b >= 0]
    agree = min(missed, key=lambda one: float(one.sum())) <= math.log(AGREEMENT)
    if len(set(nbytes[agree])) < 2:  # they all differ
        return _least_squares(nbytes, measured)
    return _least_squares(nbytes[agree], measured[agree])


def _least_squares(nbytes: np.ndarray, seconds: np.ndarray) -> Link:
    """The link with the least squares of relative errors."""
    unit = nbytes.max()  # of the second column, so that both are of one magnitude
    columns = np.stack([1 / seconds, nbytes / unit / seconds], axis=1)
    latency, slope = np.linalg.lstsq(columns, np.ones(len(nbytes)), rcond=None)[0]
    # Convex in two unknowns: where one comes out negative, the best with it at zero is the constrained optimum.
    if slope <= 0:
        return Link(_scale(columns[:, 0]), math.inf)
    if latency < 0:
        return Link(0.0, float(unit / _scale(columns[:, 1])))
    return Link(float(latency), float(unit / slope))


def _scale(column: np.ndarray) -> float:
    """The x that minimises |x column - 1|^2."""
    return float(column.sum() / (column @ column))


def _hand_off_seconds(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Median one-way seconds of each tensor from thread to thread: half of a round trip.

    this thread ──there──> echo
         ^                  │
         └──────back────────┘
    """
    there: SimpleQueue[torch.Tensor | None] = SimpleQueue()
    back: SimpleQueue[torch.Tensor] = SimpleQueue()

    def echo() -> None:
        while (tensor := there.get()) is not None:
            back.put(tensor)

    def round_trip(tensor: torch.Tensor) -> None:
        there.put(tensor)
        back.get()

    thread = threading.Thread(target=echo, name="link-echo", daemon=True)
    thread.start()
    try:
        return [seconds / 2 for seconds in _median_seconds(round_trip, tensors, HAND_OFF_ROUNDS)]
    finally:
        there.put(None)
        thread.join()


def _copy_seconds(tensors: Sequence[torch.Tensor], target: torch.device) -> list[float]:
    """Median seconds to copy each tensor to another device, allocation included."""

    def copy(tensor: torch.Tensor) -> None:
        tensor.to(target)
        synchronize(tensor.device, target)

    return _median_seconds(copy, tensors, COPY_ROUNDS)


def _memory_copy_seconds(tensor: torch.Tensor) -> float:
    """Median seconds to copy a tensor within its own memory."""
    duplicate = torch.empty_like(tensor)

    def copy(original: torch.Tensor) -> None:
        duplicate.copy_(original)
        synchronize(original.device)

    return _median_seconds(copy, [tensor], COPY_ROUNDS)[0]


def _median_seconds(
    action: Callable[[torch.Tensor], None], tensors: Sequence[torch.Tensor], rounds: int
) -> list[float]:
    """Median seconds of `action` on each tensor; the tensors take turns, so that a busy moment strikes them alike."""
    synchronize(*(tensor.device for tensor in tensors))
    samples: list[list[float]] = [[] for _ in tensors]
    for turn in range(WARM_UP_ROUNDS + rounds):
        for tensor, sample in zip(tensors, samples, strict=True):
            start = time.perf_counter()
            action(tensor)
            elapsed = time.perf_counter() - start
            if turn >= WARM_UP_ROUNDS:
                sample.append(elapsed)
    return [statistics.median(sample) for sample in samples]
