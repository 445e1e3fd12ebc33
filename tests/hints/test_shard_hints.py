"""Shard hints survive copies of the model, and `shard` refuses at once what no model can satisfy."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import mlp
from shard_hints import MESH
from torch import nn
from torch.nn import functional

import autopar
from autopar import InputError, Layout
from autopar.capture.program import capture
from autopar.hints.shard import hint_of

# -- marks on models --------------------------------------------------------------------------------------------------


def test_marks_survive_copies_and_pickles_and_are_cleared() -> None:
    model = mlp()
    first = next(m for m in model.modules() if isinstance(m, nn.Linear))
    asked = Layout((2, 2), ("a", "b"))(("a", "b"), None)
    assert autopar.shard(first, in_strategy=(asked,), parameter_plan={"weight": (1, 1)}) is first
    model.function = autopar.shard(torch.relu, in_strategy=((2, 1),))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        again = next(m for m in copied.modules() if isinstance(m, nn.Linear))
        assert hint_of(again) == hint_of(first)
        assert hint_of(first).inputs == (asked,)
        assert copied.function.hint == model.function.hint
        autopar.clear_hints(copied)
        assert hint_of(again) is None
        assert copied.function is torch.relu
    assert hint_of(first) is not None


def test_outside_of_a_capture_a_sharded_function_is_the_function() -> None:
    x = torch.randn(4, 4)
    softmax = autopar.shard(functional.softmax, in_strategy=((2, 1),))
    assert torch.equal(softmax(x, dim=1), functional.softmax(x, dim=1))


def test_a_graph_with_borders_computes_what_the_model_does() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)), nn.ReLU(inplace=True))
    x = torch.randn(4, 8)
    wanted = model(x)
    for module in model:
        autopar.shard(module, in_strategy=((2, 1),), out_strategy=((2, 1),))
    (got,) = capture(model, (x,), {}).graph_module(x)
    assert torch.equal(got, wanted)


# -- what is refused when shard() is called ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        ({}, ["the hint is empty"]),
        ({"in_strategy": (4, 1)}, ["one entry per tensor", "((4, 1),)"]),
        ({"in_strategy": ()}, ["such as ((4, 1),)"]),
        ({"in_strategy": MESH("dp", "sp")}, ["one entry per tensor"]),
        ({"in_strategy": (MESH,)}, ["call it with a name per dimension"]),
        ({"in_strategy": ((4, 0),)}, ["in_strategy[0], dimension 1: 0 parts", "at least 1"]),
        ({"in_strategy": ((2.0, -1),)}, ["dimension 0: 2.0", "dimension 1: -1"]),
        ({"in_strategy": ((True, 1),)}, ["True parts"]),
        ({"out_strategy": ("dp",)}, ["out_strategy[0]", "'dp'"]),
        ({"parameter_plan": {"wight": (1, 1)}}, ["'wight'", "'weight', 'bias'"]),
        ({"parameter_plan": {"weight": (1,)}}, ["1 entries for the 2 dimensions"]),
        ({"parameter_plan": {"weight": (4, 1)}}, ["dimension 0", "6 entries", "4 parts", "1, 2, 3 would work"]),
        ({"parameter_plan": [1]}, ["must be a dict"]),
        ({"in_strategy": (MESH("dp", None),), "out_strategy": (Layout((8,), ("x",))("x", None),)}, ["one mesh"]),
        ({"in_strategy": (MESH("dp", None),), "out_strategy": ((3, 1),)}, ["3 parts", "8 devices"]),
        ({"in_strategy": ((0, 1),), "parameter_plan": {"wight": (1, 1)}}, ["dimension 0: 0", "'wight'"]),
    ],
)
def test_a_hint_that_cannot_be_is_refused_at_once(options: dict[str, Any], messages: list[str]) -> None:
    with pytest.raises(InputError) as raised:
        autopar.shard(nn.Linear(8, 6), **options)
    assert not [m for m in messages if m not in str(raised.value)], raised.value


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Layout((), ()), "needs at least one axis"),
        (lambda: Layout((2, 0), ("a", "b")), "axis 1 has 0 devices"),
        (lambda: Layout((2, 2), ("a",)), "there are 2 axes, but 1 names"),
        (lambda: Layout((2, 2), ("a", "a")), "several axes are named 'a'"),
        (lambda: Layout((2,), ("None",)), "'None'"),
        (lambda: MESH("dp", "tp"), "dimension 1: the mesh has no axis 'tp'; its axes are dp, sp, mp"),
        (lambda: MESH("dp", ("sp", "dp")), "axis 'dp' is used twice, for dimensions 0 and 1"),
        (lambda: autopar.shard(3), "takes a torch.nn.Module or a function"),
        (lambda: autopar.shard(torch.relu, parameter_plan={"w": (1,)}), "is for modules"),
        (lambda: autopar.shard(autopar.shard(torch.relu, ((2, 1),)), ((2, 1),)), "already has the shard hint"),
    ],
)
def test_layouts_and_targets_are_checked(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError) as raised:
        build()
    assert message in str(raised.value)


def test_a_module_is_sharded_in_one_way() -> None:
    layer = autopar.shard(nn.Linear(8, 8), in_strategy=((4, 1),))
    autopar.shard(layer, in_strategy=((4, 1),))  # the same again is no contradiction
    with pytest.raises(InputError, match="already has the shard hint in_strategy"):
        autopar.shard(layer, in_strategy=((2, 1),))
