"""Models that read indices from an input of floats take few other values than those of the example."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import assert_same_outputs
from torch import nn

import autopar
from autopar import Plan
from autopar.analysis import batch_tail
from autopar.capture.program import capture


class Patches(nn.Module):
    """Patches with their row in the first column, as those of Pix2Struct; `tail(hidden)` returns."""

    def __init__(self, tail: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.rows, self.rest, self.out, self.tail = nn.Embedding(16, 8), nn.Linear(4, 8), nn.Linear(8, 3), tail

    def forward(self, patches: torch.Tensor) -> Any:
        hidden = self.rows(patches[:, :, 0].long()) + self.rest(patches[:, :, 1:])
        return self.tail(self.out(hidden.relu()))


def patches(batch: int) -> torch.Tensor:
    found = torch.randn(batch, 6, 5)
    found[:, :, 0] = torch.randint(16, (batch, 6))
    return found


def similarities(hidden: torch.Tensor) -> torch.Tensor:
    pooled = hidden.mean(1)
    return torch.log_softmax(pooled @ pooled.T, 1).diagonal().mean()


@pytest.mark.parametrize("verify", [False, True])
def test_samples_that_do_not_meet_are_split(verify: bool) -> None:
    x = patches(4)
    _, batching = batch_tail.studied(capture(Patches(lambda h: (h, h.mean())), (x,), {}), [x], verify=verify)
    assert batching.splittable
    assert [output.combine for output in batching.outputs] == ["cat", "mean"]


MIXING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cumsum": lambda h: h.cumsum(0),
    "fft": lambda h: torch.fft.fft(h, dim=0).imag,  # zero for equal samples
}


@pytest.mark.parametrize("operator", MIXING)
@pytest.mark.parametrize("equal", [False, True])
def test_samples_that_meet_stay_together_even_if_the_example_s_are_equal(operator: str, equal: bool) -> None:
    x = patches(1).repeat(4, 1, 1) if equal else patches(4)
    _, batching = batch_tail.studied(capture(Patches(lambda h: h + MIXING[operator](h)), (x,), {}), [x])
    whole = batching.obstacle if batching.tail is None else batching.tail.why
    assert operator in whole


@pytest.mark.parametrize("tail", [torch.mean, similarities])
def test_micro_batches_give_the_plain_model_s_loss_and_gradients(tail: Callable[[torch.Tensor], Any]) -> None:
    model = Patches(tail)
    plain = copy.deepcopy(model)
    plan = Plan.from_split({"rows": 0, "rest": 0, "out": 1}, n_microbatches=2)
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan)
    for batch in (4, 6):
        x = patches(batch)
        loss, expected = pm(x), plain(x)
        assert_same_outputs(loss, expected)
        loss.backward()
        expected.backward()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)
    assert pm.plan.n_microbatches == 2
    pm.close()
