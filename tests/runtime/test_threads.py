"""Several threads that call one module get what they would get one after the other."""

from __future__ import annotations

import copy
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import autopar
from autopar import Plan

N_THREADS, N_CALLS = 4, 6


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()).double()


def batch(thread: int, call: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(thread * N_CALLS + call)
    return torch.randn(4 + call % 2, 8, generator=generator, dtype=torch.float64)  # of two signatures


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("step", ["backward", "train_step", "whole loss"])
def test_gradients_of_all_threads_add_up(schedule: str, step: str) -> None:
    model = blocks()
    plan = Plan.from_split({"0": 0, "2": 1}, n_microbatches=2, schedule=schedule)
    pm = autopar.parallelize(copy.deepcopy(model), ["cpu", "cpu"], plan=plan, cache=False)

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        difference = (output - target).square()
        return difference.std() if step == "whole loss" else difference.mean()

    def train(module: nn.Module, thread: int) -> list[torch.Tensor]:
        losses = []
        for call in range(N_CALLS):
            x = batch(thread, call)
            if module is pm and step != "backward":
                losses.append(module.train_step(x, target=x, loss_fn=loss_of))
                continue
            loss = loss_of(module(x), x)
            loss.backward()
            losses.append(loss.detach())
        return losses

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autopar.AutoparWarning)
        with ThreadPoolExecutor(N_THREADS) as threads:
            losses = list(threads.map(lambda thread: train(pm, thread), range(N_THREADS)))
    torch.testing.assert_close(losses, [train(model, thread) for thread in range(N_THREADS)])
    for (name, got), expected in zip(pm.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, msg=name)


def test_a_backward_may_come_on_another_thread_and_while_others_call() -> None:
    model = blocks()
    plan = Plan.from_split({"0": 0, "2": 1}, n_microbatches=2)
    pm = autopar.parallelize(copy.deepcopy(model), ["cpu", "cpu"], plan=plan, cache=False)
    with ThreadPoolExecutor(N_THREADS) as threads:
        losses = list(threads.map(lambda thread: pm(batch(thread, 0)).square().sum(), range(N_THREADS)))
        others = [threads.submit(pm, batch(thread, 1)) for thread in range(N_THREADS)]
        list(threads.map(torch.Tensor.backward, losses))
    for thread, other in enumerate(others):
        torch.testing.assert_close(other.result(), model(batch(thread, 1)))
        model(batch(thread, 0)).square().sum().backward()
    for (name, got), expected in zip(pm.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, msg=name)
