"""Operators that devices do together: every strategy, carried out on parts, gives the whole operator's numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_calls import Call, Sizes, aten, call, places, x
from rule_examples import EXAMPLES
from shard_oracle import part
from shard_oracle import places as devices_of
from torch import fx

from autopar.analysis.rules.notation import Rule
from autopar.analysis.rules.table import bind
from autopar.sharding.layouts import REPLICATE, Placements, slices
from autopar.sharding.parallel_operators.group import OperatorGroup
from autopar.sharding.parallel_operators.operators import SPECIALS, collectives, run
from autopar.sharding.strategies import Strategy, strategies

MESHES = [(2,), (3,), (2, 2)]
IGNORED = -100
GROUPED = torch.ops.transformers.grouped_mm_fallback.default

# Running statistics, weights of classes: by operator, from its arguments.
CONSTANTS: dict[str, Callable[[tuple[Any, ...]], tuple[Any, ...]]] = {
    "batch_norm": lambda args: args[3:5],
    "cross_entropy_loss": lambda args: args[2:3],
}


def ruled(made: Call) -> Rule:
    """The rule of a call, with its tensors for operands."""
    target, args, kwargs = made
    graph, nodes = fx.Graph(), {}

    def placed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder(f"x{len(nodes)}")
        nodes[node] = value
        return node

    node = graph.call_function(target, tuple(map(placed, args)), {k: placed(v) for k, v in kwargs.items()})
    nodes[node] = target(*(a.clone() if isinstance(a, torch.Tensor) else a for a in args), **kwargs)
    rule = bind(node, lambda n: nodes[n])
    assert rule is not None
    return replace(rule, operands=tuple(nodes.get(o, o) for o in rule.operands))


def special_strategies(rule: Rule, mesh: Sequence[int]) -> list[Strategy]:
    """Also those of parts that are not even: a batch may have any size."""
    any_size = replace(rule, sizes={index: size * 12 for index, size in rule.sizes.items()})
    found = [one for one in strategies(any_size, mesh) if one.special]
    assert {one.special for one in found} == {rule.name}
    return found


def leaf(value: torch.Tensor) -> torch.Tensor:
    return value.detach().clone().requires_grad_(value.is_floating_point())


def together(
    parts: Sequence[torch.Tensor], layout: Placements, mesh: Sequence[int], like: torch.Tensor
) -> torch.Tensor:
    """The whole tensor: addends added up; what replicas have has to be the same."""
    found, seen = torch.zeros_like(like), {}
    for place, value in zip(devices_of(mesh), parts, strict=True):
        same = tuple(0 if code == REPLICATE else i for i, code in zip(place, layout, strict=True))
        if same in seen:
            torch.testing.assert_close(value, seen[same])
        else:
            seen[same] = value
            found[slices(layout, like.shape, mesh, place)] += value
    return found


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11, check_stride=False)


def check(made: Call, mesh: tuple[int, ...], one: Strategy, rule: Rule) -> None:
    """Results, gradients, and what is written to, against the operator on whole tensors."""
    target, args, kwargs = made
    swap = {id(t): leaf(t) for t in rule.operands if isinstance(t, torch.Tensor)}
    fixed = [t for t in CONSTANTS.get(rule.name, lambda given: ())(args) if t is not None]  # without gradients
    swap |= {id(t): t.clone() for t in fixed}
    whole = target(*(swap.get(id(a), a) for a in args), **kwargs)
    gradient = torch.randn_like(whole)
    whole.backward(gradient)

    calls, parts = [], []
    for place in devices_of(mesh):
        own = {id(t): leaf(part(t, one.inputs[i], mesh, place)) for i, t in enumerate(rule.operands)}
        own |= {id(t): own[id(t)].detach() for t in fixed}
        calls.append((target, [own.get(id(a), a) for a in args], kwargs))
        parts.append(own)
    results = run(one.special, calls, strategy=one, mesh=mesh)
    close(together([r.detach() for r in results], one.outputs[0], mesh, whole.detach()), whole.detach())

    back = one.gradient_out(0)
    torch.autograd.backward(
        results, [gradient[slices(back, gradient.shape, mesh, place)].clone() for place in devices_of(mesh)]
    )
    for i, tensor in enumerate(rule.operands):
        mine, layout = [own[id(tensor)] for own in parts], one.gradient_in(i)
        if any(tensor is t for t in fixed):
            close(together(mine, one.inputs[i], mesh, tensor), swap[id(tensor)])
        elif tensor.is_floating_point():
            found = [torch.zeros_like(m) if m.grad is None else m.grad for m in mine]
            close(together(found, layout, mesh, tensor), swap[id(tensor)].grad)


def check_all(made: Call, mesh: tuple[int, ...]) -> None:
    rule = ruled(made)
    for one in special_strategies(rule, mesh):
        check(made, mesh, one, rule)


sizes = st.lists(st.integers(4, 7), min_size=3, max_size=3)
proof = settings(max_examples=examples(4), deadline=None, database=None)


@pytest.mark.parametrize("mesh", MESHES)
@proof
@given(s=sizes, padding=st.booleans())
def test_rows_of_an_embedding_are_looked_up_where_they_are(mesh: tuple[int, ...], s: list[int], padding: bool) -> None:
    check_all(call(aten.embedding.default, x(s[0], s[1]), places(s[0], 3, s[2]), 2 if padding else -1), mesh)


def targets(n_classes: int, *shape: int, ignored: bool) -> torch.Tensor:
    found = places(n_classes, *shape)
    if ignored and shape:
        found[0] = IGNORED  # not as many on every device
    return found


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("reduction", [0, 1, 2])
@proof
@given(s=sizes, rank=st.integers(1, 3), smoothing=st.sampled_from([0.0, 0.2]), ignored=st.booleans())
def test_cross_entropy_is_exact_with_classes_and_rows_in_parts(
    mesh: tuple[int, ...], reduction: int, s: list[int], rank: int, smoothing: float, ignored: bool
) -> None:
    shape, rows = ([s[1]], []) if rank == 1 else ([s[0], s[1], s[2]][:rank], [s[0], s[2]][: rank - 1])
    scores, target = 5 * x(*shape) - 2, targets(s[1], *rows, ignored=ignored)
    check_all(call(aten.cross_entropy_loss.default, scores, target, None, reduction, IGNORED, smoothing), mesh)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["nll_loss", "nll_loss2d", "nll_loss_nd"])
@proof
@given(s=sizes, reduction=st.integers(0, 2))
def test_log_likelihoods_are_exact_with_classes_and_rows_in_parts(
    mesh: tuple[int, ...], name: str, s: list[int], reduction: int
) -> None:
    more = [s[2], 2] if name != "nll_loss" else []
    target = targets(s[1], s[0], *more, ignored=True)
    check_all(call(getattr(aten, name).default, x(s[0], s[1], *more), target, None, reduction, IGNORED), mesh)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_weighted_mean_over_rows_in_parts_is_exact(mesh: tuple[int, ...], smoothing: float) -> None:
    target = targets(5, 6, ignored=True)
    check_all(call(aten.cross_entropy_loss.default, x(6, 5), target, x(5), 1, IGNORED, smoothing), mesh)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "_softmax", "_log_softmax"])
@proof
@given(s=sizes, dim=st.integers(-3, 2))
def test_softmax_is_exact_with_its_dimension_in_parts(mesh: tuple[int, ...], name: str, s: list[int], dim: int) -> None:
    packet = getattr(aten, name)
    last = False if name.startswith("_") else None  # half_to_float, or another type
    target = packet.default if name.startswith("_") else packet.int
    check_all(call(target, 5 * x(*s) - 2, dim, last), mesh)


@pytest.mark.parametrize("mesh", MESHES)
@proof
@given(s=sizes, rank=st.integers(2, 4), affine=st.booleans(), tracked=st.booleans())
def test_batch_norm_is_that_of_the_whole_batch_with_rows_in_parts(
    mesh: tuple[int, ...], s: list[int], rank: int, affine: bool, tracked: bool
) -> None:
    rows = 3 * x(*[*s, 2][:rank]) + 7
    parameters = [x(s[1]) if affine else None for _ in range(2)]
    running = [x(s[1]) if tracked else None for _ in range(2)]
    check_all(call(aten.batch_norm.default, rows, *parameters, *running, True, 0.3, 1e-5, False), mesh)


@pytest.mark.parametrize("mesh", MESHES)
@proof
@given(counts=st.lists(st.integers(0, 3), min_size=4, max_size=7))
def test_experts_in_parts_do_the_rows_that_are_theirs(mesh: tuple[int, ...], counts: list[int]) -> None:
    ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    check_all(call(GROUPED, x(sum(counts), 6), x(len(counts), 6, 4), ends), mesh)


EVEN: dict[str, Callable[[], Call]] = {
    "embedding": lambda: call(aten.embedding.default, x(12, 6), places(12, 6)),
    "batch_norm": lambda: call(aten.batch_norm.default, x(12, 6, 2), x(6), x(6), x(6), x(6), True, 0.1, 1e-5, False),
    "cross_entropy_loss": lambda: call(aten.cross_entropy_loss.default, x(12, 6), places(6, 12)),
    "nll_loss": lambda: call(aten.nll_loss.default, x(12, 6), places(6, 12)),
    "softmax": lambda: call(aten.softmax.int, x(12, 6), 1),
    "grouped_mm_fallback": lambda: call(
        GROUPED, x(12, 6), x(6, 6, 4), torch.tensor([2, 4, 6, 8, 10, 12], dtype=torch.int32)
    ),
}


@pytest.mark.parametrize("name", EVEN)
def test_shapes_of_results_are_known_without_values(name: str) -> None:
    """Ranks derive the shapes of what they send each other from stages on the meta device."""
    target, args, kwargs = EVEN[name]()
    rule = ruled((target, args, kwargs))
    for one in special_strategies(rule, (2,)):
        calls: dict[str, list[Any]] = {"cpu": [], "meta": []}
        for place in devices_of((2,)):
            own = {id(t): leaf(part(t, one.inputs[i], (2,), place)) for i, t in enumerate(rule.operands)}
            for device, made in calls.items():
                given = [own.get(id(a), a).detach().to(device) if isinstance(a, torch.Tensor) else a for a in args]
                made.append((target, given, kwargs))
        real, known = (run(one.special, made, strategy=one, mesh=(2,)) for made in calls.values())
        assert [tuple(x.shape) for x in known] == [tuple(x.shape) for x in real]


@pytest.fixture
def exchanged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, tuple[int, ...]]]:
    """(bytes of a device, axes) of every all-reduce that is carried out."""
    log: list[tuple[int, tuple[int, ...]]] = []
    reduce = OperatorGroup.all_reduce

    def logged(self: OperatorGroup, parts: Any, axes: Any, *combine: Any) -> Any:
        log.append((parts[0].numel() * parts[0].element_size(), tuple(axes)))
        return reduce(self, parts, axes, *combine)

    monkeypatch.setattr(OperatorGroup, "all_reduce", logged)
    return log


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
@pytest.mark.parametrize("name", EVEN)
def test_what_is_exchanged_within_is_what_is_priced(
    name: str, mesh: tuple[int, ...], exchanged: list[tuple[int, tuple[int, ...]]]
) -> None:
    made = EVEN[name]()
    rule = ruled(made)
    assert any(one.special for one in strategies(rule, mesh))
    for one in strategies(rule, mesh):
        if not one.special:
            assert collectives(one, rule, rule.operands, mesh) == []
            continue
        exchanged.clear()
        check(made, mesh, one, rule)
        inners = collectives(one, rule, rule.operands, mesh)
        assert {inner.collective for inner in inners} <= {"all_reduce"}
        for axis in range(len(mesh)):
            carried = sum(nbytes for nbytes, axes in exchanged if axis in axes)
            assert sum(inner.nbytes for inner in inners if inner.axis == axis) == carried


def test_every_operator_whose_rule_says_together_can_be_carried_out() -> None:
    marked = set()
    for name, makers in EXAMPLES.items():
        if any(ruled(make(Sizes(4, 4, 4, 4))).together for make in makers):
            marked.add(name)
    assert marked == set(SPECIALS)


@pytest.mark.parametrize("options", [{"scale_grad_by_freq": True}, {"sparse": True}])
def test_an_embedding_of_other_gradients_keeps_its_rows_whole(options: dict[str, bool]) -> None:
    rule = ruled(call(aten.embedding.default, x(6, 4), places(6, 4), **options))
    assert not [one for one in strategies(rule, (2,)) if one.special or one.inputs[0] == (0,)]


def test_half_precision_stays_what_it_is_and_is_summed_in_single() -> None:
    torch.manual_seed(0)
    scores, target = torch.randn(8, 4096).bfloat16(), torch.randint(4096, (8,))
    made = call(aten.cross_entropy_loss.default, scores, target)
    rule = ruled(made)
    (one,) = [s for s in strategies(rule, (2,)) if s.special and s.inputs[0] == (1,)]
    calls = [(made[0], [half.contiguous(), target], {}) for half in scores.chunk(2, 1)]
    found = run(one.special, calls, strategy=one, mesh=(2,))
    assert {f.dtype for f in found} == {torch.bfloat16}
    exact = torch.nn.functional.cross_entropy(scores.double(), target)
    torch.testing.assert_close(sum(f.double() for f in found), exact, rtol=1e-2, atol=0)
