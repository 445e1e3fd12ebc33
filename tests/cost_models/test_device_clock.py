"""Seconds of operators on a device that works behind the host."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_gpu import LAUNCH, OTHER, PRODUCT, LaunchClock, SimulatedGpu
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cost_models import parse_devices
from cost_models.measuring import operator_times, timed_passes
from cost_models.measuring.device_clock import CudaClock, DeviceClock, HostClock, device_clock
from cost_models.measuring.operator_times import measure, measure_accumulate
from cost_models.measuring.timed_passes import GraphRunner, TimedPass

LAYERS = 8


def layers(width: int) -> fx.GraphModule:
    return fx.symbolic_trace(nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS))))


def timed(monkeypatch: pytest.MonkeyPatch, module: fx.GraphModule, gpu: SimulatedGpu, clock: DeviceClock) -> TimedPass:
    """A pass on the simulated device: on tensors without memory, so that products of any size take no time here."""
    monkeypatch.setattr(timed_passes.time, "perf_counter", lambda: gpu.host)
    monkeypatch.setattr(timed_passes, "waited_for_core", lambda: 0.0)
    runner = GraphRunner(module, torch.device("meta"), True, None, clock)
    runner.inputs = [torch.empty(64, 8192, device="meta", requires_grad=True)]
    with gpu:
        return runner.timed_pass(lambda outputs: outputs[0].mean())


@pytest.fixture
def eight_equal_layers() -> fx.GraphModule:
    with torch.device("meta"):
        return layers(8192)


def test_equal_layers_take_equal_seconds_forward_and_backward_on_a_device_that_works_behind_the_host(
    monkeypatch: pytest.MonkeyPatch, eight_equal_layers: fx.GraphModule
) -> None:
    gpu = SimulatedGpu()
    times = timed(monkeypatch, eight_equal_layers, gpu, gpu)
    assert len(times.forward) == LAYERS
    small = 20 * (OTHER + LAUNCH)  # operators beside the products: transposes, sums of gradients
    assert list(times.forward.values()) == pytest.approx([PRODUCT] * LAYERS, abs=small)
    assert list(times.backward.values()) == pytest.approx([2 * PRODUCT] * LAYERS, abs=small)
    assert sum(times.forward.values()) + times.loss[0] == pytest.approx(times.totals[0], rel=0.05)
    assert sum(times.backward.values()) + times.loss[1] == pytest.approx(times.totals[1], rel=0.05)


def test_adding_up_gradients_of_parameters_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, eight_equal_layers: fx.GraphModule
) -> None:
    """Of what is trained alone, among the seconds of the backward."""
    first = next(iter(eight_equal_layers.parameters()))
    first.requires_grad_(False)
    gpu = SimulatedGpu()
    times = timed(monkeypatch, eight_equal_layers, gpu, gpu)
    own = dict(times.accumulation)
    assert own.pop("_0") == 0.0
    assert len(own) == LAYERS - 1
    assert all(0 < seconds < times.backward[node] for node, seconds in own.items())
    assert list(own.values()) == pytest.approx([OTHER + LAUNCH] * len(own), abs=2 * (OTHER + LAUNCH))


def test_the_device_is_waited_for_only_at_the_ends_of_passes(
    monkeypatch: pytest.MonkeyPatch, eight_equal_layers: fx.GraphModule
) -> None:
    gpu = SimulatedGpu()
    timed(monkeypatch, eight_equal_layers, gpu, gpu)
    assert gpu.waits == 4  # before and after the forward, before and after the backward


def test_the_clock_of_the_host_shows_launches_alone(
    monkeypatch: pytest.MonkeyPatch, eight_equal_layers: fx.GraphModule
) -> None:
    gpu = SimulatedGpu()
    times = timed(monkeypatch, eight_equal_layers, gpu, LaunchClock(gpu))
    assert max(times.backward.values()) < PRODUCT  # what the other tests would see without marks on the device


class FakeEvent:
    """An event of torch.cuda whose time is the number of kernels queued before it."""

    queued = 0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at: int | None = None
        self.stream: Any = None

    def record(self, stream: Any) -> None:
        self.at, self.stream = FakeEvent.queued, stream

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.at is not None
        assert end.at is not None
        return float(end.at - self.at)


def test_marks_on_a_gpu_are_events_on_the_threads_stream_of_that_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda place: f"stream of {place}")
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    place = torch.device("cuda", 1)
    clock = device_clock(place)
    assert isinstance(clock, CudaClock)
    start = clock.mark()
    FakeEvent.queued += 3
    end = clock.mark()
    clock.wait()
    assert clock.between(start, end) == pytest.approx(3e-3)
    assert {start.stream, end.stream} == {"stream of cuda:1"}
    assert waited == [place]


def test_passes_on_a_gpu_are_timed_by_its_own_clock() -> None:
    module = fx.symbolic_trace(nn.ReLU())  # without tensors that would have to move there
    for place, kind in ((torch.device("cuda", 1), CudaClock), (torch.device("cpu"), HostClock)):
        assert isinstance(GraphRunner(module, place, True, None).clock, kind)


def test_on_a_cpu_the_hosts_clock_is_the_devices() -> None:
    clock = device_clock(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    start = clock.mark()
    time.sleep(1e-3)
    clock.wait()
    assert clock.between(start, clock.mark()) >= 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_equal_layers_take_equal_seconds_on_a_gpu() -> None:
    (device,) = parse_devices("cuda:0")
    module = layers(8192).cuda()
    x = torch.randn(2048, 8192, device="cuda", requires_grad=True)
    times = measure(module, lambda rows: [x], lambda rows: None, 2048, device)
    for seconds in (times.forward.values(), times.backward.values()):
        assert max(seconds) < 1.5 * min(seconds)
    assert measure_accumulate(device.torch_device) < 1e-9


def test_gradients_that_are_added_up_come_from_memory_and_not_from_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that is ten times as fast with what its cache of 64 MiB still holds."""
    now, nbytes, held = 0.0, 1 << 24, dict[int, None]()  # held: addresses, the most recently used one last

    class Cached(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal now
            result = func(*args, **(kwargs or {}))
            for tensor in (result, *args) if func is torch.ops.aten.add_.Tensor else (result,):
                address = id(tensor.untyped_storage())
                now += 1.0 if address in held else 10.0
                held.pop(address, None)
                held[address] = None
                while len(held) > 4:
                    held.pop(next(iter(held)))
            return result

    clock = SimpleNamespace(mark=lambda: now, wait=lambda: None, between=lambda start, end: end - start)
    monkeypatch.setattr(operator_times, "device_clock", lambda device: clock)
    with Cached():
        found = measure_accumulate(torch.device("meta"), nbytes)
    assert found * nbytes > 20.0  # two tensors that were not in the cache
