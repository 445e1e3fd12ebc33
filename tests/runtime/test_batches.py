"""Any number of samples, split into any number of micro-batches, gives the original's outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from models import assert_same_gradients, assert_same_outputs, gradients, mlp
from torch import nn
from torch.nn import functional as F

import autopar
from autopar import InputError, PipelinedModule, Plan


def pipelined(model: nn.Module, n_microbatches: int = 3, **options: Any) -> PipelinedModule:
    """`model`, whose first stage has module `a` and whose second has `b`."""
    plan = Plan.from_split({"a": 0, "b": 1}, n_microbatches=n_microbatches)
    return autopar.parallelize(model, ["cpu", "cpu"], plan=plan, **options)


class Simple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = mlp(8, 1), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def both_ways(pm: PipelinedModule, target: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """Assert that outputs, mean loss and gradients of a call and of `train_step` are the original's, uneven or not.

    Tensors among the arguments that require grad are compared too.
    """
    model = pm.unwrap()
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.requires_grad]

    def taken() -> tuple[dict[str, torch.Tensor | None], list[torch.Tensor | None]]:
        found = [x.grad for x in tensors]
        for x in tensors:
            x.grad = None
        return gradients(model), found

    expected = model(*args, **kwargs)
    loss = F.mse_loss(expected, target)
    loss.backward()
    wanted, wanted_inputs = taken()
    found = pm(*args, **kwargs)
    assert_same_outputs(found, expected)
    F.mse_loss(found, target).backward()
    for way in ("a call", "train_step"):
        if way == "train_step":
            torch.testing.assert_close(pm.train_step(*args, target=target, loss_fn=F.mse_loss, **kwargs), loss.detach())
        grads, inputs = taken()
        assert_same_gradients(grads, wanted)
        torch.testing.assert_close(inputs, wanted_inputs)


@pytest.mark.parametrize("n_microbatches", [1, 2, 3, 5])
def test_every_batch_size_at_every_step_gives_the_originals_outputs_loss_and_gradients(n_microbatches: int) -> None:
    pm = pipelined(Simple(), n_microbatches)

    @settings(max_examples=examples(6), deadline=None, derandomize=True)
    @given(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    def check(batches: list[int]) -> None:
        for batch in batches:
            both_ways(pm, torch.randn(batch, 3), torch.randn(batch, 8))

    check()


@pytest.mark.parametrize("n_microbatches", [1, 3, 4])
@pytest.mark.parametrize("batch", [1, 2, 4, 6, 7])
def test_micro_batches_are_as_even_as_they_go_never_empty_and_keep_the_order(batch: int, n_microbatches: int) -> None:
    seen: list[torch.Tensor] = []

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        assert output.shape[0] == target.shape[0]
        seen.append(target)
        return output.square().mean()

    target = torch.arange(batch)
    pm, x = pipelined(Simple(), n_microbatches), torch.randn(batch, 8)
    pm.train_step(x, target=target, loss_fn=loss_of)
    seen.clear()  # the first step also captures the loss
    pm.train_step(x, target=target, loss_fn=loss_of)
    sizes = [len(piece) for piece in seen]
    assert len(sizes) == min(n_microbatches, batch)
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat(seen), target)


@pytest.mark.parametrize("first", [1, 7])
def test_the_first_calls_batch_size_decides_nothing(first: int) -> None:
    model = Simple()
    pm = pipelined(model)
    for batch in (first, 8, 1, 2, first):
        both_ways(pm, torch.randn(batch, 3), torch.randn(batch, 8))
    assert pm.plan is not None
    assert pm.plan.n_microbatches == 3


def test_an_empty_batch_is_refused_before_anything_is_captured_or_run() -> None:
    calls: list[int] = []

    class Counting(Simple):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(len(x))
            return super().forward(x)

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise AssertionError("there is nothing to compute a loss of")

    pm, empty = pipelined(Counting()), torch.randn(0, 8)
    for _ in range(2):
        for call in (lambda: pm(empty), lambda: pm.train_step(empty, target=torch.zeros(0, 3), loss_fn=loss_of)):
            with pytest.raises(InputError, match="no samples"):
                call()
        assert 0 not in calls
        pm(torch.randn(4, 8))
    assert all(p.grad is None for p in pm.parameters())


STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "one row for all": lambda x: x[:1].expand(x.shape),
    "every second": lambda x: x.repeat_interleave(2, 0)[::2],
    "columns of more": lambda x: torch.cat([x, x], 1)[:, 4:12],
}


@pytest.mark.parametrize("strided", STRIDES.values(), ids=list(STRIDES))
def test_inputs_need_not_be_contiguous(strided: Callable[[torch.Tensor], torch.Tensor]) -> None:
    pm = pipelined(Simple())
    both_ways(pm, torch.randn(5, 3), torch.randn(5, 8))
    both_ways(pm, torch.randn(7, 3), strided(torch.randn(7, 8)))


class Shared(nn.Module):
    """Inputs with samples, and others that all samples share; `width` of the mask is not the batch's size."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        scale: torch.Tensor | float = 1.0,
        power: int = 1,
        kind: str = "tanh",
    ) -> torch.Tensor:
        y = getattr(torch, kind)(self.a(x)) * scale
        return self.b(y if mask is None else y * mask) ** power


SHARED: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": dict,
    "none": lambda: {"mask": None},
    "mask": lambda: {"mask": torch.rand(8)},
    "mask of one row": lambda: {"mask": torch.rand(1, 8)},
    "mask that requires grad": lambda: {"mask": torch.rand(8, requires_grad=True)},
    "tensor of no dimension": lambda: {"scale": torch.tensor(1.5)},
    "tensor of no dimension that requires grad": lambda: {"scale": torch.tensor(1.5, requires_grad=True)},
    "float and integer": lambda: {"scale": 0.5, "power": 2},
    "text": lambda: {"kind": "sin"},
    "all": lambda: {"mask": torch.rand(8, requires_grad=True), "scale": torch.tensor(2.0), "power": 2, "kind": "cos"},
}


@pytest.mark.parametrize("others", SHARED.values(), ids=list(SHARED))
def test_inputs_without_samples_are_shared_by_all_micro_batches(others: Callable[[], dict[str, Any]]) -> None:
    pm = pipelined(Shared())
    for batch in (5, 7, 1, 2):
        both_ways(pm, torch.randn(batch, 3), torch.randn(batch, 8), **others())


@pytest.mark.slow
def test_plain_values_may_change_at_every_call() -> None:
    model = Shared()
    pm, x = pipelined(model), torch.randn(5, 8)
    for scale, power, kind in ((1.0, 1, "tanh"), (2.0, 1, "tanh"), (2, 2, "sin"), (True, 3, "cos"), (1.0, 1, "tanh")):
        assert_same_outputs(pm(x, scale=scale, power=power, kind=kind), model(x, scale=scale, power=power, kind=kind))


class TimeFirst(nn.Module):
    """Samples are the second dimension of what comes in; of what goes out they are the first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.GRU(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)[0][-1])


@pytest.mark.slow
@pytest.mark.parametrize("batch_dim", [1, {"x": 1}], ids=["for all", "by name"])
def test_samples_in_another_dimension_train_like_the_original_whatever_their_number(batch_dim: Any) -> None:
    pm = pipelined(TimeFirst(), batch_dim=batch_dim)
    for batch in (5, 4, 1, 7):  # 4 samples of 4 steps
        both_ways(pm, torch.randn(batch, 3), torch.randn(4, batch, 8, requires_grad=True))


class Nested(nn.Module):
    """Takes and returns dicts of lists of tuples, with None, numbers and text among the tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        (first, nothing, factor), (second, bias) = batch["pairs"]
        y = self.a(first) * factor + bias
        z = self.b(y + second)
        rows = [(z, None, 3), (y.sum(1), nothing)]
        return {"rows": rows, "deep": {"label": z.argmax(1), "name": "text", "empty": []}, "n": 7}


def test_nested_inputs_and_outputs_of_any_batch_size_keep_structure_and_gradients() -> None:
    model = Nested()
    pm = pipelined(model)
    for size in (5, 7, 2, 1):
        first, second = torch.randn(size, 8, requires_grad=True), torch.randn(size, 1, requires_grad=True)
        batch = {"pairs": [(first, None, 0.5), (second, torch.randn(8))], "unused": torch.randn(size)}
        wanted = [*model.parameters(), first, second]
        grads = []
        for output in (expected := model(batch), found := pm(batch)):
            (z, _, _), (y, _) = output["rows"]
            grads.append(torch.autograd.grad(z.square().mean() + y.square().mean(), wanted))
        assert_same_outputs(found, expected)
        torch.testing.assert_close(*grads)


@pytest.mark.slow
def test_a_target_is_split_as_deep_as_it_goes_and_what_all_samples_share_stays_whole() -> None:
    model = Simple()
    pm = pipelined(model)

    def loss_of(output: torch.Tensor, target: dict[str, Any]) -> torch.Tensor:
        assert target["name"] == "text"
        (classes, weight), (nothing, rows) = target["deep"]
        assert nothing is None
        return F.cross_entropy(output, classes) + (output * weight - rows).square().mean() * target["factor"]

    for size in (5, 7, 2, 1):
        x = torch.randn(size, 8)
        deep = [(torch.randint(0, 3, (size,)), torch.rand(1, 3)), (None, torch.randn(size, 3))]
        target = {"name": "text", "deep": deep, "factor": torch.tensor(0.3)}
        expected = loss_of(model(x), target)
        expected.backward()
        wanted = gradients(model)
        torch.testing.assert_close(pm.train_step(x, target=target, loss_fn=loss_of), expected.detach())
        assert_same_gradients(gradients(pm), wanted)


@pytest.mark.slow
def test_targets_with_their_samples_where_the_inputs_have_theirs_are_split_there() -> None:
    """Time first, batch second; and one sample a micro-batch, which would broadcast."""
    model = nn.LSTM(4, 3)

    def loss(output: tuple[torch.Tensor, Any], target: dict[str, torch.Tensor]) -> torch.Tensor:
        assert output[0].shape == target["series"].shape
        return F.mse_loss(output[0], target["series"]) + target["first"].float().mean()

    x = torch.randn(7, 3, 4)
    target = {"series": torch.randn(7, 3, 3), "first": torch.arange(3)}
    wanted = loss(model(x), target)
    wanted.backward()
    expected = gradients(model)
    model.zero_grad()
    plan = Plan.from_split({"": 0}, n_microbatches=3, devices=[("cpu:0", "cpu:1")])
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan, batch_dim=1)
    found = pm.train_step(x, target=target, loss_fn=loss)
    torch.testing.assert_close(found, wanted.detach())
    assert_same_gradients(gradients(model), expected)


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, state: torch.Tensor | None = None) -> torch.Tensor:
        y = self.a(x)
        return self.b((y if state is None else y + state).tanh())


def test_a_call_may_leave_out_inputs_whose_batch_dimension_is_given() -> None:
    """As in a loop that has a state from its second step on."""
    model = Stateful()
    plan = Plan.from_split({"a": 0, "b": 1}, n_microbatches=2)
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan, batch_dim={"x": 1, "state": 1}, cache=False)
    x, state = torch.randn(5, 4, 8), None
    for _ in range(3):
        wanted = model(x, state)
        torch.testing.assert_close(pm(x, state), wanted)
        torch.testing.assert_close(pm(x), model(x))
        state = wanted.detach()
    with pytest.raises(InputError, match=r"batch_dim names \['stat'\], but the inputs are \['state', 'x'\]"):
        autopar.parallelize(model, ["cpu", "cpu"], plan=plan, batch_dim={"x": 1, "stat": 1}, cache=False)(x)
