"""Functions of tensors with and without values run without values, as if all tensors lacked them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from cost_models.graphs import on_meta
from cost_models.kernels.beside_meta import BesideMeta
from cost_models.kernels.operator_work import count_call
from cost_models.memory.allocations import Allocations

W = torch.rand(6)
CALLS: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
    lambda x, w: x * w,
    lambda x, w: w + x.sum(),
    lambda x, w: nn.functional.linear(x, w[None], bias=w[:1]),
    lambda x, w: torch.cat([x, w[None]]),
    lambda x, w: torch.stack([x[0], w], dim=1),
    lambda x, w: nn.functional.cross_entropy(x, torch.arange(4).to(x.device), weight=w),
    lambda x, w: w[x.argmax(1)],
    lambda x, w: torch.where(x > 0, x, w).var(unbiased=False),
    lambda x, w: w.clone().copy_(x[0]),
]


@pytest.mark.parametrize("call", CALLS)
def test_results_are_those_of_tensors_that_all_lack_values(call: Callable[..., torch.Tensor]) -> None:
    x = torch.randn(4, 6)
    real = call(x, W)
    with BesideMeta():
        mixed = call(on_meta(x), W)
    assert mixed.is_meta
    assert (mixed.shape, mixed.dtype) == (real.shape, real.dtype)
    with BesideMeta():
        work = count_call(lambda x: call(x, W), (on_meta(x),))[1]
    assert work == count_call(call, (on_meta(x), on_meta(W)))[1]


def test_functions_of_tensors_with_values_run_as_they_are() -> None:
    x = torch.empty(6, device="meta")
    with BesideMeta():
        assert (W * 2).sum().item() == pytest.approx(2 * float(W.sum()))
        assert (x * x).is_meta


def test_what_is_written_is_the_copy_which_stays_the_same() -> None:
    sums = torch.zeros(6)
    x = torch.empty(6, device="meta")
    with BesideMeta():
        written = sums.add_(x)
        assert written.is_meta
        assert sums.add_(x) is written
    assert torch.equal(sums, torch.zeros(6))


def test_gradients_flow_to_copies_alone() -> None:
    scale = nn.Parameter(torch.ones(6))
    x = torch.empty(4, 6, device="meta", requires_grad=True)
    with BesideMeta():
        loss = (x * scale).sum()
    loss.backward()
    assert x.grad is not None
    assert scale.grad is None


def test_copies_count_as_no_allocation() -> None:
    x = torch.empty(4, 6, device="meta")
    with Allocations() as seen, BesideMeta():
        result = x * W
    assert seen.nbytes == [result.nbytes]
