"""The search chooses the layouts that `shard` hints fix, for every tensor in the hint."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_hints import MESH, Calling, chosen, cut_into
from torch import nn

import autopar
from autopar.capture.program import capture
from autopar.planner.hint_constraints.shard_hints import resolve_sharding
from autopar.sharding.layouts import slices
from autopar.sharding.mesh import make_mesh

# -- what hints request is chosen -------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=examples(6), deadline=None)
@given(st.sampled_from([s for s in itertools.product((1, 2, 4), repeat=3) if math.prod(s) in (2, 4)]))
def test_a_single_operator_reads_its_operands_as_asked(parts: tuple[int, int, int]) -> None:
    m, k, n = parts
    matmul = autopar.shard(torch.matmul, in_strategy=((m, k), (k, n)))
    _, found = chosen(Calling(matmul), torch.randn(8, 8))
    strategy = found.strategies["matmul"]
    assert [cut_into(layout, found, 2) for layout in strategy.inputs] == [(m, k), (k, n)]
    assert strategy.share == 1 / math.prod(parts)


def test_a_larger_region_gets_its_inputs_and_hands_on_its_outputs_as_asked() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 16), nn.GELU()), nn.Linear(16, 8))
    autopar.shard(model[1], in_strategy=((2, 2),), out_strategy=((1, 4),))
    program, found = chosen(model, torch.randn(8, 8))
    (call,) = program.shard_calls
    assert [cut_into(found.strategies[n].outputs[0], found, 2) for n in (call.inputs[0], call.outputs[0])] == [
        (2, 2),
        (1, 4),
    ]


def test_a_hint_holds_for_every_call_of_a_module() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = autopar.shard(nn.Linear(8, 8), in_strategy=((4, 1),))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.fc(x).softmax(0))

    program, found = chosen(Twice(), torch.randn(8, 8))
    assert [call.title for call in program.shard_calls] == ["module 'fc'"] * 2
    for call in program.shard_calls:
        assert cut_into(found.strategies[str(call.operator)].inputs[0], found, 2) == (4, 1)


def test_inputs_count_in_the_order_of_forward() -> None:
    class Product(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a @ b

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product = autopar.shard(Product(), in_strategy=((4, 1), (1, 1)))
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.product(b=self.weight, a=x)

    _, found = chosen(Model(), torch.randn(8, 8))
    assert [cut_into(layout, found, 2) for layout in found.strategies["matmul"].inputs] == [(4, 1), (1, 1)]


def test_parameters_are_stored_as_planned_and_tied_ones_are_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    model = Tied()
    autopar.shard(model.b, parameter_plan={"weight": (2, 1)})
    _, found = chosen(model, torch.randn(8, 8))
    (stored,) = (one for name, one in found.stored.items() if name.endswith("weight"))
    assert cut_into(stored.layout, found, 2) == (2, 1)


@pytest.mark.slow
def test_what_is_not_asked_for_costs_no_more_than_the_best_of_all_that_is() -> None:
    """The constraint is none but that: the least over all ways to ask is the least without asking."""
    x = torch.randn(8, 8)
    _, free = chosen(Calling(torch.matmul), x)
    asked = []
    for m, k, n in itertools.product((1, 2, 4), repeat=3):
        if m * k * n <= 4:
            _, found = chosen(Calling(autopar.shard(torch.matmul, in_strategy=((m, k), (k, n)))), x)
            asked.append(found.seconds)
    assert min(asked) == pytest.approx(free.seconds)


# -- layouts by names -------------------------------------------------------------------------------------------------


def test_of_several_axes_on_a_dimension_the_first_is_the_outermost() -> None:
    relu = autopar.shard(torch.relu, in_strategy=(MESH(("dp", "sp"), "mp"),))
    _, found = chosen(Calling(lambda x, _: relu(x)), torch.randn(8, 8), 8)
    assert found.mesh.names == ("dp", "sp", "mp")
    assert found.strategies["relu"].inputs == ((0, 0, 1),)
    places = itertools.product(range(2), repeat=3)
    rows = {place: slices((0, 0, 1), (8, 8), (2, 2, 2), place)[0] for place in places}
    assert all(rows[dp, sp, mp] == slice(4 * dp + 2 * sp, 4 * dp + 2 * sp + 2) for dp, sp, mp in rows)


def test_axes_may_be_nested_against_the_order_of_the_mesh() -> None:
    """Devices keep their places: `dp` is still the axis whose neighbours are farthest apart."""
    relu = autopar.shard(torch.relu, in_strategy=(MESH(("sp", "dp"), "None"),))
    model = Calling(lambda x, _: relu(x))
    resolved = resolve_sharding(capture(model, (torch.randn(8, 8),), {}), model, 8)
    assert resolved.names.index("sp") < resolved.names.index("dp")
    (wanted,) = resolved.constraints.operands["relu"][0]
    (layout,) = wanted.layouts
    for number, device in enumerate(resolved.order):
        at = dict(zip(resolved.names, make_mesh(resolved.shape, list("abcdefgh")).place(number), strict=True))
        assert device == 4 * at["dp"] + 2 * at["sp"] + at["mp"]
        place = tuple(at[name] for name in resolved.names)
        assert slices(layout, (8, 8), resolved.shape, place)[0].start == 4 * at["sp"] + 2 * at["dp"]


def test_names_and_numbers_ask_for_the_same() -> None:
    for asked in ((2, 2), (4, 1), (1, 8)):
        named = {(2, 2): MESH("dp", "sp"), (4, 1): MESH(("dp", "sp")), (1, 8): MESH("None", ("dp", "sp", "mp"))}[asked]
        if len(named.dims) == 1:
            named = MESH(named.dims[0], "None")
        assert named.parts == asked
