"""Workers that share one GPU are priced as one GPU."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from fake_times import FakeTimes
from hypothesis import given
from hypothesis import strategies as st
from simulations import Case, cases

import autopar
from autopar.analysis.example import Example, capture_example
from autopar.costs import operator_passes
from autopar.costs.cost_graph import CostGraph
from autopar.costs.measured import measure_costs
from autopar.costs.python_overhead import ACTION_OVERHEAD
from autopar.options import PlanOptions
from autopar.plan.plan import Plan
from autopar.plan.stage import Stage
from autopar.planner.arrangement import Conditions
from autopar.planner.predict import predict_plan
from autopar.planner.predicted_step import step_of_plan
from autopar.planner.search import make_plan
from autopar.planner.search_options import search_options
from autopar.report.plan import plan_text
from autopar.schedule.simulate import simulate
from cost_models import Link, parse_devices

ROWS = 16
X = torch.randn(ROWS, 8)
ONE_GPU, TWO_GPUS = ("cuda:0", "cuda:0#1"), ("cuda:0", "cuda:1")
CONDITIONS = Conditions(optimizer="none", loss_inside=False)


@given(cases(), st.data())
def test_slots_on_one_hardware_run_one_at_a_time_and_it_is_never_idle_while_one_of_them_is_ready(
    case: Case, data: st.DataObject
) -> None:
    n = case.schedule.n_slots
    hardware = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    ran = simulate(case.schedule, case.stages, case.transfers, barrier=case.barrier, hardware=hardware)
    for number in set(hardware):
        spans = sorted((e.start, e.end) for e in ran.events if hardware[e.slot] == number and e.end > e.start)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    assert len(ran.events) == sum(map(len, ran.schedule.actions))
    assert ran.step_time >= case.run().step_time - 1e-9
    assert 0 <= ran.bubble <= 1


@given(cases())
def test_on_one_hardware_the_work_of_all_slots_adds_up(case: Case) -> None:
    """Without transfers nothing has to be waited for: the hardware is busy from the start to the end."""
    nothing = (0.0,) * case.schedule.n_microbatches
    transfers = [dataclasses.replace(t, forward=nothing, backward=nothing) for t in case.transfers]
    stages = [dataclasses.replace(s, finish=0.0, optimizer=0.0) for s in case.stages]
    case = dataclasses.replace(case, stages=stages, transfers=transfers, barrier=None)
    ran = simulate(case.schedule, stages, transfers, hardware=[0] * case.schedule.n_slots)
    assert ran.step_time == sum(case.seconds_of(a) for table in ran.schedule.actions for a in table)
    assert ran.bubble == 0.0


@given(cases(links=True))
def test_slots_with_hardware_of_their_own_run_as_ever(case: Case) -> None:
    ran = simulate(
        case.schedule, case.stages, case.transfers, barrier=case.barrier, hardware=range(case.schedule.n_slots)
    )
    assert ran.step_time == case.run().step_time


def layers() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(8)))


@pytest.fixture
def example() -> Example:
    return capture_example(layers(), parse_devices(["cpu", "cpu"]), (X,), {})


@pytest.fixture
def costs(example: Example, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`costs(names)`: those of workers with these names, whose operators all take equally long."""

    def named(names: tuple[str, ...]) -> CostGraph:
        monkeypatch.setattr(operator_passes, "measure", FakeTimes())
        devices = parse_devices(["cpu"] * len(names))
        found = measure_costs(example, devices, cache=False)
        renamed = tuple(
            dataclasses.replace(device, name=name, memory=1 << 20) for device, name in zip(devices, names, strict=True)
        )
        links = {pair: Link(0.0, float("inf")) for pair in itertools.permutations(names, 2)}
        return dataclasses.replace(found, devices=renamed, links=links, cores=None)

    return named


def two_stages(names: tuple[str, ...], n_microbatches: int = 4) -> Plan:
    devices = [(name,) for name in names]
    return Plan.from_split({"0": 0, "4": 1}, n_microbatches=n_microbatches, schedule="1f1b", devices=devices)


@pytest.mark.slow
def test_two_stages_on_one_gpu_take_the_work_of_both(example: Example, costs: Any) -> None:
    shared = predict_plan(two_stages(ONE_GPU), example, costs(ONE_GPU), CONDITIONS)
    apart = predict_plan(two_stages(TWO_GPUS), example, costs(TWO_GPUS), CONDITIONS)
    assert shared.single_device_time is not None
    assert shared.predicted_step_time is not None
    assert apart.predicted_step_time is not None
    work = sum(4 * (s.forward_time + s.backward_time) for s in shared.stages if s.forward_time and s.backward_time)
    assert shared.predicted_step_time == pytest.approx(work + 16 * ACTION_OVERHEAD)
    assert shared.predicted_step_time >= shared.single_device_time > apart.predicted_step_time
    assert shared.bubble == pytest.approx(0.0, abs=1e-6)
    # So do the predictions of a plan that was saved.
    step = step_of_plan(Plan.from_json(shared.to_json()))
    assert step is not None
    assert step.timeline().step_time == pytest.approx(shared.predicted_step_time)


def test_replicas_on_one_gpu_take_the_work_of_both(example: Example, costs: Any) -> None:
    plan = Plan((Stage(ONE_GPU),), n_microbatches=2, schedule="gpipe")
    shared = predict_plan(plan, example, costs(ONE_GPU), CONDITIONS)
    assert shared.single_device_time is not None
    assert shared.predicted_step_time is not None
    assert shared.predicted_step_time > shared.single_device_time


@pytest.mark.slow
def test_a_plan_says_what_its_workers_share(example: Example, costs: Any) -> None:
    both = predict_plan(two_stages(ONE_GPU), example, costs(ONE_GPU), CONDITIONS)
    again = predict_plan(both, example, costs(ONE_GPU), CONDITIONS)
    for plan in (both, again):
        text = " ".join(plan_text(plan).split())
        assert text.count("cuda:0, cuda:0#1 share cuda:0 and its memory") == 1
        assert "the work of cuda:0 and cuda:0#1 adds up on it" in text
    apart = predict_plan(two_stages(TWO_GPUS), example, costs(TWO_GPUS), CONDITIONS)
    assert "share" not in plan_text(apart)


@pytest.mark.slow
def test_the_search_uses_one_worker_of_a_gpu_with_all_its_memory(example: Example, costs: Any) -> None:
    example, search = search_options(example, PlanOptions(optimizer="none"), 2)
    plan = make_plan(costs(ONE_GPU), search)
    assert plan.used_devices == ("cuda:0",)
    assert plan.devices == ONE_GPU
    assert "share cuda:0 and its memory" in plan_text(plan)
    assert set(make_plan(costs(TWO_GPUS), search).used_devices) == set(TWO_GPUS)
    three = ("cuda:0", "cuda:1", "cuda:0#1")
    assert set(make_plan(costs(three), search).used_devices) <= set(TWO_GPUS)
    # Half of the memory holds no plan: the model fits only where a worker may use what all of them have.
    needed = max(stage.peak_memory or 0 for stage in plan.stages)
    tight = costs(ONE_GPU)
    tight = dataclasses.replace(
        tight, devices=tuple(dataclasses.replace(d, memory=int(0.6 * needed)) for d in tight.devices)
    )
    assert make_plan(tight, search).used_devices == ("cuda:0",)


@pytest.mark.slow
def test_stages_that_hints_pin_stay_apart_on_one_gpu(costs: Any) -> None:
    model = layers()
    autopar.pipeline_stage(model[0], 0)
    autopar.pipeline_stage(model[7], 1)
    example = capture_example(model, parse_devices(["cpu", "cpu"]), (X,), {})
    example, search = search_options(example, PlanOptions(optimizer="none"), 2)
    assert len(make_plan(costs(ONE_GPU), search).stages) == 2
