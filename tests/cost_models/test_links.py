"""Links: latency and bandwidth recovered from measurements, by reference or by copy."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cost_models import Device, Link, fit_link, measure_link, measure_links, parse_devices
from cost_models.hardware import links

SMALL = (1 << 10, 1 << 14, 1 << 18)  # bytes; quick to measure

latencies = st.floats(1e-7, 1e-2)
bandwidths = st.floats(1e6, 1e12)


def worker(name: str, place: str, kind: str = "a kind") -> Device:
    return Device(name, torch.device(place), kind, memory=1 << 30, threads=1)


CPU = worker("cpu:0", "cpu")
OTHER_CPU = worker("cpu:1", "cpu")
ELSEWHERE = worker("elsewhere", "meta")  # a device that a tensor must be copied to, on every machine


@given(latencies, bandwidths)
def test_a_link_is_recovered_from_its_own_times(latency: float, bandwidth: float) -> None:
    truth = Link(latency, bandwidth)
    fitted = fit_link(links.SIZES, [truth.seconds(size) for size in links.SIZES])
    for size in links.SIZES:
        assert fitted.seconds(size) == pytest.approx(truth.seconds(size), rel=1e-6)


@given(latencies, bandwidths, st.lists(st.floats(0.9, 1.1), min_size=5, max_size=5))
def test_noise_of_a_tenth_moves_no_prediction_far(latency: float, bandwidth: float, noise: list[float]) -> None:
    truth = Link(latency, bandwidth)
    measured = [truth.seconds(size) * factor for size, factor in zip(links.SIZES, noise, strict=True)]
    fitted = fit_link(links.SIZES, measured)
    for size in links.SIZES:
        assert fitted.seconds(size) == pytest.approx(truth.seconds(size), rel=0.5)


@given(latencies, bandwidths, st.lists(st.floats(0.95, 1.05), min_size=5, max_size=5))
def test_no_other_link_fits_better(latency: float, bandwidth: float, noise: list[float]) -> None:
    truth = Link(latency, bandwidth)
    seconds = [truth.seconds(size) * factor for size, factor in zip(links.SIZES, noise, strict=True)]

    def misfit(link: Link) -> float:
        return sum((link.seconds(n) / t - 1) ** 2 for n, t in zip(links.SIZES, seconds, strict=True))

    best = fit_link(links.SIZES, seconds)
    slope = 1 / best.bandwidth
    scale = max(seconds)
    for latency_step in (-1e-3 * scale, 0.0, 1e-3 * scale):
        for slope_step in (-1e-3 * scale, 0.0, 1e-3 * scale):
            latency = max(0.0, best.latency + latency_step)
            other = max(1e-30, slope + slope_step / max(links.SIZES))
            assert misfit(best) <= misfit(Link(latency, 1 / other)) * (1 + 1e-6) + 1e-9


@given(latencies, bandwidths, st.floats(0.01, 0.5), st.integers(3, 5))
def test_a_few_kilobytes_that_pass_at_once_do_not_count(
    latency: float, bandwidth: float, burst: float, n_sizes: int
) -> None:
    """A token bucket of 16 KB: 4 KB arrived in 0.15 ms, but 64 KB took 13 ms, and 1 MB 219 ms."""
    truth, sizes = Link(latency, bandwidth), links.SIZES[:n_sizes]
    first, *others = sizes
    fitted = fit_link(sizes, [truth.seconds(burst * first), *map(truth.seconds, others)])
    for size in sizes[1:]:
        assert fitted.seconds(size) == pytest.approx(truth.seconds(size), rel=0.35)


def test_measurements_that_all_differ_still_make_a_link() -> None:
    seconds = [1e-3, 1e-6, 1e-1, 1e-5, 1e-2]
    fitted = fit_link(links.SIZES, seconds)
    assert 0 <= fitted.latency <= max(seconds)


def test_one_size_does_not_make_a_link() -> None:
    with pytest.raises(ValueError, match="two or more sizes"):
        fit_link([64, 64], [1e-6, 1e-6])


def test_by_reference_the_bytes_cost_nothing() -> None:
    assert Link(2e-6, math.inf).seconds(1 << 40) == 2e-6


@pytest.mark.parametrize(
    ("latency", "bandwidth"), [(-1.0, 1.0), (math.nan, 1.0), (math.inf, 1.0), (0.0, 0.0), (0.0, -1.0)]
)
def test_a_link_that_cannot_be_is_refused(latency: float, bandwidth: float) -> None:
    with pytest.raises(ValueError, match="needs a finite latency"):
        Link(latency, bandwidth)


def test_cpu_workers_receive_the_very_tensor() -> None:
    seen: list[torch.Tensor] = []
    tensors = [torch.ones(8), torch.ones(16)]

    class Spy(links.SimpleQueue):
        def put(self, item: torch.Tensor | None, *rest: object) -> None:
            if item is not None:
                seen.append(item)
            super().put(item)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "SimpleQueue", Spy)
        seconds = links._hand_off_seconds(tensors)
    assert all(value > 0 for value in seconds)
    assert {id(tensor) for tensor in seen} == {id(tensor) for tensor in tensors}


@pytest.mark.parametrize(
    ("hand_off", "by_reference"),
    [
        ([2e-6, 2e-6, 2e-6], True),
        ([3e-6, 2e-6, 2e-6], True),
        ([2e-6, 2.2e-6, 3e-6], True),  # grows by a hundredth of the copy
        ([2e-6, 2.2e-6, 5e-5], False),  # grows by half of the copy
    ],
)
def test_bandwidth_is_infinite_only_where_size_does_not_matter(
    monkeypatch: pytest.MonkeyPatch, hand_off: Sequence[float], by_reference: bool
) -> None:
    monkeypatch.setattr(links, "_hand_off_seconds", lambda tensors: hand_off)
    monkeypatch.setattr(links, "_memory_copy_seconds", lambda tensor: 1e-4)
    assert math.isinf(measure_link(CPU, OTHER_CPU, SMALL).bandwidth) == by_reference


@pytest.mark.parametrize("target", [OTHER_CPU, ELSEWHERE], ids=["hand-off", "copy"])
def test_measured_links_cost_time(target: Device) -> None:
    assert measure_link(CPU, target, SMALL).seconds(max(SMALL)) > 0


def test_copies_are_fitted_to_the_measured_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = Link(1e-5, 1e10)
    monkeypatch.setattr(links, "_copy_seconds", lambda tensors, target: [truth.seconds(t.nbytes) for t in tensors])
    measured = measure_link(CPU, ELSEWHERE, SMALL)
    assert measured.latency == pytest.approx(truth.latency)
    assert measured.bandwidth == pytest.approx(truth.bandwidth)


def test_pairs_on_the_same_hardware_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[str, str]] = []

    def record(source: Device, target: Device) -> Link:
        measured.append((source.name, target.name))
        return Link(float(len(measured)), 1.0)

    monkeypatch.setattr(links, "measure_link", record)
    devices = [CPU, OTHER_CPU, worker("cpu:2", "cpu"), worker("cuda:0", "cuda:0"), worker("cuda:1", "cuda:1")]
    table = measure_links(devices)
    assert set(table) == {(a.name, b.name) for a in devices for b in devices if a.name != b.name}
    places = {(a.torch_device, b.torch_device) for a in devices for b in devices if a.name != b.name}
    assert len(measured) == len(places)
    assert table["cpu:0", "cpu:1"] == table["cpu:2", "cpu:0"]
    assert table["cpu:0", "cuda:0"] != table["cuda:0", "cpu:0"]
    assert table["cuda:0", "cuda:1"] != table["cuda:1", "cuda:0"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_to_and_from_a_gpu_have_a_finite_bandwidth() -> None:
    for link in measure_links(parse_devices(["cpu", "cuda:0"])).values():
        assert link.latency > 0
        assert math.isfinite(link.bandwidth)
