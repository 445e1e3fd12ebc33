"""Hints leave the model unchanged, survive its copies, and are read by module path."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hinted_models import (
    Residual,
    Tied,
    captured,
    hinted,
    nested,
)
from torch import nn

import autopar
from autopar import InputError
from autopar.hints.module_hints import Hints, read_hints


def test_hints_leave_the_model_as_it_is() -> None:
    model, plain = Residual(), Residual()
    plain.load_state_dict(model.state_dict())
    assert autopar.pipeline_stage(model.left, 1) is model.left
    assert autopar.recompute(model.right) is model.right
    autopar.keep_together(model.stem, model.out)
    x = torch.randn(3, 4)
    assert torch.equal(model(x), plain(x))
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert repr(model) == repr(plain)
    assert str(captured(model).graph) == str(captured(plain).graph)


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])
def test_hints_survive_copies_of_the_model_which_do_not_share_them(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = hinted(Tied(), {"first": 0}, ["block"], [["first", "last"]])
    expected = read_hints(model)
    other = copied(model)
    assert read_hints(other) == expected
    autopar.clear_hints(model)
    assert not read_hints(model)
    assert read_hints(other) == expected


def test_copies_of_a_block_are_kept_together_each_by_itself() -> None:
    block = hinted(nested(), together=[["0", "1"]])
    model = nn.Sequential(block, copy.deepcopy(block))
    assert read_hints(model).together == (("0.0", "0.1"), ("1.0", "1.1"))


def test_hints_are_read_by_path_and_a_later_pin_replaces_an_earlier_one() -> None:
    model = hinted(nested(), {"1": 0}, ["2.0"], [["3", "0"], ["0", "1"]])
    hints = read_hints(hinted(model, {"": 1, "1": 2}))
    assert hints
    assert hints.stages == (("", 1), ("1", 2))
    assert hints.recompute == ("2.0",)
    assert sorted(hints.together) == [("0", "1"), ("0", "3")]


def test_clearing_takes_the_hints_off_a_module_and_what_is_inside_only() -> None:
    model = hinted(nested(), {"0": 0, "1": 1}, ["1.0"])
    autopar.clear_hints(model.get_submodule("1"))
    assert read_hints(model) == Hints(stages=(("0", 0),))


def test_a_module_with_two_names_is_read_under_both() -> None:
    hints = read_hints(hinted(Tied(), {"again": 1}, together=[["block", "last"]]))
    assert hints.stages == (("block", 1), ("again", 1))
    assert set(hints.together[0]) == {"block", "again", "last"}


@pytest.mark.parametrize("stage", [-1, True, 1.0, "0", None])
def test_a_stage_that_is_no_whole_number_from_0_is_refused(stage: Any) -> None:
    model = nested()
    with pytest.raises(InputError, match="whole number from 0"):
        autopar.pipeline_stage(model, stage)
    assert not read_hints(model)


@pytest.mark.parametrize(
    "mark",
    [
        lambda wrong: autopar.pipeline_stage(wrong, 0),
        autopar.recompute,
        lambda wrong: autopar.keep_together(nn.Tanh(), wrong),
        autopar.clear_hints,
    ],
)
def test_what_is_no_module_is_refused(mark: Any) -> None:
    for wrong, name in ((torch.zeros(2), "Tensor"), ("encoder", "str"), (nn.Linear, "type")):
        with pytest.raises(InputError, match=f"Module, got {name}"):
            mark(wrong)


def test_nothing_cannot_be_kept_together() -> None:
    with pytest.raises(InputError, match="at least one module"):
        autopar.keep_together()
