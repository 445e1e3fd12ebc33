"""The model's own code, run while its parameters lie on several devices.

The meta device is used as a second one: tensors can go to it, but not come back.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from autopar.runtime.model_surface import device_map
from autopar.runtime.own_devices import on_own_devices, takes_cache
from autopar.runtime.step.outputs import scalars_at_inputs
from cost_models import parse_devices

OTHER = torch.device("meta")
ORDER = (torch.device("cpu"), OTHER)


class TwoPlaces(nn.Module):
    """A residual from the first device to the second, and a concatenation of tensors of both."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8, device=OTHER)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.a(self.embed(ids))
        y = x + self.b(x)
        return {"stage 1": y, "both": torch.cat([x, y])}


def test_operators_run_where_their_weights_are() -> None:
    model = TwoPlaces()
    ids = torch.randint(0, 16, (300, 4))  # more bytes than the weights
    with pytest.raises(RuntimeError):
        model(ids)
    with on_own_devices(model, ORDER):
        found = model(ids)
    assert {name: x.device for name, x in found.items()} == dict.fromkeys(found, OTHER)


def test_a_tensor_that_is_written_stays_where_it_is() -> None:
    model, small, large = TwoPlaces(), torch.zeros(4), torch.ones(4, 4, device=OTHER)
    with on_own_devices(model, ORDER):
        cache = torch.zeros(2, 2, 8, device=OTHER)
        cache[:, :1] = torch.ones(2, 1, 8)
        cache.index_copy_(1, torch.tensor([1]), torch.ones(2, 1, 8))
        cache += torch.ones(8)
        assert cache.device == OTHER
        assert (small + large).device == OTHER, "the one with fewer bytes moves"
        assert torch.zeros(3).to(OTHER).device == OTHER
        assert torch.stack([torch.zeros(2, device=OTHER), torch.zeros(2), torch.zeros(2, device=OTHER)]).device == OTHER


def test_on_one_cpu_nothing_is_watched() -> None:
    with on_own_devices(nn.Linear(2, 2), [torch.device("cpu")]) as mode:
        assert mode is None


class TinyCache:
    """Not of transformers."""


@pytest.mark.parametrize(
    ("value", "said"), [(TinyCache(), True), ((torch.zeros(2),), False), (None, False), ({"cache": 1}, False)]
)
def test_an_object_that_is_called_a_cache_is_one(value: Any, said: bool) -> None:
    assert takes_cache((torch.zeros(1),), {"past_key_values": value}) is said


def test_a_loss_comes_back_to_where_the_inputs_are() -> None:
    loss, logits, ids = torch.zeros((), requires_grad=True), torch.zeros(3, 2), torch.zeros(3, device=OTHER)
    found = scalars_at_inputs([loss, logits, None], [None, ids])
    assert found[0].device == OTHER
    assert found[0].requires_grad
    assert found[1] is logits, "large outputs stay on the last stage's device"
    assert scalars_at_inputs([loss], [torch.zeros(3)])[0] is loss


@pytest.mark.parametrize(
    ("devices", "shown"),
    [
        (["cpu", "cpu"], None),
        (["cuda:0", "cuda:1"], ["cuda:0", "cuda:1"]),
        (["cuda:0", "cuda:0"], ["cuda"]),
        (["cpu", "cuda:1"], ["cpu", "cuda"]),
    ],
)
def test_trainer_knows_where_the_module_is(
    devices: list[str], shown: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer leaves a module in place if its map names two devices, or one that is not Trainer's own `cuda:0`."""
    template = parse_devices(["cpu"])[0]
    at = [_placed(template, torch.device(name)) for name in devices]
    found = device_map(at)
    assert (None if found is None else list(found.values())) == shown
    if shown is not None:
        places = {x for x in shown if x != "cpu"}
        assert len(places) > 1 or torch.device(*places) != torch.device("cuda:0")


def _placed(template: Any, place: torch.device) -> Any:
    return dataclasses.replace(template, torch_device=place)
