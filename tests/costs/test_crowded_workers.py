"""CPU workers beyond the number of cores, and measurements that disagree."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fake_times import FakeTimes
from torch import nn

import autopar
from autopar.costs import measured, operator_passes
from cost_models.hardware import devices
from cost_models.measuring.operator_times import GraphTimes

X = torch.randn(32, 16)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "usable_cores", lambda: 2)
    monkeypatch.setattr(measured, "usable_cores", lambda: 2)


def plan_of(monkeypatch: pytest.MonkeyPatch, times: FakeTimes, n_workers: int) -> autopar.Plan:
    monkeypatch.setattr(operator_passes, "measure", times)
    return autopar.plan(model(), ["cpu"] * n_workers, example_args=(X,), tune=0, cache=False)


@pytest.mark.slow
@pytest.mark.parametrize("n_workers", [3, 4, 8])
@pytest.mark.usefixtures("two_cores")
def test_no_number_of_workers_is_faster_than_the_cores(monkeypatch: pytest.MonkeyPatch, n_workers: int) -> None:
    times = FakeTimes()
    plan = plan_of(monkeypatch, times, n_workers)
    assert plan.predicted_step_time is not None
    assert plan.single_device_time is not None
    assert plan.predicted_step_time >= plan.single_device_time / 2
    assert len(plan.used_devices) == 2
    assert {workers for workers, _ in times.calls} == {1, 2}
    assert f"{n_workers} CPU workers share 2 cores" in " ".join(str(plan).split())


@pytest.mark.parametrize(("busy", "slower"), [(1, 1.0), (2, 1.0), (3, 1.5), (4, 2.0)])
@pytest.mark.usefixtures("two_cores")
def test_a_plan_on_more_workers_than_cores_is_priced_with_their_share(
    monkeypatch: pytest.MonkeyPatch, busy: int, slower: float
) -> None:
    monkeypatch.setattr(operator_passes, "measure", FakeTimes())
    seen = []
    real = measured.cost_graph.build

    def build(*args: Any, **kwargs: Any) -> Any:
        seen.append(real(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(measured.cost_graph, "build", build)
    autopar.profile(model(), ["cpu"] * 4, example_args=(X,), cache=False)
    (costs,) = seen
    (kind,) = {device.kind for device in costs.devices}
    assert costs.crowding(busy) == slower
    forward, _, _ = costs.table(kind, busy).at(8)
    alone, _, _ = costs.table(kind, 1).at(8)
    assert forward == pytest.approx(slower * alone)


@pytest.mark.slow
@pytest.mark.usefixtures("two_cores")
def test_workers_with_cores_of_their_own_are_measured_together(monkeypatch: pytest.MonkeyPatch) -> None:
    times = FakeTimes()
    plan = plan_of(monkeypatch, times, 2)
    assert {workers for workers, _ in times.calls} == {1, 2}
    assert "share" not in str(plan)


@pytest.mark.slow
@pytest.mark.usefixtures("two_cores")
def test_short_measurements_that_disagree_are_taken_again_and_a_lucky_one_makes_no_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first measurement of each size is off by a factor that would make a split look good."""
    per_row = 1e-7
    count = len({*measured_sizes(monkeypatch)})
    honest = plan_of(monkeypatch, FakeTimes(per_row), 2)
    noisy = FakeTimes(per_row, [9.0, *([0.2] * (count - 1))])
    plan = plan_of(monkeypatch, noisy, 2)
    assert len(noisy.calls) > 2 * count
    assert (len(honest.used_devices), len(plan.used_devices)) == (1, 1)
    assert plan.predicted_step_time == pytest.approx(honest.predicted_step_time)


def measured_sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    times = FakeTimes()
    plan_of(monkeypatch, times, 2)
    return times.calls


@pytest.mark.slow
@pytest.mark.usefixtures("two_cores")
def test_what_still_disagrees_is_kept_with_its_lowest_and_said_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    count = len({*measured_sizes(monkeypatch)})
    noisy = FakeTimes(1e-12, [2.0**i for i in range(60)])
    with caplog.at_level("INFO", logger="autopar.costs.operator_passes"):
        plan_of(monkeypatch, noisy, 2)
    assert len(noisy.calls) <= count * (operator_passes._MEASUREMENTS + 1)
    assert "disagree; keeping the lowest" in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("two_cores")
def test_long_measurements_average_out_disturbances_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    times = FakeTimes(per_row=1e-2)
    plan_of(monkeypatch, times, 2)
    assert len(times.calls) == len({*times.calls})


@pytest.mark.slow
@pytest.mark.parametrize("width", [4, 64])
def test_a_model_of_tiny_operators_is_not_split(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Six layers of 20 us: what Python does for every action is more than what a second worker takes off."""
    monkeypatch.setattr(operator_passes, "measure", FakeTimes(per_row=2e-5 / 64 / 3))
    layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(6)))
    plan = autopar.plan(
        copy.deepcopy(layers), ["cpu", "cpu"], example_args=(torch.randn(64, width),), tune=0, cache=False
    )
    assert (len(plan.used_devices), plan.n_microbatches) == (1, 1)


class SmallMemory(FakeTimes):
    """A device whose memory holds passes of up to `most` samples."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __call__(self, module: Any, inputs: Any, loss: Any, rows: int, device: Any, **options: Any) -> GraphTimes:
        if rows > self.most:
            self.calls.append((options["workers"], rows))
            raise torch.OutOfMemoryError(f"CUDA out of memory with {rows} samples")
        return super().__call__(module, inputs, loss, rows, device, **options)


@pytest.mark.slow
@pytest.mark.usefixtures("two_cores")
def test_sizes_that_do_not_fit_are_predicted_from_those_that_do_and_the_plan_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, whole = (plan_of(monkeypatch, times, 2) for times in (SmallMemory(8), FakeTimes()))
    assert plan.predicted_step_time == pytest.approx(whole.predicted_step_time, rel=1e-3)
    assert plan.single_device_time == pytest.approx(whole.single_device_time, rel=1e-3)
    assert "32 samples at once do not fit the memory" in " ".join(str(plan).split())


@pytest.mark.usefixtures("two_cores")
def test_a_model_of_which_no_pass_fits_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(autopar.InfeasibleError, match=r"does not hold a pass of 2 samples.*Cluster.preset"):
        plan_of(monkeypatch, SmallMemory(0), 2)
