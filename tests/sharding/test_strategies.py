"""Strategies: cut the operands as they say, run the operator on every device's parts, put the results together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_calls import Sizes, sample_call
from rule_examples import EXAMPLES, RANDOM
from rule_oracle import bound, rerun
from shard_oracle import part, places

from autopar.analysis.rules.table import RULES
from autopar.sharding.layouts import Placements, local_shape, slices
from autopar.sharding.strategies import REPEATED, Strategy, repeated, strategies

_NEW = ("new_empty", "empty_like", "empty")


def whole_of(parts: dict[tuple[int, ...], torch.Tensor], layout: Placements, mesh: Sequence[int], like: Any) -> Any:
    found = torch.zeros_like(like)
    for place, value in parts.items():
        # Replicas are one: the first counts.
        if all(i == 0 for i, code in zip(place, layout, strict=True) if code == -1):
            found[slices(layout, like.shape, mesh, place)] += value
    return found


def check(target: Any, args: Any, kwargs: Any, rule: Any, whole: list[torch.Tensor], one: Strategy, mesh: Any) -> None:
    results: list[dict[tuple[int, ...], torch.Tensor]] = [{} for _ in whole]
    shape = list(local_shape(one.outputs[0], whole[0].shape, mesh))
    for place in places(mesh):
        swap = {
            id(tensor): part(tensor, layout, mesh, place)
            for tensor, layout in zip(rule.operands, one.inputs, strict=True)
            if isinstance(tensor, torch.Tensor)
        }
        for found, value in zip(results, rerun(target, args, kwargs, swap, shape), strict=True):
            found[place] = value * one.scale if one.scale != 1 else value
    for parts, layout, tensor in zip(results, one.outputs, whole, strict=True):
        assert {tuple(p.shape) for p in parts.values()} == {local_shape(layout, tensor.shape, mesh)}
        if tensor.dtype == torch.bool:
            parts, tensor = {k: v.long() for k, v in parts.items()}, tensor.long()
        put = whole_of(parts, layout, mesh, tensor)
        torch.testing.assert_close(put, tensor, rtol=1e-9, atol=1e-9, equal_nan=True, check_stride=False)


@pytest.mark.parametrize("name", [n for n in RULES if n not in RANDOM and n not in _NEW])
@settings(max_examples=examples(2), deadline=None, database=None)
@given(mesh=st.sampled_from([(2,), (2, 2), (3, 2)]), seed=st.integers(0, 9))
def test_parts_that_every_strategy_makes_put_together_are_the_whole(
    name: str, mesh: tuple[int, ...], seed: int
) -> None:
    for make in EXAMPLES.get(name, [sample_call(name)]):
        torch.manual_seed(seed)
        target, args, kwargs = make(Sizes(6, 4, 12, 6))
        rule, whole = bound(target, args, kwargs)
        inside = {i for dims in rule.inputs for dim in dims for i in dim}
        found = strategies(rule, mesh)
        assert found[0].axes == (REPEATED,) * len(mesh)
        for one in found:
            new = any(axis in rule.kinds and axis not in inside for axis in one.axes)
            if not new:  # nothing to cut: made anew, alike all along
                check(target, args, kwargs, rule, whole, one, mesh)


def test_a_linear_layer_has_the_strategies_that_are_known_by_name() -> None:
    x, w, b = torch.randn(4, 6), torch.randn(8, 6), torch.randn(8)
    rule, _ = bound(torch.ops.aten.linear.default, (x, w, b), {})
    found = {one.axes[0]: (one.inputs, one.outputs) for one in strategies(rule, (2,))}
    assert found.pop("n") == (((-1,), (0,), (0,)), ((1,),))
    assert found.pop("k") == (((1,), (1,), (-2,)), ((-2,),))
    assert found.pop("b1") == (((0,), (-1,), (-1,)), ((0,),))
    assert found.pop("02") == (((-2,), (-1,), (-2,)), ((-2,),))
    assert found.pop("12") == (((-1,), (-2,), (-2,)), ((-2,),))
    assert found == {REPEATED: (((-1,), (-1,), (-1,)), ((-1,),))}


def test_every_device_has_its_share_of_the_work() -> None:
    x, w = torch.randn(8, 12), torch.randn(8, 12)
    rule, _ = bound(torch.ops.aten.linear.default, (x, w), {})
    for one in strategies(rule, (2, 4)):
        cut = math.prod(n for n, axis in zip((2, 4), one.axes, strict=True) if axis in rule.kinds)
        assert one.share == pytest.approx(1 / cut)


def test_uneven_parts_and_axes_of_one_device_are_no_strategies() -> None:
    x, w = torch.randn(4, 3), torch.randn(6, 3)
    rule, _ = bound(torch.ops.aten.linear.default, (x, w), {})
    assert {one.axes[0] for one in strategies(rule, (4,))} == {REPEATED, "b1", "0", "1"}
    assert all(one.axes[1] == REPEATED for one in strategies(rule, (2, 1)))
    assert not any(one.axes == ("n", "n") for one in strategies(rule, (2, 2)))


def test_an_operator_without_a_rule_is_repeated() -> None:
    one = repeated(2, 1, 3)
    assert (one.inputs, one.outputs, one.share) == (((-1,) * 3,) * 2, ((-1,) * 3,), 1.0)
