"""Gathered tensors are kept as shards: gradients stay the same, and each is gathered once more in the backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shardings import assert_same_step, one_stage, pipelined
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from autopar import PipelinedModule
from autopar.capture.program import capture
from autopar.lower import regather
from autopar.lower.collectives import all_gather, gradient
from autopar.lower.regather import keeping_shards, kept_as_shards
from autopar.sharding.stage_sharding import StageSharding
from cost_models.graphs import storage_key

SAMPLES, LENGTH, HIDDEN, N = 4, 8, 12, 4
pytestmark = pytest.mark.usefixtures("shared_exports")

MOVES = (("all_gather", 0, 1),)


class Layer(nn.Module):
    """Between its norms, parts of sequences; within, columns and then rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.query, self.key, self.value, self.out = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.out(self.query(y) * self.key(y) + self.value(y))


class Layers(nn.Module):
    def __init__(self, n: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def sequence_parallel(n_layers: int, *, regather: bool) -> StageSharding:
    strategies, parameters = {}, {}
    for i in range(n_layers):
        layer = f"layers.{i}"
        strategies[f"{layer}.norm/layer_norm#0"] = "S1 R R -> S1"
        for name in ("query", "key", "value"):
            strategies[f"{layer}.{name}/linear#0"] = "R S0 -> S2"
            parameters[f"{layer}.{name}.weight"] = "S0"
        strategies |= {f"{layer}/{name}": "S2 S2 -> S2" for name in ("mul#0", "add#0")}
        strategies[f"{layer}/add#1"] = "S1 S1 -> S1"
        strategies[f"{layer}.out/linear#0"] = "S2 S1 -> P"
        parameters[f"{layer}.out.weight"] = "S1"
    found = StageSharding.from_texts((N,), ("tensor",), strategies, parameters)
    return StageSharding(found.mesh, found.axes, found.strategies, found.parameters, regather=regather)


def trained(model: nn.Module, *, regather: bool = True, n_microbatches: int = 2, **stage: Any) -> PipelinedModule:
    program = capture(model, (inputs(),), {})
    sharding = sequence_parallel(2, regather=regather)
    return pipelined(model, one_stage(program, sharding, n_microbatches, **stage))


def inputs() -> torch.Tensor:
    return torch.randn(SAMPLES, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def gathered_again(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The collectives that run for a backward."""
    ran: list[str] = []

    def counted(name: str, move: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (ran.append(name), move(*args, **kwargs))[1]

    monkeypatch.setattr(regather, "MOVES", {name: counted(name, move) for name, move in regather.MOVES.items()})
    return ran


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "again"),
    [
        ({}, 4),  # two layers, two micro-batches; once for queries, keys and values together
        ({"recompute": True}, 4),
        ({"layerwise": True}, 0),  # a layer's second run has just gathered
        ({"regather": False}, 0),
    ],
    ids=str,
)
def test_a_stage_gathers_once_more_for_all_readers_and_has_the_same_gradients(
    stage: dict[str, Any], again: int, gathered_again: list[str]
) -> None:
    model = Layers()
    assert_same_step(model, trained(model, **stage), inputs())
    assert gathered_again == ["all_gather"] * again


def test_two_backwards_of_one_forward_have_the_same_gradients() -> None:
    model, x = Layers(), inputs()
    output = trained(model)(x).square().sum()
    output.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    output.backward()
    for before, parameter in zip(once, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, 2 * before)


@pytest.mark.parametrize("regathers", [False, True])
def test_the_hooks_of_the_caller_get_shards_in_place_of_gathered_tensors(regathers: bool) -> None:
    model = Layers()
    pm = trained(model, regather=regathers, n_microbatches=1)
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[storage_key(tensor)] = tensor
        return tensor

    x = inputs()
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = pm(x).square().sum()
    whole = [t for t in kept.values() if t.untyped_storage().nbytes() == x.nbytes]
    assert len(whole) == (0 if regathers else 2) + 1  # the gathered one of each layer; the last output, squared
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.slow
def test_parameters_that_are_stored_in_parts_are_gathered_for_each_pass(gathered_again: list[str]) -> None:
    """ZeRO 3: once more for the backward of each micro-batch."""
    model = Layers(1)
    weights = [name for name, parameter in model.named_parameters() if parameter.dim() == 2]
    sharding = StageSharding.from_texts((N,), ("data",), {}, dict.fromkeys(weights, "S0"))
    pm = pipelined(model, one_stage(capture(model, (inputs(),), {}), sharding, 2))
    assert_same_step(model, pm, inputs())
    assert gathered_again == ["all_gather"] * 2 * len(weights)


# -- the hooks by themselves ------------------------------------------------------------------------------------------


def shards(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [torch.randn(2, 3, 5, dtype=dtype, requires_grad=True) for _ in range(2)]


def gathered(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    result = kept_as_shards(parts, all_gather(parts, axis=0, dim=1, mesh=(2,)), moves=MOVES, mesh=(2,))
    return gradient(parts, result, moves=(("reduce_scatter", 0, 1),), mesh=(2,))


def twice(read: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    """The gradients of shards whose whole is read, kept whole and as shards."""
    found = []
    for keep in (False, True):
        torch.manual_seed(0)
        parts = shards(dtype)
        if keep:
            with keeping_shards():
                outputs = [read(x) for x in gathered(parts)]
        else:
            outputs = [read(x) for x in gathered(parts)]
        sum(y.abs().square().sum() for y in outputs).backward()
        found.append([part.grad for part in parts])
    return found[0], found[1]


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.view(-1, 5) @ torch.ones(5, 4, dtype=x.dtype, requires_grad=True),
        lambda x: x.transpose(0, 1)[1:] * torch.ones(5, dtype=x.dtype, requires_grad=True),
        lambda x: x * x.flip(0),
        lambda x: x.exp() * x,
    ],
)
def test_views_of_a_gathered_tensor_are_gathered_again(read: Any, gathered_again: list[str]) -> None:
    torch.testing.assert_close(*twice(read), rtol=0, atol=0)
    assert gathered_again == ["all_gather"]


@pytest.mark.parametrize("read", [lambda x: x.conj() * x, lambda x: torch.view_as_real(x) ** 2])
def test_tensors_that_read_the_entries_otherwise_keep_their_values(read: Any) -> None:
    torch.testing.assert_close(*twice(read, torch.complex128), rtol=0, atol=0)


def test_the_gathered_tensor_is_freed_before_the_backward_and_after_its_last_reader() -> None:
    weight = torch.ones(4, 5, requires_grad=True, dtype=torch.float64)
    alive = {}
    for keep in (False, True):
        parts = shards()
        if keep:
            with keeping_shards():
                whole = gathered(parts)
                outputs = [functional.linear(x, weight) for x in whole]
        else:
            whole = gathered(parts)
            outputs = [functional.linear(x, weight) for x in whole]
        storage = weakref.ref(whole[0].untyped_storage())
        del whole
        alive[keep] = storage() is not None
        sum(y.sum() for y in outputs).backward()
    assert alive == {False: True, True: False}


def test_a_write_into_a_kept_shard_is_an_error_as_everywhere_in_autograd() -> None:
    weight = torch.ones(4, 5, requires_grad=True, dtype=torch.float64)
    parts = [part.detach() for part in shards()]
    wanted = [part.requires_grad_() for part in parts]
    with keeping_shards():
        outputs = [functional.linear(x, weight) for x in gathered(wanted)]
    with torch.no_grad():
        parts[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sum(y.sum() for y in outputs).backward()


def test_so_is_a_write_into_any_other_kept_tensor() -> None:
    x = torch.randn(3, requires_grad=True)
    y = torch.randn(3)
    with keeping_shards():
        z = x * y
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_a_later_tensor_in_the_same_place_is_not_taken_for_a_gathered_one() -> None:
    """Memory and even the identity of a freed storage come back."""
    weight = torch.ones(4, 5, requires_grad=True, dtype=torch.float64)
    for _ in range(20):
        with keeping_shards():
            gathered(shards())
            others = [torch.randn(2, 6, 5, dtype=torch.float64) for _ in range(2)]
            outputs = [functional.linear(x, weight) for x in others]
        weight.grad = None
        sum(y.sum() for y in outputs).backward()
        expected = sum(x.sum((0, 1)) for x in others)
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad[0], expected)
