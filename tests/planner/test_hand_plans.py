"""Plans by hand: they run like the plain model, cut what their degrees say, and have one price."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Cluster, Plan
from autopar.analysis.example import example_ahead, resized
from autopar.options import PlanOptions
from autopar.planner.hand_plan.by_hand import plan_by_hand
from autopar.planner.hand_plan.shared_work import SharedWork
from autopar.report.sharding import stored_words
from cost_models.memory.optimizer_step import optimizer_step_temporaries

HIDDEN, LENGTH, VOCABULARY, BATCH = 16, 6, 24, 8


class Attention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def split(y: torch.Tensor) -> torch.Tensor:
            return y.view(*y.shape[:2], self.heads, -1).transpose(1, 2)

        q, k, v = (split(layer(x)) for layer in (self.query, self.key, self.value))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention = Attention(heads)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Language(nn.Module):
    """A small GPT that returns its loss."""

    def __init__(self, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block(heads) for _ in range(layers))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def tokens(batch: int = BATCH) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(0))


def by_hand(devices: Any, model: nn.Module | None = None, **degrees: Any) -> Plan:
    return Plan.by_hand(model or Language(), devices, example_args=(tokens(),), **degrees)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("degrees", "devices"),
    [
        ({"tensor": 2}, 2),
        ({"tensor": 2, "sequence_parallel": True}, 2),
        ({"tensor": 2, "pipeline": 2, "micro_batch": 2, "schedule": "gpipe"}, 4),
        ({"tensor": 2, "pipeline": 2, "chunks": 2, "micro_batch": 2}, 4),
        ({"data": 2, "pipeline": 2, "zero": 1, "recompute": "full", "micro_batch": 2}, 4),
        ({"zero": 2, "micro_batch": 1}, 2),
        ({"zero": 2, "tensor": 2, "data": 2, "pipeline": 2, "micro_batch": 2}, 8),
        ({"zero": 3}, 2),
        ({"tensor": 2, "data": 2, "zero": 3}, 4),
        ({"pipeline": 4, "schedule": "zb-h1"}, 4),
    ],
)
def test_a_plan_by_hand_trains_like_the_plain_model(degrees: dict[str, Any], devices: int) -> None:
    torch.manual_seed(0)
    model = Language()
    plain = copy.deepcopy(model)
    plan = by_hand(["cpu"] * devices, model, **degrees)
    pm = autopar.parallelize(model, ["cpu"] * devices, plan=plan)
    loss = pm.train_step(tokens())
    expected = plain(tokens())
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for (name, mine), (_, its) in zip(pm.named_parameters(), plain.named_parameters(), strict=True):
        assert mine.grad is not None, name
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-4, atol=1e-6, msg=name)
    pm.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "degrees",
    [
        {"tensor": 4, "pipeline": 2},
        {"tensor": 2, "pipeline": 2, "micro_batch": 2, "zero": 1, "recompute": "full"},
        {"tensor": 4, "sequence_parallel": True},
        {"zero": 2, "micro_batch": 1},
        {"zero": 2, "tensor": 2},
        {"zero": 3},
        {"tensor": 2, "pipeline": 2, "chunks": 2},
    ],
)
def test_a_plan_by_hand_has_one_price_made_loaded_and_priced_again(degrees: dict[str, Any]) -> None:
    cluster, model = Cluster.preset("8xH100"), Language()
    plan = by_hand(cluster, model, **degrees)
    assert plan.predicted_step_time
    for same in (plan, Plan.from_json(plan.to_json())):
        again = autopar.plan(model, cluster, example_args=(tokens(),), plan=same)
        assert again.predicted_step_time == pytest.approx(plan.predicted_step_time, rel=1e-9)
        assert [stage.peak_memory for stage in again.stages] == [stage.peak_memory for stage in plan.stages]


def collectives(plan: Plan, axis: str, *, once: bool) -> list[str]:
    exchanges = [one for stage in plan.stages if stage.sharding is not None for one in stage.sharding.exchanges]
    return [one.collective for one in exchanges if one.axis == axis and one.once is once]


@pytest.mark.slow
def test_tensor_parallelism_adds_up_twice_a_layer_in_each_direction() -> None:
    """Shoeybi et al., Megatron-LM, 2019: two all-reduces in the forward, two in the backward, of each layer."""
    layers = 4
    found = collectives(by_hand(Cluster.preset("4xH100"), Language(layers), tensor=4), "tensor", once=False)
    assert set(found) == {"all_reduce"}
    # Beside the layers: the embedding, the head's input, and the loss over parts of the vocabulary (its sums).
    beside = len(found) - 4 * layers
    more = collectives(by_hand(Cluster.preset("4xH100"), Language(2 * layers), tensor=4), "tensor", once=False)
    assert len(more) == 8 * layers + beside


@pytest.mark.slow
def test_sequence_parallelism_gathers_and_scatters_in_place_of_adding_up() -> None:
    plan = by_hand(Cluster.preset("2xH100"), tensor=2, sequence_parallel=True)
    found = collectives(plan, "tensor", once=False)
    assert found.count("all_gather") >= 4
    assert found.count("reduce_scatter") >= 4
    norms = [
        text for stage in plan.stages for key, text in (stage.sharding.texts[0] if stage.sharding else ())
        if "norm" in key
    ]  # fmt: skip
    assert norms
    assert all(text.split()[0] == "S1" for text in norms)  # of samples, tokens, numbers


@pytest.mark.slow
def test_every_matrix_is_cut_by_the_tensor_degree() -> None:
    plan = by_hand(Cluster.preset("4xH100"), tensor=4)
    (stage,) = plan.stages
    assert stage.sharding is not None
    matrices = {name for name, p in Language().named_parameters() if p.dim() > 1}
    cut = {name for name, stored in stage.sharding.parameters if any(code >= 0 for code in stored.layout)}
    assert matrices <= cut


class Positioned(Language):
    """Adds learned positions; the head is the embedding."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.positions = nn.Parameter(torch.randn(LENGTH, HIDDEN))
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.blocks[0](self.embed(tokens) + self.positions))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.slow
def test_learned_positions_are_whole_and_a_tied_embedding_is_read_as_it_is_stored() -> None:
    """As in Megatron-LM, where the table of words is cut by vocabulary and what it gives is added up."""
    (stage,) = by_hand(Cluster.preset("2xH100"), Positioned(), tensor=2).stages
    assert stage.sharding is not None
    stored = {name: one.layout for name, one in stage.sharding.parameters}
    assert stored.get("positions", (-1,)) == (-1,)  # parameters that are stored and updated whole are not listed
    (table,) = stored.keys() & {"embed.weight", "head.weight"}
    assert stored[table] == (0,)
    assert not [one for one in stage.sharding.redistributions if one.tensor == table]


@pytest.mark.slow
def test_zero_cuts_what_its_stage_says_over_the_replicas() -> None:
    cluster = Cluster.preset("8xH100")
    plans = [by_hand(cluster, zero=zero) for zero in (0, 1, 3)]
    total = sum(p.numel() * p.element_size() for p in Language().parameters())
    assert plans[0].stages[0].parameter_bytes == total
    assert plans[1].stages[0].parameter_bytes == total
    held = plans[2].stages[0].parameter_bytes
    assert held is not None
    assert held < total / 4  # what 8 devices cannot cut evenly stays whole
    peaks = [plan.stages[0].peak_memory or 0 for plan in plans]
    assert peaks[0] > peaks[1] > peaks[2]
    reduced = [set(collectives(plan, "data", once=True)) for plan in plans]
    assert reduced[0] == {"all_reduce"}
    assert {"reduce_scatter", "all_gather"} <= reduced[1]
    assert "all_gather" in collectives(plans[2], "data", once=False)


@pytest.mark.slow
def test_stages_have_as_many_layers_and_go_round_the_devices_with_chunks() -> None:
    plan = by_hand(Cluster.preset("4xH100"), Language(8), pipeline=2, data=2, chunks=2)
    assert plan.schedule == "interleaved-1f1b"
    assert [stage.devices for stage in plan.stages] == 2 * [("0.0:H100", "0.1:H100"), ("0.2:H100", "0.3:H100")]
    blocks = [{m[1] for key in stage.operators if (m := re.match(r"blocks\.(\d)", key))} for stage in plan.stages]
    assert blocks == [{"0", "1"}, {"2", "3"}, {"4", "5"}, {"6", "7"}]


def test_a_plan_that_does_not_fit_says_so() -> None:
    model = nn.Sequential(*(nn.Linear(40_000, 40_000, device="meta") for _ in range(2)))
    plan = Plan.by_hand(model, Cluster.preset("2xT4"), example_args=(torch.randn(4, 40_000, device="meta"),), tensor=2)
    assert any("does not fit: stage 0 needs" in note for note in plan.notes)


@pytest.mark.slow
def test_packed_projections_are_noted_and_exact() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (y.view(*x.shape[:2], 2, 4).transpose(1, 2) for y in self.qkv(x).split(8, dim=2))
            y = nn.functional.scaled_dot_product_attention(q, k, v)
            return self.out(y.transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    model, x = Packed(), torch.randn(4, 5, 8)
    plain = copy.deepcopy(model)
    plan = Plan.by_hand(model, ["cpu"] * 2, example_args=(x,), tensor=2)
    assert any("exchange what" in note for note in plan.notes), plan.notes
    pm = autopar.parallelize(model, ["cpu"] * 2, plan=plan)
    torch.testing.assert_close(pm(x), plain(x), rtol=1e-5, atol=1e-6)
    pm.close()


@pytest.mark.slow
def test_a_model_of_complex_numbers_is_planned_and_trains_like_the_plain_model() -> None:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = (nn.Linear(8, 8, dtype=torch.complex64) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.view_as_real(self.down(self.up(torch.complex(x, x.flip(1))))).square().mean()

    torch.manual_seed(0)
    model, x = Waves(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    assert autopar.plan(model, Cluster.preset("2xH100"), example_args=(x,)).predicted_step_time
    expected = plain(x)
    expected.backward()
    for degrees in ({"tensor": 2}, {"data": 2}):
        plan = Plan.by_hand(model, ["cpu"] * 2, example_args=(x,), **degrees)
        pm = autopar.parallelize(copy.deepcopy(model), ["cpu"] * 2, plan=plan)
        assert pm.train_step(x).item() == pytest.approx(expected.item(), rel=1e-5)
        for mine, its in zip(pm.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, its.grad, rtol=1e-4, atol=1e-6)
        pm.close()


# -- ZeRO --------------------------------------------------------------------------------------------------------------


def zero_plan(zero: int, model: nn.Module | None = None, **degrees: Any) -> Plan:
    example = (torch.zeros(16, 64, dtype=torch.long),)
    cluster = Cluster.preset("4xH100")
    return Plan.by_hand(model or Language(8), cluster, example_args=example, zero=zero, **{"micro_batch": 2, **degrees})


@pytest.mark.slow
def test_zero_cuts_no_states_over_devices_that_cut_tensors() -> None:
    """As in Megatron-LM, whose devices of a tensor group have norms and their optimizer's states whole."""

    class Wide(nn.Module):  # with enough parameters that a part of the optimizer's step is worth its all-gather
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(1024, 2048), nn.Linear(2048, 1024)
            self.shift = nn.Parameter(torch.empty(4096, 1024))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(nn.functional.gelu(self.up(x + self.shift)))

    with torch.device("meta"):
        model, example = Wide(), (torch.empty(4, 4096, 1024),)
    for cluster, zero in (("2xA100-80", 0), ("4xA100-80", 1)):
        plan = Plan.by_hand(model, Cluster.preset(cluster), tensor=2, zero=zero, example_args=example)
        sharding = plan.stages[0].sharding
        assert sharding is not None
        along = sharding.axes.index("tensor")
        assert all(one.state[along] == one.layout[along] for _, one in sharding.parameters), sharding.texts[1]
        assert ("ZeRO 1" in str(plan)) == (zero == 1)
        assert any(one.state != one.layout for _, one in sharding.parameters) == (zero == 1)


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{}, {"tensor": 2}, {"pipeline": 2, "micro_batch": 1}, {"micro_batch": 4}])
def test_each_stage_of_zero_holds_no_more_than_the_one_before(degrees: dict[str, Any]) -> None:
    peaks = [max(stage.peak_memory or 0 for stage in zero_plan(zero, **degrees).stages) for zero in (0, 1, 2, 3)]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 4


@pytest.mark.slow
def test_zero_2_scatters_gradients_for_every_micro_batch_and_zero_1_once() -> None:
    one, two = (zero_plan(zero) for zero in (1, 2))

    def scatters(plan: Plan) -> set[bool]:
        exchanges = [e for stage in plan.stages if stage.sharding is not None for e in stage.sharding.exchanges]
        return {e.once for e in exchanges if e.collective == "reduce_scatter"}

    assert scatters(one) == {True}
    assert scatters(two) == {False}
    sharding = two.stages[0].sharding
    assert sharding is not None
    assert dict(sharding.texts[1])["blocks.0.up.weight"] == "R / S0 / S0"
    words = stored_words(sharding.stored["blocks.0.up.weight"], sharding.axes, (), sharding.axes)
    assert words == "gradient and state over data (ZeRO 2)"
    loaded = Plan.from_json(two.to_json())
    assert loaded == two


@pytest.mark.slow
def test_zero_2_takes_as_long_as_zero_1_with_one_micro_batch_and_longer_with_more() -> None:
    for micro_batch, longer in ((4, False), (1, True)):
        one, two = (
            zero_plan(zero, micro_batch=micro_batch, launch="cuda-graphs").predicted_step_time or 0.0 for zero in (1, 2)
        )
        if longer:
            assert two > one
        else:
            assert two == pytest.approx(one, rel=1e-2)


@pytest.mark.slow
def test_plans_that_share_work_have_the_price_of_plans_alone() -> None:
    """Equal plans, whatever was priced before: other batches, clusters, micro-batches and degrees."""
    model, options = Language(), PlanOptions(optimizer="adam")
    largest = example_ahead(model, (tokens(16),), {})
    shared = SharedWork(largest, options)
    defaults = {"schedule": None, "chunks": 1, "zero": 0, "recompute": "none", "sequence_parallel": False}
    for batch, cluster, degrees in (
        (16, "8xH100", {"tensor": 2, "pipeline": 2, "data": 2, "micro_batch": 2}),
        (8, "8xH100", {"tensor": 2, "pipeline": 2, "data": 2, "micro_batch": 2}),
        (16, "4xH100", {"tensor": 2, "pipeline": 1, "data": 2, "micro_batch": 4, "zero": 1}),
        (16, "8xH100", {"tensor": 2, "pipeline": 2, "data": 2, "micro_batch": 1, "zero": 2}),
        (16, "8xH100", {"tensor": 1, "pipeline": 4, "data": 2, "micro_batch": 2, "recompute": "full"}),
        (16, "8xH100", {"tensor": 4, "pipeline": 1, "data": 2, "micro_batch": 8, "zero": 3}),
        (8, "8xA100-80", {"tensor": 4, "pipeline": 1, "data": 2, "micro_batch": 1, "sequence_parallel": True}),
        (16, "8xH100", {"tensor": 2, "pipeline": 2, "data": 2, "micro_batch": 2}),
    ):
        example = resized(largest, (tokens(batch),), {})
        assert example is not None
        wanted, nodes = defaults | degrees, Cluster.preset(cluster)
        found = plan_by_hand(example, nodes, options, wanted, shared=shared)
        alone = plan_by_hand(example_ahead(model, (tokens(batch),), {}), nodes, options, wanted)
        assert found.predicted_step_time == alone.predicted_step_time
        assert [stage.peak_memory for stage in found.stages] == [stage.peak_memory for stage in alone.stages]
        assert [stage.sharding for stage in found.stages] == [stage.sharding for stage in alone.stages]


def test_a_call_of_one_sample_needs_a_capture_of_its_own() -> None:
    example = example_ahead(Language(), (tokens(),), {})
    assert resized(example, (tokens(1),), {}) is None
    assert resized(example, (tokens()[:, :3],), {}) is None


class Shifted(Language):
    """With a buffer that is added to what is embedded."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(LENGTH, HIDDEN))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.shift
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.slow
def test_zero_cuts_parameters_and_no_buffers() -> None:
    plan = by_hand(Cluster.preset("2xH100"), Shifted(), zero=3)
    assert plan.stages[0].sharding is not None
    stored = dict(plan.stages[0].sharding.parameters)
    assert "head.weight" in stored
    assert "shift" not in stored


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{"tensor": 4}, {"tensor": 2, "zero": 1}, {"tensor": 2, "pipeline": 2}])
def test_the_peak_of_a_mesh_has_room_for_what_the_optimizer_holds_while_it_steps(degrees: dict[str, Any]) -> None:
    """Where that is more than activations: few samples, many parameters. A fused step needs nothing besides."""
    model, cluster = nn.Sequential(*(Wide() for _ in range(4))), Cluster.preset("4xH100")
    example = (torch.zeros(4, 2, 256),)
    foreach, fused = (
        Plan.by_hand(model, cluster, example_args=example, optimizer="adamw", optimizer_step=how, **degrees)
        for how in ("foreach", "fused")
    )
    for stage, other in zip(foreach.stages, fused.stages, strict=True):
        states = (stage.optimizer_bytes or 0) // 8  # elements on a device, of two states each
        held = optimizer_step_temporaries("adamw", [(states,)], implementation="foreach")
        assert held > 0
        resident = sum((stage.parameter_bytes or 0, stage.gradient_bytes or 0, stage.optimizer_bytes or 0))
        assert stage.peak_memory == pytest.approx(resident + held, rel=1e-3)
        assert (other.peak_memory or 0) < (stage.peak_memory or 0)
    loaded = Plan.from_json(foreach.to_json())
    assert [stage.step_bytes for stage in loaded.stages] == [stage.step_bytes for stage in foreach.stages]


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))
