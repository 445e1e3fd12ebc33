"""One step, as every system runs it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.analysis.example import Example
from autopar.capture import torch_private
from autopar.errors import InputError
from autopar.runtime.comparing.contestants import without_loss_function

Loss = Callable[[Any, Any], torch.Tensor]


class Refusal(Exception):
    """A system cannot run this step. The message says why, in words."""


@dataclass(frozen=True)
class TrainingStep:
    """`loss(model(*args, **kwargs), target).backward()`, the loss being a mean over samples; or a forward alone.

    For systems that want a row of blocks, `block_loss(blocks(input), target)` is the same loss, from the same
    parameters.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    loss: Loss
    batch_size: int  # samples
    dims: tuple[int | None, ...]  # of every flat entry of (args, kwargs), the dimension that counts samples
    target_dims: tuple[int | None, ...]  # the same of the target
    blocks: nn.Sequential | None = None  # None: the model is no row of blocks
    block_loss: Loss | None = None
    tied: tuple[nn.Parameter, ...] = ()  # read by several blocks; the last one has it in no table of parameters
    training: bool = True  # otherwise, a step is a forward alone

    @classmethod
    def of(cls, example: Example) -> TrainingStep:
        """The training step of an example call. Without a loss function, `without_loss_function` is it."""
        loss = example.loss or without_loss_function
        dims = tuple(one.batch_dim for one in example.program.inputs)
        n_targets = len(torch_private.tree_leaves(example.target))
        target_dims = example.target_dims or (0,) * n_targets
        tensors = [x for x in example.args if isinstance(x, torch.Tensor)]
        is_row = isinstance(example.model, nn.Sequential) and len(example.args) == len(tensors) == 1
        blocks = example.model if is_row and not example.kwargs and example.target is not None else None
        return cls(
            example.model,
            example.args,
            example.kwargs,
            example.target,
            loss,
            example.program.batch_size,
            dims,
            target_dims,
            blocks if isinstance(blocks, nn.Sequential) else None,
            loss,
            training=example.training,
        )

    @property
    def input(self) -> torch.Tensor:
        """What the first block reads."""
        (tensor,) = torch_private.tree_leaves((self.args, self.kwargs))
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def run(self) -> float | None:
        """Forward and backward; the loss. None for a forward alone."""
        with torch.set_grad_enabled(self.training):
            output = self.model(*self.args, **self.kwargs)
            if not self.training:
                return None
            loss = self.loss(output, self.target)
            loss.backward()
        return float(loss.item())

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def part(self, number: int, n: int) -> TrainingStep:
        """The same step on one of `n` equal parts of the batch. Raises Refusal where it has none."""
        if not self.batch_size or self.batch_size % n:
            raise Refusal(f"a batch of {self.batch_size} samples has no {n} equal parts")
        leaves, spec = torch_private.tree_flatten((self.args, self.kwargs))
        args, kwargs = torch_private.tree_unflatten(self._cut(leaves, self.dims, number, n), spec)
        leaves, spec = torch_private.tree_flatten(self.target)
        target = torch_private.tree_unflatten(self._cut(leaves, self.target_dims, number, n), spec)
        return replace(self, args=args, kwargs=kwargs, target=target, batch_size=self.batch_size // n)

    def _cut(self, leaves: list[Any], dims: tuple[int | None, ...], number: int, n: int) -> list[Any]:
        def cut(leaf: Any, dim: int | None) -> Any:
            if dim is None or not isinstance(leaf, torch.Tensor) or leaf.dim() <= dim:
                return leaf
            return leaf.chunk(n, dim)[number].clone() if leaf.shape[dim] == self.batch_size else leaf

        return [cut(leaf, dim) for leaf, dim in zip(leaves, dims, strict=True)]

    def save(self, path: Path) -> None:
        """For another process. Raises Refusal for what cannot be sent there, such as a lambda as loss function."""
        try:
            torch.save(self, path)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise Refusal(
                f"it runs in processes of its own, and the model or the loss function cannot be sent there ({error}): "
                "define them at the top level of a module"
            ) from error


def load_step(path: Path) -> TrainingStep:
    """What `save` wrote, in any process."""
    step = torch.load(path, weights_only=False)
    if not isinstance(step, TrainingStep):
        raise InputError(f"{path} holds no training step")
    return step
