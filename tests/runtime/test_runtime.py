"""A pipelined model is called, saved, trained and torn down like the original."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from models import (
    TwoTowers,
    assert_same_gradients,
    assert_same_outputs,
    bert,
    gradients,
    mlp,
    ragged_mask,
    sum_of_squares,
    tokens,
)
from torch import nn

import autopar
from autopar import InputError, PipelinedModule, Plan
from autopar.capture.torch_private import tree_leaves

pytestmark = pytest.mark.usefixtures("shared_exports")

AB = Plan.from_split({"a": 0, "b": 1}, n_microbatches=3)
TWO_STAGES = Plan.from_split({"0": 0, "3": 1}, n_microbatches=3)


def pipelined(model: nn.Module, plan: Plan = AB, **options: Any) -> PipelinedModule:
    return autopar.parallelize(model, ["cpu", "cpu"], plan=plan, **options)


def worker_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("autopar")]


class Shaped(nn.Module):
    """`result(y, x)` makes the output of two layers."""

    def __init__(self, result: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.result = nn.Linear(8, 8), nn.Linear(8, 4), result

    def forward(self, x: torch.Tensor) -> Any:
        return self.result(self.b(self.a(x).tanh()), x)


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


@dataclasses.dataclass
class Record:
    value: torch.Tensor
    note: str


RESULTS = {
    "tensor": lambda y, x: y,
    "tuple": lambda y, x: (y, y.exp()),
    "list": lambda y, x: [y, x],
    "dict": lambda y, x: {"z": y, "a": y + 1},
    "named tuple": lambda y, x: Pair(y, {"deep": [y * 2]}),
    "dataclass": lambda y, x: Record(y, "text"),
    "nested with other values": lambda y, x: {"y": (y, None, 3), "more": ["text", 2.5, True, {"e": ()}]},
    "an input as it is": lambda y, x: (x, y),
    "one tensor twice": lambda y, x: (y, y),
    "views of one tensor": lambda y, x: (y[:, :2], y[:, 2:], y.flatten(1)),
    "integers": lambda y, x: (y, y.argmax(1), y > 0),
    "nothing that needs grad": lambda y, x: y.argmax(1),
}


@pytest.mark.parametrize("result", RESULTS.values(), ids=list(RESULTS))
@pytest.mark.parametrize("n_microbatches", [1, 3])
def test_outputs_have_the_originals_type_and_values(result: Callable[..., Any], n_microbatches: int) -> None:
    model, x = Shaped(result), torch.randn(5, 8)
    expected = model(x)
    found = pipelined(model, dataclasses.replace(AB, n_microbatches=n_microbatches))(x)
    assert_same_outputs(found, expected)
    grads = [[getattr(leaf, "requires_grad", None) for leaf in tree_leaves(o)] for o in (found, expected)]
    assert grads[0] == grads[1]
    if any(grads[1]):
        sum_of_squares(expected).backward()
        wanted = gradients(model)
        sum_of_squares(found).backward()
        assert_same_gradients(gradients(model), wanted)


@pytest.mark.slow
def test_transformers_outputs_keep_their_class() -> None:
    model = bert()
    plan = Plan.from_split({"bert.embeddings": 0, "bert.encoder.layer.1": 1}, n_microbatches=2)
    inputs = {"input_ids": tokens(4), "attention_mask": ragged_mask(4)}
    pm = pipelined(model, plan)
    for extra in ({}, {"return_dict": False}, {"output_hidden_states": True}, {"labels": torch.tensor([0, 1, 1, 0])}):
        assert_same_outputs(pm(**inputs, **extra), model(**inputs, **extra))


class ManyArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        scale: float = 1.0,
        double: bool = False,
        kind: str = "tanh",
        **more: torch.Tensor,
    ) -> torch.Tensor:
        y = getattr(torch, kind)(self.a(x)) * scale
        y = y if mask is None else y * mask
        y = self.b(y + sum(more.values())) if more else self.b(y)
        return 2 * y if double else y


@pytest.mark.slow
def test_arguments_may_come_by_place_by_name_in_any_order_and_of_any_plain_type() -> None:
    model, pm = (m := ManyArguments()), pipelined(m)
    x, mask = torch.randn(5, 8), torch.rand(5, 1)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x,), {}),
        ((x, mask), {}),
        ((x, None, 2.0, True), {}),
        ((), {"x": x, "mask": mask, "scale": 3}),
        ((), {"scale": 3, "mask": mask, "x": x}),
        ((x,), {"kind": "sin", "double": True}),
        ((x,), {"kind": "cos", "double": False, "mask": None}),
        ((x,), {"bias": mask, "other": x}),
        ((x,), {"other": x, "bias": mask}),
        ((x[:, :8].double().float(),), {}),
    ]
    for _ in range(2):
        for args, kwargs in calls:
            assert_same_outputs(pm(*args, **kwargs), model(*args, **kwargs))


def test_nested_inputs_are_batched_leaf_by_leaf() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, batch: dict[str, Any], *, pair: tuple[torch.Tensor, int]) -> torch.Tensor:
            return self.b(self.a(batch["x"]) + batch["deep"][0]) * pair[0] + pair[1]

    model, pm = (m := Nested()), pipelined(m)
    for rows in (5, 7):
        batch = {"x": torch.randn(rows, 8), "deep": [torch.randn(rows, 1)]}
        pair = (torch.randn(8), 3)
        assert_same_outputs(pm(batch, pair=pair), model(batch, pair=pair))


@pytest.mark.slow
def test_a_new_signature_is_captured_anew_and_the_old_one_stays() -> None:
    model = Shaped(lambda y, x: y)
    model.a = nn.Identity()  # type: ignore[assignment]
    pm = pipelined(model, Plan.from_split({"b": 0}, n_microbatches=2, devices=[("cpu:0", "cpu:1")]))
    for shape in ((4, 8), (4, 3, 8), (4, 2, 8), (4, 8)):
        x = torch.randn(shape)
        assert_same_outputs(pm(x), model(x))
    pm.double()
    assert_same_outputs(pm(x.double()), model(x.double()))


@pytest.mark.slow
def test_training_and_evaluation_are_distinguished_module_by_module() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5))
    pm, x = pipelined(model, Plan.from_split({"0": 0, "2": 1}, n_microbatches=2)), torch.ones(4, 8)
    assert not torch.equal(pm(x), pm(x))
    assert_same_outputs(pm.eval()(x), model(x))
    assert not model.training
    pm.train()
    model[1].eval()
    model[3].eval()
    assert_same_outputs(pm(x), model(x))
    model[1].train()
    assert not torch.equal(pm(x), pm(x))


class LongFirst(nn.Module):
    """An LSTM as torch makes it: time first, samples second; and a mask that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, (state, _) = self.rnn(x * mask[:, None, None])
        return self.head(output), state


@pytest.mark.parametrize("batch_dim", [1, {"x": 1}], ids=["for all", "by name"])
def test_batch_dim_says_where_the_samples_are(batch_dim: Any) -> None:
    model, plan = LongFirst(), Plan.from_split({"rnn": 0, "head": 1}, n_microbatches=2)
    pm = pipelined(model, plan, batch_dim=batch_dim)
    for rows in (5, 4):  # 5 samples of 5 steps
        inputs = {"x": torch.randn(5, rows, 6, requires_grad=True), "mask": torch.rand(5)}
        wanted = [*model.parameters(), inputs["x"]]
        expected, found = model(**inputs), pm(**inputs)
        assert_same_outputs(found, expected)
        grads = [torch.autograd.grad(out.square().sum() + state.sum(), wanted) for out, state in (found, expected)]
        torch.testing.assert_close(*grads)


def test_batch_dim_none_shares_an_input_of_the_batchs_size() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x) @ mask)

    model = Masked()
    pm = pipelined(model, batch_dim={"x": 0, "mask": None})
    for rows in (5, 7):
        inputs = {"mask": torch.rand(5, 5), "x": torch.randn(rows, 5)}
        assert_same_outputs(pm(**inputs), model(**inputs))


def test_batch_dim_that_does_not_fit_is_refused_by_name() -> None:
    for wrong, name in (({"y": 0}, "'y'"), ({"x": 2}, "'x'")):
        with pytest.raises(InputError, match=name):
            pipelined(Shaped(lambda y, x: y), batch_dim=wrong)(torch.randn(5, 8))


def test_a_call_without_samples_is_refused_first_and_later() -> None:
    pm = pipelined(Shaped(lambda y, x: y))
    with pytest.raises(InputError, match=r"no samples.*\(0, 8\)"):
        pm(torch.randn(0, 8))
    pm(torch.randn(5, 8))
    with pytest.raises(InputError, match=r"no samples"):
        pm(torch.randn(0, 8))


def test_a_first_call_of_one_sample_does_not_keep_later_batches_whole() -> None:
    model = mlp()
    pm = pipelined(model, TWO_STAGES)
    pm(torch.randn(1, 16))
    x = torch.randn(6, 16)
    assert_same_outputs(pm(x), model(x))
    assert pm.plan is not None
    assert pm.plan.n_microbatches == 3


def test_names_tensors_and_the_original_are_the_originals() -> None:
    model = TwoTowers()
    names = [name for name, _ in model.named_parameters()]
    tensors, keys = dict(model.named_parameters()), list(model.state_dict())
    pm = pipelined(model, Plan.from_split({"left": 0, "right": 1}, n_microbatches=2))
    for _ in range(2):
        assert pm.unwrap() is model
        assert [name for name, _ in pm.named_parameters()] == names
        assert list(pm.state_dict()) == keys
        assert [name for name, _ in pm.named_modules()] == [name for name, _ in model.named_modules()]
        assert all(pm.get_parameter(name) is tensors[name] for name in names)
        pm(torch.randn(4, 6), torch.randn(4, 10))
    with pytest.raises(InputError, match="unwrap"):
        autopar.parallelize(pm, ["cpu"])


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("through", ["wrapper", "original"])
def test_loaded_weights_are_the_ones_used_and_trained(assign: bool, through: str) -> None:
    model, other, x = mlp(), mlp(), torch.randn(5, 16)
    pm = pipelined(model, TWO_STAGES)
    pm(x)
    (pm if through == "wrapper" else model).load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
    found, expected = pm(x), other(x)
    assert_same_outputs(found, expected)
    found.sum().backward()
    expected.sum().backward()
    assert_same_gradients(gradients(model), gradients(other))


@pytest.mark.parametrize("how", ["loss.backward", "train_step"])
@pytest.mark.parametrize("make", [functools.partial(torch.optim.SGD, momentum=0.9), torch.optim.AdamW])
def test_an_optimizer_made_before_the_first_call_trains_the_model(how: str, make: Any) -> None:
    model = mlp()
    twin = copy.deepcopy(model)
    pm = pipelined(model, TWO_STAGES)
    optimizers = make(pm.parameters(), lr=0.05), make(twin.parameters(), lr=0.05)

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean()

    for _ in range(5):
        x, y = torch.randn(2, 5, 16)
        loss_of(twin(x), y).backward()
        if how == "train_step":
            pm.train_step(x, target=y, loss_fn=loss_of)
        else:
            loss_of(pm(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(dict(model.state_dict()), dict(twin.state_dict()), rtol=1e-4, atol=1e-6)


def test_train_step_splits_targets_of_any_structure_and_needs_one() -> None:
    model, pm = (m := mlp()), pipelined(m, TWO_STAGES)
    x, target = torch.randn(5, 16), {"y": torch.randn(5, 16), "weights": (torch.rand(5), 0.5)}

    def loss_of(output: torch.Tensor, target: dict[str, Any]) -> torch.Tensor:
        weights, factor = target["weights"]
        return ((output - target["y"]).square().mean(1) * weights).mean() * factor

    expected = loss_of(model(x), target)
    expected.backward()
    wanted = gradients(model)
    torch.testing.assert_close(pm.train_step(x, target=target, loss_fn=loss_of), expected.detach())
    assert_same_gradients(gradients(pm), wanted)
    with pytest.raises(InputError, match="target="):
        pm.train_step(x, target=None, loss_fn=loss_of)


@pytest.mark.slow
def test_threads_end_when_closed_and_when_dropped_and_a_closed_model_starts_anew() -> None:
    gc.collect()
    before = len(worker_threads())
    pm, x = pipelined(mlp(), TWO_STAGES), torch.randn(5, 16)
    pm(x)
    mine = worker_threads()[before:]
    assert len(mine) == 2
    pm.close()
    for thread in mine:
        thread.join(timeout=10)
    assert len(worker_threads()) == before
    assert_same_outputs(pm(x), pm.unwrap()(x))
    mine, watch = worker_threads()[before:], weakref.ref(pm)
    del pm
    gc.collect()
    assert watch() is None
    for thread in mine:
        thread.join(timeout=10)
    assert len(worker_threads()) == before
