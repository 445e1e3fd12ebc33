"""How a batch is divided into micro-batches: the one rule for planning, measuring, reporting and running.

They have at most two sizes, so two numbers say what all of them take: the mean, and the ratio of the smaller to the
larger ones:

    seconds of each  --mean_and_ratio-->  mean, ratio  --from_mean-->  seconds of each
"""

from collections.abc import Sequence


def split_sizes(batch: int, n_microbatches: int, least: int = 1, multiple: int = 1) -> list[int]:
    """Samples in each micro-batch: as even as possible, larger ones first.

    10 samples in 4 micro-batches are 3, 3, 2, 2. There are fewer micro-batches than `n_microbatches` where one would
    have fewer samples than `least`. Every size is a multiple of `multiple`, which must divide the batch.
    """
    units = batch // multiple
    parts = max(1, min(n_microbatches, units // -(-least // multiple)))
    small, more = divmod(units, parts)
    return [(small + 1) * multiple] * more + [small * multiple] * (parts - more)


def largest_size(batch: int, n_microbatches: int) -> int:
    """Samples in the largest micro-batch."""
    return -(-batch // n_microbatches)


def mean_and_ratio(seconds: Sequence[float]) -> tuple[float, float]:
    """Of micro-batches, larger ones first: their mean, and the last one divided by the first one."""
    first, last = seconds[0], seconds[-1]
    mean = first + sum(one - first for one in seconds) / len(seconds)  # exactly `first` where all are equal
    return mean, last / first if first else 1.0


def from_mean(mean: float, sizes: Sequence[int], ratio: float | None = None) -> tuple[float, ...]:
    """Seconds of micro-batches of these `sizes` (samples), larger ones first, which take `mean` seconds on average.

    `ratio`: what a smaller one takes, divided by what a larger one takes. None: they take as long as their samples say.
    """
    most = sizes[0]
    if ratio is None:
        ratio = sizes[-1] / most
    smaller = sum(size < most for size in sizes)
    larger = mean * (len(sizes) / (len(sizes) - smaller + smaller * ratio))
    return tuple(larger if size == most else larger * ratio for size in sizes)
