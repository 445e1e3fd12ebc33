"""Every rule, by its definition: shard the operands along an index, run the operator on the shards, put the results
together as the line of index notation says, and compare with the whole."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_calls import Sizes, sample_call
from rule_examples import EXAMPLES, RANDOM
from rule_oracle import bound, rerun

from autopar.analysis.rules.calls import quotient
from autopar.analysis.rules.notation import Dims, IndexKind, Rule, read
from autopar.analysis.rules.table import RULES
from autopar.analysis.rules.views import factorise

sizes = st.builds(Sizes, *[st.integers(2, 4)] * 4)


def taken(tensor: Any, dims: Dims, rule: Rule, index: str, start: int, stop: int) -> Any:
    """The shard of a tensor that has entries start:stop of `index`."""
    factors = [i for dim in dims for i in dim]
    if index not in factors:
        return tensor
    unfolded = tensor.reshape([rule.sizes[i] for i in factors])
    part = unfolded.narrow(factors.index(index), start, stop - start)
    return part.reshape(local_shape(tensor.shape, dims, rule, index, stop - start)).contiguous()


def local_shape(shape: Any, dims: Dims, rule: Rule, index: str, length: int) -> list[int]:
    return [n // rule.sizes[index] * length if index in dim else n for n, dim in zip(shape, dims, strict=True)]


def check_shards(target: Any, args: Any, kwargs: Any, rule: Rule, index: str, whole: list[torch.Tensor]) -> None:
    size, kind = rule.sizes[index], rule.kinds[index]
    inside = any(index in dim for dims in rule.inputs for dim in dims)
    if not inside:  # new: all along it alike
        for tensor, dims in zip(whole, rule.outputs, strict=True):
            first = taken(tensor, dims, rule, index, 0, 1)
            assert all(torch.equal(taken(tensor, dims, rule, index, i, i + 1), first) for i in range(size))
        return
    parts, shares = [], []
    for start, stop in ((0, 1), (1, size)):
        swap = {}
        for i, (tensor, dims) in enumerate(zip(rule.operands, rule.inputs, strict=True)):
            part = taken(tensor, dims, rule, index, start, stop)
            once = kind is IndexKind.SUMMED and i in rule.addends and not any(index in dim for dim in dims)
            swap[id(tensor)] = torch.zeros_like(part) if once and start else part
        shape = local_shape(whole[0].shape, rule.outputs[0], rule, index, stop - start)
        parts.append(rerun(target, args, kwargs, swap, shape))
        shares.append((stop - start) / size)
    for i, (tensor, dims) in enumerate(zip(whole, rule.outputs, strict=True)):
        pieces = [p[i] for p in parts]
        if kind is IndexKind.KEPT:
            for piece, (start, stop) in zip(pieces, ((0, 1), (1, size)), strict=True):
                assert_equal(piece, taken(tensor, dims, rule, index, start, stop))
        elif kind is IndexKind.SUMMED:
            assert_equal(pieces[0] + pieces[1], tensor)
        else:
            assert_equal(pieces[0] * shares[0] + pieces[1] * shares[1], tensor)


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, equal_nan=True, check_stride=False)


@pytest.mark.parametrize("name", [name for name in RULES if name not in RANDOM])
@settings(max_examples=examples(4), deadline=None, database=None)
@given(sizes=sizes, seed=st.integers(0, 9))
def test_shards_of_every_operator_put_together_are_the_whole(name: str, sizes: Sizes, seed: int) -> None:
    for make in EXAMPLES.get(name, [sample_call(name)]):
        torch.manual_seed(seed)
        target, args, kwargs = make(sizes)
        assert target.overloadpacket.__name__ == name
        rule, whole = bound(target, args, kwargs)
        assert all(t.dim() == len(dims) for t, dims in zip(whole, rule.outputs, strict=True))
        for index, kind in rule.kinds.items():
            if kind is not IndexKind.WHOLE:
                check_shards(target, args, kwargs, rule, index, whole)


@pytest.mark.parametrize("name", [name for name in RULES if name not in RANDOM])
def test_operators_are_linear_in_the_operands_that_their_rules_say(name: str) -> None:
    for make in EXAMPLES.get(name, [sample_call(name)]):
        target, args, kwargs = make(Sizes(2, 3, 4, 2))
        rule, whole = bound(target, args, kwargs)
        for group in rule.linear:
            swap: dict[int, Any] = {}
            for i in group:
                x = rule.operands[i]
                swap[id(x)] = torch.rand_like(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x * 2
            added = {id(rule.operands[i]): rule.operands[i] + swap[id(rule.operands[i])] for i in group}
            others = rerun(target, args, kwargs, swap, list(whole[0].shape))
            together = rerun(target, args, kwargs, added, list(whole[0].shape))
            for first, second, both in zip(whole, others, together, strict=True):
                assert_equal(both, first + second)


@pytest.mark.parametrize("name", sorted(RANDOM))
def test_rules_of_random_operators_fit_their_shapes(name: str) -> None:
    for make in EXAMPLES.get(name, [sample_call(name)]):
        rule, whole = bound(*make(Sizes(2, 3, 4, 2)))
        for tensor, dims in zip(whole, rule.outputs, strict=True):
            assert [math.prod(rule.sizes[i] for i in dim) for dim in dims] == list(tensor.shape)


@settings(max_examples=examples(40), deadline=None, database=None)
@given(st.lists(st.integers(1, 6), min_size=0, max_size=4), st.data())
def test_views_are_folded_from_common_indices_in_row_major_order(before: list[int], data: st.DataObject) -> None:
    numel, after, left = math.prod(before), [], math.prod(before)
    while left > 1 and len(after) < 4:
        after.append(data.draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0])))
        left //= after[-1]
    after.append(left)
    found = factorise(before, after)
    if found is None:
        cuts = [{math.prod(shape[i:]) for i in range(len(shape))} for shape in (before, after)]
        assert any(a % b and b % a for a in cuts[0] for b in cuts[1])
        return
    left_dims, right_dims, parts = found
    line = f"{' '.join(left_dims)} -> {' '.join(right_dims)}"
    rule = read(line, ["x"], [before], [after], parts)
    order = [i for dim in rule.inputs[0] for i in dim]
    assert order == [i for dim in rule.outputs[0] for i in dim]
    assert math.prod(rule.sizes[i] for i in order) == numel
    for dims, shape in ((rule.inputs[0], before), (rule.outputs[0], after)):
        assert [math.prod(rule.sizes[i] for i in dim) for dim in dims] == shape


@pytest.mark.parametrize(
    ("line", "shapes", "results", "text"),
    [
        ("*b k, n k, n -> *b n ; 02 12", [(2, 5, 3), (4, 3), None], [(2, 5, 4)], "b2 b1 k, n k -> b2 b1 n ; 0 1"),
        ("*a, *a -> *a ; *", [(2, 3), (3,)], [(2, 3)], "a2 a1, a1 -> a2 a1 ; 01"),
        ("*a, *a -> *a ; 0 1", [(2, 3), (2, 1)], [(2, 3)], "a2 a1, a2 1 -> a2 a1 ; 0 1"),
        ("a ~k -> a", [(2, 3)], [(2,)], "a ~k -> a"),
    ],
)
def test_a_line_is_read_for_the_shapes_at_hand(line: str, shapes: Any, results: Any, text: str) -> None:
    assert str(read(line, range(len(shapes)), shapes, results)) == text


@settings(max_examples=examples(25), deadline=None, database=None)
@given(*[st.integers(1, 60)] * 2, st.booleans())
def test_quotients_are_those_of_all_batch_sizes(a: int, b: int, symbolic: bool) -> None:
    import sympy

    batch = sympy.Symbol("B", integer=True, positive=True)
    found = quotient(a * batch if symbolic else a, b)
    assert found == (None if a % b else a // b * (batch if symbolic else 1))
    assert quotient(batch + 1, batch) is None
