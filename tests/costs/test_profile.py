"""Profiles: sums over modules are those of their operators, bytes are those that torch shows, nothing is changed."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from torch import nn

import autopar
from autopar import Cluster, InputError, Profile
from autopar.report.tables import WIDTH

BATCH = 4


class Tied(nn.Module):
    """A layer used twice, a buffer that is written, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.body(x))).tanh()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Tied()


@pytest.fixture(scope="module")
def profiled(model: nn.Module) -> Profile:
    return autopar.profile(model, ["cpu", "cpu"], example_args=(torch.randn(BATCH, 8),))


def saved_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes of all storages but parameters and buffers that autograd keeps."""
    resident = {t.data_ptr() for t in [*model.parameters(), *model.buffers()]}
    kept: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in resident:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.slow
def test_a_module_costs_what_the_operators_inside_it_cost(profiled: Profile) -> None:
    (kind,) = profiled.kinds
    for module in profiled.modules:
        inside = [
            o
            for o in profiled.operators
            if f"{o.name.partition('/')[0]}.".startswith(module.name and module.name + ".")
        ]
        assert module.operators == len(inside) > 0
        assert module.forward[kind] == pytest.approx(sum(o.forward[kind] for o in inside))
        assert module.backward[kind] == pytest.approx(sum(o.backward[kind] for o in inside))
    assert profiled.model.operators == len(profiled.operators)
    assert all(o.forward[kind] >= 0 and o.backward[kind] >= 0 for o in profiled.operators)


def test_parameter_bytes_are_the_models_own_and_tied_ones_count_once(model: nn.Module, profiled: Profile) -> None:
    own = sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])
    assert profiled.model.parameter_bytes == own
    assert profiled["second"].parameter_bytes == 8 * 8 * 4
    assert profiled["body.0"].parameter_bytes == (8 * 8 + 8) * 4


def test_activation_bytes_are_what_autograd_keeps(model: nn.Module, profiled: Profile) -> None:
    x = torch.randn(BATCH, 8)
    assert profiled.model.activation_bytes == saved_bytes(copy.deepcopy(model), x)


@pytest.mark.slow
def test_activation_bytes_of_a_large_batch_follow_from_a_few_samples() -> None:
    layers = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 2))
    x = torch.randn(48, 6)
    found = autopar.profile(layers, ["cpu"], example_args=(x,))
    assert found.model.activation_bytes == saved_bytes(layers, x)


def test_a_module_hands_on_what_is_read_outside_it(profiled: Profile) -> None:
    assert profiled["body"].output_bytes == BATCH * 8 * 4
    assert profiled.model.output_bytes == BATCH * 8 * 4


def test_parents_come_before_their_children(profiled: Profile) -> None:
    names = [module.name for module in profiled.modules]
    assert names == ["", "body", "body.0", "body.1", "body.2", "first", "second"]


def test_the_slowest_operators_come_first(profiled: Profile) -> None:
    seconds = [cost.seconds(profiled.kinds[0]) for cost in profiled.slowest()]
    assert seconds == sorted(seconds, reverse=True)
    assert len(profiled.slowest(2)) == 2


def test_the_text_is_ascii_within_the_width_and_names_modules_and_links(profiled: Profile) -> None:
    text = str(profiled)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= WIDTH
    for part in ("the whole model", "body.1", "first/linear#0", "cpu:0 -> cpu:1"):
        assert part in text


def test_the_json_is_valid_even_with_infinite_bandwidth(profiled: Profile) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    data = json.loads(profiled.to_json(), parse_constant=refuse)
    assert [module["name"] for module in data["modules"]] == [module.name for module in profiled.modules]
    assert {(link["source"], link["target"]) for link in data["links"]} == {("cpu:0", "cpu:1"), ("cpu:1", "cpu:0")}


def test_the_graph_survives_a_file_format(profiled: Profile, tmp_path: Path) -> None:
    nx.write_graphml(profiled.graph, tmp_path / "graph.xml")
    read = nx.read_graphml(tmp_path / "graph.xml")
    assert set(read.edges) == set(profiled.graph.edges)
    assert {data["label"] for _, data in read.nodes(data=True)} == {cost.name for cost in profiled.operators}
    assert nx.is_directed_acyclic_graph(profiled.graph)


def test_profiling_changes_nothing_of_the_model(model: nn.Module) -> None:
    model.zero_grad()
    model.first.weight.grad = torch.ones(8, 8)  # type: ignore[union-attr]
    before = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    autopar.profile(model, ["cpu", "cpu"], example_args=(torch.ones(BATCH, 8),))
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {"first.weight"}
    assert torch.equal(model.first.weight.grad, torch.ones(8, 8))  # type: ignore[union-attr,arg-type]
    assert torch.equal(random, torch.get_rng_state())


def test_a_model_in_eval_mode_is_profiled_forward_alone() -> None:
    found = autopar.profile(nn.Linear(4, 4).eval(), ["cpu"], example_args=(torch.randn(2, 4),))
    assert not found.training
    assert found.model.activation_bytes == 0
    assert "backward" not in str(found).partition("device")[0]


def test_arguments_that_do_not_fit_are_named() -> None:
    with pytest.raises(InputError, match="example_args"):
        autopar.profile(nn.Linear(2, 2), ["cpu"])
    with pytest.raises(InputError, match=r"torch\.nn\.Module"):
        autopar.profile("model", ["cpu"], example_args=())  # type: ignore[arg-type]
    with pytest.raises(InputError, match="target"):
        autopar.profile(nn.Linear(2, 2), ["cpu"], example_args=(torch.ones(2, 2),), loss_fn=nn.functional.mse_loss)


def test_a_model_without_operators_is_refused() -> None:
    with pytest.raises(InputError, match="runs no operators in this call, so there is nothing to profile"):
        autopar.profile(nn.Identity(), Cluster.preset("2xH100"), example_args=(torch.randn(4, 8),))
