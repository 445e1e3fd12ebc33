"""A device at hand as a `DeviceSpec`: its best product, copy and launch, timed in about a second."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from cost_models.hardware.device_specs import DeviceSpec
from cost_models.hardware.devices import Device, operator_threads, synchronize

ROUNDS = 5  # the fastest counts: other programs only add time
LAUNCHES = 200

_PRODUCT = {"cpu": 768, "cuda": 8192}  # rows of square factors: large enough to be limited by arithmetic
_TRIAL = 192  # rows of square factors, multiplied in a hundredth of a second by a CPU that emulates the dtype
_MUCH_SLOWER = 4  # than in float32, in a trial
_COPY = {"cpu": 64 << 20, "cuda": 1 << 30}  # bytes: larger than caches


def measure_spec(device: Device) -> DeviceSpec:
    """What `device` reaches, with its own number of threads; its efficiencies are 1, as the figures are reached ones.

    Dtypes in which a product is slower than in float32 are left out: there float32 is what to compare with. Large
    products in float16 take a CPU a hundred times as long, so small ones are tried first.
    """
    place = device.torch_device
    with operator_threads(device.threads):
        single, trial = (_product_rate(place, torch.float32, n) for n in (_PRODUCT[place.type], _TRIAL))
        peaks = {"float32": single}
        for dtype in (torch.float16, torch.bfloat16):
            if _product_rate(place, dtype, _TRIAL) * _MUCH_SLOWER < trial:
                continue
            rate = _product_rate(place, dtype, _PRODUCT[place.type])
            if rate > single:
                peaks[str(dtype).removeprefix("torch.")] = rate
        bandwidth = _copy_rate(place)
        launch = _launch_seconds(place)
    source = f"measured, {time.strftime('%Y-%m-%d')}, torch {torch.__version__}"
    sources = dict.fromkeys(("peak_flops", "memory", "bandwidth", "launch"), source)
    return DeviceSpec(device.kind, peaks, device.memory, bandwidth, 1.0, 1.0, launch, sources=sources)


def _product_rate(place: torch.device, dtype: torch.dtype, n: int) -> float:
    """FLOP/s of a product of `n` x `n` matrices."""
    a, b = (torch.ones(n, n, dtype=dtype, device=place) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / _best(lambda: torch.mm(a, b, out=out), place)


def _copy_rate(place: torch.device) -> float:
    """Bytes/s, read and written, of copying within the device's memory."""
    source = torch.ones(_COPY[place.type], dtype=torch.uint8, device=place)
    target = torch.empty_like(source)
    return 2 * source.numel() / _best(lambda: target.copy_(source), place)


def _launch_seconds(place: torch.device) -> float:
    """Seconds an operator on one element takes when many are queued."""
    tensor = torch.zeros(1, device=place)

    def launches() -> None:
        for _ in range(LAUNCHES):
            tensor.add_(1.0)

    return _best(launches, place) / LAUNCHES


def _best(action: Callable[[], object], place: torch.device) -> float:
    """The shortest of some runs, in seconds, after one that does not count."""
    seconds = []
    for _ in range(1 + ROUNDS):
        start = time.perf_counter()
        action()
        synchronize(place)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
