"""Seconds of the operators of a graph on a device that need not be present.

A kernel takes as long as the slower of its two roofs, and its launch (Williams, Waterman, Patterson: Roofline, 2009):

    FLOP/s |        ________ achievable peak      seconds = max(FLOPs / achievable, bytes / bandwidth) + launch
           |      /
           |    /  bytes/s x intensity            The roofs are curves of the kernel's size: see `efficiency_curves`.
           |__/______________ FLOPs per byte
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from cost_models.kernels.efficiency_curves import (
    BATCHED_PRODUCTS,
    CHANNEL,
    CONVOLUTIONS,
    UNALIGNED,
    WINOGRAD,
    Efficiency,
    filled,
    reuse_needed,
)
from cost_models.kernels.kernel import ComputeKind, Kernel, MemoryKind
from cost_models.kernels.operator_work import OperatorWork, count

_BATCHED = 3  # dimensions of the result of many products


@dataclass(frozen=True)
class Rates:
    """The highest rates of a device."""

    peak_flops: Mapping[torch.dtype, float]  # FLOP/s of dense products by the dtype of the factors
    bandwidth: float  # bytes/s of its memory
    launch: float  # s: starting a kernel
    units: int = 0  # multiprocessors, among which the tiles of a product are divided; 0: not known
    convolutions: float = 0.0  # FLOP/s of float32 convolutions; 0: as of other products
    single: float = 0.0  # FLOP/s of float32 without units for products of matrices; 0: not known

    def peak(self, dtype: torch.dtype, *, convolution: bool = False) -> float:
        """FLOP/s at `dtype`, of convolutions or of other products.

        Raises:
            ValueError: the device's FLOP/s at `dtype` are not known.
        """
        if convolution and dtype == torch.float32 and self.convolutions:
            return self.convolutions
        if dtype not in self.peak_flops:
            known = ", ".join(str(d) for d in self.peak_flops)
            raise ValueError(f"the device's FLOP/s are not known for {dtype}; known are {known}")
        return self.peak_flops[dtype]


@dataclass(frozen=True)
class OperatorEstimate:
    """What one node of a graph does and how long it takes."""

    forward_flops: int
    backward_flops: int
    forward_bytes: int  # read and written
    backward_bytes: int
    forward_seconds: float
    backward_seconds: float


def estimate(
    module: fx.GraphModule,
    rows: int,
    rates: Rates,
    efficiency: Efficiency,
    *,
    training: bool = True,
    inputs: Sequence[Any] | None = None,
) -> dict[str, OperatorEstimate]:
    """Costs of every node of a flat graph that computes, at `rows` samples; nothing is run.

    `module`, `rows`, `training` and `inputs` are as for `work.count`, which raises what it raises.

    Raises:
        ValueError: FLOP/s for the dtype of a product are not known.
    """
    counted = count(module, rows, training=training, inputs=inputs)
    return {name: price(work, rates, efficiency) for name, work in counted.items()}


def price(work: OperatorWork, rates: Rates, efficiency: Efficiency) -> OperatorEstimate:
    """What work that was counted costs on a device.

    Raises:
        ValueError: FLOP/s for the dtype of a product are not known.
    """
    return OperatorEstimate(
        sum(k.flops for k in work.forward),
        sum(k.flops for k in work.backward),
        sum(k.nbytes for k in work.forward),
        sum(k.nbytes for k in work.backward),
        sum(kernel_seconds(k, rates, efficiency) for k in work.forward),
        sum(kernel_seconds(k, rates, efficiency) for k in work.backward),
    )


def kernel_seconds(kernel: Kernel, rates: Rates, efficiency: Efficiency) -> float:
    """Seconds of one kernel, launch included."""
    return busy_seconds(kernel, rates, efficiency) + rates.launch


def busy_seconds(kernel: Kernel, rates: Rates, efficiency: Efficiency) -> float:
    """Seconds for which one kernel keeps the device busy: without its launch, which the host does beforehand."""
    if not kernel.flops:
        curve = efficiency.memory[cast(MemoryKind, kernel.kind)]
        return max(curve.seconds(kernel.nbytes, rates.bandwidth), _by_channels(kernel, rates))
    return max(_computing(kernel, rates, efficiency), _moving(kernel, rates, efficiency))


def _computing(kernel: Kernel, rates: Rates, efficiency: Efficiency) -> float:
    """Seconds of the FLOPs of a product."""
    peak = rates.peak(kernel.dtype, convolution=kernel.kind in CONVOLUTIONS)
    curve = efficiency.compute[cast(ComputeKind, kernel.kind)]
    if kernel.kind in CONVOLUTIONS and rates.units:  # measured curves know their convolutions
        if _on_matrix_units(kernel, rates):
            curve = CONVOLUTIONS[kernel.kind]
        elif kernel.dtype == torch.float32 and kernel.winograd:
            peak /= WINOGRAD
    flops = kernel.flops * (1 - kernel.skipped) / _filled(kernel, rates) * _detour(kernel, rates)
    return curve.seconds(flops, kernel.nbytes, peak, rates.bandwidth)


def _by_channels(kernel: Kernel, rates: Rates) -> float:
    """Least seconds of a kernel that uses one multiprocessor to add up each channel."""
    if not (kernel.channels and rates.units):
        return 0.0
    share = CHANNEL[cast(MemoryKind, kernel.kind)] * kernel.channels / rates.units
    return kernel.nbytes / (share * rates.bandwidth)


def _moving(kernel: Kernel, rates: Rates, efficiency: Efficiency) -> float:
    """Seconds of the bytes of a product."""
    copying = efficiency.memory["pointwise"].seconds(kernel.nbytes, rates.bandwidth)
    if len(kernel.sizes) < _BATCHED or not rates.units:  # measured curves know their products
        return copying
    return max(copying, kernel.nbytes / (BATCHED_PRODUCTS * rates.bandwidth))


def _detour(kernel: Kernel, rates: Rates) -> float:
    """How much longer a product takes whose rows start at odd addresses, on units for 16-bit numbers."""
    sixteen = kernel.dtype.itemsize == 2
    return UNALIGNED if sixteen and not kernel.aligned and _on_matrix_units(kernel, rates) else 1.0


def _on_matrix_units(kernel: Kernel, rates: Rates) -> bool:
    """Whether a kernel computes on units for products of matrices."""
    if kernel.dtype.itemsize == 2:
        return rates.peak(kernel.dtype) > rates.peak(torch.float32)
    single = kernel.dtype == torch.float32 and rates.single > 0
    return single and rates.peak(kernel.dtype, convolution=kernel.kind in CONVOLUTIONS) > rates.single


def _filled(kernel: Kernel, rates: Rates) -> float:
    """The fraction of the device's units that a product keeps busy with work of use."""
    results = math.prod(kernel.sizes)
    if not rates.units or len(kernel.sizes) < 2 or not results:
        return 1.0
    reuse = reuse_needed(rates.peak(kernel.dtype), rates.bandwidth, kernel.dtype.itemsize)
    return filled(kernel.sizes, rates.units, kernel.flops / (2 * results), reuse)
