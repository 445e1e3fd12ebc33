"""Memory: optimizer state as torch.optim allocates it, and bytes that are free."""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from cost_models import DeviceError, available_memory, optimizer_name, optimizer_state_bytes
from cost_models.hardware import devices
from cost_models.memory.optimizer_state import OPTIMIZER_KINDS

NAMES = sorted(OPTIMIZER_KINDS.keys() - {"adafactor"})


def made(name: str, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    kind = OPTIMIZER_KINDS[name]
    return kind.maker(parameters, lr=0.1, **kind.settings)  # type: ignore[call-arg]


@pytest.mark.parametrize("optimizer", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizer_state_is_what_torch_allocates(optimizer: str, dtype: torch.dtype) -> None:
    model = torch.nn.Linear(7, 5, dtype=dtype)
    steps = made(optimizer, model.parameters())
    model(torch.ones(2, 7, dtype=dtype)).sum().backward()
    steps.step()
    allocated = sum(
        tensor.nbytes
        for parameter in model.parameters()
        for tensor in steps.state[parameter].values()
        if torch.is_tensor(tensor) and tensor.shape == parameter.shape
    )
    counted = sum(optimizer_state_bytes(optimizer, p.nbytes, p.shape) for p in model.parameters())
    assert counted == allocated


def test_no_optimizer_has_no_state() -> None:
    assert optimizer_state_bytes("none", 4096, (32, 32)) == 0


@pytest.mark.parametrize("name", sorted(OPTIMIZER_KINDS))
def test_an_optimizer_is_recognised_with_the_settings_of_its_state(name: str) -> None:
    parameters = list(torch.nn.Linear(3, 3).parameters())
    optimizer = made(name, parameters)
    assert optimizer_name(optimizer) == name
    own = type("Own", (type(optimizer),), {})
    optimizer.__class__ = own
    assert optimizer_name(optimizer) == name


def test_the_group_of_parameters_with_the_most_state_counts() -> None:
    a, b = torch.nn.Linear(3, 3).parameters()
    groups = [{"params": [a]}, {"params": [b], "momentum": 0.9}]
    assert optimizer_name(torch.optim.SGD(groups, lr=0.1)) == "momentum"


def test_an_optimizer_of_unknown_state_is_answered_with_the_known_names() -> None:
    parameters = list(torch.nn.Linear(3, 3).parameters())
    with pytest.raises(ValueError, match=r"LBFGS is not known.*none, sgd, momentum, adam"):
        optimizer_name(torch.optim.LBFGS(parameters))
    with pytest.raises(ValueError, match=r"give Adam\(model.parameters\(\)\)"):
        optimizer_name(torch.optim.Adam)  # type: ignore[arg-type]


def test_an_unknown_optimizer_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'lion'.*none, sgd, momentum, adam, adamw"):
        optimizer_state_bytes("lion", 4, (1,))


def test_free_ram_is_some_of_the_machines() -> None:
    assert 0 < available_memory(torch.device("cpu")) <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_free_ram_counts_what_linux_says_is_available(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       2000 kB\nMemFree:        10 kB\nMemAvailable:   1500 kB\n")
    assert devices._available_ram(meminfo) == 1500 * 1024


def test_free_ram_is_known_without_linux(tmp_path: Path) -> None:
    assert devices._available_ram(tmp_path / "missing") > 0


def test_free_gpu_memory_includes_what_the_allocator_has_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda place: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda place: 70)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda place: 50)
    assert available_memory(torch.device("cuda", 0)) == 120


def test_the_memory_of_an_unsupported_device_is_an_error() -> None:
    with pytest.raises(DeviceError, match="'meta'"):
        available_memory(torch.device("meta"))
