"""What runs once on the whole batch, the end of a model or a loss that is not split, has a price and needs memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar import AutoparWarning, Cluster, InputError, Plan
from autopar.analysis.example import Example, example_ahead
from autopar.costs.estimated import estimate_costs
from autopar.costs.whole_batch import WholeBatch
from autopar.plan.display import step_parts
from autopar.planner.predict import predict_plan
from autopar.planner.predicted_step import step_of_plan
from autopar.planner.search import make_plan
from autopar.planner.search_options import SearchOptions
from autopar.runtime.memory_watch import MemoryWatch
from cost_models.hardware.devices import parse_devices
from cost_models.kernels.operator_work import count_call
from cost_models.memory.call_memory import call_memory

CLUSTER = Cluster.preset("4xA100-80")
WIDTH = 64
SPLIT = Plan.from_split({"layers.0": 0, "layers.2": 1}, n_microbatches=4)


def contrast(x: torch.Tensor) -> torch.Tensor:
    """Every sample is compared with every other."""
    scores = functional.normalize(x, dim=-1) @ functional.normalize(x, dim=-1).T
    return functional.cross_entropy(scores, torch.arange(len(x), device=x.device))


def against(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return contrast(output) + functional.mse_loss(output, target)


class Layers(nn.Module):
    """`ends`: how often the same end follows the layers."""

    def __init__(self, ends: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.ends = ends

    def forward(self, x: torch.Tensor) -> Any:
        x = self.layers(x)
        return (
            {"loss": sum((contrast(x * (i + 1)) for i in range(self.ends)), start=x.new_zeros(()))} if self.ends else x
        )


def example(ends: int, rows: int = 64, loss: Callable[..., torch.Tensor] | None = None) -> Example:
    torch.manual_seed(0)
    x = torch.randn(rows, WIDTH)
    return example_ahead(Layers(ends), (x,), {}, loss_fn=loss, target=None if loss is None else x)


EXAMPLES = {
    "end of a model": lambda: example(1),
    "loss that is not split": lambda: example(0, loss=against),
    "loss of what an end returns": lambda: example(2, loss=lambda output, _: output["loss"] * 2),
}


@pytest.fixture(params=EXAMPLES)
def case(request: pytest.FixtureRequest) -> Example:
    return EXAMPLES[request.param]()


@pytest.mark.slow
def test_a_step_takes_what_the_whole_batch_takes_longer(case: Example) -> None:
    costs = estimate_costs(case, CLUSTER)
    without = replace(costs, whole_batch={})
    (on_whole_batch,) = costs.whole_batch.values()
    seconds = on_whole_batch.seconds
    assert seconds > 0
    for schedule in ("gpipe", "1f1b", "zb-h1", "interleaved-1f1b"):
        options = SearchOptions(n_microbatches=4, schedule=schedule)
        plans = [make_plan(one, options) for one in (costs, without)]
        found, shorter = (plan.predicted_step_time for plan in plans)
        assert found is not None
        assert found == pytest.approx((shorter or 0.0) + seconds)
        assert plans[0].whole_batch_time == seconds
        assert plans[0].bound is not None
        assert plans[0].bound <= found


@pytest.mark.slow
def test_a_plan_keeps_the_price_in_its_file_and_by_hand() -> None:
    case = example(1)
    costs = estimate_costs(case, CLUSTER)
    plan = make_plan(costs, SearchOptions(n_microbatches=4, schedule="1f1b"))
    loaded = Plan.from_json(plan.to_json())
    assert loaded == plan
    step = step_of_plan(loaded)
    assert step is not None
    assert step.timeline().step_time == pytest.approx(plan.predicted_step_time)
    again = predict_plan(loaded, case, costs, SearchOptions().conditions)
    assert again.predicted_step_time == pytest.approx(plan.predicted_step_time)


@pytest.mark.slow
def test_a_price_is_that_of_the_kernels_of_the_code() -> None:
    """Of the same code without a model around it. Twice the code takes twice as long."""
    one, two = (estimate_costs(example(ends), CLUSTER).whole_batch for ends in (1, 2))
    x = torch.empty(64, WIDTH, device="meta", requires_grad=True)
    _, work = count_call(contrast, (x,))
    kernels = len(work.forward) + len(work.backward)
    assert kernels
    (once,), (twice,) = one.values(), two.values()
    assert 1.5 < twice.seconds / once.seconds < 2.5
    assert kernels * 1e-6 < once.seconds < kernels * 50e-6  # launches bound it


@pytest.mark.slow
def test_an_explanation_tells_it_from_waiting() -> None:
    costs = estimate_costs(example(1), CLUSTER)
    longer = {kind: one._replace(seconds=1.0) for kind, one in costs.whole_batch.items()}
    plan = make_plan(replace(costs, whole_batch=longer), SearchOptions(n_microbatches=4))
    bottleneck = plan.explain().bottleneck
    assert bottleneck is not None
    assert bottleneck.bound == "whole batch"
    assert sum(share for _, share in bottleneck.shares) == pytest.approx(1.0)
    assert "what it does once on the whole batch" in " ".join(str(plan.explain()).split())
    assert plan.bubble is not None
    assert plan.bubble < 1 - bottleneck.busy + 1e-9, "the device that does it is not idle"
    faster = [change for change in plan.explain().helps if change.what.startswith("computing 10% faster")]
    assert faster[0].gain(plan) > 0.08, "it takes less time on a faster device, too"
    assert not any("batch twice as large" in change.what for change in plan.explain().helps), (
        "nobody knows what that does"
    )
    parts = step_parts(plan)
    assert parts["the whole batch"] == 1.0
    assert sum(parts.values()) == pytest.approx(plan.predicted_step_time)


@pytest.mark.slow
def test_inference_has_it_after_the_last_forward() -> None:
    torch.manual_seed(0)
    case = example_ahead(Layers(1).eval(), (torch.randn(64, WIDTH),), {})
    with torch.no_grad():
        costs = estimate_costs(replace(case, training=False), CLUSTER)
    ((seconds, *_),) = costs.whole_batch.values()
    plans = [make_plan(one, SearchOptions(n_microbatches=4)) for one in (costs, replace(costs, whole_batch={}))]
    found, shorter = (plan.predicted_step_time for plan in plans)
    assert found == pytest.approx((shorter or 0.0) + seconds)
    assert not plans[0].barrier


def test_nothing_runs_on_the_whole_batch_where_micro_batches_have_losses() -> None:
    assert WholeBatch.of(example(0, loss=functional.mse_loss)) is None
    assert WholeBatch.of(example(0)) is None


@pytest.mark.parametrize("rows", [32, 128])
@pytest.mark.parametrize("code", [contrast, lambda x: functional.cross_entropy(x, x.detach().argmax(1))])
def test_memory_is_that_of_the_same_code_with_values(code: Callable[[torch.Tensor], torch.Tensor], rows: int) -> None:
    def of(x: torch.Tensor) -> list[torch.Tensor]:
        return [code(x)]

    meta = torch.empty(rows, WIDTH, device="meta", requires_grad=True)
    predicted = call_memory(lambda: of(meta), [meta], "cpu")
    x = torch.randn(rows, WIDTH, requires_grad=True)
    watch = MemoryWatch(parse_devices(["cpu"]))
    with watch.step([x]), watch("cpu:0"):
        of(x)[0].backward()
    (measured,) = watch.peaks.values()
    measured -= x.numel() * x.element_size()
    assert measured * 0.99 <= predicted <= measured * 1.01


def test_the_device_of_the_outputs_states_the_memory() -> None:
    """64 samples of 64 numbers are compared in tables of 256 by 256 numbers."""
    rows = 256
    case = example(1, rows)
    costs = estimate_costs(case, CLUSTER)
    unknown = {kind: one._replace(nbytes=0, outputs=0) for kind, one in costs.whole_batch.items()}
    plans = [
        predict_plan(SPLIT, case, one, SearchOptions().conditions)
        for one in (costs, replace(costs, whole_batch=unknown))
    ]
    (first, last), (first_without, last_without) = ([stage.peak_memory for stage in plan.stages] for plan in plans)
    assert first == first_without
    assert (last or 0) - (last_without or 0) > 2 * rows * rows * 4  # the scores, and what their softmax keeps


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{"pipeline": 2}, {"data": 2}, {"tensor": 2}])
def test_meshes_state_the_memory_too(degrees: dict[str, int]) -> None:
    rows = 1024
    call: dict[str, Any] = {"example_args": (torch.randn(rows, WIDTH),), "micro_batch": 128, "optimizer": "sgd"}
    less, more = (Plan.by_hand(Layers(ends), Cluster.preset("2xH100"), **call, **degrees) for ends in (0, 1))
    peaks = [max(stage.peak_memory or 0 for stage in plan.stages) for plan in (less, more)]
    assert peaks[1] - peaks[0] > 2 * rows * rows * 4  # the scores, and what their softmax keeps


@pytest.mark.slow
def test_the_end_counts_among_the_flops_of_the_model() -> None:
    """As where the batch is not split, and the end is part of the graph."""
    x = torch.randn(256, WIDTH)
    works = [
        autopar.plan(Layers(1), CLUSTER, example_args=(x,), batch_dim=batch_dim).work
        for batch_dim in (None, {"x": None})
    ]
    assert works[0] is not None
    assert works[1] is not None
    assert works[0].flops == works[1].flops


@pytest.mark.parametrize("ends", [0, 1])
@pytest.mark.parametrize(
    ("wrong", "got"),
    [(lambda o, t: 1.0, "a float"), (lambda o, t: None, "a NoneType"), (lambda o, t: (t.sum(),), "a tuple")],
)
@pytest.mark.slow
def test_what_is_no_loss_is_refused(wrong: Callable[..., Any], got: str, ends: int) -> None:
    x = torch.randn(16, WIDTH)
    for devices in (CLUSTER, ["cpu", "cpu"]):
        with pytest.raises(InputError, match=f"must return one tensor with one element, got {got}"):
            autopar.plan(Layers(ends), devices, example_args=(x,), loss_fn=wrong, target=x, cache=False, tune=0)


@pytest.mark.slow
def test_a_loss_that_needs_values_is_left_out_and_the_end_is_not() -> None:
    x = torch.randn(64, WIDTH)
    call: dict[str, Any] = {
        "example_args": (x,),
        "loss_fn": lambda o, t: o["loss"] * float(t.sum().item() > 0),
        "target": x,
    }
    with pytest.warns(AutoparWarning, match="predictions leave out the loss, because"):
        plan = autopar.plan(Layers(1), CLUSTER, n_microbatches=4, **call)
    alone = autopar.plan(Layers(1), CLUSTER, n_microbatches=4, example_args=(x,))
    assert plan.whole_batch_time == pytest.approx(alone.whole_batch_time)


@pytest.mark.slow
def test_at_hand_it_is_measured() -> None:
    torch.manual_seed(0)
    call: dict[str, Any] = {"example_args": (torch.randn(512, WIDTH),), "cache": False, "plan": SPLIT}
    less, more = (autopar.plan(Layers(ends), ["cpu", "cpu"], **call) for ends in (1, 4))
    assert less.whole_batch_time is not None
    assert more.whole_batch_time is not None
    assert more.whole_batch_time > 2 * less.whole_batch_time > 0
    for plan in (less, more):
        assert (plan.predicted_step_time or 0) > plan.whole_batch_time  # type: ignore[operator]
        assert "on the whole batch" in str(plan)
        assert not any("leave out" in note for note in plan.notes)


def fails(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError("no loss today")


@pytest.mark.slow
def test_a_loss_that_fails_is_left_out() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, WIDTH)
    call: dict[str, Any] = {"example_args": (x,), "loss_fn": fails, "target": x, "plan": SPLIT, "cache": False}
    plan = autopar.plan(Layers(0), ["cpu", "cpu"], **call)
    assert plan.whole_batch_time is None
    assert any("predictions leave out the loss" in note and "no loss today" in note for note in plan.notes)


@pytest.mark.slow
def test_a_profile_tells_it_apart() -> None:
    torch.manual_seed(0)
    x = torch.randn(512, WIDTH)
    call: dict[str, Any] = {"example_args": (x,), "cache": False}
    profile = autopar.profile(Layers(2), ["cpu"], **call)
    (seconds,) = profile.whole_batch.values()
    assert seconds > 0
    assert "on the whole batch" in str(profile)
    assert json.loads(profile.to_json())["whole_batch"] == dict(profile.whole_batch)
    assert not autopar.profile(Layers(0), ["cpu"], **call).whole_batch


@pytest.mark.slow
def test_the_memory_of_a_profiled_step_has_the_end_of_the_model() -> None:
    """Its loss is that of `train_step`; then the tables of scores are there at the end of the forward."""
    rows = 256
    torch.manual_seed(0)
    x = torch.randn(rows, WIDTH)
    call: dict[str, Any] = {"example_args": (x,), "optimizer": "sgd"}
    with_end, without = (autopar.profile(Layers(ends), CLUSTER, **call).memory for ends in (1, 0))
    assert with_end is not None
    assert without is not None
    assert with_end.peak.total - without.peak.total > rows * rows * 4


class Selected(nn.Module):
    """A mask selects what its mean is over: sizes depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layers(x)[mask] ** 2).mean()}


def test_an_end_whose_sizes_depend_on_values_is_left_out_on_clusters_and_measured_at_hand() -> None:
    call: dict[str, Any] = {"example_args": (torch.randn(16, WIDTH), torch.arange(16) % 3 == 0)}
    with pytest.warns(AutoparWarning, match="predictions leave out"):
        ahead = autopar.plan(Selected(), CLUSTER, n_microbatches=4, **call)
    assert ahead.whole_batch_time is None
    assert ahead.predicted_step_time
    with pytest.warns(AutoparWarning, match="predictions leave out"):
        profile = autopar.profile(Selected(), CLUSTER, optimizer="adamw", **call)
    assert profile.memory is not None
    at_hand = autopar.plan(Selected(), ["cpu", "cpu"], n_microbatches=4, tune=0, cache=False, **call)
    assert at_hand.whole_batch_time
