"""How a batch is divided into micro-batches: the one rule for planning, measuring, reporting and running."""


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
