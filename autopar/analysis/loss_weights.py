"""What the losses of micro-batches weigh in the loss of the batch, where each divides by a count of its own.

Counts on a GPU stay tensors there: to read them, the host would have to wait for the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Weights = tuple[float | torch.Tensor, ...]  # one per micro-batch; tensors have no dimensions


def shares_of(counts: Sequence[torch.Tensor]) -> Weights:
    """Each count's share of their sum; 1 for all of them if they sum up to 0. Numbers, if the counts are on the CPU."""
    if all(count.device.type == "cpu" for count in counts):
        numbers = [count.item() for count in counts]
        whole = sum(numbers)
        return tuple(number / whole if whole else 1.0 for number in numbers)
    total = torch.stack(list(counts)).sum()
    return tuple(torch.where(total == 0, torch.ones_like(total), count / total) for count in counts)


def is_nothing(share: float | torch.Tensor) -> bool:
    """Whether the host knows that a share is 0. It does not look at tensors."""
    return not isinstance(share, torch.Tensor) and share == 0


def weighted(value: torch.Tensor, share: float | torch.Tensor) -> torch.Tensor:
    """`value * share`. Without a share it is 0, also where the value is NaN: a mean over nothing."""
    if not isinstance(share, torch.Tensor):
        return value * share
    share = share.to(value)
    return torch.where(share != 0, value * share, torch.zeros_like(value))
