"""Where a model takes the length of a tensor, its graph runs at other batch sizes if that is the same computation."""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.capture.program import capture
from autopar.errors import AutoparError

Forward = Callable[[nn.Linear, torch.Tensor], Any]


class Measures(nn.Module):
    def __init__(self, returned: Forward) -> None:
        super().__init__()
        self.layer, self.returned = nn.Linear(4, 4), returned

    def forward(self, x: torch.Tensor) -> Any:
        return self.returned(self.layer, x)


def in_a_block(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = torch.ones(len(x), 1) * len(x)
    return layer(x) * scale


def either(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return layer(x) if isinstance(len(x), int) else 2 * layer(x)


def row_by_row(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([layer(x[i]) for i in range(len(x))])


OPEN: dict[str, Forward] = {
    "view": lambda layer, x: layer(x).view(len(x), -1),
    "numbers": lambda layer, x: layer(x) + torch.arange(len(x))[:, None],
    "divided": lambda layer, x: layer(x).sum() / len(x),
    "arithmetic": lambda layer, x: layer(x).view(2 * len(x) // 2, 4) * (len(x) + 1),
    "of an activation": lambda layer, x: layer(x).expand(3, len(layer(x)), 4),
}
FIXED: dict[str, Forward] = {
    "in a block": in_a_block,
    "type": either,
    "key": lambda layer, x: {f"n{len(x)}": layer(x)},
    "dictionary": lambda layer, x: layer(x) * {3: 5.0, 6: 7.0}[len(x)],
    "loop": row_by_row,
    "list": lambda layer, x: layer(x) * torch.tensor([2.0] * len(x))[:, None],
    "number": lambda layer, x: layer(x) * torch.tensor(float(len(x))),
}


@pytest.mark.parametrize("returned", OPEN.values(), ids=OPEN.keys())
def test_a_length_is_the_size_of_the_call(returned: Forward) -> None:
    model = Measures(returned)
    program = capture(model, (torch.randn(3, 4),), {})
    assert program.any_batch
    for rows in (3, 6, 5):
        x = torch.randn(rows, 4)
        bound = program.bind((x,), {})
        assert bound is not None
        torch.testing.assert_close(program.graph_module(*bound[0])[0], model(x))


def test_lengths_stay_open_in_models_with_hooks_and_shard_hints() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Measures(OPEN["view"]), nn.Linear(4, 4))
    for layer in (model[0], model[1].layer):
        layer.register_forward_hook(lambda *call: None)
    autopar.shard(model[2], in_strategy=((1, 2),))
    program, x = capture(model, (torch.randn(3, 4),), {}), torch.randn(6, 4)
    torch.testing.assert_close(program.graph_module(x)[0], model(x))


@pytest.mark.slow
@pytest.mark.parametrize("returned", FIXED.values(), ids=FIXED.keys())
def test_code_that_needs_a_number_gets_one_and_the_graph_serves_this_size_alone(returned: Forward) -> None:
    model, x, other = Measures(returned), torch.randn(3, 4), torch.randn(6, 4)
    program = capture(model, (x,), {})
    bound = program.bind((x,), {})
    assert bound is not None
    found, expected = program.graph_module(*bound[0])[0], model(x)
    if isinstance(expected, dict):
        assert list(expected) == ["n3"]
        assert "n3" in str(program.out_spec)
        expected = expected["n3"]
    torch.testing.assert_close(found, expected)
    assert program.bind((other,), {}) is None


def test_len_is_pythons_own_again_also_after_an_error() -> None:
    own = builtins.len

    def failing(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        raise LookupError(f"{len(x)} samples")

    with pytest.raises(AutoparError, match="3 samples"):
        capture(Measures(failing), (torch.randn(3, 4),), {})
    assert builtins.len is own


def test_other_threads_measure_as_ever_while_a_model_is_traced() -> None:
    lengths: list[Any] = []

    def measured_elsewhere(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: lengths.append(len(torch.zeros(7))))
        thread.start()
        thread.join()
        return layer(x).view(len(x), 4)

    assert capture(Measures(measured_elsewhere), (torch.randn(3, 4),), {}).any_batch
    assert set(map(type, lengths)) == {int}
