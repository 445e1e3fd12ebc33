"""Plans for hardware that is not there: from data sheets, over models without weights, to be run where it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from models import bert, gpt2, llama, t5, tokens
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import autopar
from autopar import Cluster, DeviceError, InfeasibleError, InputError, Plan, PlanError
from autopar.analysis.operators import compute_nodes, operator_keys
from autopar.capture.node_names import module_path
from autopar.capture.program import Program, capture
from cost_models import parse_devices
from cost_models.hardware.device_specs import describes

pytestmark = pytest.mark.usefixtures("shared_exports")

H100 = Cluster.preset("2xH100")


def on_meta(build: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = build()
    return model.train()


def call_of(build: Any, batch: int = 8) -> dict[str, Any]:
    """Keyword arguments for a model of `build`."""
    given: dict[str, Any] = {"input_ids": tokens(batch)}
    if build is t5:
        given["decoder_input_ids"] = tokens(batch)
    return given if build is bert else {**given, "use_cache": False}


def without_values(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}


def squared(output: Any, target: torch.Tensor) -> torch.Tensor:
    return (output.logits - target).square().mean()


@pytest.mark.parametrize("build", [gpt2, llama, bert, t5])
@pytest.mark.slow
def test_a_model_without_weights_gets_the_plan_of_the_model(build: Any) -> None:
    real, ahead = build().train(), on_meta(build)
    inputs = call_of(build)
    given = without_values(inputs)
    one, other = (
        autopar.plan(model, H100, example_kwargs=kwargs, n_microbatches=4, max_replicas=1, schedule="gpipe")
        for model, kwargs in ((real, inputs), (ahead, given))
    )
    assert all(p.is_meta for p in ahead.parameters())
    ours, others = (sorted(key for stage in plan.stages for key in stage.operators) for plan in (one, other))
    assert _without_copies(ours) == _without_copies(others)
    assert len(other.stages) == len(one.stages)
    assert other.predicted_step_time == pytest.approx(one.predicted_step_time, rel=0.02)
    if ours == others:  # copies have a price, so that another cut may be as good
        assert [stage.operators for stage in other.stages] == [stage.operators for stage in one.stages]
        assert [stage.parameter_bytes for stage in other.stages] == [stage.parameter_bytes for stage in one.stages]
    assert other.model == one.model
    assert any("2xH100" in note for note in other.notes)


def _without_copies(operators: Sequence[str]) -> list[str]:
    """Whether attention's result is laid out in order depends on the device's kernel."""
    return [key for key in operators if "/contiguous#" not in key]


@pytest.mark.slow
def test_inputs_may_be_real_where_the_model_is_not() -> None:
    plan = autopar.plan(on_meta(gpt2), H100, example_kwargs=call_of(gpt2), n_microbatches=2)
    assert plan.batch_size == 8


@pytest.mark.slow
def test_a_model_made_under_fake_tensor_mode_is_planned_for() -> None:
    inputs = call_of(gpt2)
    with FakeTensorMode():
        fake = gpt2().train()
    plan, same = (autopar.plan(model, H100, example_kwargs=inputs, n_microbatches=4) for model in (fake, on_meta(gpt2)))
    assert plan.stages == same.stages
    assert not any(p.is_meta for p in fake.parameters())  # planned for on a copy


@pytest.mark.slow
@pytest.mark.parametrize("build", [gpt2, llama, bert, t5])
def test_layers_captured_once_are_the_layers_of_a_whole_capture(build: Any) -> None:
    model = on_meta(build)
    inputs = without_values(call_of(build))
    whole, once = (capture(model, (), inputs, trace_equal_layers_once=look) for look in (False, True))
    for program in (whole, once):
        program.graph.lint()
    facts = [_facts(program) for program in (whole, once)]
    assert facts[0] == facts[1]
    assert list(facts[0]) == list(facts[1])


def _facts(program: Program) -> dict[str, Any]:
    """Of every operator what it is, where it is from, what it gives and what it reads."""
    keys = operator_keys(program)
    return {
        key: (
            str(node.target),
            module_path(node),
            _shape(node),
            [keys.get(source, str(source.target)) for source in node.all_input_nodes],
        )
        for node, key in keys.items()
    }


def _shape(node: Any) -> Any:
    value = node.meta.get("val")
    return (str(tuple(value.shape)), value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__


class Alternating(nn.Module):
    """Two types of layers in turn; one layer has another attribute than the others of its type."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled(2.0 if i != 4 else 3.0, i) if i % 2 == 0 else Plain(i) for i in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Plain(nn.Module):
    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


class Scaled(Plain):
    looked_into = 0

    def __init__(self, factor: float, place: int) -> None:
        super().__init__(place)
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Scaled.looked_into += 1
        return self.linear(x) * self.factor


def test_equal_layers_are_looked_into_once_and_others_always() -> None:
    torch.manual_seed(0)
    model, x = Alternating(), torch.randn(4, 6)
    Scaled.looked_into = 0
    program = capture(model, (x,), {}, trace_equal_layers_once=True)
    assert Scaled.looked_into == 2  # the factors are 2, 2, 3 and 2
    assert torch.equal(program.graph_module(x)[0], model(x))
    assert sum("mul" in node.name for node in compute_nodes(program.graph)) == 4
    assert "forward" not in vars(model.layers[0])


def test_layers_called_with_something_else_are_looked_into() -> None:
    class Narrowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Plain(i) for i in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x)
            x = self.layers[1](x[:, :2])
            return self.layers[2](x)

    torch.manual_seed(0)
    model, x = Narrowing(), torch.randn(4, 5, 6)
    program = capture(model, (x,), {}, trace_equal_layers_once=True)
    assert torch.equal(program.graph_module(x)[0], model(x))


@pytest.mark.slow
def test_a_plan_made_ahead_runs_where_such_devices_are(tmp_path: Path) -> None:
    model, inputs = gpt2().train(), call_of(gpt2)
    target = torch.randn_like(model(**inputs).logits)
    plan = autopar.plan(
        on_meta(gpt2),
        Cluster.preset("2xcpu"),
        example_kwargs=inputs,
        target=target,
        loss_fn=squared,
        n_microbatches=4,
        max_replicas=1,
        schedule="1f1b",
    )
    assert len(plan.stages) == 2
    plan.save(tmp_path / "plan.json")
    oracle = squared(model(**inputs), target)
    oracle.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    module = autopar.parallelize(model, ["cpu", "cpu"], plan=Plan.load(tmp_path / "plan.json"))
    loss = module.train_step(target=target, loss_fn=squared, **inputs)
    module.close()
    assert module.plan is not None
    assert module.plan.used_devices == ("cpu:0", "cpu:1")
    assert torch.allclose(loss, oracle.detach(), rtol=1e-5)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, expected[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.slow
def test_a_plan_for_other_devices_is_refused_by_name(tmp_path: Path) -> None:
    model = gpt2()
    plan = autopar.plan(model, H100, example_kwargs=call_of(gpt2), n_microbatches=4)
    with pytest.raises(PlanError, match="H100"):
        autopar.parallelize(model, ["cpu", "cpu"], plan=plan)
    here = plan.on(["cuda:0", "cuda:1"], ["NVIDIA H100 80GB HBM3"] * 2)
    assert set(here.used_devices) <= {"cuda:0", "cuda:1"}
    with pytest.raises(PlanError, match=r"needs 1 device of kind H100 that is not offered"):
        plan.on(["cuda:0", "cuda:1"], ["NVIDIA H100 80GB HBM3", "Tesla T4"])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("A100-40", "NVIDIA A100-SXM4-40GB"),
        ("A100-80", "NVIDIA A100-SXM4-80GB"),
        ("A100-80", "NVIDIA A100 80GB PCIe"),
        ("H100", "NVIDIA H100 80GB HBM3"),
        ("H200", "NVIDIA H200"),
        ("B200", "NVIDIA B200"),
        ("V100", "Tesla V100-SXM2-16GB"),
        ("T4", "Tesla T4"),
        ("L4", "NVIDIA L4"),
        ("RTX4090", "NVIDIA GeForce RTX 4090"),
        ("cpu", "AMD EPYC, 1 thread"),
        ("cpu", "AMD EPYC, 16 threads"),
    ],
)
def test_a_known_device_is_recognised_by_the_name_its_driver_gives(name: str, kind: str) -> None:
    assert describes(name, kind)
    kinds = ["NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA L40S"]
    others = [other for other in [*kinds, "NVIDIA L4", "Tesla T4", "AMD EPYC, 1 thread"] if other != kind]
    alike = {"NVIDIA A100 80GB PCIe": {"NVIDIA A100-SXM4-80GB"}, "AMD EPYC, 16 threads": {"AMD EPYC, 1 thread"}}
    assert {other for other in others if describes(name, other)} == alike.get(kind, set())


def test_what_needs_the_devices_is_refused_for_a_cluster_that_is_not_here() -> None:
    model, inputs = gpt2(), call_of(gpt2)
    with pytest.raises(InputError, match="tune"):
        autopar.plan(model, H100, example_kwargs=inputs, tune=2)
    with pytest.raises(DeviceError, match=r"1 node of 2xH100 is not at hand"):
        autopar.parallelize(model, H100, example_kwargs=inputs)


@pytest.mark.parametrize("call", [autopar.parallelize, autopar.plan, autopar.profile, autopar.compare])
def test_a_model_without_values_is_not_run(call: Any) -> None:
    with pytest.raises(InputError, match=r"'transformer\.wte\.weight' has no values .*Cluster\.preset"):
        call(on_meta(gpt2), ["cpu", "cpu"], example_kwargs=call_of(gpt2))


@pytest.mark.slow
def test_a_cluster_at_hand_is_measured_like_its_devices() -> None:
    model = gpt2()
    cluster = dataclasses.replace(Cluster.preset("2xcpu"), at_hand=parse_devices(["cpu", "cpu"]))
    plan = autopar.plan(model, cluster, example_kwargs=call_of(gpt2))
    assert set(plan.devices) == {"cpu:0", "cpu:1"}
    assert not any("estimated" in note for note in plan.notes)


class Similarity(nn.Module):
    """Samples compared with each other, as CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y @ y.T


def test_samples_that_meet_keep_the_batch_whole_without_values_too() -> None:
    plan = autopar.plan(on_meta(Similarity), H100, example_args=(torch.empty(8, 6),))
    assert plan.n_microbatches == 1
    assert any("matmul" in note or "mm" in note for note in plan.notes)


@pytest.mark.slow
def test_a_profile_of_a_cluster_estimates_every_operator() -> None:
    slow, fast = (
        autopar.profile(on_meta(gpt2), Cluster.preset(name, 2), example_kwargs=call_of(gpt2))
        for name in ("8xT4", "8xH100")
    )
    assert slow.kinds == ("T4",)
    for a, b in zip(slow.operators, fast.operators, strict=True):
        assert a.forward["T4"] >= b.forward["H100"]
    assert list(fast.links) == [("0.0:H100", "0.1:H100"), ("0.0:H100", "1.0:H100")]
    assert "0.0:H100 -> 1.0:H100" in str(fast)


@pytest.mark.slow
def test_a_profile_tells_what_a_training_step_has_in_memory() -> None:
    model = gpt2().train()
    given = {"example_kwargs": call_of(gpt2), "target": torch.zeros(8, 12, 64), "loss_fn": squared}
    parameters = sum(p.nbytes for p in model.parameters())
    for devices, subject in ((["cpu"], model), (H100, on_meta(gpt2))):
        found = autopar.profile(subject, devices, optimizer="adamw", **given)  # type: ignore[arg-type]
        assert found.memory is not None
        step = found.memory.step
        assert parameters <= step.parameters == step.gradients <= 1.1 * parameters  # a GPU rounds every tensor up
        assert step.optimizer == 2 * step.parameters
        assert "transient" in str(found)
    assert autopar.profile(model, ["cpu"], **given).memory is None  # type: ignore[arg-type]
    with pytest.raises(InputError, match="adafactor"):
        autopar.profile(model, ["cpu"], optimizer="lion", **given)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="evaluation"):
        autopar.profile(model.eval(), ["cpu"], optimizer="sgd", example_kwargs=call_of(gpt2))


@pytest.mark.slow
def test_replicas_of_a_cluster_reduce_their_gradients_as_its_network_does() -> None:
    cluster = Cluster.preset("8xH100")
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    plan = autopar.plan(model, cluster, example_args=(torch.randn(4096, 512),), n_microbatches=8)
    replicated = [stage for stage in plan.stages if len(stage.devices) > 1]
    assert replicated
    for stage in replicated:
        assert stage.parameter_bytes is not None
        seconds = cluster.seconds("all_reduce", stage.parameter_bytes, stage.devices)
        assert stage.sync_time == pytest.approx(seconds, rel=1e-3)  # between two known sizes


@pytest.mark.parametrize("how", ["foreach", "fused"])
def test_what_lacks_only_while_the_optimizer_steps_is_named(how: Any) -> None:
    """Many parameters and few samples: AdamW's temporaries are more than all activations."""
    model = on_meta(lambda: nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))))
    call: dict[str, Any] = {"example_args": (torch.zeros(2, 1024),), "optimizer": "adamw", "optimizer_step": how}
    parameters = 4 * sum(p.numel() for p in model.parameters())
    # Parameters, gradients and two states, and less than a further copy, or than two samples.
    limit = {"foreach": 4.1 * parameters, "fused": 4 * parameters + 1000}[how]
    with pytest.raises(InfeasibleError) as failure:
        autopar.plan(model, Cluster.preset("H100"), memory_limit=limit, **call)
    message = str(failure.value)
    if how == "foreach":
        assert "temporaries of the optimizer's step" in message
        assert "activations" not in message
        assert "or optimizer_step='fused', which needs no temporaries" in message
    else:
        assert "activations" in message
        assert "fused" not in message


def test_steps_without_temporaries_are_advised_only_where_they_fit() -> None:
    """AdamW's temporaries are more than all activations, which do not fit either."""
    model = on_meta(lambda: nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))))
    call: dict[str, Any] = {"example_args": (torch.zeros(512, 1024),), "optimizer": "adamw", "n_microbatches": 1}
    limit = 4.3 * 4 * sum(p.numel() for p in model.parameters())
    with pytest.raises(InfeasibleError, match="temporaries of the optimizer's step") as failure:
        autopar.plan(model, Cluster.preset("H100"), memory_limit=limit, **call)
    assert "fused" not in str(failure.value)


def test_a_product_whose_rate_is_not_known_is_named() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last((x @ x.T).float())  # type: ignore[no-any-return]

    x = torch.ones(4, 4, dtype=torch.int64)
    with pytest.raises(InputError, match=r"(?s)matmul.*test_planning_ahead.*torch\.int64.*convert the factors"):
        autopar.plan(Counts(), Cluster.preset("2xT4"), example_args=(x,))


@pytest.mark.slow
def test_an_explanation_says_what_the_most_shards_cost() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 4096)), torch.empty(64, 64, 4096)
    cluster = Cluster.preset("2xH100")
    one, free = (autopar.plan(model, cluster, example_args=(x,), max_shards=n) for n in (1, None))
    (limit,) = one.explain().limits
    assert limit.what == "without max_shards=1"
    assert limit.step_time == pytest.approx(free.predicted_step_time)
    assert limit.step_time < (one.predicted_step_time or 0.0)
    assert not any("max_shards" in change.what for change in free.explain().limits)


def test_a_plan_of_one_stage_and_one_micro_batch_has_one_objective_its_step() -> None:
    """However many devices were offered: the model runs as it is, without what actions of a pipeline take besides."""
    model, x = nn.Sequential(nn.Linear(256, 256), nn.GELU()), torch.empty(8, 64, 256)
    for devices in ("1xH100", "2xH100"):
        for options in ({}, {"n_microbatches": 1}):
            call = {"example_args": (x,), "target": x, "loss_fn": nn.functional.mse_loss, **options}
            plan = autopar.plan(model, Cluster.preset(devices), **call)
            assert (len(plan.stages), plan.n_microbatches) == (1, 1)
            assert plan.objective == pytest.approx(plan.predicted_step_time)


def test_plans_priced_again_say_that_they_are_estimated_and_which_layers_keep_all() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.empty(8, 64)
    plan = autopar.plan(model, H100, example_args=(x,), target=x, loss_fn=nn.functional.mse_loss)
    again = plan.with_(recompute="full")
    assert again.notes[0] == plan.notes[0] == f"estimated from the data sheets of {H100.title}, not measured"
    assert any(note.startswith("kept, because a single operator keeps nothing") for note in again.notes)
    assert "recompute is 'full' now" in again.notes
