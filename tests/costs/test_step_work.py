"""FLOPs of a step on devices at hand, and model FLOPs utilisation where the GPU's name leads to a data sheet."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from autopar.analysis.example import Example, capture_example
from autopar.costs.model_flops import step_work_at_hand
from autopar.plan.step_work import StepWork
from autopar.report.quantities import no_data_sheet
from cost_models import Device, parse_devices
from cost_models.hardware.device_specs import data_sheet_of, known_devices

H100, ROWS, WIDTH = "NVIDIA H100 80GB HBM3", 8, 16
FLOPS = 2 * ROWS * WIDTH * WIDTH * (3 + 2)  # three products each, but no gradient of the input for the first layer


def gpus(*names: str, kind: str = H100) -> list[Device]:
    return [Device(name, torch.device(name.partition("#")[0]), kind, 80 << 30, 1) for name in names]


@pytest.fixture(scope="module")
def example() -> Example:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    return capture_example(model, parse_devices(["cpu"]), (torch.randn(ROWS, WIDTH),), {})


def peak(name: str, dtype: str) -> float:
    return known_devices()[name].peak_flops[dtype]


def test_utilisation_is_of_the_peaks_of_all_gpus_at_hand(example: Example) -> None:
    work = step_work_at_hand(example, gpus("cuda:0", "cuda:1"))
    assert work.flops == FLOPS
    assert work.utilisation(1e-6) == pytest.approx(FLOPS / (2 * peak("H100", "float32")) / 1e-6)


def test_workers_on_one_gpu_have_its_peak_together(example: Example) -> None:
    assert step_work_at_hand(example, gpus("cuda:0", "cuda:0#1")) == step_work_at_hand(example, gpus("cuda:0"))


def test_products_under_autocast_are_at_the_peak_of_its_dtype(example: Example) -> None:
    """Nothing is counted twice to find out what autocast casts. Without CUDA, torch only knows autocast of CPUs."""
    casting = [dataclasses.replace(gpu, torch_device=torch.device("cpu")) for gpu in gpus("cuda:0")]
    with torch.autocast("cpu", torch.bfloat16):
        work = step_work_at_hand(example, casting)
    assert work.flops == FLOPS
    assert work.least_time == pytest.approx(FLOPS / peak("H100", "bfloat16"))


def test_convolutions_are_at_the_peak_of_tf32_which_torch_lets_them_use() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 6 * 6, WIDTH))
    work = step_work_at_hand(
        capture_example(model, parse_devices(["cpu"]), (torch.randn(ROWS, 3, 8, 8),), {}), gpus("cuda:0")
    )
    convolution, linear = 2 * 2 * ROWS * 8 * 6 * 6 * 3 * 3 * 3, 3 * 2 * ROWS * 8 * 6 * 6 * WIDTH
    assert work.flops == convolution + linear
    least = convolution / peak("H100", "tf32") + linear / peak("H100", "float32")
    assert work.least_time == pytest.approx(least)


@pytest.mark.parametrize("kind", ["NVIDIA H100 PCIe", "AMD EPYC, 1 thread", "another GPU"])
def test_without_a_data_sheet_flops_are_counted_and_the_device_is_named(example: Example, kind: str) -> None:
    work = step_work_at_hand(example, [*gpus("cuda:0"), *gpus("cuda:1", kind=kind)])
    assert (work.flops, work.least_time) == (FLOPS, None)
    assert no_data_sheet([H100, kind, kind]) == f"no data sheet for {kind}"


def test_flops_are_not_counted_where_an_operator_cannot_be_seen(example: Example) -> None:
    program = dataclasses.replace(example.program, uncaptured=("module '0' runs uncaptured",))
    opaque = dataclasses.replace(example, program=program)
    assert step_work_at_hand(opaque, gpus("cuda:0")) == StepWork()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100 80GB PCIe", "A100-80"),
        (H100, "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("Tesla T4", "T4"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        # Other peaks than those of the data sheet:
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("Tesla V100-PCIE-16GB", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA L40S", None),
        ("AMD EPYC, 1 thread", None),
    ],
)
def test_the_name_of_a_card_leads_to_the_data_sheet_that_has_its_peaks(kind: str, name: str | None) -> None:
    found = data_sheet_of(kind)
    assert (found and found.name) == name
