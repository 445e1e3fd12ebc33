"""The loss of a batch from the losses of its micro-batches: the loss of the whole batch is the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autopar import InputError
from autopar.analysis.example import Example, capture_example
from autopar.analysis.loss import LossSplit, study_loss
from autopar.capture import torch_private

CLASSES = 8
WEIGHTS = torch.linspace(0.1, 2.0, CLASSES)
Loss = Callable[[Any, Any], torch.Tensor]


def classifier() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, CLASSES))


@cache
def example_of_length(length: int | None) -> Example:
    return example_of(MODEL, torch.randn(8, 6) if length is None else torch.randn(8, length, 6))


@cache
def studied(case: Case) -> LossSplit:
    example = example_of_length(case.length)
    return study_loss(case.loss, example.program, example.batching, case.target(8))


def example_of(model: nn.Module, *args: torch.Tensor) -> Example:
    return capture_example(model, (), args, {})


def classes(batch: int, *more: int, ignored: float = 0.4, index: int = -100) -> torch.Tensor:
    chosen = torch.randint(0, CLASSES, (batch, *more))
    return chosen.masked_fill(torch.rand(chosen.shape) < ignored, index)


@dataclass(frozen=True)
class Case:
    """A loss over outputs [B, CLASSES] or, with a length, [B, length, CLASSES]."""

    name: str
    loss: Loss
    target: Callable[[int], Any]
    combine: str = "mean"
    length: int | None = None


def penalised(model: nn.Module) -> Loss:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return 0.5 * F.cross_entropy(output, target) + 0.01 * sum(p.square().sum() for p in model.parameters())

    return loss


MODEL = classifier()
SPLIT = [
    Case("cross-entropy", F.cross_entropy, classes),
    Case("cross-entropy module", nn.CrossEntropyLoss(), classes),
    Case("ignore_index 255", nn.CrossEntropyLoss(ignore_index=255), lambda b: classes(b, index=255)),
    Case("class weights", nn.CrossEntropyLoss(weight=WEIGHTS), classes),
    Case("class weights in the target", lambda o, t: F.cross_entropy(o, t[0], t[1]), lambda b: (classes(b), WEIGHTS)),
    Case("label smoothing", nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2), classes),
    Case("probabilities", F.cross_entropy, lambda b: torch.rand(b, CLASSES).softmax(1)),
    Case("negative log-likelihood", lambda o, t: F.nll_loss(o.log_softmax(1), t), classes),
    Case("tokens", lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()), lambda b: classes(b, 5), length=5),
    Case("tokens last", lambda o, t: F.cross_entropy(o.mT, t), lambda b: classes(b, 5), length=5),
    Case(
        "next tokens",
        lambda o, t: F.cross_entropy(o[:, :-1].reshape(-1, CLASSES), t[:, 1:].reshape(-1)),
        lambda b: classes(b, 5),
        length=5,
    ),
    Case("penalised", penalised(MODEL), classes),
    Case("sum", nn.CrossEntropyLoss(reduction="sum"), classes, "sum"),
    Case("squares", F.mse_loss, lambda b: torch.randn(b, CLASSES)),
    Case("sum of squares", nn.MSELoss(reduction="sum"), lambda b: torch.randn(b, CLASSES), "sum"),
    Case("sum by samples", lambda o, t: (o - t).abs().sum() / o.shape[0], lambda b: torch.randn(b, CLASSES)),
    Case("huber", F.huber_loss, lambda b: torch.randn(b, CLASSES)),
    Case("binary", F.binary_cross_entropy_with_logits, lambda b: torch.rand(b, CLASSES).round()),
    Case(
        "masked by hand",
        lambda o, t: ((o - t[0]).square().mean(-1) * t[1]).sum() / t[1].sum(),
        lambda b: (torch.randn(b, 5, CLASSES), (torch.rand(b, 5) < 0.5).float()),
        length=5,
    ),
    Case(
        "weights as long as the batch",
        lambda o, t: ((o - t[0]) ** 2 * t[1]).mean(),
        lambda b: (torch.randn(b, 8), WEIGHTS),
    ),
]


def dice(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    share = output.sigmoid()
    return 1 - (2 * (share * target).sum() + 1) / (share.sum() + target.sum() + 1)


def of_numpy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.square().mean() * float(target.numpy().mean())


LABELS = classes(8)
WHOLE = [
    Case("dice", dice, lambda b: torch.rand(b, CLASSES).round()),
    Case("numpy", of_numpy, lambda b: torch.rand(b, CLASSES)),
    Case("two means", lambda o, t: F.cross_entropy(o, t) + o.square().mean(), classes),
    Case("root", lambda o, t: F.mse_loss(o, t).sqrt(), lambda b: torch.randn(b, CLASSES)),
    Case("contrast", lambda o, t: F.cross_entropy(o @ o.T, torch.arange(len(o))), lambda b: None),
    Case("labels from outside", lambda o, t: F.cross_entropy(o, LABELS), lambda b: None),
    Case("a size as a number", lambda o, t: (o - t).abs().sum() / len(o), lambda b: torch.randn(b, CLASSES)),
    Case("dropout", lambda o, t: F.mse_loss(F.dropout(o), t), lambda b: torch.randn(b, CLASSES)),
    Case("clamped count", lambda o, t: (o.mean(1) * t).sum() / t.sum().clamp(min=1), lambda b: torch.rand(b).round()),
]


def inputs_of(case: Case, batch: int) -> torch.Tensor:
    return torch.randn(batch, 6) if case.length is None else torch.randn(batch, case.length, 6)


def gradients(loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(MODEL.parameters())))


def by_parts(case: Case, split: LossSplit, x: torch.Tensor, target: Any, sizes: list[int]) -> list[torch.Tensor]:
    """Gradients of the weighted losses of micro-batches, each from its own forward."""
    leaves, spec = torch_private.tree_flatten(target)
    pieces = [
        [leaf] * len(sizes) if dim is None else list(leaf.split(sizes, dim))
        for leaf, dim in zip(leaves, split.target_dims, strict=True)
    ]
    targets = [[piece[i] for piece in pieces] for i in range(len(sizes))]
    rows = x.split(sizes)
    totals = [torch.zeros_like(p) for p in MODEL.parameters()]
    for own, part, weight in zip(rows, targets, split.weights(sizes, [[r] for r in rows], targets), strict=True):
        if weight:
            found = gradients(case.loss(MODEL(own), torch_private.tree_unflatten(part, spec)))
            totals = [total + weight * gradient for total, gradient in zip(totals, found, strict=True)]
    return totals


@pytest.mark.parametrize("case", SPLIT, ids=lambda case: case.name)
@settings(max_examples=3, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda s: 2 <= sum(s) != 8), seed=st.integers(0, 9)
)
def test_weighted_losses_of_micro_batches_have_the_gradients_of_the_batch(
    case: Case, sizes: list[int], seed: int
) -> None:
    torch.manual_seed(seed)
    split = study_loss(
        case.loss, (example := example_of(MODEL, inputs_of(case, 8))).program, example.batching, case.target(8)
    )
    assert split.combine == case.combine, split.why
    x, target = inputs_of(case, sum(sizes)), case.target(sum(sizes))
    whole = case.loss(MODEL(x), target)
    if not whole.isfinite():
        return  # nothing to average, in the plain model either
    for mine, original in zip(by_parts(case, split, x, target, sizes), gradients(whole), strict=True):
        assert (mine - original).norm() <= 1e-5 * original.norm() + 1e-12


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.name)
def test_a_loss_that_no_weights_put_together_sees_the_whole_batch(case: Case) -> None:
    split = studied(case)
    assert split.combine == "whole"
    assert "loss_fn" in split.why
    assert __file__ in split.why, "the user's line"


def test_a_micro_batch_without_targets_counts_nothing() -> None:
    example = example_of_length(None)
    target = classes(8, ignored=0.0)
    target[:4] = -100
    split = study_loss(F.cross_entropy, example.program, example.batching, target)
    parts = [[part] for part in target.split([4, 1, 3])]
    assert split.weights([4, 1, 3], [[]] * 3, parts) == [0.0, 0.25, 0.75]
    ignored = [[torch.full_like(part[0], -100)] for part in parts]
    assert split.weights([4, 1, 3], [[]] * 3, ignored) == [1.0, 0.0, 0.0], "0 / 0 stays what it is in the plain model"


def test_target_dim_says_which_tensors_belong_to_samples() -> None:
    example = example_of_length(None)
    target = (torch.randn(8, 8), WEIGHTS)
    loss: Loss = lambda o, t: ((o - t[0]) ** 2 * t[1]).mean()  # noqa: E731
    assert study_loss(loss, example.program, example.batching, target, (0, None)).target_dims == (0, None)
    assert study_loss(loss, example.program, example.batching, target, (0, 0)).combine == "whole"
    with pytest.raises(InputError, match=r"target_dim has 1 entries, but the target has 2 leaves"):
        study_loss(loss, example.program, example.batching, target, (0,))
    with pytest.raises(InputError, match=r"target_dim\[1\] is 1, but that target is \(8,\) and the batch is 8"):
        study_loss(loss, example.program, example.batching, target, (0, 1))


class Labelled(nn.Module):
    """Returns its own mean over the targets that it does not ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.body = classifier()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.body(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def test_the_models_own_mean_is_weighted_by_what_the_model_counts() -> None:
    model, labels = Labelled(), classes(8, ignored=0.0)
    labels[:3] = -100
    example = example_of(model, torch.randn(8, 6), labels)
    split = study_loss(lambda o, t: 2 * o["loss"], example.program, example.batching, None)
    assert split.combine == "mean"
    sizes = [4, 1, 3]
    parts = [[None, part] for part in labels.split(sizes)]
    assert split.weights(sizes, parts, [[]] * 3) == [1 / 5, 1 / 5, 3 / 5]
