"""How each loss function that a model is trained with splits over micro-batches: studied once, then looked up by what
it computes with (`loss_identity`)."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar.analysis.batching import Batching
from autopar.analysis.loss import study_loss
from autopar.analysis.loss_split import LossSplit
from autopar.capture import torch_private
from autopar.capture.program import Program
from autopar.options import BatchDim
from autopar.runtime.signatures.loss_identity import ALIKE, EXACT, LOOSE, Form, identity

_MOST = 16  # loss functions of a signature; the one that was used longest ago goes
# After as many studies of a loss that never splits, whatever it computes with, it is not studied again.
_MOST_IN_VAIN = 4

TargetDim = int | Sequence[int | None] | None


class LossSplits:
    """The loss functions that one captured signature has been trained with."""

    def __init__(self, program: Program, batching: Batching) -> None:
        self._program, self._batching = program, batching
        self._known: OrderedDict[Any, LossSplit] = OrderedDict()
        self._forms: dict[Form, None] = {}  # in which they are known
        self._in_vain: Counter[Any] = Counter()

    def of(
        self,
        loss_fn: Callable[[Any, Any], Any],
        target: Any,
        batch_size: int,
        target_dim: TargetDim,
        default_dims: Sequence[int],
    ) -> LossSplit:
        """How `loss_fn(output, target)` splits in a call of `batch_size` samples, which the capture may have others of.

        Raises InputError for a `target_dim` that does not fit `target`.
        """
        key = self._found(loss_fn, target, target_dim, default_dims)
        if key is None:
            program = replace(self._program, batch_size=batch_size)
            split = study_loss(loss_fn, program, self._batching, target, target_dim, default_dims=default_dims)
            form = self._form(split, _key(LOOSE, loss_fn, target, target_dim, default_dims))
            key = _key(form, loss_fn, target, target_dim, default_dims)
            self._known[key], self._forms[form] = split, None
            if len(self._known) > _MOST:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]

    def known(
        self, loss_fn: Callable[[Any, Any], Any], target: Any, target_dim: TargetDim, default_dims: Sequence[int]
    ) -> LossSplit | None:
        """What `of` would look up; None: it would study the loss."""
        return self._known.get(self._found(loss_fn, target, target_dim, default_dims))

    def _form(self, split: LossSplit, loose: Any) -> Form:
        """What another loss must share with one that splits so, to split alike.

        On the whole batch every loss is right: one that counts its calls, or never splits, need not be studied again.
        A count of targets may hold tensors; other rules do not depend on which tensors a loss computes with.
        """
        if split.combine == "whole":
            self._in_vain[loose] += 1  # few: such keys hold types, and no objects
            return LOOSE if split.counts_calls or self._in_vain[loose] >= _MOST_IN_VAIN else ALIKE
        return ALIKE if split.count is None else EXACT

    def _found(
        self, loss_fn: Callable[[Any, Any], Any], target: Any, target_dim: TargetDim, default_dims: Sequence[int]
    ) -> Any:
        """The key of a known split for the loss; None where there is none."""
        for form in self._forms:
            key = _key(form, loss_fn, target, target_dim, default_dims)
            if key in self._known:
                return key
        return None


def _key(
    form: Form, loss_fn: Callable[[Any, Any], Any], target: Any, target_dim: TargetDim, default_dims: Sequence[int]
) -> Any:
    leaves, spec = torch_private.tree_flatten(target)
    dims = tuple(target_dim) if isinstance(target_dim, Sequence) else target_dim
    return (form, identity(loss_fn, form), str(spec), tuple(map(_shape, leaves)), dims, tuple(default_dims))


def default_target_dims(batch_dim: BatchDim) -> tuple[int, ...]:
    """The dimensions of a target that are tried for its samples, where the user gives none."""
    return (batch_dim, 0) if isinstance(batch_dim, int) else (0,)


def _shape(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return identity(leaf, EXACT)
    return (leaf.dtype, leaf.dim(), tuple(leaf.shape[1:]), leaf.device.type)
