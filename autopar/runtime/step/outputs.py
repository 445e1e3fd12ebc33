"""The outputs of micro-batches joined into the model's outputs, and the gradients of those split again."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from autopar.analysis.batch_proof import OutputCombination
from autopar.analysis.loss_weights import Weights, is_nothing, shares_of, weighted


class OutputCollector:
    """The flat outputs of a call. Workers add those of micro-batches in any order.

    All outputs end up on one device, whichever replica of the last stage made them.
    """

    def __init__(self, outputs: Sequence[OutputCombination], sizes: Sequence[int], device: torch.device) -> None:
        """`outputs`: how each flat output combines; `sizes`: samples in each micro-batch; `device`: of the results."""
        self.device = device
        self.outputs = outputs
        self.sizes = tuple(sizes)
        self.total = sum(sizes)
        self.values: list[Any] = [None] * len(outputs)
        self.differentiable = [False] * len(outputs)
        self.gradients: list[torch.Tensor | None] = []
        self._lock = threading.Lock()
        self._pieces: dict[int, dict[int, Any]] = {}  # flat output -> micro-batch -> value, until reduced
        self._shares: dict[int, Weights] = {}  # flat output that is a mean -> each micro-batch's weight, sum 1

    def add(self, values: Sequence[Any], microbatch: int) -> None:
        """Add the flat outputs of one micro-batch."""
        start = sum(self.sizes[:microbatch])
        for index, (value, how) in enumerate(zip(values, self.outputs, strict=True)):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                self.differentiable[index] = True
            self._combine(index, value, how, microbatch, start)

    def finish(self) -> list[Any]:
        """(8) All outputs of the batch, detached. Every micro-batch must have been added."""
        for index, pieces in self._pieces.items():
            # Sum in the order of micro-batches, not of arrival, so that the result has the same bits every time.
            ordered = [self._here(pieces[i]) for i in range(len(self.sizes))]
            if self.outputs[index].combine == "mean":
                self._shares[index] = shares = self._mean_shares(index)
                ordered = [weighted(p, s) for p, s in zip(ordered, shares, strict=True) if not is_nothing(s)]
            self.values[index] = sum(ordered[1:], ordered[0])
        self._pieces.clear()
        return self.values

    def gradients_of(self, microbatch: int) -> list[torch.Tensor | None]:
        """The gradients of one micro-batch's flat outputs, from the caller's gradients of the whole outputs."""
        start, rows = sum(self.sizes[:microbatch]), self.sizes[microbatch]
        result: list[torch.Tensor | None] = []
        for index, (gradient, how) in enumerate(zip(self.gradients, self.outputs, strict=True)):
            if gradient is None or len(self.sizes) == 1:
                result.append(gradient)
            elif how.combine == "cat":
                assert how.batch_dim is not None
                factor = gradient.shape[how.batch_dim] // self.total
                result.append(gradient.narrow(how.batch_dim, factor * start, factor * rows))
            elif how.combine == "sum":
                result.append(gradient)
            elif index in self._shares:
                share = self._shares[index][microbatch]
                if isinstance(share, torch.Tensor):  # a cross-entropy, which makes zeros of zeros (batch_proof.py)
                    result.append(gradient * share.to(gradient))
                else:
                    result.append(gradient * share if share else None)  # a mean over no entries has the gradient NaN
            else:  # equal in all micro-batches, so that it is their mean
                result.append(gradient * (rows / self.total))
        return result

    def _here(self, piece: Any) -> Any:
        """A tensor, or a number such as the size of a batch."""
        return piece.to(self.device) if isinstance(piece, torch.Tensor) else piece

    def _combine(self, index: int, value: Any, how: OutputCombination, microbatch: int, start: int) -> None:
        if how.combine in ("first", "constant") or len(self.sizes) == 1:
            if microbatch == 0:
                self.values[index] = value.detach() if isinstance(value, torch.Tensor) else value
            return
        piece, rows = value.detach() if isinstance(value, torch.Tensor) else value, self.sizes[microbatch]
        if how.combine == "cat":
            assert how.batch_dim is not None
            factor = piece.shape[how.batch_dim] // rows  # the batch dimension may have several entries per sample
            with self._lock:
                if self.values[index] is None:
                    shape = list(piece.shape)
                    shape[how.batch_dim] = factor * self.total
                    self.values[index] = piece.new_empty(shape, device=self.device)
            self.values[index].narrow(how.batch_dim, factor * start, factor * rows).copy_(piece)
            return
        with self._lock:
            self._pieces.setdefault(index, {})[microbatch] = piece

    def _mean_shares(self, index: int) -> Weights:
        """The weight of each micro-batch in flat output `index`, which is a mean. Those of counts on a GPU are tensors:
        to read them, the host would have to wait for the GPU."""
        place = self.outputs[index].weight
        if place is None:
            return tuple(size / self.total for size in self.sizes)
        counts = [torch.as_tensor(self._pieces[place][i]) for i in range(len(self.sizes))]
        # With nothing to average in the whole batch, the model computes 0/0. Weights of 1 keep that NaN.
        return shares_of([count.double().to(counts[0].device) for count in counts])


def scalars_at_inputs(outputs: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """`outputs` with their scalars, such as a loss, on the accelerator of the inputs.

    The caller cannot know on which device the plan puts the last stage, and adds losses up on the device of its data.
    """
    device = next((x.device for x in inputs if isinstance(x, torch.Tensor)), None)
    if device is None or device.type == "cpu":
        return list(outputs)
    return [x.to(device) if isinstance(x, torch.Tensor) and x.dim() == 0 else x for x in outputs]
