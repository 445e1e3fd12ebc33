"""The share of a backward that only parameters need is what autograd is spared when it leaves them out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import UNet, bert, gpt2, ragged_mask, tokens
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode

from autopar.analysis.batching import study
from autopar.analysis.node_values import observe
from autopar.analysis.operators import operator_name, weight_shares
from autopar.capture.program import Program, capture
from autopar.costs.cost_graph import build
from autopar.costs.measured import Measured
from cost_models import parse_devices
from cost_models.graphs import tensors_in


class Spared(fx.Interpreter):
    """Runs a graph; for every operator the fraction of its backward's FLOPs that no gradient of an activation needs.

    Activations are what is not the same for other inputs: `others` are the values of such a run.
    """

    def __init__(self, program: Program, others: dict[fx.Node, Any]) -> None:
        super().__init__(program.graph_module, garbage_collect_values=False)
        self.others = others
        self.fractions: dict[fx.Node, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function":
            leaves = {source: _leaf(self.env[source]) for source in n.all_input_nodes}
            args, kwargs = fx.map_arg((n.args, n.kwargs), lambda source: _copy(leaves[source]))
            results = [t for t in tensors_in(n.target(*args, **kwargs)) if t.requires_grad]  # type: ignore[operator]
            read = {s: x for s, x in leaves.items() if isinstance(x, torch.Tensor) and x.requires_grad}
            everything = _backward_flops(results, list(read.values()))
            if everything:
                activations = [x for s, x in read.items() if not torch.equal(x, self.others[s])]
                self.fractions[n] = 1 - _backward_flops(results, activations) / everything
        return super().run_node(n)


def _leaf(value: Any) -> Any:
    needs = isinstance(value, torch.Tensor) and value.requires_grad
    return value.detach().requires_grad_() if needs else value


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value  # no leaf may be written in place


def _backward_flops(results: list[torch.Tensor], inputs: list[torch.Tensor]) -> int:
    if not inputs or not results:
        return 0
    ones = [torch.ones_like(r) for r in results]
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(results, inputs, ones, retain_graph=True, allow_unused=True)
    return counter.get_total_flops()


class Partly(nn.Module):
    """Layers that are trained in part, and weights that are read through views."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(8, 8) for _ in range(4)]
        self.stack = nn.Sequential(*self.layers)
        self.layers[1].weight.requires_grad_(False)
        self.layers[2].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        tied = self.layers[0].weight.t()
        return torch.addmm(self.layers[3].bias, x, tied.view(8, 8)) @ (tied * 2)


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Conv1d(4, 4, 3), nn.ConvTranspose1d(4, 2, 3))


class Gates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(8, 8, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "linear, partly trained": (Partly, lambda: {"x": torch.randn(4, 8)}),
    "convolutions": (Convolutions, lambda: {"input": torch.randn(4, 2, 16)}),
    "skips": (UNet, lambda: {"x": torch.randn(4, 3, 8, 8)}),
    "gpt2": (gpt2, lambda: {"input_ids": tokens(4)}),
    "bert": (bert, lambda: {"input_ids": tokens(4), "attention_mask": ragged_mask(4)}),
    "gru": (Gates, lambda: {"x": torch.randn(4, 12, 8)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_flops_of_products_are_spared_by_the_share(name: str) -> None:
    make, inputs = MODELS[name]
    model, kwargs = make().train(), inputs()
    program = capture(model, (), kwargs)
    leaves, others = (program.bind((), x)[0] for x in (kwargs, inputs()))  # type: ignore[index]
    spared = Spared(program, observe(program.graph_module, others))
    spared.run(*leaves)
    shares = weight_shares(program)
    assert len(spared.fractions) >= 3
    for node, fraction in spared.fractions.items():
        # A recurrence's first state has no gradient of its own: a little less for the activations.
        assert shares[node] == pytest.approx(fraction, abs=0.05), f"{node.format_node()}"


def shares_of(model: nn.Module, *args: Any) -> dict[str, list[float]]:
    program = capture(model.train(), args, {})
    found: dict[str, list[float]] = {}
    for node, share in weight_shares(program).items():
        found.setdefault(operator_name(node), []).append(share)
    return found


def test_what_reads_no_trained_parameter_has_nothing_to_put_off() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False), nn.Dropout(0.1), nn.Tanh())
    assert shares_of(layers, torch.randn(3, 4)) == {"linear": [1, 0], "dropout": [0], "tanh": [0]}


def test_a_look_up_and_views_of_parameters_are_all_theirs() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.places = nn.Embedding(9, 4), nn.Embedding(5, 4)
            self.start = nn.Parameter(torch.randn(1, 1, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.embed(x) + self.places(torch.arange(5))
            y = torch.cat([self.start.expand(len(x), 1, 4), y], 1)
            return y @ self.embed.weight.t()

    found = shares_of(Model(), torch.randint(9, (3, 5)))
    assert {name: found[name] for name in ("embedding", "expand", "add", "t", "matmul")} == {
        "embedding": [1, 1],
        "expand": [1],
        "add": [1],  # a sum over the samples; the gradient of what is looked up passes as it is
        "t": [1],
        "matmul": [0.5],
    }


def test_kernels_that_fuse_both_gradients_spare_nothing() -> None:
    norms = nn.Sequential(nn.Conv1d(2, 4, 1), nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.LayerNorm(8))
    found = shares_of(norms, torch.randn(3, 2, 8))
    assert found == {"conv1d": [1], "add_": [0], "batch_norm": [0], "group_norm": [0], "layer_norm": [0.5]}
    assert shares_of(nn.LSTM(4, 4, 2), torch.randn(3, 5, 4))["lstm"] == [1, 0]


def test_called_modules_count_their_own_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
    program = capture(model, (torch.randn(3, 4),), {})
    called = dataclasses.replace(program, graph_module=fx.symbolic_trace(model))  # what capture falls back on
    assert list(weight_shares(called).values()) == [1, 0, 0.5, 0]


def test_the_cost_graph_carries_the_shares() -> None:
    x = torch.randn(4, 8)
    program = capture(Partly().train(), (x,), {})
    batching = study(program, [x])
    source = Measured(program, batching, [x], parse_devices(["cpu"]), training=True, n_microbatches=1)
    costs = build(program, batching, source, training=True)
    carried = {name: operator.weight_share for name, operator in costs.operators.items()}
    assert carried == {node.name: share for node, share in weight_shares(program).items()}
