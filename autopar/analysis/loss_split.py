"""What is known of a loss: how the losses of micro-batches make the loss of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.analysis.loss_count import Count
from autopar.analysis.loss_weights import Weights, shares_of


@dataclass(frozen=True)
class LossSplit:
    """How the losses of micro-batches make the loss of the batch."""

    combine: str  # "mean" (weighted by samples, or by `count`), "sum", or "whole": the loss sees the whole batch
    target_dims: tuple[int | None, ...] = ()  # of every flat target leaf: the dimension that counts samples, or None
    count: Count | None = None
    why: str = ""  # for "whole": what keeps the loss from being split, with the operator and its source line
    counts_calls: bool = False  # it changes a number or a buffer of its own, which it does once for every batch
    error: str = field(default="", compare=False)  # that the loss raised while it was studied
    failure: Exception | None = field(default=None, compare=False)  # the same, if the user's own code raised it
    digest: str = field(default="", compare=False)  # of what the loss computes (`loss_digest`)

    def weights(
        self, sizes: Sequence[int], inputs: Sequence[Sequence[Any]], targets: Sequence[Sequence[Any]]
    ) -> Weights:
        """The weight of every micro-batch's loss. A weight of 0 means that the micro-batch has nothing to average.

        Counts of targets on a GPU are tensors there: to read them, the host would have to wait for the GPU.

        Args:
            sizes: samples of each micro-batch. inputs, targets: flat leaves of each micro-batch.
        """
        if self.combine == "sum":
            return (1.0,) * len(sizes)
        if self.count is None:
            return tuple(size / sum(sizes) for size in sizes)
        counts = [self.count.of(own, target) for own, target in zip(inputs, targets, strict=True)]
        # Nothing to average in the whole batch is 0 / 0 in the plain model, too. The micro-batches keep that.
        return shares_of(counts)

    def whole_batch_needed(self, inputs: Sequence[Any], targets: Sequence[Any]) -> str:
        """Why the loss of a call must see the whole batch; "" where it need not. The weights of micro-batches count as
        constants, so that a loss has no weight that depends on a flat input or target that requires a gradient."""
        if self.combine == "whole":
            return self.why or "its operators cannot be followed"
        for where, index in self.count.leaves if self.count is not None else ():
            leaf = (targets if where == "target" else inputs)[index]
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                return f"it divides by what {where} {index} adds up to, and that requires a gradient"
        return ""

    @property
    def guards_gradients(self) -> bool:
        """Whether the gradient of a micro-batch that has nothing to average must be replaced by zeros."""
        return self.count is not None and not self.count.keeps_zeros
