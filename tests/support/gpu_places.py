"""Lists of devices that tests of GPUs run on: with one GPU, with several, and the same test on CPU workers.

Cases with a GPU have the mark `gpu` (`pytest -m gpu`), and are skipped with the reason where there are too few.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from cost_models import parse_devices


def on(*devices: str) -> object:
    """A case of a parametrized test: a list of devices."""
    needed = max((int(d.partition(":")[2]) + 1 for d in devices if d.startswith("cuda")), default=0)
    marks = [pytest.mark.gpu] if needed else []
    if needed:
        there = torch.cuda.device_count()
        reason = f"needs {needed} CUDA device{'s' if needed > 1 else ''}, and PyTorch sees {there}"
        marks.append(pytest.mark.skipif(there < needed, reason=reason))
    return pytest.param(list(devices), marks=marks, id="+".join(devices))


PAIRS = (
    on("cpu", "cpu"),
    on("cuda:0", "cuda:0"),
    on("cpu", "cuda:0"),
    on("cuda:0", "cpu"),
    on("cuda:0", "cuda:1"),
)
ON_PAIRS = pytest.mark.parametrize("devices", PAIRS)
"""Two workers: on CPUs, on one GPU, on both, on two GPUs."""

ON_ONE = pytest.mark.parametrize("devices", [on("cpu"), on("cuda:0")])
ON_GPU = pytest.mark.parametrize("devices", [on("cuda:0")])
ON_ONE_GPU_TWICE = pytest.mark.parametrize("devices", [on("cuda:0", "cuda:0")])


def places(devices: Sequence[str]) -> list[torch.device]:
    """Where tensors of these workers live, each once, the CPU as well."""
    found = [device.torch_device for device in parse_devices(list(devices))]
    return list(dict.fromkeys([torch.device("cpu"), *found]))


def names(devices: Sequence[str]) -> tuple[str, ...]:
    """Of these workers, as plans have them."""
    return tuple(device.name for device in parse_devices(list(devices)))


def on_cpu(tensors: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    return {name: None if t is None else t.detach().cpu() for name, t in tensors.items()}
