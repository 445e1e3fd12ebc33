"""Several GPUs of one process: their threads launch under one lock, which measured operators contain."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fake_times import FakeTimes
from simulated_gpu import OTHER, PRODUCT
from simulated_interpreter import one_interpreter
from torch import fx, nn
from torch.nn.functional import mse_loss

from autopar import Plan
from autopar.analysis.example import Example, capture_example
from autopar.costs import measured, operator_passes
from autopar.costs.cost_graph import CostGraph
from autopar.costs.python_overhead import PythonOverhead
from autopar.planner.arrangement import Conditions
from autopar.planner.predict import predict_plan
from cost_models import Device, Link, parse_devices
from cost_models.measuring.operator_times import GraphTimes, measure

LAYERS = 8
PRODUCTS = {"launch-bound": OTHER, "kernel-bound": PRODUCT}  # s of one
SHORT = 1e-9  # s for passes: as few as possible


def gpus_of(*names: str) -> list[Device]:
    return [Device(name, torch.device(name.partition("#")[0]), "GPU", 80 << 30, threads=1) for name in names]


def timed(n_gpus: int) -> GraphTimes:
    """Passes on this number of simulated GPUs at once."""
    with torch.device("meta"):
        module = fx.symbolic_trace(nn.Sequential(*(nn.Linear(16, 16) for _ in range(LAYERS))))
    first, *others = gpus_of(*(f"cuda:{i}" for i in range(n_gpus)))
    x = torch.empty(4, 16, device="meta", requires_grad=True)
    beside = [(module, gpu.torch_device) for gpu in others]
    return measure(module, lambda rows: [x], lambda rows: None, 4, first, workers=n_gpus, budget=SHORT, beside=beside)


@pytest.mark.slow
@pytest.mark.parametrize(("bound", "slower"), [("launch-bound", 1.0), ("kernel-bound", 0.0)])
@pytest.mark.parametrize("n_gpus", [2, 3])
def test_operators_wait_for_the_launches_of_other_gpus_and_not_for_their_kernels(
    monkeypatch: pytest.MonkeyPatch, bound: str, slower: float, n_gpus: int
) -> None:
    one_interpreter(monkeypatch, PRODUCTS[bound])
    alone, crowded = timed(1), timed(n_gpus)
    assert crowded.workers == n_gpus
    assert crowded.total == pytest.approx((1 + slower * (n_gpus - 1)) * alone.total, rel=0.05)


@pytest.mark.slow
def test_simulated_passes_take_the_same_seconds_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            one_interpreter(patch, OTHER)
            found.append(timed(2))
    assert found[0] == found[1]


def test_every_gpu_has_its_own_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter = one_interpreter(monkeypatch, OTHER)
    timed(3)
    assert interpreter.places == [torch.device("cuda", i) for i in range(3)]


@pytest.mark.parametrize("workers", [1, 3])
def test_other_gpus_are_as_many_as_the_other_workers(workers: int) -> None:
    module, (first, other) = fx.symbolic_trace(nn.ReLU()), gpus_of("cuda:0", "cuda:1")
    with pytest.raises(ValueError, match=rf"{workers} workers have {workers - 1} other GPUs.*got 1"):
        measure(
            module, lambda rows: [], lambda rows: None, 1, first, workers=workers, beside=[(module, other.torch_device)]
        )


class Recorded(FakeTimes):
    """And where the passes were made."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[tuple[str, ...]] = []

    def __call__(self, module: Any, inputs: Any, loss: Any, rows: int, device: Any, **options: Any) -> GraphTimes:
        self.places.append((str(device.torch_device), *(str(place) for _, place in options["beside"])))
        return super().__call__(module, inputs, loss, rows, device, **options)


@pytest.fixture
def without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither links nor sums of gradients are measured."""

    def links(devices: Any) -> dict[tuple[str, str], Link]:
        return {(a.name, b.name): Link(0.0, 1e12) for a in devices for b in devices if a is not b}

    monkeypatch.setattr(measured, "measure_links", links)
    monkeypatch.setattr(measured, "measure_accumulate", lambda place: 0.0)


def example_of(n_layers: int = 2) -> Example:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(n_layers)))
    x = torch.zeros(16, 16)
    return capture_example(model, parse_devices(["cpu"]), (x,), {}, loss_fn=mse_loss, target=x)


@pytest.mark.usefixtures("without_copies")
@pytest.mark.parametrize(
    ("names", "at_once"),
    [
        (["cuda:0"], []),
        (["cuda:0", "cuda:0#1"], []),
        (["cuda:0", "cuda:1"], ["cuda:0", "cuda:1"]),
        (["cuda:0", "cuda:0#1", "cuda:3"], ["cuda:0", "cuda:3"]),
    ],
)
def test_passes_run_on_every_different_gpu_at_once(
    monkeypatch: pytest.MonkeyPatch, names: list[str], at_once: list[str]
) -> None:
    times = Recorded()
    monkeypatch.setattr(operator_passes, "measure", times)
    measured.measure_costs(example_of(), gpus_of(*names), cache=False)
    assert {*times.places} == {("cuda:0",), *([tuple(at_once)] if at_once else [])}
    sizes = {workers: {rows for n, rows in times.calls if n == workers} for workers, _ in times.calls}
    assert sizes.pop(1) == {1, 2, 4, 8, 16}, "as of one GPU, so that nothing else is predicted of it"
    assert sizes == ({len(at_once): {1, 2, 4, 8}} if at_once else {})


def test_gpus_with_processes_of_their_own_do_not_wait_for_each_other() -> None:
    example = example_of()
    jobs = measured._sizes(gpus_of("cuda:0", "cuda:1"), example.program, example.batching, None, own_processes=True)
    assert {workers for workers, _ in jobs} == {1}


def costs_on(monkeypatch: pytest.MonkeyPatch, product: float, *names: str) -> tuple[Example, CostGraph]:
    one_interpreter(monkeypatch, product)
    monkeypatch.setattr(operator_passes, "measure", partial(measure, budget=SHORT))
    example = example_of()
    return example, measured.measure_costs(example, gpus_of(*names), n_microbatches=4, cache=False)


@pytest.mark.slow
@pytest.mark.usefixtures("without_copies")
@pytest.mark.parametrize("bound", PRODUCTS)
def test_stages_on_two_gpus_are_priced_with_what_launches_wait(monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    """Against the same stages on one GPU, whose worker launches for both in turn."""
    seconds = {}
    for names in (("cuda:0", "cuda:1"), ("cuda:0", "cuda:0#1")):
        with pytest.MonkeyPatch.context() as patch:
            example, costs = costs_on(patch, PRODUCTS[bound], *names)
        costs = replace(costs, python=PythonOverhead(busy=1e-5, alone=1e-5))
        plan = Plan.from_split({"0": 0, "1": 1}, n_microbatches=4, devices=names)
        priced = predict_plan(plan, example, costs, Conditions("none", loss_inside=True))
        assert not priced.one_worker, "every GPU has its worker, however small operators are"
        seconds[names[1]] = [(s.forward_time or 0.0) + (s.backward_time or 0.0) for s in priced.stages]
    for two, one in zip(seconds["cuda:1"], seconds["cuda:0#1"], strict=True):
        assert two == pytest.approx((2 if bound == "launch-bound" else 1) * one, rel=0.1)
