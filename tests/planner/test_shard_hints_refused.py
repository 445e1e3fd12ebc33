"""Planning refuses shard hints that the captured model cannot satisfy, and says what would work."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from shard_hints import Calling, chosen, cut_into, refusal
from torch import nn

import autopar
from autopar import Layout, Plan, PlanError
from autopar.capture import export
from autopar.plan.stage import Stage
from autopar.sharding.layouts import REPLICATE
from autopar.sharding.stage_sharding import StageSharding
from cost_models.memory.byte_sizes import parse_bytes

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
    message = refusal(build(), torch.randn(8, 8))
    assert not [m for m in messages if m not in message], message


def test_everything_wrong_is_reported_at_once() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 8))
    autopar.shard(model[0], ((5, 1),))
    autopar.shard(model[1], ((1, 2),))
    autopar.shard(model[2], ((2, 1), (1, 1)))
    message = refusal(model, torch.randn(8, 8))
    assert all(f"module '{i}'" in message for i in range(3)), message


def test_the_batch_is_checked_in_micro_batches() -> None:
    message = refusal(sharded(nn.Linear(8, 8), ((4, 1),)), torch.randn(8, 8), n_microbatches=4)
    assert "dimension 0" in message
    assert "2 entries" in message
    assert "a micro-batch has 2 of 8 samples" in message
    assert "equal micro-batches" in refusal(sharded(nn.Linear(8, 8), ((1, 2),)), torch.randn(8, 8), n_microbatches=3)


def test_contradicting_plans_for_one_parameter_are_refused() -> None:
    inner = autopar.shard(nn.Linear(8, 8), parameter_plan={"weight": (2, 1)})
    model = autopar.shard(nn.Sequential(inner), parameter_plan={"0.weight": (1, 2)})
    message = refusal(model, torch.randn(8, 8))
    assert "contradict" in message
    assert "'0.weight'" in message


def test_what_asks_for_several_plans_or_stages_beside_is_refused() -> None:
    model = nn.Sequential(autopar.shard(nn.Linear(8, 8), ((2, 1),)), nn.Linear(8, 8))
    with pytest.raises(PlanError, match="schedule='gpipe'"):
        autopar.plan(model, ["cpu"] * 2, example_args=(torch.randn(8, 8),), schedule="gpipe")
    with pytest.raises(PlanError, match="tune"):
        autopar.plan(model, ["cpu"] * 2, example_args=(torch.randn(8, 8),), tune=2)


def test_devices_left_over_are_reported() -> None:
    relu = autopar.shard(torch.relu, in_strategy=((2, 1),))
    model = Calling(lambda x, _: relu(x))
    plan = autopar.plan(model, ["cpu"] * 4, example_args=(torch.randn(8, 8),))
    assert any("repeat the work of /relu#0 (2 of 4 devices do different parts)" in note for note in plan.notes)
    assert any("sharded by hints on function 'relu'" in note for note in plan.notes)
    (stage,) = plan.stages
    assert stage.sharding is not None
    layouts = stage.sharding.strategy_of["/relu#0"][0]
    assert sum(code == REPLICATE for code in layouts[0]) == 1


@pytest.mark.slow
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
    message = refusal(Calling(autopar.shard(torch.matmul, ((4, 1), (1, 1)))), torch.randn(8, 8))
    assert "function 'matmul' runs no operator that the captured graph shows" in message


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


@pytest.mark.parametrize("pinned", [False, True])
def test_too_little_memory_is_reported_with_its_purpose(pinned: bool) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    autopar.shard(model[0], ((1, 1),), ((1, 2),))
    for module, stage in zip(model, (0, 1, 1), strict=True):
        if pinned:
            autopar.pipeline_stage(module, stage)
    devices = ["cpu"] * (4 if pinned else 2)
    call: dict[str, Any] = {"example_args": (torch.zeros(4, 256),), "cache": False}
    with pytest.raises(autopar.InfeasibleError, match="sharded by the hints, needs") as e:
        autopar.plan(model, devices, memory_limit=3_000, **call)
    found = re.search(r"needs ([\d.]+ \w+) on each device, has 3 kB", str(e.value))
    assert found is not None
    needed = parse_bytes(found[1])
    held = dict(re.findall(r"(weights|gradients|optimizer|activations)[^\d,]* ([\d.]+ \w+)", str(e.value)))
    assert [*held] == ["weights", "gradients", "optimizer", "activations"]
    assert sum(map(parse_bytes, held.values())) == pytest.approx(needed, rel=0.01)
    autopar.plan(model, devices, memory_limit=round(1.01 * needed), **call)  # with as much, there is a plan
