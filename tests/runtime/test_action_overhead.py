"""What Python takes for an action: measured once, the same for every plan, and what it does to predictions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_times import FakeTimes
from pretend_gpus import PretendGpus
from torch import nn

import autopar
from autopar import Plan
from autopar.costs import operator_passes
from autopar.costs.python_overhead import PythonOverhead
from autopar.plan.display import step_parts
from autopar.planner.predicted_step import ONE_WORKER, step_of_plan
from autopar.runtime.planning import action_overhead
from autopar.runtime.planning.action_overhead import measured_once, python_overhead
from cost_models import Device, parse_devices

CPUS = parse_devices(["cpu", "cpu"])
GIVEN = PythonOverhead(busy=4e-5, alone=1e-5, splitting=2e-5)


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The workers of every measurement, which gives `GIVEN`."""
    found: list[str] = []

    def times(gpus: tuple[Device, ...]) -> dict[str, float]:
        found.append(" ".join(gpu.name for gpu in gpus) or "CPU workers")
        return {"plain": 1e-4, "one worker": 1.4e-4, "two workers": 1.3e-4}

    monkeypatch.setattr(action_overhead, "_times", times)
    monkeypatch.setattr(action_overhead, "_splitting", lambda: GIVEN.splitting)
    measured_once.cache_clear()
    yield found
    measured_once.cache_clear()


@pytest.mark.parametrize("cache", [True, False])
def test_python_is_measured_once(
    measurements: list[str], cache: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    for _ in range(3):
        found = python_overhead(CPUS, cache=cache)
        assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(GIVEN))
        if cache:
            measured_once.cache_clear()  # as in another process
    assert measurements == ["CPU workers"]


@pytest.mark.parametrize("value", [{"busy": -1.0}, {"busy": "x"}, {"other": 1.0}, None, 3.0, {"alone": 1e3}])
def test_a_damaged_cache_is_measured_again(
    measurements: list[str], value: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(action_overhead, "asdict", lambda _: value)
    python_overhead(CPUS, cache=True)
    monkeypatch.undo()
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    with pytest.MonkeyPatch.context() as again:
        again.setattr(action_overhead, "measured_once", lambda gpus: GIVEN)
        assert python_overhead(CPUS, cache=True) == GIVEN


def test_a_disturbed_measurement_is_not_kept_for_other_processes(
    measurements: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(action_overhead, "_splitting", lambda: 2e-3)
    assert python_overhead(CPUS, cache=True).splitting == 2e-3
    measured_once.cache_clear()  # as in another process, on a quiet machine
    monkeypatch.setattr(action_overhead, "_splitting", lambda: GIVEN.splitting)
    for _ in range(2):
        assert python_overhead(CPUS, cache=True).splitting == GIVEN.splitting
        measured_once.cache_clear()
    assert measurements == ["CPU workers"] * 2
    assert "unusable" not in caplog.text


def gpu(name: str, memory: int = 1 << 30) -> Device:
    return Device(name, torch.device(name.partition("#")[0]), "gpu", memory, 1)


@pytest.mark.parametrize(
    ("devices", "workers"),
    [
        ((CPUS[0],), "CPU workers"),
        ((gpu("cuda:1"),), "cuda:1"),
        ((gpu("cuda:0"), gpu("cuda:0#1")), "cuda:0"),
        ((gpu("cuda:0"), gpu("cuda:0#1"), gpu("cuda:3"), gpu("cuda:2")), "cuda:0 cuda:3"),
        ((*CPUS, gpu("cuda:0")), "cuda:0 cpu:0"),
    ],
)
def test_python_is_measured_on_workers_with_hardware_of_their_own(
    measurements: list[str], devices: tuple[Device, ...], workers: str
) -> None:
    python_overhead(devices, cache=False)
    assert measurements == [workers]


def test_python_on_gpus_is_measured_once_for_each_kind_of_workers(
    measurements: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    for memory in (1 << 30, 1 << 20):  # what is free changes
        for devices in (CPUS, (gpu("cuda:0", memory),), (gpu("cuda:0", memory), gpu("cuda:1", memory))):
            python_overhead(devices, cache=True)
        measured_once.cache_clear()  # as in another process
    assert measurements == ["CPU workers", "cuda:0", "cuda:0 cuda:1"]


@pytest.mark.slow
@pytest.mark.usefixtures("shared_exports")
@pytest.mark.parametrize("names", [("cuda:0",), ("cuda:0", "cuda:1"), ("cuda:0", "cpu:0")])
def test_actions_on_gpus_run_by_one_worker_and_by_one_for_each(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    """Kernels of a step are queued by the workers that its price is about."""
    gpus, steps = PretendGpus(monkeypatch), []
    real = action_overhead._seconds_of

    def seconds_of(step: Any, devices: Any, *, until_idle: bool) -> float:
        gpus.threads.clear()
        before = len(gpus.waits)
        taken = real(step, devices, until_idle=until_idle)
        steps.append((until_idle, set().union(*gpus.threads.values()) - {"MainThread"}, len(gpus.waits) - before))
        return taken

    monkeypatch.setattr(action_overhead, "_seconds_of", seconds_of)
    monkeypatch.setattr(action_overhead, "_ROUNDS", 2)
    devices = tuple(CPUS[0] if name == "cpu:0" else gpu(name) for name in names)
    measured_once.cache_clear()
    try:
        with gpus.recording():
            found = measured_once(action_overhead._gpus_among(devices))
    finally:
        measured_once.cache_clear()
        gpus.close()
    n_gpus = len(names) - ("cpu:0" in names)
    for index, (until_idle, workers, waits) in enumerate(steps):
        name = ("plain", "one worker", "two workers")[index // 2 % (1 + len(names))]
        assert workers == {f"autopar-{one}" for one in {"plain": (), "one worker": names[:1]}.get(name, names)}
        assert until_idle == (name == "two workers")
        assert until_idle or waits == n_gpus, "waiting for the GPU is none of the CPU time"
    assert found.busy >= found.alone >= 0
    gpus.check()


@pytest.mark.slow
def test_measuring_leaves_random_numbers_and_threads_as_they_were() -> None:
    measured_once.cache_clear()
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    found = measured_once()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert found.busy >= found.alone >= 0
    assert found.splitting >= 0


def planned(monkeypatch: pytest.MonkeyPatch, per_row: float, python: PythonOverhead = GIVEN, **options: Any) -> Plan:
    """For eight layers whose operators each take `per_row` s a sample; 8 samples, 4 micro-batches."""
    monkeypatch.setattr(operator_passes, "measure", FakeTimes(per_row))
    monkeypatch.setattr("autopar.runtime.planning.at_hand.python_overhead", lambda devices, cache: python)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    fixed: dict[str, Any] = {"n_microbatches": 4, "max_replicas": 1, "tune": 0, "cache": False, **options}
    pm = autopar.parallelize(
        model, ["cpu", "cpu"], example_args=(torch.zeros(8, 4),), target=torch.zeros(8, 4), loss_fn=_loss, **fixed
    )
    assert pm.plan is not None
    return pm.plan


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


@pytest.mark.slow
def test_tiny_operators_stay_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, large = (planned(monkeypatch, per_row) for per_row in (2e-6, 1e-3))
    assert len(tiny.used_devices) == 1
    assert len(large.used_devices) == 2
    assert not large.one_worker
    assert large.action_time == GIVEN.busy
    assert tiny.action_time == GIVEN.alone


@pytest.mark.slow
def test_a_pipeline_that_one_worker_runs_takes_all_of_its_actions_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    by_hand = Plan.from_split({"0": 0, "4": 1}, n_microbatches=4)
    monkeypatch.setattr(operator_passes, "measure", FakeTimes(2e-6))
    monkeypatch.setattr("autopar.runtime.planning.at_hand.python_overhead", lambda devices, cache: GIVEN)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    x = torch.zeros(8, 4)
    plan = autopar.plan(model, ["cpu", "cpu"], example_args=(x,), target=x, loss_fn=_loss, plan=by_hand, cache=False)
    work = sum(4 * ((s.forward_time or 0.0) + (s.backward_time or 0.0)) for s in plan.stages)
    assert plan.one_worker
    assert plan.notes.count(ONE_WORKER) == 1
    assert plan.predicted_step_time is not None
    sent = sum(4 * link.seconds for link in plan.transfers)
    in_turn = work + 2 * 2 * 4 * GIVEN.alone
    assert in_turn <= plan.predicted_step_time * (1 + 1e-9)
    assert plan.predicted_step_time <= in_turn + sent * (1 + 1e-9)
    step = step_of_plan(Plan.from_json(plan.to_json()))  # so do the predictions of a plan that was saved
    assert step is not None
    assert step.timeline().step_time == pytest.approx(plan.predicted_step_time)
    shares = dict(plan.explain().bottleneck.shares)  # the worker waits for nothing but links
    assert shares["compute"] + shares["link"] == pytest.approx(1.0)
    assert "finer split" not in str(plan.explain())
    assert step_parts(plan)["waiting for other stages"] <= sent


@pytest.mark.slow
def test_the_dearer_an_action_the_fewer_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    def stages(busy: float) -> int:
        python = PythonOverhead(busy=busy, alone=busy, splitting=1.0)
        return len(planned(monkeypatch, 1e-4, python, schedule="interleaved-1f1b").stages)

    assert stages(1e-6) > stages(5e-3)
