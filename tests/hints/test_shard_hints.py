"""shard(): what is asked for is what is chosen, and whatever cannot be is refused with what could."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from models import mlp
from torch import nn
from torch.nn import functional

import autopar
from autopar import InputError, Layout, Plan, PlanError
from autopar.capture import export
from autopar.capture.program import Program, capture
from autopar.hints.shard import hint_of
from autopar.plan.plan import Stage
from autopar.planner.hint_constraints.shard_hints import microbatch_on_meta, resolve_sharding
from autopar.planner.intra_op.strategy_graph import ShardingTask
from autopar.planner.intra_op.strategy_search import Sharding, choose
from autopar.sharding.layouts import REPLICATE, slices
from autopar.sharding.mesh import make_mesh
from autopar.sharding.stage_sharding import StageSharding
from cost_models import Cluster


class Calling(nn.Module):
    """What a function makes of the input, and of a weight."""

    def __init__(self, function: Callable[..., Any], *shape: int) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(shape or (8, 8)))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, self.weight)


def chosen(model: nn.Module, x: torch.Tensor, n_devices: int = 4) -> tuple[Program, Sharding]:
    program = capture(model, (x,), {})
    resolved = resolve_sharding(program, model, n_devices)
    module, inputs, rows = microbatch_on_meta(program, 1)
    cluster = Cluster.preset(f"{n_devices}xH100")
    names = [cluster.devices[i].name for i in resolved.order]
    mesh = make_mesh(resolved.shape, names, resolved.names)
    return program, choose(ShardingTask(module, inputs, rows, cluster), mesh, constraints=resolved.constraints)


def refusal(model: nn.Module, x: torch.Tensor, n_devices: int = 4, n_microbatches: int = 1) -> str:
    with pytest.raises(PlanError) as raised:
        resolve_sharding(capture(model, (x,), {}), model, n_devices, n_microbatches)
    return str(raised.value)


def cut_into(layout: tuple[int, ...], found: Sharding, dims: int) -> tuple[int, ...]:
    pairs = list(zip(layout, found.mesh.shape, strict=True))
    return tuple(math.prod(n for code, n in pairs if code == d) for d in range(dims))


# -- what is asked for is chosen --------------------------------------------------------------------------------------


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

MESH = Layout((2, 2, 2), ("dp", "sp", "mp"))


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


# -- what is refused when the model is captured -----------------------------------------------------------------------


def sharded(layer: nn.Module, *hint: Any, **options: Any) -> nn.Module:
    return nn.Sequential(autopar.shard(layer, *hint, **options))


def calling(function: Callable[..., Any], *hint: Any) -> nn.Module:
    return Calling(autopar.shard(function, *hint))


def no_rule(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return torch.linalg.qr(x)[0]


def nested(outer: Any, inner: Any) -> nn.Module:
    return nn.Sequential(autopar.shard(nn.Sequential(autopar.shard(nn.Linear(8, 8), inner)), outer))


def two_meshes() -> nn.Module:
    a, b = (autopar.shard(nn.Linear(8, 8), (Layout((2, 2), names)("x", None),)) for names in (("x", "y"), ("x", "z")))
    return nn.Sequential(a, b)


def two_orders() -> nn.Module:
    mesh = Layout((2, 2), ("x", "y"))
    return nn.Sequential(*(autopar.shard(nn.Linear(8, 8), (mesh(o, None),)) for o in (("x", "y"), ("y", "x"))))


class Uncalled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(8, 8), autopar.shard(nn.Linear(8, 8), ((4, 1),))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@pytest.mark.parametrize(
    ("build", "messages"),
    [
        (lambda: calling(torch.matmul, ((4, 1),)), ["2 tensor inputs", "in_strategy has 1", "function 'matmul'"]),
        (lambda: sharded(nn.Linear(8, 8), None, ((4, 1), (4, 1))), ["1 tensor output ((8, 8))", "out_strategy has 2"]),
        (lambda: sharded(nn.Linear(8, 8), ((4,),)), ["module '0', input 0", "1 entries for the 2 dimensions"]),
        (lambda: sharded(nn.Linear(8, 8), ((3, 1),)), ["3 parts", "dimension 0", "8 entries", "1, 2 would work"]),
        (lambda: sharded(nn.Linear(8, 8), ((8, 1),)), ["8 parts for 4 devices", "one of 1, 2, 4"]),
        (lambda: calling(torch.matmul, ((1, 2), (4, 1))), ["dimension 1 of operand 0 into 2", "summed over together"]),
        (lambda: calling(torch.matmul, ((1, 2), (1, 1))), ["dimension 0 of operand 1 into 1", "cut them alike"]),
        (lambda: sharded(nn.LayerNorm(8), ((1, 2),)), ["layer_norm", "dimension 1 of operand 0", "needed whole", "0"]),
        (lambda: sharded(nn.Identity(), ((4, 1),)), ["module '0' runs no operator"]),
        (Uncalled, ["module 'spare'", "does not call"]),
        (two_meshes, ["one mesh", "('x', 'y')", "('x', 'z')"]),
        (two_orders, ["'x', 'y'", "one order", "the same order"]),
        (lambda: sharded(nn.Linear(8, 8), (Layout((2, 4), ("a", "b"))("a", None),)), ["mesh of 8 devices", "are 4"]),
        (lambda: nested(((4, 1),), ((1, 4),)), ["contradict", "module '0', input 0 as (4, 1)", "module '0.0'"]),
        (lambda: Calling(autopar.shard(no_rule, ((2, 1), None))), ["linalg_qr", "can be cut ((1, 1))"]),
    ],
)
def test_what_a_captured_model_cannot_do_is_refused(build: Callable[[], nn.Module], messages: list[str]) -> None:
    told = refusal(build(), torch.randn(8, 8))
    assert not [m for m in messages if m not in told], told


def test_everything_wrong_is_told_at_once() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 8))
    autopar.shard(model[0], ((5, 1),))
    autopar.shard(model[1], ((1, 2),))
    autopar.shard(model[2], ((2, 1), (1, 1)))
    told = refusal(model, torch.randn(8, 8))
    assert all(f"module '{i}'" in told for i in range(3)), told


def test_the_batch_is_checked_in_micro_batches() -> None:
    told = refusal(sharded(nn.Linear(8, 8), ((4, 1),)), torch.randn(8, 8), n_microbatches=4)
    assert "dimension 0" in told
    assert "2 entries" in told
    assert "a micro-batch has 2 of 8 samples" in told
    assert "equal micro-batches" in refusal(sharded(nn.Linear(8, 8), ((1, 2),)), torch.randn(8, 8), n_microbatches=3)


def test_contradicting_plans_for_one_parameter_are_refused() -> None:
    inner = autopar.shard(nn.Linear(8, 8), parameter_plan={"weight": (2, 1)})
    model = autopar.shard(nn.Sequential(inner), parameter_plan={"0.weight": (1, 2)})
    told = refusal(model, torch.randn(8, 8))
    assert "contradict" in told
    assert "'0.weight'" in told


def test_what_asks_for_several_plans_or_stages_beside_is_refused() -> None:
    model = nn.Sequential(autopar.shard(nn.Linear(8, 8), ((2, 1),)), nn.Linear(8, 8))
    with pytest.raises(PlanError, match="schedule='gpipe'"):
        autopar.plan(model, ["cpu"] * 2, example_args=(torch.randn(8, 8),), schedule="gpipe")
    with pytest.raises(PlanError, match="tune"):
        autopar.plan(model, ["cpu"] * 2, example_args=(torch.randn(8, 8),), tune=2)


def test_devices_left_over_are_told_of() -> None:
    relu = autopar.shard(torch.relu, in_strategy=((2, 1),))
    model = Calling(lambda x, _: relu(x))
    plan = autopar.plan(model, ["cpu"] * 4, example_args=(torch.randn(8, 8),))
    assert any("repeat the work of /relu#0 (2 of 4 devices do different parts)" in note for note in plan.notes)
    assert any("sharded as asked by hints on function 'relu'" in note for note in plan.notes)
    (stage,) = plan.stages
    assert stage.sharding is not None
    layouts = stage.sharding.strategy_of["/relu#0"][0]
    assert sum(code == REPLICATE for code in layouts[0]) == 1


def test_a_plan_that_does_otherwise_is_refused() -> None:
    x = torch.randn(8, 8)
    model = nn.Sequential(autopar.shard(nn.Linear(8, 8), ((4, 1),), parameter_plan={"weight": (2, 2)}), nn.ReLU())
    plan = autopar.plan(model, ["cpu"] * 4, example_args=(x,))
    followed = autopar.parallelize(model, ["cpu"] * 4, plan=Plan.from_json(plan.to_json()))
    assert torch.allclose(followed(x), model(x), atol=1e-6)
    assert torch.allclose(followed.eval()(x), model(x), atol=1e-6)
    (stage,) = plan.stages
    for other, message in (
        (replace(stage.sharding, strategies=()), "module '0', input 0 as .4, 1.; in the plan, 0/linear#0 has RR there"),
        (replace(stage.sharding, parameters=()), "parameter '0.weight' as .2, 2.; in the plan, 0.weight has RR there"),
    ):
        with pytest.raises(PlanError, match=message):
            autopar.parallelize(model, ["cpu"] * 4, plan=replace(plan, stages=(replace(stage, sharding=other),)))(x)
    with pytest.raises(PlanError, match="4 parts for 1 devices"):
        autopar.parallelize(model, ["cpu"] * 2, plan=Plan.from_split({"0": 0, "1": 1}, n_microbatches=1))(x)


def test_hints_of_one_stage_say_nothing_about_the_others() -> None:
    x = torch.randn(8, 8)
    model = nn.Sequential(autopar.shard(nn.Linear(8, 8), ((2, 1),)), nn.Linear(8, 4))
    sharding = StageSharding.from_texts((2,), ("rows",), {"0/linear#0": "S0 R R -> S0"})
    first = Stage(("cpu:0", "cpu:1"), ("0/linear#0",), sharding=sharding)
    plan = Plan((first, Stage(("cpu:2",), ("1/linear#0",))), 2)
    assert torch.allclose(autopar.parallelize(model, ["cpu"] * 3, plan=plan)(x), model(x), atol=1e-6)


def test_calls_that_the_tracer_does_not_show_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("no export today")

    monkeypatch.setattr(export, "_export", refuse)
    told = refusal(Calling(autopar.shard(torch.matmul, ((4, 1), (1, 1)))), torch.randn(8, 8))
    assert "function 'matmul' runs no operator that the captured graph shows" in told


def test_a_tracer_that_starts_again_loses_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    export, failures = torch.export.export, [RuntimeError("once more")]

    def unsteady(*args: Any, **kwargs: Any) -> Any:
        found = export(*args, **kwargs)
        if failures:
            raise failures.pop()
        return found

    monkeypatch.setattr(torch.export, "export", unsteady)
    monkeypatch.setattr("autopar.capture.torch_private.register_output_type", lambda *_: True)
    _, found = chosen(Calling(autopar.shard(torch.matmul, ((4, 1), (1, 1)))), torch.randn(8, 8))
    assert cut_into(found.strategies["matmul"].inputs[0], found, 2) == (4, 1)
