"""A forward that writes its own parameters is refused by the parameter's name, and planning leaves the model alone."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import autopar
from autopar import CaptureError, Plan
from autopar.capture.program import capture


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 4)

    def change(self) -> None:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change()
        found: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return found


class Clamped(Two):
    def change(self) -> None:
        with torch.no_grad():
            self.up.weight.clamp_(-0.1, 0.1)


class Normed(Two):
    def change(self) -> None:
        self.up.weight.data = self.up.weight.data / self.up.weight.data.norm()


class Shrunk(Two):
    def change(self) -> None:
        self.up.weight.data.mul_(0.9)


class Copied(Two):
    def change(self) -> None:
        with torch.no_grad():
            self.up.weight.copy_(self.up.weight * 0.9)


class OfView(Two):
    def change(self) -> None:
        with torch.no_grad():
            self.up.weight.t()[0].zero_()


class Uncaptured(Two):
    def change(self) -> None:
        torch.from_numpy(self.up.weight.detach().numpy()).mul_(0.9)


WRITERS = [Clamped, Normed, Shrunk, Copied, OfView, Uncaptured]
SPLIT = Plan.from_split({"up": 0, "down": 1}, n_microbatches=2)


@pytest.mark.parametrize("plan", [None, SPLIT], ids=["searched", "given"])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_write_is_refused_by_the_parameters_name_and_changes_nothing(writer: type[Two], plan: Plan | None) -> None:
    model = writer()
    before = {name: (t, t.data_ptr(), t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    call: dict[str, Any] = {"target": torch.randn(8, 4), "loss_fn": nn.functional.mse_loss}
    with pytest.raises(CaptureError, match=r"writes the parameter 'up\.weight'"):
        autopar.parallelize(model, ["cpu", "cpu"], plan=plan, example_args=(torch.randn(8, 8),), **call)
    for name, tensor in model.state_dict(keep_vars=True).items():
        own, place, values = before[name]
        assert tensor is own
        assert tensor.data_ptr() == place
        assert torch.equal(tensor, values)
    model.up.weight.data = torch.ones(8, 8)  # outside of a capture everybody may
    assert bool((model.up.weight == 1).all())


class Averages(nn.Module):
    """Keeps a running mean, as code with statistics of its own does."""

    mean: torch.Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.how == "whole":
                self.mean.mul_(0.9).add_(0.1 * hidden.mean(0))
            elif self.how == "view":
                self.mean[:4].mul_(0.9).add_(0.1 * hidden.mean(0)[:4])
            else:
                self.mean[0] = hidden.mean()
        return hidden + self.mean[0]


@pytest.mark.parametrize("how", ["whole", "view", "item"])
def test_statistics_written_in_place_under_no_grad_are_kept(how: str) -> None:
    """Export holds such a write in a block whose result nothing reads: it runs as the user's own code."""
    model = nn.Sequential(nn.Linear(8, 8), Averages(how), nn.Linear(8, 4))
    original, x, y = copy.deepcopy(model), torch.randn(8, 8), torch.randn(8, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of code that runs uncaptured, and so sees the batch whole
        plan = Plan.from_split({"0": 0, "2": 1}, n_microbatches=2)
        pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan)
        for _ in range(2):
            loss = pm.train_step(x, target=y, loss_fn=nn.functional.mse_loss)
            expected = nn.functional.mse_loss(original(x), y)
            torch.testing.assert_close(torch.as_tensor(loss), expected.detach())
        pm.close()
    torch.testing.assert_close(model[1].mean, original[1].mean)


@pytest.mark.parametrize(
    "how", [parametrizations.weight_norm, parametrizations.spectral_norm], ids=lambda f: f.__name__
)
def test_weights_that_are_computed_anew_are_captured(how: Any) -> None:
    layer = how(nn.Linear(8, 8))
    model = nn.Sequential(layer, nn.BatchNorm1d(8), nn.Linear(8, 4)).train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    capture(model, (torch.randn(8, 8),), {})
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
