"""Optimizers outside of torch in checkpoints of one process: all states go on, or are refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from custom_optimizers import CUSTOM, Momentum
from rank_pending_states import made, steps
from torch import nn

import autopar


@pytest.mark.parametrize("name", CUSTOM)
def test_all_states_go_on(tmp_path: Path, name: str) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return CUSTOM[name](model.parameters())

    model, optimizer = made(make)
    steps(model, optimizer, 3)
    autopar.save(tmp_path, model, optimizer, step=3)
    wanted = steps(model, optimizer, 3)
    model, optimizer = made(make)
    autopar.load(tmp_path, model, optimizer)
    assert steps(model, optimizer, 3) == wanted


def add(key: Any, state: Any) -> Callable[[nn.Module, torch.optim.Optimizer], None]:
    """As a state of the first parameter."""
    return lambda model, optimizer: optimizer.state[next(model.parameters())].update({key: state})


WRONG: dict[str, tuple[Callable[[nn.Module, torch.optim.Optimizer], None], str]] = {
    "a name that is no text": (
        add((1, 2), 3),
        r"the optimizer's state \(1, 2\) of '0.weight' is named by a value of type tuple: use a text or a number",
    ),
    "one name twice": (
        add("[0]", torch.ones(12, 12)),
        r"two of the optimizer's states of '0.weight' have the name '\[0\]': rename one of them",
    ),
    "a number for no parameter": (
        lambda _, optimizer: optimizer.state.update({3: {"n": 1}}),  # type: ignore[dict-item]
        "the optimizer has a state of 3, of type int, which is no parameter: use a text",
    ),
    "a tensor that is no parameter": (
        lambda _, optimizer: optimizer.state.update({torch.ones(5): {"n": 1}}),
        r"the optimizer has states of a tensor of shape \(5,\) that is none of the model's parameters: delete them",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_checkpoint_cannot_keep_is_refused_by_name(tmp_path: Path, name: str) -> None:
    change, words = WRONG[name]
    model, optimizer = made(lambda m: Momentum(m.parameters(), 0))
    steps(model, optimizer, 1)
    change(model, optimizer)
    with pytest.raises(autopar.InputError, match=words):
        autopar.save(tmp_path, model, optimizer, step=1)
    assert not list(tmp_path.iterdir())


def test_a_group_without_parameters_takes_the_saved_group_that_no_other_continues(tmp_path: Path) -> None:
    def make(*rates: float) -> torch.optim.Optimizer:
        """The group with rate 1 has the parameters."""
        groups = [{"params": list(model.parameters()) if rate == 1 else [], "lr": rate} for rate in rates]
        return torch.optim.SGD(groups)

    model = nn.Linear(2, 2)
    autopar.save(tmp_path, model, make(1, 2, 3), step=1)
    late = make(4, 5, 1)
    autopar.load(tmp_path, model, late)
    assert [group["lr"] for group in late.param_groups] == [2, 3, 1]
    words = "group 1 of the optimizer's 2 has no parameters that say which of the checkpoint's 3 groups it continues"
    with pytest.raises(autopar.CheckpointError, match=re.escape(words)):
        autopar.load(tmp_path, model, make(1, 2))


def test_names_of_parameters_stay_those_of_the_optimizer(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    autopar.save(tmp_path, model, torch.optim.SGD([("w", model.weight), ("b", model.bias)]), step=1)
    late = torch.optim.SGD(model.named_parameters())
    autopar.load(tmp_path, model, late)
    assert late.param_groups[0]["param_names"] == ["weight", "bias"]
