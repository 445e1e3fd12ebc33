"""What is measured and predicted of GPUs. Run with `python -m pytest -m gpu`.

What makes sense on a CPU runs there as well, without the mark.
"""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from gpu_places import ON_GPU, ON_ONE, ON_ONE_GPU_TWICE, on
from torch import nn
from torch.nn.functional import mse_loss

import autopar
from autopar import AutoparWarning, InfeasibleError
from cost_models.measuring.environment import float32_settings_kept


def linears(width: int, count: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(count)])


@ON_GPU
def test_eight_equal_layers_take_equal_time_forward_and_backward(devices: list[str]) -> None:
    """A launch takes none of the GPU's time, and the last operator does not take that of all others."""
    model, x = linears(8192, 8).to(devices[0]), torch.randn(1024, 8192, device=devices[0])
    profile = autopar.profile(model, devices, example_args=(x,), target=x, loss_fn=mse_loss, cache=False)
    (kind,) = set(profile.kinds)
    layers = [profile[str(i)] for i in range(8)]
    for seconds in ([c.forward[kind] for c in layers[1:]], [c.backward[kind] for c in layers[1:]]):
        assert max(seconds) < 1.3 * min(seconds)


@ON_GPU
def test_matrix_products_are_priced_under_the_callers_autocast(devices: list[str]) -> None:
    """And remembered for it alone."""
    model, x = linears(4096, 4).to(devices[0]), torch.randn(2048, 4096, device=devices[0])

    def seconds() -> float:
        profile = autopar.profile(model, devices, example_args=(x,), target=x, loss_fn=mse_loss)
        return profile.model.seconds(profile.kinds[0])

    single = seconds()
    with torch.autocast("cuda", torch.bfloat16):
        half = seconds()
    assert half < 0.8 * single
    assert seconds() == single, "from the cache"


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 64, 256), nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(torch.relu(self.conv(x)).flatten(1))
        return self.b(torch.relu(y)) @ self.b.weight


@pytest.mark.slow
@ON_ONE
@pytest.mark.parametrize("tf32", [False, True])
def test_a_batch_that_is_proven_to_split_is_split_whatever_products_round_to(devices: list[str], tf32: bool) -> None:
    with float32_settings_kept(), warnings.catch_warnings():
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        warnings.simplefilter("error", AutoparWarning)
        x = torch.randn(32, 3, 8, 8)
        options = {"n_microbatches": 4, "tune": 0, "cache": False}
        plan = autopar.plan(Product(), devices, example_args=(x,), **options)
    assert plan.n_microbatches == 4


@ON_ONE_GPU_TWICE
def test_two_workers_on_one_gpu_are_no_faster_than_one(devices: list[str]) -> None:
    model, x = linears(2048, 8), torch.randn(512, 2048)
    call = {"example_args": (x,), "target": x, "loss_fn": mse_loss, "tune": 0, "n_microbatches": 4}
    twice, once = (autopar.plan(model, slots, **call).predicted_step_time for slots in (devices, devices[:1]))
    assert twice is not None
    assert once is not None
    assert twice > 0.95 * once


@ON_GPU
def test_planning_holds_the_model_once(devices: list[str]) -> None:
    model, x = linears(4096, 8).to(devices[0]), torch.randn(32, 4096, device=devices[0])
    size = sum(p.nbytes for p in model.parameters())
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    autopar.plan(model, devices, example_args=(x,), target=x, loss_fn=mse_loss, tune=0, cache=False)
    more = torch.cuda.max_memory_allocated() - before
    assert more < 1.25 * size, "gradients of the model beside it, no second model"
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + (64 << 20)  # workspaces stay


@ON_GPU
def test_what_the_model_holds_on_the_gpu_counts_once(devices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW's step holds five times the model's size: its two states and its temporaries. One is there already."""
    model, x = linears(8192, 1).to(devices[0]), torch.randn(8, 8192, device=devices[0])
    size, total = sum(p.nbytes for p in model.parameters()), torch.cuda.mem_get_info()[1]
    call = {"example_args": (x,), "target": x, "loss_fn": mse_loss, "optimizer": "adamw", "tune": 0}
    for times, fits in ((4.7, True), (3.5, False)):
        gc.collect()  # what other tests and plans left in the allocator would count as free
        torch.cuda.empty_cache()
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_, times=times: (int(times * size), total))
        if fits:
            autopar.plan(model, devices, **call)
        else:
            with pytest.raises(InfeasibleError):
                autopar.plan(model, devices, **call)


@pytest.mark.parametrize("devices", [on("cuda:0", "cuda:1")])
def test_two_gpus_are_faster_than_one_by_the_plan_and_by_the_clock(devices: list[str]) -> None:
    """Of a model large enough for both."""
    model, x = linears(8192, 8), torch.randn(2048, 8192)
    call = {"example_args": (x,), "target": x, "loss_fn": mse_loss}
    found = autopar.compare(model, devices, {"auto": None}, repeats=3, **call)
    assert found.speed_up(found["auto"]) > 1.3
    assert len(found["auto"].plan.used_devices) == 2
