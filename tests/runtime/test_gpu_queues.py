"""What a GPU does later: streams, waits of the host, memory, failures. Run with `python -m pytest -m gpu`.

What makes sense for CPU workers runs on them as well, without the mark.
"""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_places import ON_GPU, ON_ONE_GPU_TWICE, ON_PAIRS, on_cpu, places
from models import assert_same_gradients, gpt2, gradients, mlp, tokens
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import mse_loss

import autopar
from autopar import DeviceError, PipelinedModule, Plan
from autopar.costs.history import recall
from benchmarks.gpu_memory import in_use
from cost_models.hardware.devices import synchronize


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Whatever makes the host wait for a GPU is an error in here."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def pipelined(model: nn.Module, devices: list[str], schedule: str = "1f1b", n_microbatches: int = 4) -> PipelinedModule:
    plan = Plan.from_split({"0": 0, "3": 1}, n_microbatches=n_microbatches, schedule=schedule)
    return autopar.parallelize(model, devices, plan=plan, cache=False)


def gpus(devices: list[str]) -> list[torch.device]:
    return [place for place in places(devices) if place.type == "cuda"]


# -- the host waits for nothing ---------------------------------------------------------------------------------------


@ON_ONE_GPU_TWICE
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("host_inputs", [False, True], ids=["inputs on the GPU", "inputs of the host"])
def test_a_step_makes_the_host_wait_for_nothing(devices: list[str], schedule: str, host_inputs: bool) -> None:
    pm = pipelined(mlp(64, 6), devices, schedule)
    at = torch.device("cpu") if host_inputs else gpus(devices)[0]
    x, y = torch.randn(16, 64, device=at), torch.randn(16, 64, device=at)
    if host_inputs:
        x, y = x.pin_memory(), y.pin_memory()
    for _ in range(2):  # the first ones capture, place and compile kernels
        pm.train_step(x, target=y, loss_fn=mse_loss)
        pm(x).sum().backward()
    with no_synchronization():
        pm.train_step(x, target=y, loss_fn=mse_loss)
        pm(x).sum().backward()
    synchronize(*gpus(devices))
    pm.close()


@ON_ONE_GPU_TWICE
def test_a_step_with_the_models_own_loss_makes_the_host_wait_for_nothing(devices: list[str]) -> None:
    plan = Plan.from_split({"transformer.h.0": 0, "transformer.h.2": 1}, n_microbatches=2)
    pm = autopar.parallelize(gpt2(), devices, plan=plan, cache=False)
    ids = tokens(4).to(gpus(devices)[0])
    for _ in range(2):
        pm.train_step(input_ids=ids, labels=ids)
    with no_synchronization():
        pm.train_step(input_ids=ids, labels=ids)
    pm.close()


@ON_ONE_GPU_TWICE
def test_a_step_with_dropout_makes_the_host_wait_for_nothing(devices: list[str]) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.Linear(16, 16), nn.Linear(16, 16), nn.Dropout(0.2))
    pm, x = pipelined(model, devices), torch.randn(8, 16, device=gpus(devices)[0])
    for _ in range(2):
        pm.train_step(x, target=x, loss_fn=mse_loss)
    with no_synchronization():
        pm.train_step(x, target=x, loss_fn=mse_loss)
    pm.close()


# -- streams ----------------------------------------------------------------------------------------------------------


@ON_PAIRS
def test_a_pipeline_computes_on_the_streams_of_its_caller(devices: list[str]) -> None:
    """The input is made, used and overwritten, and gradients are read, on streams that nobody waits for."""
    model = mlp(256, 6)
    original = copy.deepcopy(model)
    pm = pipelined(model, devices)
    for at in places(devices):
        x = torch.randn(64, 256, device=at)
        pm(x).sum().backward()
        model.zero_grad()
        synchronize(*gpus(devices))
        streams = [torch.cuda.Stream(gpu) for gpu in gpus(devices)]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        with _on(streams):
            for _ in range(5):
                x = torch.randn(64, 256, device=at)
                kept = x.clone()
                output = pm(x)
                with torch.no_grad():
                    found = output.clone()
                output.sum().backward()
                x.fill_(float("nan"))
                mine = {name: None if g is None else g.clone() for name, g in gradients(model).items()}
                wanted = original(kept.cpu())
                wanted.sum().backward()
                torch.testing.assert_close(found.cpu(), wanted.detach(), rtol=1e-3, atol=1e-4)
                assert_same_gradients(on_cpu(mine), on_cpu(gradients(original)), 1e-3)
    pm.close()


@contextmanager
def _on(streams: list[torch.cuda.Stream]) -> Iterator[None]:
    with torch.cuda.stream(streams[0]) if streams else nullcontext():
        if len(streams) > 1:
            with _on(streams[1:]):
                yield
        else:
            yield


@ON_PAIRS
@pytest.mark.parametrize("pinned", [False, True])
def test_an_input_may_be_overwritten_right_after_the_call(devices: list[str], pinned: bool) -> None:
    if pinned and not gpus(devices):
        pytest.skip("memory is pinned for GPUs")
    model = mlp(64, 6)
    original = copy.deepcopy(model)
    pm = pipelined(model, devices)
    for at in [torch.device("cpu")] if pinned else places(devices):
        x = torch.randn(512, 64, device=at)
        x = x.pin_memory() if pinned else x
        with torch.no_grad():
            pm(x)
            for _ in range(10):
                x.normal_()
                kept = x.clone()
                found = pm(x)
                x.fill_(float("nan"))
                torch.testing.assert_close(found.cpu(), original(kept.cpu()), rtol=1e-3, atol=1e-4)
    pm.close()


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@ON_PAIRS
def test_memory_of_a_step_is_given_back(devices: list[str]) -> None:
    pm = pipelined(mlp(64, 6), devices)
    x = torch.randn(64, 64)

    def used(steps: int) -> list[int]:
        for _ in range(steps):
            pm.train_step(x, target=x, loss_fn=mse_loss)
        return [in_use(place) for place in places(devices)]

    first = used(5)
    assert all(later <= before for later, before in zip(used(20), first, strict=True))
    pm.close()


@ON_ONE_GPU_TWICE
def test_memory_stays_bounded_while_the_host_runs_ahead(devices: list[str]) -> None:
    pm = pipelined(mlp(1024, 6), devices, n_microbatches=8)
    x = torch.randn(4096, 1024).pin_memory()

    def peak(steps: int) -> int:
        synchronize(*gpus(devices))
        torch.cuda.reset_peak_memory_stats()
        for _ in range(steps):
            pm.train_step(x, target=x, loss_fn=mse_loss)
        synchronize(*gpus(devices))
        return torch.cuda.max_memory_allocated()

    peak(3)
    assert peak(50) <= 1.2 * peak(3)
    pm.close()


class Heads(nn.Module):
    """Attention with dropout over long sequences: a matrix of scores would be larger than all else."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.a(x).unflatten(-1, (4, 16)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, dropout_p=0.1, is_causal=True)
        return self.b(y.transpose(1, 2).flatten(2))


@ON_ONE_GPU_TWICE
def test_attention_with_dropout_holds_no_matrix_of_scores(devices: list[str]) -> None:
    model = Heads().to(gpus(devices)[0], torch.bfloat16)
    plan = Plan.from_split({"a": 0, "b": 1}, n_microbatches=2)
    pm = autopar.parallelize(model, devices, plan=plan, cache=False)
    length = 4096
    x = torch.randn(2, length, 64, device=gpus(devices)[0], dtype=torch.bfloat16)
    pm(x).sum().backward()
    synchronize(*gpus(devices))
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    pm(x).sum().backward()
    synchronize(*gpus(devices))
    assert torch.cuda.max_memory_allocated() - before < 4 * length * length * x.element_size()  # scores of a sample
    pm.close()


# -- failures ---------------------------------------------------------------------------------------------------------


@ON_GPU
def test_a_worker_that_cannot_use_its_gpu_says_so(devices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(device: Any) -> None:
        raise RuntimeError("the device is lost")

    before = threading.active_count()
    monkeypatch.setattr(torch.cuda, "set_device", lost)
    with pytest.raises(DeviceError, match="no worker can start on cuda:0: the device is lost"):
        pipelined(mlp(64, 6), devices * 2)(torch.randn(8, 64))
    assert threading.active_count() == before


_ASSERTION = """
import torch, autopar
from torch import nn
model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 4))
plan = autopar.Plan.from_split({"0": 0, "2": 1}, n_microbatches=2)
pm = autopar.parallelize(model, ["cuda:0", "cuda:0"], plan=plan, cache=False)
x = torch.zeros(4, 3, dtype=torch.long, device="cuda:0")
pm(x).sum().item()
for _ in range(3):
    pm(x + 100).sum().backward()
torch.cuda.synchronize()
"""


@ON_GPU
def test_a_failed_assertion_of_a_kernel_names_the_way_to_find_it(devices: list[str], tmp_path: Path) -> None:
    """In a process of its own: no GPU works in it afterwards."""
    script = tmp_path / "script.py"
    script.write_text(_ASSERTION)
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240)
    assert ran.returncode != 0
    assert "CUDA_LAUNCH_BLOCKING" in ran.stderr


@ON_ONE_GPU_TWICE
def test_profiled_steps_on_a_gpu_are_in_the_history(
    devices: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    x = torch.randn(64, 64)
    pm = autopar.parallelize(
        mlp(64, 6), devices, example_args=(x,), target=x, loss_fn=mse_loss, tune=0, max_replicas=1, n_microbatches=2
    )
    found = len(recall())
    for _ in range(3):
        pm.train_step(x, target=x, loss_fn=mse_loss, profile=True)
    assert len(recall()) == found + 3
    pm.close()
