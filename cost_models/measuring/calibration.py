"""Rates and efficiency curves of a real device, from a handful of operators of several sizes."""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from cost_models.graphs import tensors_in
from cost_models.hardware.device_specs import DeviceSpec
from cost_models.hardware.devices import Device, operator_threads, synchronize
from cost_models.kernels.efficiency_curves import ComputeCurve, Efficiency, MemoryCurve
from cost_models.kernels.kernel import COMPUTE_KINDS, MEMORY_KINDS, ComputeKind, Kernel, Kind, MemoryKind
from cost_models.kernels.operator_work import count_call
from cost_models.kernels.roofline import Rates
from cost_models.measuring.cache import MeasurementCache, signature_key

_aten = torch.ops.aten
_SETS = 16  # of operands that take turns, at most
_SETS_BYTES = 1 << 26  # of all sets together, unless one is larger


@dataclass(frozen=True)
class Calibration:
    """What a device was measured to do. `rates` and `efficiency` belong together."""

    rates: Rates
    efficiency: Efficiency

    def spec(self, measured: DeviceSpec) -> DeviceSpec:
        """A kind of device that was measured, with these figures in place of its own."""
        peaks = {str(dtype).removeprefix("torch."): peak for dtype, peak in self.rates.peak_flops.items()}
        return replace(
            measured,
            peak_flops={**measured.peak_flops, **peaks},
            bandwidth=self.rates.bandwidth,
            launch=self.rates.launch,
            curves=self.efficiency.to_json(),
            sources={**measured.sources, "curves": measured.sources["peak_flops"]},
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON value that `from_json` reads."""
        return {
            "peak_flops": {str(dtype).removeprefix("torch."): peak for dtype, peak in self.rates.peak_flops.items()},
            "bandwidth": self.rates.bandwidth,
            "launch": self.rates.launch,
            "efficiency": self.efficiency.to_json(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """What `to_json` wrote. Raises AttributeError, LookupError, TypeError or ValueError for anything else."""
        peaks = {getattr(torch, name): peak for name, peak in value["peak_flops"].items()}
        numbers = (*peaks.values(), value["bandwidth"], value["launch"])
        if not all(isinstance(dtype, torch.dtype) for dtype in peaks) or not all(0 <= n < math.inf for n in numbers):
            raise ValueError("cached rates must be finite numbers >= 0 by dtype")
        rates = Rates(peaks, value["bandwidth"], value["launch"])
        return cls(rates, Efficiency.from_json(value["efficiency"]))


@dataclass(frozen=True)
class Probe:
    """One operator to be timed, which is one kernel."""

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]  # of its tensors, which come first
    constants: tuple[Any, ...] = ()
    gradient: bool = False  # time the backward instead


def calibrate(device: Device, cache: MeasurementCache | None = None, budget: float = 10.0) -> Calibration:
    """Measure `device`: about `budget` seconds, once (the result is kept in `cache`).

    Bandwidth is that of a large copy between tensors that exist, a peak the fastest product. On a GPU the peaks are of
    float32 and bfloat16, on a CPU of float32. Operators are timed with operands in turn, so that weights come from
    memory as they do in a model.
    """
    how = ("recorded, 256 channels",) if device.torch_device.type == "cuda" else ()
    key = signature_key("calibration", device.kind, device.threads, *how)
    known = cache.get(key, Calibration.from_json) if cache is not None else None
    if known is not None:
        return known
    with operator_threads(device.threads):
        result = _calibrate(device.torch_device, budget)
    if cache is not None:
        cache.put(key, result.to_json())
    return result


def _calibrate(place: torch.device, budget: float) -> Calibration:
    gpu = place.type == "cuda"
    bandwidth = _copy_bandwidth(place, 1 << (30 if gpu else 26))
    smallest = Probe(_aten.relu.default, ((16,),))
    launch = _seconds(smallest, torch.float32, place, 0.02)
    gap = _seconds(smallest, torch.float32, place, 0.02, recorded=True) if gpu else launch
    dtypes = [torch.float32, torch.bfloat16] if gpu else [torch.float32]
    probes = [(probe, dtype) for dtype in dtypes for probe in _probes(large=gpu)]
    measured: list[tuple[Kernel, float]] = []
    for probe, dtype in probes:
        seconds = _seconds(probe, dtype, place, budget / len(probes), recorded=gpu)
        measured.append((_kernel(probe, dtype), max(seconds - gap, seconds / 100)))
    peaks = {d: max(k.flops / s for k, s in measured if k.dtype == d) for d in dtypes}
    return Calibration(Rates(peaks, bandwidth, launch), _fit(measured, peaks, bandwidth))


def _fit(measured: Sequence[tuple[Kernel, float]], peaks: Mapping[torch.dtype, float], bandwidth: float) -> Efficiency:
    """Curves for the measured kernels. FLOPs of all dtypes count in units of their peak."""
    by_kind: dict[Kind, list[tuple[Kernel, float]]] = defaultdict(list)
    for kernel, seconds in measured:
        by_kind[kernel.kind].append((kernel, seconds))
    compute: dict[ComputeKind, ComputeCurve] = {
        kind: ComputeCurve.fit([(k.flops / peaks[k.dtype], k.nbytes, s) for k, s in by_kind[kind]], 1.0, bandwidth)
        for kind in COMPUTE_KINDS
    }
    memory: dict[MemoryKind, MemoryCurve] = {
        kind: MemoryCurve.fit([(k.nbytes, s) for k, s in by_kind[kind]], bandwidth) for kind in MEMORY_KINDS
    }
    return Efficiency(compute, memory)


def _probes(large: bool) -> Iterator[Probe]:
    """Kernels of all sorts and sizes; on a GPU (`large`) the sizes are of another order."""
    more = 8 if large else 1
    for m, k, n in ((16, 16, 16), (64, 64, 64), (8, 768, 768), (128, 128, 128), (64, 768, 3072), (512, 768, 768)):
        yield Probe(_aten.mm.default, ((m * more, k), (k, n * more)))
    yield Probe(_aten.mm.default, ((768 * more, 768 * more), (768 * more, 768 * more)))
    yield Probe(_aten.bmm.default, ((48 * more, 64, 64), (48 * more, 64, 64)))
    same = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    for batch, channels, size, window in ((2, 8, 16, 3), (2, 64, 56, 1), (1, 64, 28, 3), (2, 256, 14, 3)):
        shapes = ((batch * more, channels, size, size), (channels, channels, window, window))
        yield Probe(_aten.convolution.default, shapes, same)
        yield Probe(_aten.convolution.default, shapes, same, gradient=True)
    for batch, heads, length, depth in ((2, 4, 16, 16), (2, 12, 64, 64), (1, 12, 256, 64), (1, 4, 1024, 64)):
        heads_of = ((batch * more, heads, length, depth),) * 3
        yield Probe(_aten.scaled_dot_product_attention.default, heads_of)
        yield Probe(_aten.scaled_dot_product_attention.default, heads_of, gradient=True)
    for rows in (8, 128, 2048, 16384):
        x = ((rows * more, 256),)
        for function in (_aten.relu.default, _aten.clone.default, _aten.relu_.default):
            yield Probe(function, x)
        yield Probe(_aten.add.Tensor, x + x)
        for function in (_aten.gelu.default, _aten.silu.default, _aten.exp.default, _aten.tanh.default):
            yield Probe(function, x)
        yield Probe(_aten.gelu.default, x, gradient=True)
        yield Probe(_aten.tanh.default, x, gradient=True)
        yield Probe(_aten.sum.dim_IntList, x, ([0],))
        yield Probe(_aten.mean.dim, x, ([-1],))
        for gradient in (False, True):
            yield Probe(_aten._softmax.default, x, (-1, False), gradient)
            yield Probe(_layer_norm, (*x, (256,), (256,)), (), gradient)
    for size in (8, 32, 96, 256):
        channels = 256 if large else 32  # a GPU's multiprocessors share the channels of a batch norm
        image = ((more, channels, size, size),)
        for gradient in (False, True):
            yield Probe(_batch_norm, (*image, (channels,), (channels,)), (), gradient)
            yield Probe(_aten.max_pool2d_with_indices.default, image, ([3, 3], [2, 2], [1, 1]), gradient)
        yield Probe(_aten.bernoulli_.float, image, (0.1,))


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    return _aten.native_layer_norm.default(x, weight.shape, weight, bias, 1e-5)


def _batch_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    return _aten.native_batch_norm.default(x, weight, bias, None, None, True, 0.1, 1e-5)


def _kernel(probe: Probe, dtype: torch.dtype) -> Kernel:
    tensors = [torch.empty(shape, dtype=dtype, device="meta", requires_grad=probe.gradient) for shape in probe.shapes]
    _, work = count_call(probe.function, (*tensors, *probe.constants))
    (kernel,) = work.backward if probe.gradient else work.forward
    return kernel


def _seconds(probe: Probe, dtype: torch.dtype, place: torch.device, budget: float, *, recorded: bool = False) -> float:
    """Seconds of one call: the least of five rounds, each over several sets of operands.

    `recorded`: the GPU runs the calls from a recorded graph, as the host takes longer to launch a small kernel than the
    GPU to run it.
    """
    nbytes = sum(torch.Size(shape).numel() for shape in probe.shapes) * dtype.itemsize
    operands = [torch.randn(shape, dtype=dtype, device=place) for shape in probe.shapes]
    sets = [
        [tensor.roll(shift).requires_grad_(probe.gradient) for tensor in operands]
        for shift in range(max(1, min(_SETS, _SETS_BYTES // nbytes)))
    ]
    # A backward runs on its forward's stream, which has to be the one that records.
    stream = torch.cuda.Stream(place) if recorded else None
    if stream is not None:
        synchronize(place)
    with torch.set_grad_enabled(probe.gradient), torch.cuda.stream(stream):
        calls = [_prepared(probe, tensors) for tensors in sets]
        _run(calls[:1], place)  # lazy initialisation
        once = _run(calls[-2:], place) / len(calls[-2:])
        n = max(2, min(1000, round(budget / 6 / max(once, 1e-7))))
        many = list(itertools.islice(itertools.cycle(calls), n))
        if stream is not None:
            many = [_recorded(many, stream).replay]
        return min(_run(many, place) / n for _ in range(5))  # what disturbs only adds


def _recorded(calls: Sequence[Callable[[], Any]], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return graph


def _prepared(probe: Probe, tensors: Sequence[torch.Tensor]) -> Callable[[], Any]:
    if not probe.gradient:
        return lambda: probe.function(*tensors, *probe.constants)
    result = tensors_in(probe.function(*tensors, *probe.constants))[0]
    gradient = torch.ones_like(result)
    return lambda: torch.autograd.grad(result, tensors, gradient, retain_graph=True)


def _run(calls: Sequence[Callable[[], Any]], place: torch.device) -> float:
    """Seconds for all calls, one behind the other."""
    synchronize(place)
    start = time.perf_counter()
    for call in calls:
        call()
    synchronize(place)
    return time.perf_counter() - start


def _copy_bandwidth(place: torch.device, nbytes: int) -> float:
    """Bytes per second, read and written, of a copy between two tensors."""
    source, target = (torch.ones(nbytes // 4, device=place) for _ in range(2))
    return 2 * nbytes / min(_run([lambda: target.copy_(source)], place) for _ in range(10))
