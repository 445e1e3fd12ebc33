"""A weight that two stages use is one tensor for everyone outside, and its gradient is the same bits every time."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable

import pytest
import torch
from faults import TOKENS, WIDTH, Acts, happening, mean_square, on_every_worker, passing
from models import assert_same_gradients, assert_same_outputs, gradients
from tied_models import SharedModules
from torch import nn
from torch.nn import functional

import autopar
from autopar import Plan


class Tied(nn.Module):
    """The head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(passing(self.body(passing(self.embed(tokens), 0)), 1))


@pytest.mark.parametrize("way", ["a call", "train_step"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_tied_weights_get_the_same_bits_however_long_the_stages_take(schedule: str, way: str) -> None:
    model, chance, tokens = Tied(), random.Random(0), torch.randint(0, TOKENS, (8, 3))
    mean_square(model(tokens), tokens).backward()
    original = gradients(model)
    plan = Plan.from_split({"embed": 0, "body": 1, "head": 1}, n_microbatches=4, schedule=schedule)
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan)
    delays: Acts = {
        (pass_, place): lambda: time.sleep(chance.random() * 2e-3)
        for pass_ in ("forward", "backward")
        for place in (0, 1)
    }
    found = []
    for _ in range(20):
        with on_every_worker(pm), happening(delays):
            if way == "train_step":
                pm.train_step(tokens, target=tokens, loss_fn=mean_square)
            else:
                mean_square(pm(tokens), tokens).backward()
        found.append(gradients(pm))
    assert_same_gradients(found[0], original)
    for name, gradient in found[0].items():
        assert all(torch.equal(gradient, other[name]) for other in found), name  # type: ignore[arg-type]


def test_tied_weights_are_one_tensor_for_state_dict_and_optimizer() -> None:
    model, tokens = Tied(), torch.randint(0, TOKENS, (8, 3))
    plan = Plan.from_split({"embed": 0, "body": 1, "head": 1}, n_microbatches=4)
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan)
    for _ in range(2):
        pm(tokens)
        state = pm.state_dict()
        assert list(state) == ["embed.weight", "body.weight", "body.bias", "head.weight"]
        assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr() == model.embed.weight.data_ptr()
        assert [name for name, _ in pm.named_parameters()] == ["embed.weight", "body.weight", "body.bias"]
        (group,) = torch.optim.AdamW(pm.parameters()).param_groups
        assert sum(p is model.embed.weight for p in group["params"]) == 1
        assert len(group["params"]) == 3
        pm.load_state_dict({name: torch.ones_like(tensor) for name, tensor in state.items()})
        assert model.head.weight is model.embed.weight


def in_stages(model: nn.Module, x: torch.Tensor) -> Plan:
    return Plan.from_split({"entry": 0, "layers.1": 0, "layers.2": 1, "layers.4": 1, "exit": 1}, n_microbatches=4)


def by_hand(**degrees: int) -> Callable[[nn.Module, torch.Tensor], Plan]:
    return lambda model, x: Plan.by_hand(model, ["cpu"] * 2, example_args=(x,), **degrees)


@pytest.mark.parametrize(
    "planned",
    [in_stages, by_hand(pipeline=2), by_hand(data=2), by_hand(tensor=2), by_hand(data=2, zero=3)],
    ids=["split", "pipeline", "data", "tensor", "zero"],
)
def test_modules_with_several_names_train_as_the_original(planned: Callable[[nn.Module, torch.Tensor], Plan]) -> None:
    model, x = SharedModules(), torch.randn(8, 12)
    original = copy.deepcopy(model)
    pm = autopar.parallelize(model, ["cpu"] * 2, plan=planned(model, x))
    mine, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (pm, original))
    for _ in range(3):
        loss = pm.train_step(x, target=x, loss_fn=functional.mse_loss)
        expected = functional.mse_loss(original(x), x)
        expected.backward()
        assert_same_outputs(loss, expected.detach())
        mine.step()
        theirs.step()
        assert_same_gradients(gradients(pm), gradients(original))
    assert list(pm.state_dict()) == list(original.state_dict())
    assert_same_outputs(dict(pm.state_dict()), dict(original.state_dict()))
