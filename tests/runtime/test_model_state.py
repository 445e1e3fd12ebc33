"""Whatever a captured graph depends on shows in the model's state, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autopar.runtime.signatures.model_state import ModelState


class Block(nn.Module):
    """Two names of one module, and a parameter that is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.again, self.nothing = self.first, None
        self.register_module("absent", None)
        self.register_parameter("missing", None)
        self.inner = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Dropout(0.5))
        self.scale, self.act, self.table, self.chosen = 1.0, torch.relu, {"a": 1}, [0, 1]
        self.config, self.mask, self.values = SimpleNamespace(flag=True), None, torch.ones(2)
        self.register_buffer("buffer", None)


def equal_module(block: Block) -> None:
    """Of the same class, with the same parameters."""
    new = nn.ReLU()
    block.inner[1] = new


def halve(block: Block) -> None:
    block.inner[0].weight.data = block.inner[0].weight.data.half()


def replace_table(block: Block) -> None:
    block.inner._modules = {"0": nn.Linear(2, 2, bias=False), "1": block.inner[1]}


CHANGES: dict[str, Callable[[Block], object]] = {
    "an inner module's mode": lambda b: b.inner[1].eval(),
    "another module of the same kind": equal_module,
    "another table of modules": replace_table,
    "one more module": lambda b: b.inner.append(nn.ReLU()),
    "one module less": lambda b: b.inner.pop(1),
    "a module where there was none": lambda b: setattr(b, "absent", nn.ReLU()),
    "another parameter": lambda b: setattr(b.first, "weight", nn.Parameter(torch.ones(2, 2))),
    "a parameter where there was none": lambda b: setattr(b, "missing", nn.Parameter(torch.ones(2))),
    "a parameter less": lambda b: setattr(b.first, "bias", None),
    "another dtype": halve,
    "a hook": lambda b: b.inner[1].register_forward_hook(lambda *_: None),
    "a hook before": lambda b: b.inner[1].register_forward_pre_hook(lambda *_: None),
    "a backward hook": lambda b: b.inner[1].register_full_backward_hook(lambda *_: None),
    "a number": lambda b: setattr(b, "scale", 0.5),
    "a number of another type": lambda b: setattr(b, "scale", True),
    "a number of a module of torch's": lambda b: setattr(b.inner[2], "p", 0.1),
    "a function": lambda b: setattr(b, "act", torch.tanh),
    "another forward": lambda b: setattr(b.first, "forward", torch.tanh),
    "what a dict holds": lambda b: b.table.update(a=2),
    "what a list holds": lambda b: b.chosen.append(2),
    "what an object holds": lambda b: setattr(b.config, "flag", False),
    "a tensor where there was none": lambda b: setattr(b, "mask", torch.ones(2)),
    "no tensor where there was one": lambda b: setattr(b, "values", None),
    "a buffer where there was none": lambda b: setattr(b, "buffer", torch.ones(2)),
    "one more attribute": lambda b: setattr(b, "more", 1),
    "the default dtype": lambda b: torch.set_default_dtype(torch.float64),
    "the default device": lambda b: torch.set_default_device("meta"),
}


@pytest.fixture(autouse=True)
def defaults() -> object:
    yield None
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_shows(change: str) -> None:
    block = Block()
    reader = ModelState(block)
    before = reader.now()
    assert reader.now() == before
    CHANGES[change](block)
    after = reader.now()
    assert after != before
    assert reader.now() == after


def test_training_and_the_hooks_of_the_root_do_not_show() -> None:
    block = Block()
    reader = ModelState(block)
    before = reader.now()
    block.register_forward_hook(lambda *_: None)
    block.first.weight.data = torch.zeros(2, 2)
    block.first.weight.requires_grad_(False)
    block.first.weight.grad = torch.ones(2, 2)
    block.values = torch.zeros(2)
    block.scale = 2.0 / 2
    block.table = {"a": 1}
    assert reader.now() == before


def test_an_attribute_that_is_set_again_does_not_show() -> None:
    block = Block()
    reader = ModelState(block)
    before = reader.now()
    del block.scale
    block.scale = 1.0
    assert reader.now() == before


def test_tensors_that_follow_each_other_at_one_address_in_a_container_differ() -> None:
    block = Block()
    reader = ModelState(block)
    block.table = {"a": torch.zeros(1)}
    for _ in range(5):
        before = reader.now()
        block.table.clear()
        block.table["a"] = torch.zeros(1)
        assert reader.now() != before


def test_tuples_that_follow_each_other_at_one_address_differ() -> None:
    block = Block()
    reader = ModelState(block)
    block.sizes = ([1][0], 2)
    before = reader.now()
    for step in range(20):
        block.sizes = (step, step + 5)
        block.sizes = (step + 7, step)
        now = reader.now()
        assert now != before
        before = now


def test_what_the_models_code_assigns_and_parts_that_run_uncaptured_do_not_show() -> None:
    block = Block()
    reader = ModelState(block)
    reader.leave_out(["scale", "inner"])
    before = reader.now()
    block.scale, block.inner[2].p = 3.0, 0.1
    assert reader.now() == before
    block.table["a"] = 2
    assert reader.now() != before


def test_numbers_that_follow_each_other_at_one_address_differ() -> None:
    """A number that nobody holds any more gives its address to the next."""
    block = Block()
    reader = ModelState(block)
    before = reader.now()
    for step in range(20):
        block.scale = float(step) + 0.25
        now = reader.now()
        assert now != before
        before = now


def test_a_change_that_is_undone_leaves_the_state_as_it_was() -> None:
    block = Block()
    reader = ModelState(block)
    before, kept = reader.now(), block.inner[1]
    block.inner[1] = nn.Tanh()
    assert reader.now() != before
    block.inner[1] = kept
    assert reader.now() == before
