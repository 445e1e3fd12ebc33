"""The loss of a batch from the losses of its micro-batches: the loss of the whole batch is the oracle."""

from __future__ import annotations

from functools import cache
from typing import Any

import losses
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from losses import MODEL, SPLIT, WEIGHTS, WHOLE, Case, Loss, classes, classifier, inputs_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar import InputError
from autopar.analysis.checked_loss import checked_loss
from autopar.analysis.example import Example, capture_example
from autopar.analysis.loss import study_loss
from autopar.analysis.loss_split import LossSplit
from autopar.analysis.own_loss import own_loss
from autopar.capture import torch_private


@cache
def example_of_length(length: int | None) -> Example:
    return example_of(MODEL, torch.randn(8, 6) if length is None else torch.randn(8, length, 6))


@cache
def studied(case: Case) -> LossSplit:
    example = example_of_length(case.length)
    return study_loss(case.loss, example.program, example.batching, case.target(8))


def example_of(model: nn.Module, *args: torch.Tensor) -> Example:
    return capture_example(model, (), args, {})


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


@pytest.mark.slow
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
    assert losses.__file__ in split.why, "the user's line"


def test_a_micro_batch_without_targets_counts_nothing() -> None:
    example = example_of_length(None)
    target = classes(8, ignored=0.0)
    target[:4] = -100
    split = study_loss(F.cross_entropy, example.program, example.batching, target)
    parts = [[part] for part in target.split([4, 1, 3])]
    assert split.weights([4, 1, 3], [[]] * 3, parts) == (0.0, 0.25, 0.75)
    ignored = [[torch.full_like(part[0], -100)] for part in parts]
    assert split.weights([4, 1, 3], [[]] * 3, ignored) == (1.0, 1.0, 1.0), "0 / 0 stays what it is in the plain model"


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
    assert split.weights(sizes, parts, [[]] * 3) == (1 / 5, 1 / 5, 3 / 5)


class Running:
    """Scales a loss by what it has seen so far, and counts its calls."""

    __slots__ = ("__dict__", "extra", "n")

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(output, target)
        self.mean = loss.detach() if self.n == 0 else 0.9 * self.mean + 0.1 * loss.detach()
        self.n, self.extra = self.n + 1, loss.detach()
        HISTORY.append(loss.detach())
        return loss / self.mean


HISTORY: list[torch.Tensor] = []
RUNNING = {"inner": (Running(),)}


def global_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    global _seen
    _seen = F.cross_entropy(output, target)
    return RUNNING["inner"][0](output, target) + 0 * _seen


@pytest.mark.parametrize("kind", ["object", "closure", "global", "method"])
def test_a_study_leaves_what_a_loss_refers_to_as_it_was(kind: str) -> None:
    running = RUNNING["inner"][0] if kind == "global" else Running()
    functions: dict[str, Loss] = {
        "object": running,
        "closure": lambda o, t: running(o, t),
        "global": global_loss,
        "method": running.__call__,
    }
    example, target = example_of_length(None), classes(8, ignored=0.0)
    study_loss(functions[kind], example.program, example.batching, target)
    assert (vars(running), running.n, HISTORY) == ({}, 0, [])
    assert not hasattr(running, "extra")
    assert "_seen" not in globals()


def test_a_loss_function_that_calls_itself_is_studied() -> None:
    def loss(output: torch.Tensor, target: torch.Tensor, depth: int = 2) -> torch.Tensor:
        return loss(output, target, depth - 1) if depth else F.cross_entropy(output, target)

    example = example_of_length(None)
    assert study_loss(loss, example.program, example.batching, classes(8, ignored=0.0)).combine == "mean"


def test_a_loss_without_values_is_refused() -> None:
    with FakeTensorMode():
        fake = torch.zeros(())
    with pytest.raises(InputError, match="returned a tensor without values"):
        checked_loss(fake, F.cross_entropy, torch.zeros(()))


class _Labelled(nn.Module):
    """Moves its labels to its logits, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(x)
        return F.cross_entropy(logits, labels.to(logits.device), ignore_index=3)


def test_a_count_is_computed_where_the_targets_are() -> None:
    """Models and losses were captured on the CPU; the meta device stands in for a GPU."""
    x, labels, weights = torch.randn(8, 6), torch.tensor([0, 1, 2, 3, 4, 3, 2, 1]), torch.rand(5)
    example = example_of(_Labelled(), x, labels)
    own = study_loss(own_loss, example.program, example.batching, None)
    example = example_of(nn.Linear(6, 5), x)
    weighted = study_loss(nn.CrossEntropyLoss(weights), example.program, example.batching, labels)
    assert own.count is not None
    assert weighted.count is not None
    for count, expected in ((own.count, (labels != 3).sum()), (weighted.count, weights[labels].sum())):
        for _ in range(2):
            torch.testing.assert_close(count.of([x, labels], [labels]), expected.double())
            elsewhere = labels.to("meta")
            assert count.of([x, elsewhere], [elsewhere]).device.type == "meta"
