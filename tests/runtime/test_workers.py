"""Worker threads: they start or say why not, and run backwards themselves."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import autopar
from autopar import DeviceError, Plan
from autopar.runtime.step import workers
from autopar.runtime.step.workers import Worker, WorkerPool
from cost_models import parse_devices


def test_a_worker_whose_device_cannot_be_used_says_so_and_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(count: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("the device is lost")

    (device,) = parse_devices(["cpu"])
    before = set(threading.enumerate())
    monkeypatch.setattr(workers.torch, "set_num_threads", lost)
    with pytest.raises(DeviceError, match=r"no worker can start on cpu:0: the device is lost"):
        Worker(device, WorkerPool([device]))
    assert set(threading.enumerate()) <= before  # threads of earlier tests may end meanwhile


class _Observed(torch.autograd.Function):
    """Writes down where its backward runs."""

    backwards: ClassVar[list[tuple[str, bool]]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _Observed.backwards.append((threading.current_thread().name, torch._C._is_multithreading_enabled()))
        return gradient * 2


class _Watched(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Observed.apply(x)
        return found


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_backwards_run_in_the_worker_that_calls_them_whatever_the_device(schedule: str) -> None:
    """Autograd's one thread for a GPU would wait for itself where the caller's backward runs on it."""
    model = nn.Sequential(nn.Linear(4, 4), _Watched(), nn.Linear(4, 4))
    plan = Plan.from_split({"0": 0, "2": 1}, n_microbatches=2, schedule=schedule)
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan, cache=False)
    pm(torch.randn(4, 4))
    _Observed.backwards.clear()
    pm(torch.randn(4, 4)).sum().backward()
    assert _Observed.backwards == [("autopar-cpu:0", False)] * 2
    assert torch._C._is_multithreading_enabled(), "of the caller's thread"
