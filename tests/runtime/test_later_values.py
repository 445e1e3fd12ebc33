"""A batch is split only where that is right for every later batch, not for the values of the first one alone."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar import Plan

WIDTH = 8
ROWS = 4
Forward = Callable[["TwoLayers", torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class TwoLayers(nn.Module):
    """What it returns is computed from its scores, the classes and a mask."""

    def __init__(self, returned: Forward) -> None:
        super().__init__()
        self.first, self.last, self.other = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.returned = returned

    def forward(self, x: torch.Tensor, classes: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.returned(self, self.first(x).tanh(), classes, mask)


def cross_entropy(model: TwoLayers, h: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model.last(h), classes)


def squares(model: nn.Module) -> torch.Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum()


class Normalised(torch.autograd.Function):
    """Its backward relates the samples, though its forward does not."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / gradient.norm()


def hooked(h: torch.Tensor) -> torch.Tensor:
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient / gradient.norm())
    return h


def times_duplicates(h: torch.Tensor) -> torch.Tensor:
    kinds = (h[:, 0] * 3).round().long()
    _, place, counts = torch.unique(kinds, return_inverse=True, return_counts=True)
    return h * counts[place][:, None]


# Split: means of the same targets, scaled and added to what no sample changes.
SPLIT: dict[str, Forward] = {
    "scaled": lambda m, h, y, _: cross_entropy(m, h, y) * 0.5,
    "divided": lambda m, h, y, _: -cross_entropy(m, h, y) / 4,
    "with weight decay": lambda m, h, y, _: cross_entropy(m, h, y) + 0.01 * squares(m),
    "of two heads": lambda m, h, y, _: cross_entropy(m, h, y) + 0.3 * functional.cross_entropy(m.other(h), y),
    "log-likelihood": lambda m, h, y, _: functional.nll_loss(m.last(h).log_softmax(-1), y) + 1,
    "routed": lambda m, h, y, mask: h.index_put((mask.nonzero()[:, 0],), m.last(h[mask])).square(),
}


def without_gradients(m: TwoLayers, h: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    scores = m.last(h) @ m.other(h).T
    with torch.no_grad():
        targets = (scores / 2).softmax(1).argmax(0)
    return functional.cross_entropy(scores, targets)


def own_diagonal(m: TwoLayers, h: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    scores = m.last(h) @ m.other(h).T
    scores.fill_diagonal_(-10.0)
    return scores.logsumexp(1)


def first_column(m: TwoLayers, h: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    scores = m.last(h) @ m.other(h).T
    scores[:, 0] = 0.0
    scores.mul_(2).add_(1)
    return scores


def view_before_a_write(m: TwoLayers, h: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    scores = m.last(h) @ m.other(h).T
    turned = scores.T
    scores.add_(1)
    return turned * 2


def one_class_a_selected_sample(m: TwoLayers, h: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(m.last(h)[mask], y[mask].clamp(min=0))


# Split, but for an end that needs the whole batch: means over different numbers, or over numbers that values decide.
SPLIT_BUT_FOR_THE_END: dict[str, Forward] = {
    "and a mean of samples": lambda m, h, y, _: cross_entropy(m, h, y) + m.other(h).square().mean(),
    "of other targets": lambda m, h, y, _: (
        cross_entropy(m, h, y) + functional.cross_entropy(m.other(h), y.clamp(max=2))
    ),
    "of weighted classes": lambda m, h, y, _: functional.cross_entropy(m.last(h), y, torch.arange(8.0)),
    "under a mask": lambda m, h, y, mask: m.last(h)[mask].square().mean(),
    "under a mask, scaled": lambda m, h, y, mask: m.last(h)[mask].square().mean() * 0.5,
    "of masked classes": lambda m, h, y, mask: functional.cross_entropy(m.last(h)[mask], y[mask]) + h.square().mean(),
    "of selected entries": lambda m, h, y, mask: torch.masked_select(m.last(h), mask[:, None]).square().mean(),
    "divided by a count": lambda m, h, y, mask: (m.last(h).square().mean(1) * mask).sum() / mask.sum(),
    "times reciprocal": lambda m, h, y, mask: m.last(h)[mask].square().sum() * mask.sum().reciprocal(),
    "without gradients": without_gradients,
    "first column": first_column,
    "view before a write": view_before_a_write,
    "one class a selected sample": one_class_a_selected_sample,
    "similarity": lambda m, h, y, _: m.last(h) @ m.other(h).T,
    "contrast": lambda m, h, y, _: functional.cross_entropy(m.last(h) @ m.other(h).T, torch.arange(len(h))),
    "centred": lambda m, h, y, _: (m.last(h) - m.last(h).mean(0)) * m.other.bias,
}
# Not split: values decide a number before a layer, or an operator whose code is not known relates samples.
WHOLE: dict[str, Forward] = {
    "own diagonal": own_diagonal,  # torch.export traces it for one batch size
    "of duplicates": lambda m, h, y, _: m.last(times_duplicates(h)),
    "centred before a layer": lambda m, h, y, _: m.last(h - h.mean(0)),
    "with a backward of its own": lambda m, h, y, _: m.last(Normalised.apply(h)).square().mean(),
}


def steps_apart(returned: Forward) -> tuple[float, int]:
    """The largest difference of losses and gradients from the plain model's in two steps, relative to the largest
    entry; micro-batches. Of the first batch every target counts, of the second some."""
    torch.manual_seed(0)
    plain = TwoLayers(returned)
    model = copy.deepcopy(plain)
    split = Plan.from_split({"first": 0, "last": 1}, n_microbatches=2)
    pipelined = autopar.parallelize(model, ["cpu", "cpu"], plan=split)
    apart = 0.0
    for classes, mask in (([0, 1, 2, 3], [True] * 4), ([-100, 3, -100, 1], [False, True, True, True])):
        x = torch.randn(ROWS, WIDTH)
        inputs = (x, torch.tensor(classes), torch.tensor(mask))
        results = []
        for one in (plain, pipelined):
            one.zero_grad()
            result = one(*inputs)
            result.square().sum().backward()
            results.append(result.detach())
        grads = [(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True)]
        for a, b in [tuple(results), *grads]:
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                apart = max(apart, float((a - b).abs().max() / (1 + a.abs().max())))
    return apart, pipelined.plan.n_microbatches


@pytest.mark.parametrize("returned", SPLIT.values(), ids=SPLIT.keys())
def test_means_of_the_same_targets_are_split_and_right_where_later_targets_are_ignored(returned: Forward) -> None:
    apart, n_microbatches = steps_apart(returned)
    assert apart < 1e-6
    assert n_microbatches == 2


@pytest.mark.parametrize("returned", SPLIT_BUT_FOR_THE_END.values(), ids=SPLIT_BUT_FOR_THE_END.keys())
def test_an_end_that_needs_the_whole_batch_gets_it_and_the_rest_is_split(returned: Forward) -> None:
    apart, n_microbatches = steps_apart(returned)
    assert apart < 1e-6
    assert n_microbatches == 2


@pytest.mark.filterwarnings("ignore:the batch is not split")
@pytest.mark.parametrize("returned", WHOLE.values(), ids=WHOLE.keys())
def test_what_depends_on_numbers_that_values_decide_keeps_the_batch_whole(returned: Forward) -> None:
    apart, n_microbatches = steps_apart(returned)
    assert apart < 1e-6
    assert n_microbatches == 1


class Hooked(nn.Module):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return hooked(h)


@pytest.mark.filterwarnings("ignore:the batch is not split", "ignore:module '1'")
def test_a_tensor_hook_that_relates_samples_keeps_the_batch_whole() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), Hooked(), nn.Linear(WIDTH, 4))
    model = copy.deepcopy(plain)
    split = Plan.from_split({"0": 0, "1": 0, "2": 1}, n_microbatches=2)
    pipelined = autopar.parallelize(model, ["cpu", "cpu"], plan=split)
    x = torch.randn(ROWS, WIDTH)
    for one in (plain, pipelined):
        one(x).square().mean().backward()
    assert torch.equal(plain[0].weight.grad, model[0].weight.grad)


class Centred(torch.autograd.Function):
    """It relates the samples, and has no backward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


@pytest.mark.filterwarnings("ignore:the batch is not split")
def test_a_function_without_a_backward_that_relates_samples_keeps_the_batch_whole() -> None:
    model = TwoLayers(lambda m, h, y, _: m.last(Centred.apply(h)))
    plain = copy.deepcopy(model)
    split = Plan.from_split({"first": 0, "last": 1}, n_microbatches=2)
    inputs = (torch.randn(ROWS, WIDTH), torch.arange(ROWS), torch.ones(ROWS, dtype=torch.bool))
    pipelined = autopar.parallelize(model, ["cpu", "cpu"], plan=split)
    assert torch.allclose(pipelined(*inputs), plain(*inputs), atol=1e-6)
    assert pipelined.plan.n_microbatches == 1
