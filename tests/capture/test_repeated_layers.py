"""Equal layers are found, and only equal ones: what is done once for several of them is right for each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from tied_models import SharedModules
from torch import fx, nn
from torch.nn import functional

from autopar.analysis.batching import study
from autopar.analysis.node_values import observe
from autopar.analysis.operators import requires_grad_nodes
from autopar.capture.program import Program, capture
from autopar.capture.repeated_layers.fold import fold
from autopar.capture.repeated_layers.measure_once import ReducedGraph, reduce_graph

WIDTH = 8


class Block(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.norm, self.linear, self.scale = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * functional.gelu(self.linear(self.norm(x)))


class Stack(nn.Module):
    """Blocks between an entry and a head; `odd` has another scale than the others."""

    def __init__(self, n: int, odd: int | None = None) -> None:
        super().__init__()
        self.entry, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(Block(2.0 if i == odd else 1.0) for i in range(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def captured(model: nn.Module) -> Program:
    return capture(model, (torch.randn(4, WIDTH),), {})


def calls(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def reduced(model: nn.Module, limit: int) -> tuple[Program, ReducedGraph]:
    program, x = captured(model), torch.randn(4, WIDTH)
    grad = {node.name for node in requires_grad_nodes(program.graph_module)}
    return program, reduce_graph(program.graph_module, study(program, [x]).shapes, set(), grad, limit)


@pytest.mark.slow
@pytest.mark.parametrize("n", [4, 7])
def test_a_folded_stack_is_a_stack_of_three_layers(n: int) -> None:
    """First, middle and last stay. With equal weights everywhere, it computes what three layers compute."""
    model, three = Stack(n), Stack(3)
    for block in [*model.blocks, *three.blocks]:
        block.load_state_dict(model.blocks[0].state_dict())
    for name in ("entry", "head"):
        getattr(three, name).load_state_dict(getattr(model, name).state_dict())
    folded = fold(captured(model).graph_module)
    assert calls(folded.module.graph) == calls(captured(three).graph)
    x = torch.randn(4, WIDTH)
    torch.testing.assert_close(folded.module(x)[0], three(x))
    assert set(folded.copies.values()) == {n - 2}


def test_copies_and_kept_nodes_add_up_to_the_whole_graph() -> None:
    whole = captured(Stack(6)).graph_module
    folded = fold(whole)
    kept = {node.name for node in folded.module.graph.nodes}
    assert {folded.kept(node.name) for node in whole.graph.nodes} == kept
    assert sum(folded.copies.get(name, 1) for name in kept) == len(whole.graph.nodes)


def test_each_left_out_node_has_the_value_of_its_representative_where_weights_are_equal() -> None:
    """With zero weights each block returns its input, so nodes at the same place of all layers have one value."""
    model = Stack(6)
    for block in model.blocks:
        block.load_state_dict(model.blocks[0].state_dict())
        nn.init.zeros_(block.linear.weight)
        nn.init.zeros_(block.linear.bias)
    whole = captured(model).graph_module
    folded = fold(whole)
    values = {node.name: value for node, value in observe(whole, [torch.randn(4, WIDTH)]).items()}
    for name, value in values.items():
        torch.testing.assert_close(value, values[folded.kept(name)])


@pytest.mark.slow
def test_a_layer_with_another_constant_is_not_folded_or_measured_for_others() -> None:
    model = Stack(9, odd=4)
    folded = fold(captured(model).graph_module)
    assert set(folded.copies.values()) == {2}  # two runs of four layers, the odd one between them
    program, graph = reduced(model, 1)
    odd = [node for node in program.graph.nodes if 2.0 in node.args]
    assert [graph.like[node.name] for node in odd] == [(node.name,) for node in odd]


@pytest.mark.parametrize("limit", [1, 2])
def test_operators_are_measured_by_equal_ones_and_at_most_limit_times(limit: int) -> None:
    program, graph = reduced(Stack(6), limit)
    nodes = {node.name: node for node in program.graph.nodes}
    values = {node.name: value for node, value in observe(program.graph_module, [torch.randn(4, WIDTH)]).items()}
    for name, like in graph.like.items():
        assert 1 <= len(like) <= limit
        for other in like:
            assert nodes[other].target == nodes[name].target
            assert [values[a.name].shape for a in nodes[other].all_input_nodes] == [
                values[a.name].shape for a in nodes[name].all_input_nodes
            ]
    assert calls(graph.module.graph).count("aten.gelu.default") == limit


def test_a_reduced_graph_runs_forward_and_backward() -> None:
    _, graph = reduced(Stack(6), 2)
    stand_ins = [shape.make(4, torch.device("cpu")).requires_grad_(grad) for shape, grad in graph.stand_ins]
    results = graph.module(torch.randn(4, WIDTH), *stand_ins)
    assert [r.shape for r in results[: graph.n_outputs]] == [(4, 2)]
    sum(r.sum() for r in results).backward()
    assert all(s.grad is not None for s in stand_ins if s.requires_grad)


@pytest.mark.slow
def test_layers_traced_once_compute_what_each_traced_layer_computes() -> None:
    model, x = Stack(5), torch.randn(4, WIDTH)
    program = capture(model, (x,), {}, trace_equal_layers_once=True)
    assert calls(program.graph) == calls(capture(copy.deepcopy(model), (x,), {}).graph)
    torch.testing.assert_close(program.graph_module(x)[0], model(x))


def stack_with_a_tied_weight() -> Stack:
    model = Stack(4)
    model.blocks[3].linear.weight = model.blocks[0].linear.weight
    return model


@pytest.mark.parametrize("build", [SharedModules, stack_with_a_tied_weight])
def test_layers_traced_once_read_their_own_parameters_where_layers_share_some(build: Callable[[], nn.Module]) -> None:
    model = build()
    x = torch.randn(4, next(model.parameters()).shape[-1])
    program = capture(model, (x,), {}, trace_equal_layers_once=True)
    traced = capture(copy.deepcopy(model), (x,), {})
    assert calls(program.graph) == calls(traced.graph)
    assert len(program.graph.find_nodes(op="get_attr")) == len(traced.graph.find_nodes(op="get_attr"))
    torch.testing.assert_close(program.graph_module(x)[0], model(x))


class Routed(nn.Module):
    """Chooses rows by a computed index, which no gradient passes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.table = nn.Linear(WIDTH, 3), nn.Embedding(3, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        choice = self.gate(x).argmax(-1)
        return self.table(choice) * choice.float().cos().unsqueeze(-1) + self.frozen(x)


@dataclass
class _Result:
    """torch.export does not know it: the model is traced a second time after it is registered."""

    value: torch.Tensor


class _ReturnsResult(Stack):
    def forward(self, x: torch.Tensor) -> _Result:  # type: ignore[override]
        return _Result(super().forward(x))


@pytest.mark.slow
def test_a_model_that_is_traced_twice_copies_the_layers_of_its_last_trace() -> None:
    model, x = _ReturnsResult(5), torch.randn(4, WIDTH)
    program = capture(model, (x,), {}, trace_equal_layers_once=True)
    assert calls(program.graph_module.graph) == calls(captured(Stack(5)).graph)
    assert torch.equal(program.graph_module(x)[0], model(x).value)


@pytest.mark.parametrize("build", [Routed, lambda: Stack(3)], ids=["routed", "stack"])
def test_nodes_require_grad_where_autograd_says_so(build: type[nn.Module]) -> None:
    class Recording(fx.Interpreter):
        def run_node(self, n: fx.Node) -> object:
            value = super().run_node(n)
            if isinstance(value, torch.Tensor) and value.requires_grad:
                recorded.add(n)
            return value

    recorded: set[fx.Node] = set()
    module = captured(build()).graph_module
    Recording(module, garbage_collect_values=False).run(torch.randn(4, WIDTH))
    assert {n for n in requires_grad_nodes(module) if n.op != "output"} == recorded
