"""How much of a device's peak a kernel reaches, as a smooth function of its size.

```
    achieved                    A kernel with products takes   flops / (best peak) + exposed bytes / bandwidth + ramp,
      best |        ______      any other                      bytes / (best bandwidth) (1 + far x) + ramp,
           |     _--                                           x = bytes / (bytes + cache) from 0 to 1.
           |   _/
           |__/_________ size   So small kernels fall short of `best` by their ramp, products of little arithmetic
                                intensity by their bytes, and large tensors by what no cache holds.
```

Both formulas are linear in all parameters except `cache`, so a least-squares fit to measured seconds is exact and
quick.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Self

import numpy as np

from cost_models.kernels.kernel import COMPUTE_KINDS, MEMORY_KINDS, ComputeKind, Kind, MemoryKind

BEST_MATMUL = {"A100": 271 / 312, "H100": 795 / 989, "H200": 788 / 989}
"""Best measured bf16 product over the dense peak of the specification."""

BEST_COPY = 4300 / 4800
"""Measured bytes/s of a copy, read and written, over the specification, on an H200."""

BATCHED_PRODUCTS = 40.3e9 / 41.7e-3 / 1555e9
"""Fraction of the bandwidth that products of many small matrices reach, such as those of attention: attention by
products and a softmax moves 40.3 GB in 41.7 ms, forward and backward, on an A100 of 1555 GB/s (Dao et al.,
FlashAttention, 2022, figure 2: GPT-2 medium, 64 samples of 1024 tokens, 16 heads of 64)."""

_CACHES = 20  # sizes tried for `MemoryCurve.cache`

_ROUNDS = 5  # of reweighting; the second changes the third digit


LARGEST_TILES = ((256, 128), (128, 256))
"""Rows and columns of a result that a unit computes at a time: the largest and most efficient of cuBLAS (NVIDIA, Matrix
Multiplication Background User's Guide, 2023, section 2.3)."""

TILES = (*LARGEST_TILES, (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))
"""All of that list. cuBLAS takes one of them by heuristics, whatever the size (section 2.3)."""

_THIN_TILES = ((64, 32), (32, 64), (32, 32), (16, 64), (64, 16), (1, 128), (128, 1))
"""Of kernels for small and thin results."""

_THIN = 64  # with fewer rows or columns the largest tiles would be half empty

_SPLITS = (1, 2, 4, 8, 16, 32)
"""Parts into which a library divides the sums of a product, so that more units work on one tile: assumed."""

_SUMS = 4
"""What writing and reading back a partial sum of 32 bits takes, in loads of a factor of 16 bits."""

CACHE_SPEED = 3.5
"""Bytes/s from the cache that all units share over those from memory: 5120 bytes a clock of 1.41 GHz over 2039 GB/s on
an A100 (NVIDIA A100 architecture white paper, 2020); other devices are taken for alike."""

UNALIGNED = 3.0
"""How many times as long a product takes whose rows start at odd addresses: a language model's head takes three times
as long with a vocabulary for which the library has to fall back to such a kernel (Netflix Technology Blog: Scaling LLM
Post-Training at Netflix, 2026-02). NVIDIA's guide (section 2.2) asks for multiples of 16 bytes; what multiples of 4 and
8 bytes lose has no figure there, and none is taken."""

_LARGEST_REUSE = 256 * 128 / (256 + 128)  # multiplications for each number that is loaded for a tile


def reuse_needed(peak: float, bandwidth: float, itemsize: int) -> float:
    """Multiplications for each number loaded from the cache with which a device of `peak` FLOP/s is not waiting for it.

    At most what the largest tiles have: the efficiency of large products is a device's own figure.
    """
    return min(peak * itemsize / (2 * CACHE_SPEED * bandwidth), _LARGEST_REUSE)


@lru_cache(maxsize=1 << 16)
def filled(sizes: tuple[int, ...], units: int, depth: float = math.inf, reuse: float = _LARGEST_REUSE) -> float:
    """Fraction of what `units` multiprocessors compute that is of use in a matrix product whose result has `sizes`.

        |#######|#######|##     |    the tiles of the result are computed in waves of `units`: the last wave, and tiles
        | wave 1| wave 2| wave 3|    at the edges, are full or not (section 3 of the guide)

    The best of TILES counts, as libraries choose, with what each costs: a tile of h x w takes as long as its h w
    multiplications or as loading h + w numbers, where each number should serve `reuse` multiplications. For a result
    of at most one wave of LARGEST_TILES, or of at most 64 rows or columns, thinner tiles count as well; and if fewer
    tiles than units are left, libraries divide the sums, of `depth` products each, over several units, which write
    partial sums.

    So a product never takes less time than one with fewer rows, columns or products in a sum. 1 if the number of units
    is unknown (0), or the sizes are (none).
    """
    if not units or len(sizes) < 2 or not math.prod(sizes):
        return 1.0
    *batch, rows, columns = sizes
    count = math.prod(batch)

    def tiles(height: int, width: int) -> int:
        return count * -(-rows // height) * -(-columns // width)

    # Times are of one product in each sum, and in multiplications.
    best: float = min(-(-tiles(h, w) // units) * max(h * w, (h + w) * reuse) for h, w in TILES)
    if min(tiles(h, w) for h, w in LARGEST_TILES) <= units or min(rows, columns) <= _THIN:
        for h, w in (*TILES, *_THIN_TILES):
            number, each = tiles(h, w), max(h * w, (h + w) * reuse)
            for parts in _SPLITS:
                sums = _SUMS * h * w * reuse / depth if parts > 1 else 0.0
                best = min(best, -(-number * parts // units) * (each / parts + sums))
    return count * rows * columns / (units * best)


@dataclass(frozen=True)
class ComputeCurve:
    """The speed of kernels that compute products."""

    best: float  # fraction of the peak FLOP/s that the largest reach
    ramp: float = 0.0  # s: filling and draining the device's units
    exposed: float = 0.0  # fraction of the time for moving its bytes that computing does not hide

    def seconds(self, flops: float, nbytes: float, peak: float, bandwidth: float) -> float:
        """Seconds for `flops` on a device of `peak` FLOP/s and `bandwidth` bytes/s, without its launch."""
        return flops / (self.best * peak) + self.exposed * nbytes / bandwidth + self.ramp

    def achieved(self, flops: float, intensity: float, peak: float, bandwidth: float) -> float:
        """Fraction of `peak` that a product of `flops` FLOPs and `intensity` FLOPs per byte reaches."""
        return flops / (peak * self.seconds(flops, flops / intensity, peak, bandwidth))

    @classmethod
    def fit(cls, samples: Sequence[tuple[float, float, float]], peak: float, bandwidth: float) -> Self:
        """The curve that is nearest to measured (flops, bytes, seconds), in relative errors."""
        flops, nbytes, seconds = np.array(samples, dtype=float).T
        slowness, exposed, ramp = _least_squares([flops / peak, nbytes / bandwidth, np.ones_like(flops)], seconds)[0]
        return cls(1 / slowness, ramp, exposed)


@dataclass(frozen=True)
class MemoryCurve:
    """The speed of kernels that read and write."""

    best: float  # fraction of the bandwidth; more than 1 where a cache is faster than the memory behind it
    ramp: float = 0.0  # s
    far: float = 0.0  # how much longer a byte takes where nothing stays in the cache
    cache: float = 1.0  # bytes of a kernel for which half of `far` counts

    def seconds(self, nbytes: float, bandwidth: float) -> float:
        """Seconds for moving `nbytes` on a device of `bandwidth` bytes/s, without the launch."""
        return nbytes / (self.best * bandwidth) * (1 + self.far * nbytes / (nbytes + self.cache)) + self.ramp

    def achieved(self, nbytes: float, bandwidth: float) -> float:
        """Fraction of `bandwidth` that a kernel of `nbytes` bytes reaches."""
        return nbytes / (bandwidth * self.seconds(nbytes, bandwidth))

    @classmethod
    def fit(cls, samples: Sequence[tuple[float, float]], bandwidth: float) -> Self:
        """The curve that is nearest to measured (bytes, seconds), in relative errors."""
        nbytes, seconds = np.array(samples, dtype=float).T
        near, fixed = nbytes / bandwidth, np.ones_like(nbytes)
        fits = []
        # Sizes of the cache beyond the measured ones would be fitted to noise.
        for cache in np.geomspace(nbytes.min(), nbytes.max(), _CACHES):
            (slowness, ramp, far), error = _least_squares([near, fixed, near * nbytes / (nbytes + cache)], seconds)
            fits.append((error, cls(1 / slowness, ramp, far / slowness, float(cache))))
        return min(fits, key=lambda pair: pair[0])[1]


CONVOLUTIONS: Mapping[Kind, ComputeCurve] = {
    "convolution": ComputeCurve(0.41, exposed=0.79),
    "convolution_backward": ComputeCurve(0.28, exposed=0.75),
}
"""Of convolutions on units for products of matrices (implicit products), with the copies between layouts of tensors
that cuDNN makes before and after them: fitted to the kernels of a training step of ResNet-50 (64 images of 224 x 224,
float32 as TF32) on an H200, which it prices with errors of 17 % on average. Numbers of 16 bits are taken for alike."""

WINOGRAD = 16 / 36
"""Multiplications of Winograd's algorithm over those of a convolution with windows of 3 x 3: 16 for each tile of 2 x 2
results (Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, 2015). cuDNN has it for float32 on units for
single products."""

BATCH_NORM = 0.42
"""Fraction of the bandwidth that batch norm reaches in training, on the bytes that each tensor has once: it reads its
inputs twice, for the sums and for the results. Measured in the same step, with 256 channels and more."""

CHANNEL: Mapping[MemoryKind, float] = {"batch_norm": 0.38, "batch_norm_backward": 0.22}
"""Bytes/s at which one multiprocessor adds up a channel, over its share of the bandwidth; each channel has one.
Measured in the same step, with 64 and 128 channels."""


@dataclass(frozen=True)
class Efficiency:
    """The efficiency curve of every kind of kernel."""

    compute: Mapping[ComputeKind, ComputeCurve]
    memory: Mapping[MemoryKind, MemoryCurve]

    @classmethod
    def default(
        cls,
        best_matmul: float = float(np.mean(list(BEST_MATMUL.values()))),
        best_copy: float = BEST_COPY,
        best_attention: float = 0.73,
    ) -> Self:
        """The curves of a data-centre GPU that was not measured.

        best: of products and convolutions (implicit products) `best_matmul`; of attention `best_attention` forward and
        63/73 of it backward (Dao, FlashAttention-2, 2023, section 4.1: 0.73 and 0.63 on an A100); of copies
        `best_copy`, and the other kernels that move bytes are taken for as good. The ramp of a product, 5 us, has no
        source but the order of magnitude of its waves of tiles.
        """
        ramp = 5e-6
        product = ComputeCurve(best_matmul, ramp)
        compute: dict[ComputeKind, ComputeCurve] = dict.fromkeys(COMPUTE_KINDS, product)
        backward = ComputeCurve(best_attention * 63 / 73, ramp)
        compute |= {"attention": ComputeCurve(best_attention, ramp), "attention_backward": backward}
        memory: dict[MemoryKind, MemoryCurve] = dict.fromkeys(MEMORY_KINDS, MemoryCurve(best_copy))
        sums = MemoryCurve(min(best_copy, BATCH_NORM))
        return cls(compute, memory | dict.fromkeys(CHANNEL, sums))

    def to_json(self) -> dict[str, Any]:
        """A JSON value that `from_json` reads."""
        return {
            "compute": {kind: asdict(curve) for kind, curve in self.compute.items()},
            "memory": {kind: asdict(curve) for kind, curve in self.memory.items()},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        return cls(
            {kind: ComputeCurve(**curve) for kind, curve in value["compute"].items()},
            {kind: MemoryCurve(**curve) for kind, curve in value["memory"].items()},
        )


def _least_squares(columns: Sequence[np.ndarray], seconds: np.ndarray) -> tuple[tuple[float, ...], float]:
    """Coefficients >= 0 (the first > 0) for which the columns' sum is nearest to `seconds`, and its squared error.

    An error is the logarithm of a ratio, so that half and double count the same: to a small one, (model - seconds) /
    sqrt(model seconds) is equal, which reweighting reaches in a few rounds.
    """
    matrix = np.stack(columns, axis=1)
    model = seconds
    for _ in range(_ROUNDS):
        weights = 1 / np.sqrt(model * seconds)
        coefficients = _non_negative(matrix * weights[:, None], seconds * weights)
        model = matrix @ coefficients
    return tuple(float(c) for c in coefficients), float((np.log(model / seconds) ** 2).sum())


def _non_negative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The x >= 0, first entry > 0, that minimizes |matrix x - target|, all entries of `matrix` being >= 0.

    At the optimum some entries are at their bound and the others as if there were no bounds: the best of all subsets
    of the columns, 2^(n - 1) small problems for n columns. The first column alone always gives a positive entry.
    """
    candidates: list[tuple[float, tuple[float, ...]]] = []
    n = matrix.shape[1]
    for others in itertools.chain.from_iterable(itertools.combinations(range(1, n), k) for k in range(n)):
        chosen = [0, *others]
        part, *_ = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)
        if part[0] > 0 and (part >= 0).all():
            whole = np.zeros(n)
            whole[chosen] = part
            candidates.append((float(((matrix @ whole - target) ** 2).sum()), tuple(whole)))
    return np.array(min(candidates)[1])
