"""The tensors of one pipelined call: what goes in, and what the workers keep, send back and return.

A `PipelineCall` is fixed before the first worker starts. `CallTensors` fills up while the workers run: a forward stores
what its backward needs, and a backward takes it away again.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from autopar.analysis.batch_proof import OutputCombination
from autopar.analysis.example import LossFunction
from autopar.analysis.loss_split import LossSplit
from autopar.analysis.loss_weights import Weights, is_nothing, weighted
from autopar.capture import torch_private
from autopar.capture.program import Program
from autopar.capture.thread_state import CallerState
from autopar.lower.deferred_batch_norm import Statistics
from autopar.lower.split_backward import WeightPart
from autopar.runtime.step.loss_leaves import LossLeaves
from autopar.runtime.step.micro_batches import split_leaf, split_target
from autopar.runtime.step.outputs import OutputCollector


@dataclass(frozen=True)
class PipelineCall:
    """What one call computes: the micro-batches that go in, and how outputs and the loss come out."""

    inputs: tuple[Sequence[Any], ...]  # for each flat input of the model, its piece for each micro-batch
    batch_dims: tuple[int | None, ...]  # for each flat input, the dimension that was split; None: shared by all
    sizes: tuple[int, ...]  # samples in each micro-batch
    outputs: tuple[OutputCombination, ...]  # for each flat output, how those of the micro-batches combine
    state: CallerState  # the caller's thread-local settings of torch, which the workers apply
    seed: int | None  # of the random operators; None: there are none
    loss: LossFunction | None  # the last stage ends in loss(output, target); None: it returns the outputs
    targets: Sequence[Any]  # for each micro-batch, if there is a loss
    loss_weights: Weights = ()  # of each micro-batch's loss; 0: it has no targets
    target_pieces: tuple[Sequence[Any], ...] = ()  # for each flat target, its piece for each micro-batch
    target_dims: tuple[int | None, ...] = ()  # for each flat target, as `batch_dims`
    guards_gradients: bool = False  # the gradient of a loss without targets may be NaN, and counts nothing
    return_outputs: bool = True  # a training step may need only the loss

    @classmethod
    def of(
        cls,
        program: Program,
        leaves: Sequence[Any],
        sizes: Sequence[int],
        outputs: Sequence[OutputCombination],
        state: CallerState,
        *,
        seed: int | None = None,
        loss: LossFunction | None = None,
        target: Any = None,
        loss_split: LossSplit | None = None,
        return_outputs: bool = True,
    ) -> PipelineCall:
        """Split the flat inputs `leaves` and, with a loss, `target` into micro-batches of `sizes` samples.

        `loss_split`: how the targets are split, and what the losses of micro-batches weigh. `return_outputs`: collect
        the model's outputs, also in a call with a loss. Raises InputError.
        """
        dims = tuple(i.batch_dim for i in program.inputs)
        # (1) One piece of every input for each micro-batch.
        inputs = tuple(split_leaf(leaf, dim, sizes) for leaf, dim in zip(leaves, dims, strict=True))
        if loss is None:
            return cls(inputs, dims, tuple(sizes), tuple(outputs), state, seed, None, ())
        flat, spec = torch_private.tree_flatten(target)
        is_whole = len(sizes) == 1 or loss_split is None
        target_dims = (None,) * len(flat) if is_whole or loss_split is None else loss_split.target_dims
        pieces = [
            split_target(leaf, dim, sizes, i) for i, (leaf, dim) in enumerate(zip(flat, target_dims, strict=True))
        ]
        flat_targets = [[piece[i] for piece in pieces] for i in range(len(sizes))]
        weights: Weights = (1.0,)
        guards = False
        if not is_whole and loss_split is not None:
            flat_inputs = [[piece[i] for piece in inputs] for i in range(len(sizes))]
            weights = loss_split.weights(sizes, flat_inputs, flat_targets)
            guards = isinstance(weights[0], torch.Tensor) and loss_split.guards_gradients
        return cls(
            inputs,
            dims,
            tuple(sizes),
            tuple(outputs),
            state,
            seed,
            loss,
            [torch_private.tree_unflatten(leaves, spec) for leaves in flat_targets],
            weights,
            tuple(pieces),
            tuple(target_dims),
            guards,
            return_outputs,
        )

    def pieces(self, index: int) -> Sequence[Any]:
        """Of flat input `index`, for each micro-batch; the flat targets come after the inputs."""
        n = len(self.inputs)
        return self.inputs[index] if index < n else self.target_pieces[index - n]

    def split_dim(self, index: int) -> int | None:
        """The dimension in which flat input `index` was split; the flat targets come after the inputs."""
        n = len(self.inputs)
        return self.batch_dims[index] if index < n else self.target_dims[index - n]

    @cached_property
    def targets_need_gradients(self) -> bool:
        return any(isinstance(x, torch.Tensor) and x.requires_grad for pieces in self.target_pieces for x in pieces)

    @property
    def n_microbatches(self) -> int:
        return len(self.sizes)

    @property
    def batch_size(self) -> int:
        """Samples."""
        return sum(self.sizes)


@dataclass
class KeptForward:
    """What a stage keeps of a micro-batch between its forward and the end of its backward."""

    model_inputs: list[Any]  # leaves: pieces of the model's inputs
    received: list[Any]  # leaves: values that earlier stages sent
    outputs: tuple[Any, ...] | None  # with their autograd graph; None where the backward computes them again
    loss: torch.Tensor | None = None  # in the last stage of a call with a loss function
    loss_inputs: tuple[Any, ...] = ()  # leaves: the outputs that the loss read, where its backward ends there
    targets: tuple[Any, ...] = ()  # leaves: the flat targets that the loss read, where some require a gradient
    weights: WeightPart | None = None  # after the input part of a split backward
    # Then, of a replica's first micro-batch: the memory of the gradients of its inputs, which it does not keep.
    sent: Sequence[weakref.ref[torch.UntypedStorage]] | None = None


class CallTensors:
    """What workers store of a call. Every entry has one writer, so that no lock is needed."""

    def __init__(self, call: PipelineCall, device: torch.device) -> None:
        """`device`: where the outputs and the loss of the batch are, also where the last stage has several devices."""
        self.outputs = OutputCollector(call.outputs, call.sizes, device)
        self.statistics = Statistics()  # of batch norms whose running statistics move once per batch
        self.losses: list[torch.Tensor | None] = [None] * call.n_microbatches
        self.has_gradient = False  # whether the loss of a micro-batch had a gradient; the last stage writes it
        self.kept: dict[tuple[int, int], KeptForward] = {}  # (stage, micro-batch)
        # By (flat input or target, micro-batch, stage).
        self.input_gradients: dict[tuple[int, int, int], torch.Tensor] = {}
        self.loss_leaves: LossLeaves | None = None  # of a call that must know what else its loss trains
        self._call = call
        self._device = device

    def loss(self) -> torch.Tensor:
        """The loss of the batch: the weighted losses of the micro-batches added up."""
        pairs = zip(self.losses, self._call.loss_weights, strict=True)
        known = [weighted(loss, w).to(self._device) for loss, w in pairs if loss is not None and not is_nothing(w)]
        return sum(known[1:], known[0]).reshape(())

    def input_gradient(self, index: int) -> torch.Tensor | None:
        """The gradient of the whole flat input `index`, summed over the stages that read it, on the input's device.
        Flat targets are counted after the inputs."""
        pieces = self._call.pieces(index)
        device = pieces[0].device
        totals: list[torch.Tensor | None] = [None] * self._call.n_microbatches
        for (leaf, microbatch, _), gradient in sorted(self.input_gradients.items(), key=lambda item: item[0]):
            if leaf == index:
                here, before = gradient.to(device), totals[microbatch]
                totals[microbatch] = here if before is None else before + here
        known = [total for total in totals if total is not None]
        if not known:
            return None
        dim = self._call.split_dim(index)
        if dim is None:
            return sum(known[1:], known[0])
        return torch.cat(
            [torch.zeros_like(p) if total is None else total for p, total in zip(pieces, totals, strict=True)], dim
        )
