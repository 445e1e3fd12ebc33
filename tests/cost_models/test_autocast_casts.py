"""Meta tensors under autocast: the casts that operators make, and what they keep, are those of a device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from cost_models.kernels.autocast_casts import AutocastCasts
from cost_models.kernels.device_kernels import DeviceKernels

BF16 = torch.bfloat16
CALLS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "linear": (functional.linear, [(8, 16), (4, 16), (4,)]),
    "matmul": (torch.matmul, [(2, 8, 16), (2, 16, 4)]),
    "convolution": (functional.conv2d, [(2, 3, 8, 8), (4, 3, 3, 3)]),
    "layer norm": (lambda x, w: functional.layer_norm(x, (16,), w), [(8, 16), (16,)]),
    "softmax": (lambda x: torch.softmax(x, -1), [(8, 16)]),
    "loss": (functional.mse_loss, [(8, 16), (8, 16)]),
    "relu": (torch.relu, [(8, 16)]),
    "addition": (torch.add, [(8, 16), (8, 16)]),
    "einsum": (lambda a, b: torch.einsum("ij,kj->ik", a, b), [(8, 16), (4, 16)]),
    "aten": (torch.ops.aten.linear.default, [(8, 16), (4, 16), (4,)]),
    "attention": (functional.scaled_dot_product_attention, [(2, 4, 8, 16)] * 3),
    "cat": (lambda a, b: torch.cat([a, b]), [(8, 16), (8, 16)]),
}


def kept(run: Callable[[], torch.Tensor]) -> tuple[torch.dtype, int]:
    """The dtype of a result, and bytes of the storages that its backward needs."""
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    return result.dtype, sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("first", [torch.float32, BF16])
@pytest.mark.parametrize("name", CALLS)
def test_operators_cast_and_keep_what_they_do_on_the_device(name: str, first: torch.dtype) -> None:
    operator, shapes = CALLS[name]
    found = []
    for device in ("cpu", "meta"):
        inputs = [torch.ones(s, device=device, dtype=first if i == 0 else None) for i, s in enumerate(shapes)]
        leaves = [x.requires_grad_() for x in inputs]
        kernels = DeviceKernels("cpu") if device == "meta" else nullcontext()
        with torch.autocast("cpu", BF16), kernels, AutocastCasts("cpu"):
            found.append(kept(lambda leaves=leaves: operator(*leaves)))  # type: ignore[misc]
    assert found[0] == found[1]


def test_a_parameter_is_cast_once_and_its_gradient_has_its_own_dtype() -> None:
    layer = nn.Linear(16, 16, device="meta")
    x = torch.ones(8, 16, device="meta")
    casts = AutocastCasts("cpu")
    with torch.autocast("cpu", BF16), casts:
        loss = layer(layer(x)).sum()
    assert sorted(t.numel() for t in casts.kept) == [16, 256]
    assert all(t.dtype == BF16 for t in casts.kept)
    loss.backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


def test_nothing_is_cast_where_autocast_is_off() -> None:
    x = torch.ones(8, 16, device="meta")
    casts = AutocastCasts("cpu")
    with casts:
        assert functional.linear(x, torch.ones(4, 16, device="meta")).dtype == torch.float32
    with torch.autocast("cpu", BF16), casts:
        with torch.autocast("cpu", enabled=False):
            assert functional.linear(x, torch.ones(4, 16, device="meta")).dtype == torch.float32
        assert functional.linear(x, torch.ones(4, 16, device="meta")).dtype == BF16
    assert not list(casts.kept)
