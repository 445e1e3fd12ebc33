"""Sharded stages compute what the original computes, whatever strategy every operator has."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import assert_same_gradients, assert_same_outputs, gradients, sum_of_squares
from shardings import (
    Attention,
    Convolutions,
    InPlace,
    Mlp,
    Pieces,
    Tied,
    assert_same_step,
    at_random,
    one_stage,
    pipelined,
)
from torch import fx, nn
from torch.nn import functional

from autopar import PipelinedModule, Plan, PlanError
from autopar.analysis.operators import operator_keys
from autopar.capture.program import capture
from autopar.lower.collectives import added_up
from autopar.lower.device_values import DeviceValue, DeviceValues
from autopar.lower.regather import kept_as_shards
from autopar.sharding.layouts import PARTIAL, REPLICATE, layouts
from autopar.sharding.stage_sharding import StageSharding

pytestmark = pytest.mark.usefixtures("shared_exports")

MESHES = [(2,), (3,), (4,), (2, 2)]


def rows(*shape: int) -> Callable[[int], torch.Tensor]:
    return lambda batch: torch.randn(batch, *shape, dtype=torch.float64)


GRAPHS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "mlp": (Mlp, rows(12)),
    "mlp over sequences": (Mlp, rows(6, 12)),
    "attention": (Attention, rows(12, 24)),
    "convolutions, frozen norms": (lambda: Convolutions().eval(), rows(3, 8, 8)),
    "tied": (Tied, lambda batch: torch.randint(24, (batch, 12))),
    "pieces": (Pieces, rows(4, 12)),
    "in place": (InPlace, rows(12, 12)),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("graph", GRAPHS)
def test_any_strategies_give_the_originals_outputs_and_gradients(graph: str, mesh: tuple[int, ...], seed: int) -> None:
    build, inputs = GRAPHS[graph]
    model, x = build().double(), inputs(4 * math.prod(mesh))
    sharding = at_random(capture(model, (x,), {}), mesh, seed)
    assert_same_step(model, pipelined(model, one_stage(capture(model, (x,), {}), sharding)), x, tolerance=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("graph", ["attention", "tied", "in place"])
def test_so_do_any_strategies_where_gathered_tensors_are_kept_as_shards(graph: str, mesh: tuple[int, ...]) -> None:
    build, inputs = GRAPHS[graph]
    model, x = build().double(), inputs(4 * math.prod(mesh))
    program = capture(model, (x,), {})
    sharding = replace(at_random(program, mesh, 0), regather=True)
    pm = pipelined(model, one_stage(program, sharding))
    assert_same_step(model, pm, x, tolerance=1e-9)
    (stage,) = pm.stages
    assert any(node.target is kept_as_shards for node in stage.graph.nodes)


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 3), (3, 2), (2, 2, 2)], ids=str)
def test_moves_between_any_two_layouts_leave_the_whole_tensor_as_it_is(mesh: tuple[int, ...]) -> None:
    """Forward, and in the backward its gradient, which may be the same everywhere or add up."""
    shape = (12, 12) if len(mesh) < 3 else (8,)
    parts, options = DeviceValues(mesh, math.prod(mesh)), layouts(shape, mesh)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    given = parts.graph.placeholder("x")
    given.meta["val"], source = x, DeviceValue((given,))
    wholes = []
    chance = random.Random(0)
    for before, after in itertools.product(options, repeat=2):
        gradient = tuple(code if code >= 0 else chance.choice([REPLICATE, PARTIAL]) for code in after)
        cut = parts.read(source, given, before, added_up(before))
        changed = parts.read(DeviceValue(cut, (before,), (added_up(before),), True), given, after, gradient)
        wholes.append(parts.joined(DeviceValue(changed, (after,), (gradient,), True), 0, given))
    parts.graph.output(tuple(wholes))
    found = fx.GraphModule({}, parts.graph)(x)
    factors = torch.randn(len(wholes), dtype=torch.float64).unbind()
    for whole in found:
        torch.testing.assert_close(whole, x)
    torch.stack([(whole.square() * f).sum() for whole, f in zip(found, factors, strict=True)]).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach() * sum(factors))


MEGATRON = StageSharding.from_texts(
    (2,),
    ("model",),
    {"up/linear#0": "R S0 S0 -> S1", "/gelu#0": "S1 -> S1", "down/linear#0": "S1 S1 P -> P"},
    {"up.weight": "S0", "up.bias": "S0", "down.weight": "S1"},
)


def megatron(n_microbatches: int = 2, **more: Any) -> tuple[nn.Module, Plan]:
    model = Mlp()
    return model, one_stage(capture(model, (torch.randn(4, 12),), {}), MEGATRON, n_microbatches, **more)


def graph_of(pm: PipelinedModule) -> fx.Graph:
    (module,) = pm.stages
    return module.graph


def calls(pm: PipelinedModule, name: str) -> list[fx.Node]:
    return [node for node in graph_of(pm).nodes if getattr(node.target, "__name__", "") == name]


def test_a_megatron_mlp_reduces_once_forward_and_once_backward() -> None:
    """Shoeybi et al., Megatron-LM, 2019, section 3: f and g."""
    model, plan = megatron()
    pm = pipelined(model, plan)
    assert_same_step(model, pm, torch.randn(4, 12))
    assert len(calls(pm, "all_reduce")) == 1
    moves = Counter(move[0] for node in calls(pm, "gradient") for move in node.kwargs["moves"])  # type: ignore[union-attr]
    assert not any(calls(pm, name) for name in ("all_gather", "reduce_scatter", "all_to_all"))
    assert moves["all_gather"] == moves["reduce_scatter"] == moves["all_to_all"] == 0
    # The input is whole on the first device: what comes back for it is added up where it was spread.
    assert len(calls(pm, "spread")) == 1


def test_a_layer_behind_another_one_reduces_the_gradient_of_what_it_reads_whole() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Mlp(), Mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    model, x = Two(), torch.randn(4, 12)
    program = capture(model, (x,), {})
    keys = operator_keys(program).values()
    gelu = MEGATRON.strategy_of["/gelu#0"]
    strategies_ = [(k, gelu) for k in keys if "gelu" in k]
    strategies_ += [(k, one) for k in keys for name, one in MEGATRON.strategies if k.endswith(name) and "linear" in k]
    stored = [(f"{part}.{name}", one) for part in ("first", "second") for name, one in MEGATRON.parameters]
    pm = pipelined(model, one_stage(program, StageSharding((2,), ("model",), tuple(strategies_), tuple(stored))))
    assert_same_step(model, pm, x)
    assert len(calls(pm, "all_reduce")) == 2
    reduced = [n for n in calls(pm, "gradient") if any(m[0] == "all_reduce" for m in n.kwargs["moves"])]  # type: ignore[union-attr]
    assert len(reduced) == 1  # of what the second one reads; the first one's is the stage's input


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_batch_norm_in_training_moves_the_models_running_statistics_once(mesh: tuple[int, ...], seed: int) -> None:
    model, x = Convolutions().double(), torch.randn(4 * math.prod(mesh), 3, 8, 8, dtype=torch.float64)
    program, original = capture(model, (x,), {}), copy.deepcopy(model)
    pm = pipelined(model, one_stage(program, at_random(program, mesh, seed), 1))
    for _ in range(2):
        expected, found = original(x), pm(x)
        assert_same_outputs(found, expected, 1e-9)
        sum_of_squares(expected).backward()
        sum_of_squares(found).backward()
    found_gradients, wanted_gradients = gradients(model), gradients(original)
    for name in ("conv1.bias", "conv2.bias"):  # batch norm takes off the mean: the true gradient is zero
        assert found_gradients.pop(name).norm() < 1e-11
        assert wanted_gradients.pop(name).norm() < 1e-11
    assert_same_gradients(found_gradients, wanted_gradients, 1e-9)
    for (name, wanted), (_, buffer) in zip(original.named_buffers(), model.named_buffers(), strict=True):
        torch.testing.assert_close(buffer, wanted, msg=lambda m, name=name: f"{name}: {m}")


def test_deferred_batch_norm_leaves_the_statistics_of_the_batch() -> None:
    model, x = Convolutions().double(), torch.randn(8, 3, 8, 8, dtype=torch.float64)
    program, original = capture(model, (x,), {}), copy.deepcopy(model)
    original.conv1.register_forward_hook(lambda *_: None)
    pipelined(model, one_stage(program, at_random(program, (2,), 0)), batch_norm="deferred")(x)
    original(x)
    torch.testing.assert_close(model.norm1.running_mean, original.norm1.running_mean)
    assert int(model.norm1.num_batches_tracked) == 1


@pytest.mark.slow
def test_writes_stay_in_place_only_where_somebody_sees_them() -> None:
    def in_place(build: Callable[[], nn.Module], *shape: int) -> set[str]:
        model, x = build().eval(), torch.randn(shape)
        pm = pipelined(model, one_stage(capture(model, (x,), {}), StageSharding((2,), ("a",)), 1))
        with torch.no_grad():
            assert_same_outputs(pm(x), model(x))
        targets = [node.target for node in graph_of(pm).nodes if isinstance(node.target, torch._ops.OpOverload)]
        return {t.overloadpacket.__name__ for t in targets if t.overloadpacket.__name__.endswith("_")}

    assert in_place(Convolutions, 4, 3, 8, 8) == set()
    assert in_place(InPlace, 4, 12, 12) == {"fill_", "add_"}


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.dropout(torch.relu(self.a(x)), 0.3, self.training)
        return self.b(y + functional.rrelu(y, training=self.training))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_random_numbers_come_again_with_the_seed_and_when_a_stage_recomputes(mesh: tuple[int, ...]) -> None:
    model, x = Drops().double(), torch.randn(24, 12, dtype=torch.float64)
    program = capture(model, (x,), {})
    sharding, found = at_random(program, mesh, 1), []
    for recompute in (False, True):
        pm = pipelined(model, one_stage(program, sharding, recompute=recompute))
        for _ in range(2):
            torch.manual_seed(3)
            output = pm(x)
            sum_of_squares(output).backward()
            found.append((output.detach(), gradients(model)))
    for output, grads in found[1:]:
        assert torch.equal(output, found[0][0])
        assert_same_gradients(grads, found[0][1], 1e-9)


@pytest.mark.parametrize("layout", ["R", "S0", "S1", "P"])
def test_dropout_keeps_its_mean_and_differs_where_parts_do(layout: str) -> None:
    class Dropout(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.dropout(x, 0.25)

    model, x = Dropout(), torch.ones(64, 64)
    program = capture(model, (x,), {})
    if layout == "P":
        with pytest.raises(PlanError, match="has no strategy"):
            pipelined(model, one_stage(program, StageSharding.from_texts((2,), ("a",), {"/dropout#0": "P -> P"}), 1))(x)
        return
    pm = pipelined(
        model, one_stage(program, StageSharding.from_texts((2,), ("a",), {"/dropout#0": f"{layout} -> {layout}"}), 1)
    )
    y = pm(x)
    assert set(y.unique().tolist()) == {0.0, x[0, 0].item() / 0.75} or torch.allclose(y[y > 0], torch.tensor(1 / 0.75))
    assert abs(y.mean().item() - 1) < 0.1
    if layout == "R":
        assert_devices_draw_alike(x)
    else:
        assert not torch.equal(*y.chunk(2, int(layout[1])))


def assert_devices_draw_alike(x: torch.Tensor) -> None:
    """Half of each device's result together is the result of one device."""

    class Dropout(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.dropout(x, 0.25).neg()

    found = []
    for negated in ("R -> R", "S0 -> S0"):
        program = capture(Dropout(), (x,), {})
        texts = {"/dropout#0": "R -> R", "/neg#0": negated}
        pm = pipelined(Dropout(), one_stage(program, StageSharding.from_texts((2,), ("a",), texts), 1))
        torch.manual_seed(5)
        found.append(pm(x))
    assert torch.equal(*found)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("recompute", [False, True])
def test_meshes_may_be_replicas_under_any_schedule(schedule: str, recompute: bool) -> None:
    model, x = Mlp().double(), torch.randn(12, 12, dtype=torch.float64)
    program = capture(model, (x,), {})
    plan = one_stage(program, at_random(program, (2,), 3), 3, replicas=2, recompute=recompute)
    plan = Plan.from_json(replace(plan, schedule=schedule).to_json())
    assert_same_step(model, pipelined(model, plan), x, tolerance=1e-9)


def test_hooks_of_modules_run_once_a_microbatch() -> None:
    model, x, seen = Mlp().double(), torch.randn(12, 12, dtype=torch.float64), Counter[Any]()
    model.up.register_forward_hook(lambda module, args, output: seen.update([("forward", output.shape[0])]))
    model.down.register_full_backward_hook(lambda module, before, after: seen.update([("backward", after[0].shape[0])]))
    program = capture(model, (x,), {})
    pm = pipelined(model, one_stage(program, at_random(program, (2,), 1)))
    assert_same_step(model, pm, x, tolerance=1e-9)
    assert seen == {("forward", 12): 1, ("backward", 12): 1, ("forward", 6): 2, ("backward", 6): 2}


@pytest.mark.slow
def test_batches_of_any_size_run() -> None:
    model, x = Attention().double(), torch.randn(16, 12, 24, dtype=torch.float64)
    program = capture(model, (x[:8],), {})
    pm = pipelined(model, one_stage(program, at_random(program, (2,), 1)))
    for n in (8, 4, 12, 16, 6):
        assert_same_step(model, pm, x[:n], tolerance=1e-9)
    with torch.no_grad():
        assert_same_outputs(pm(x), model(x), 1e-9)
    with torch.inference_mode():
        assert_same_outputs(pm(x), model(x), 1e-9)


def test_the_models_own_parameters_are_trained_and_saved_whole() -> None:
    """In float64: Adam divides by the root of squared gradients, which amplifies rounding of small ones."""
    model, plan = megatron()
    model.double()
    original, x = copy.deepcopy(model), torch.randn(4, 12, dtype=torch.float64)
    before = torch.optim.Adam(model.parameters(), lr=0.1)
    pm = pipelined(model, plan)
    pm(x)
    after = torch.optim.SGD(pm.parameters(), lr=0.1, momentum=0.9)
    mine = [
        torch.optim.Adam(original.parameters(), lr=0.1),
        torch.optim.SGD(original.parameters(), lr=0.1, momentum=0.9),
    ]
    for _ in range(3):
        for module, optimizers in ((pm, [before, after]), (original, mine)):
            sum_of_squares(module(x)).backward()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    assert {k: v.shape for k, v in pm.state_dict().items()} == {k: v.shape for k, v in original.state_dict().items()}
    for (name, found), wanted in zip(pm.named_parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")
    fresh = Mlp().double()
    pm.load_state_dict(fresh.state_dict())
    assert_same_outputs(pm(x), fresh(x))


def test_a_device_that_shares_the_models_memory_has_views_of_its_slices() -> None:
    model, plan = megatron()
    pm, x = pipelined(model, plan), torch.randn(4, 12)
    pm(x)
    assert_same_outputs(pm.stages[0](x)[0], model(x))
    held = {name: tuple(tensor.shape) for name, tensor in pm.stages[0].named_parameters()}
    assert [held[f"up.weight__{i}"] for i in range(2)] == [(12, 12)] * 2
    assert [held[f"down.weight__{i}"] for i in range(2)] == [(12, 12)] * 2
    memory = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert {p.untyped_storage().data_ptr() for p in pm.stages[0].parameters()} == memory


def test_frozen_parameters_get_no_gradient_and_may_be_thawed() -> None:
    model, plan = megatron()
    pm, x = pipelined(model, plan), torch.randn(4, 12)
    model.up.requires_grad_(False)
    assert_same_step(model, pm, x)
    model.requires_grad_(True)
    assert_same_step(model, pm, x)


def test_what_no_operator_or_parameter_can_have_is_refused_with_what_it_can() -> None:
    model, x = Mlp(), torch.randn(4, 12)
    program = capture(model, (x,), {})
    wrong = StageSharding.from_texts((2,), ("a",), {"up/linear#0": "S0 S0 R -> S0"})
    with pytest.raises(
        PlanError, match=r"up/linear#0 has no strategy 'S0 S0 R -> S0' .*; it has R R R -> R; S0 R R -> S0"
    ):
        pipelined(model, one_stage(program, wrong))(x)
    with pytest.raises(
        PlanError, match=r"up.weight of shape \(24, 12\) cannot be stored as 'S1' on a mesh of shape \(5,\)"
    ):
        pipelined(model, one_stage(program, StageSharding.from_texts((5,), ("a",), {}, {"up.weight": "S1"})))(x)
