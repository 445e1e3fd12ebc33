"""A loss may hold tensors: it is priced, and its memory rehearsed, as if they were where the outputs are."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import AutoparWarning, Cluster, InputError, Plan
from cost_models.graphs import on_meta

CLUSTER = Cluster.preset("2xH100", nodes=1)
X, CLASSES, VALUES = torch.randn(8, 16), torch.arange(8), torch.rand(8, 16)
ONES = torch.ones(1, 16)
functional = nn.functional


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A loss that is left out of prices is said by a warning, and so is memory that is not rehearsed, by a note."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", AutoparWarning)
        yield


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))


class Scaled(nn.Module):
    """A loss that trains a parameter, and has a buffer and a plain tensor."""

    def __init__(self, place: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(place(torch.tensor(2.0)))
        self.register_buffer("shares", place(torch.rand(16)))
        self.offsets = place(torch.rand(16))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(output * self.scale * self.shares + self.offsets, target)


class Weighted:
    """An object that is called and keeps what it was last called with."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.last = weight, None

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.last = output
        return functional.cross_entropy(output, target, self.weight)


def closure(weight: torch.Tensor) -> Any:
    return lambda output, target: functional.cross_entropy(output, target, weight)


def of_teacher(teacher: nn.Module) -> Any:
    return lambda output, target: functional.mse_loss(output, teacher(target))


# From a function that places tensors: the same loss with tensors elsewhere.
LOSSES: dict[str, tuple[Callable[[Callable[..., Any]], Any], torch.Tensor]] = {
    "class weights": (lambda place: nn.CrossEntropyLoss(weight=place(torch.rand(16))), CLASSES),
    "a closure": (lambda place: closure(place(torch.rand(16))), CLASSES),
    "a partial": (lambda place: functools.partial(functional.cross_entropy, weight=place(torch.rand(16))), CLASSES),
    "pos_weight": (lambda place: nn.BCEWithLogitsLoss(pos_weight=place(torch.rand(16))), VALUES),
    "an object": (lambda place: Weighted(place(torch.rand(16))), CLASSES),
    "a module": (Scaled, VALUES),
    "a teacher": (lambda place: of_teacher(place(layers())), VALUES),
}


def as_is(value: Any) -> Any:
    return value


def by_hand(model: nn.Module, loss: Any, x: torch.Tensor, target: torch.Tensor) -> Plan:
    call: dict[str, Any] = {"example_args": (x,), "target": target, "loss_fn": loss}
    return Plan.by_hand(model, CLUSTER, pipeline=2, data=1, micro_batch=2 if len(x) > 1 else 1, **call)


def searched(model: nn.Module, loss: Any, x: torch.Tensor, target: torch.Tensor) -> Plan:
    return autopar.plan(model, CLUSTER, example_args=(x,), target=target, loss_fn=loss, n_microbatches=min(4, len(x)))


def prices(plan: Plan) -> tuple[Any, ...]:
    return plan.predicted_step_time, [stage.peak_memory for stage in plan.stages], plan.notes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan", "rows"),
    [*((name, by_hand, rows) for name in LOSSES for rows in (8, 1)), ("class weights", searched, 8)],
)
def test_prices_do_not_depend_on_where_the_tensors_of_a_loss_are(
    name: str, plan: Callable[..., Plan], rows: int
) -> None:
    make, target = LOSSES[name]
    x, y = X[:rows], target[:rows]
    expected = time, _, notes = prices(plan(on_meta(layers()), make(on_meta), x, y))
    assert time is not None
    assert not any("formula" in note or "leave out" in note for note in notes)
    assert prices(plan(layers(), make(as_is), x, y)) == expected
    assert prices(plan(on_meta(layers()), make(as_is), x, y)) == expected


@pytest.mark.slow
def test_a_loss_counts_the_kernels_that_its_tensors_need() -> None:
    wide = torch.rand(16, 4096)

    def with_product(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output @ wide, target)

    more, less = (by_hand(layers(), loss, X, CLASSES) for loss in (with_product, functional.cross_entropy))
    assert more.predicted_step_time is not None
    assert less.predicted_step_time is not None
    assert more.predicted_step_time > less.predicted_step_time


@pytest.mark.slow
@pytest.mark.parametrize("rows", [8, 1])
def test_planning_leaves_the_tensors_of_a_loss_as_they_are(rows: int) -> None:
    trained, keeping = Scaled(as_is), Weighted(torch.rand(16))
    before = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    by_hand(layers(), trained, X[:rows], VALUES[:rows])
    by_hand(layers(), keeping, X[:rows], CLASSES[:rows])
    assert trained.scale.grad is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in trained.state_dict().items())
    assert keeping.last is None


@pytest.mark.slow
def test_a_gradient_scaler_is_not_set_up_without_values() -> None:
    scaler = torch.amp.GradScaler("cpu")
    weight = torch.rand(16)

    def scaled(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return scaler.scale(functional.cross_entropy(output, target, weight))

    by_hand(on_meta(layers()), scaled, X, CLASSES)
    by_hand(layers(), scaled, X[:1], CLASSES[:1])
    loss = scaled(X, CLASSES)
    assert not loss.is_meta
    assert loss.item() == pytest.approx(scaler.get_scale() * functional.cross_entropy(X, CLASSES, weight).item())


@pytest.mark.slow
def test_the_memory_of_a_step_on_one_device_has_such_a_loss() -> None:
    call: dict[str, Any] = {"example_args": (X,), "target": CLASSES, "optimizer": "adam"}
    peaks = [
        autopar.profile(layers(), CLUSTER, loss_fn=nn.CrossEntropyLoss(weight=place(torch.rand(16))), **call).memory
        for place in (as_is, on_meta)
    ]
    assert peaks[0] == peaks[1]


def of_positive(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output[output > 0].square().mean()


def reading_a_value(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, target) * output.mean().item()


class _Halved(torch.autograd.Function):
    """Its backward reads a tensor with values, which none of its operators saw beside one without."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x / 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] / 2 * torch.atan2(ctx.saved_tensors[0], gradients[0]), None


def with_own_backward(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(_Halved.apply(output, ONES), target)


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (reading_a_value, r"loss_fn 'reading_a_value' .* cannot be called on tensors without values: .*item"),
        (with_own_backward, "its backward needs values: .*"),
    ],
)
def test_a_loss_of_one_micro_batch_that_needs_values_is_left_out_and_plans_say_so(loss: Any, why: str) -> None:
    said = f"predictions leave out the loss, because {why}"
    with pytest.warns(AutoparWarning, match=said):
        plans = [plan(layers(), loss, X[:1], CLASSES[:1]) for plan in (searched, by_hand)]
    for plan in plans:
        assert plan.predicted_step_time is not None
        assert len([note for note in plan.notes if note.startswith("predictions leave out the loss")]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoparWarning)
        call: dict[str, Any] = {"example_args": (X[:1],), "target": CLASSES[:1], "loss_fn": loss}
        again = autopar.plan(layers(), CLUSTER, plan=plans[0], **call)
    assert len([note for note in again.notes if note.startswith("predictions leave out the loss")]) == 1


def test_the_memory_of_a_step_whose_loss_needs_values_is_refused() -> None:
    call: dict[str, Any] = {"example_args": (X[:1],), "target": CLASSES[:1], "loss_fn": of_positive}
    with pytest.raises(InputError, match=r"loss_fn 'of_positive' .* cannot be called on tensors without values"):
        autopar.profile(layers(), CLUSTER, optimizer="adam", **call)
