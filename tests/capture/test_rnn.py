"""Recurrent layers are operators of their own, compute what the stack does, and may run on different devices."""

from __future__ import annotations

import copy
import operator
from typing import Any

import pytest
import torch
from models import assert_same_gradients, assert_same_outputs, gradients, sum_of_squares
from torch import fx, nn
from torch.nn.utils.rnn import pack_sequence

import autopar
from autopar import Plan
from autopar.analysis.node_values import observe
from autopar.analysis.operators import compute_nodes, is_random, operator_keys, operator_name
from autopar.capture.program import Program, capture
from autopar.capture.rnn import separate_layers
from autopar.capture.torch_private import tree_leaves, tree_unflatten
from autopar.plan.stage import Stage

aten = torch.ops.aten
KINDS = {
    "lstm": (nn.LSTM, {}),
    "gru": (nn.GRU, {}),
    "rnn_tanh": (nn.RNN, {}),
    "rnn_relu": (nn.RNN, {"nonlinearity": "relu"}),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "two layers without bias": {"bias": False},
    "three layers, batch first": {"num_layers": 3, "batch_first": True},
    "both directions, dropout": {"bidirectional": True, "dropout": 0.4},
}


class Stacked(nn.Module):
    """A recurrent stack and a linear layer; returns all that they compute."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        build, own = KINDS[kind]
        self.rnn = build(4, 6, **{"num_layers": 2} | own | options)
        self.head = nn.Linear((options.get("proj_size") or 6) * (2 if options.get("bidirectional") else 1), 3)

    def forward(self, x: torch.Tensor, hx: Any = None) -> Any:
        y, state = self.rnn(x, hx)
        return self.head(y), state


def inputs(model: Stacked, samples: int) -> torch.Tensor:
    return torch.randn(samples, 3, 4) if model.rnn.batch_first else torch.randn(3, samples, 4)


def initial(model: Stacked, samples: int) -> Any:
    rnn = model.rnn
    rows = rnn.num_layers * (2 if rnn.bidirectional else 1)
    h = torch.randn(rows, samples, rnn.proj_size or rnn.hidden_size)
    return (h, torch.randn(rows, samples, rnn.hidden_size)) if isinstance(rnn, nn.LSTM) else h


def captured(model: Stacked, samples: int, hx: Any = None) -> Program:
    kwargs = {"x": inputs(model, samples)} | ({} if hx is None else {"hx": hx})
    dims: dict[str, int | None] = dict.fromkeys(kwargs, 1)
    dims["x"] = 0 if model.rnn.batch_first else 1
    return capture(model, (), kwargs, batch_dim=dims)


def run(program: Program, *args: Any, **kwargs: Any) -> Any:
    bound = program.bind(args, kwargs)
    assert bound is not None
    return tree_unflatten(list(program.graph_module(*bound[0])), program.out_spec)


def recurrent(program: Program) -> list[fx.Node]:
    return [n for n in compute_nodes(program.graph) if operator_name(n) in KINDS]


def assert_same_bits(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_layer_by_layer_gives_the_bits_of_the_stack(kind: str, options: dict[str, Any], training: bool) -> None:
    model = Stacked(kind, **options).train(training)
    program = captured(model, 4)
    assert len(recurrent(program)) == model.rnn.num_layers
    for samples in (4, 7):
        x = inputs(model, samples)
        results = []
        for call in (lambda x: run(program, x=x), model):
            torch.manual_seed(3)  # torch's own stack draws its masks in the same order
            output = call(x)
            sum_of_squares(output).backward()
            results.append((output, list(gradients(model).values())))
        assert_same_bits(results[0], results[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_initial_states_are_taken_by_their_layers(kind: str) -> None:
    model = Stacked(kind, bidirectional=True)
    program = captured(model, 4, initial(model, 4))
    for samples in (4, 7):
        x, hx = inputs(model, samples), initial(model, samples)
        assert_same_bits(run(program, x=x, hx=hx), model(x, hx))


@pytest.mark.slow
def test_projected_states_have_widths_of_their_own() -> None:
    model = Stacked("lstm", proj_size=3, bidirectional=True)
    x, hx = inputs(model, 7), initial(model, 7)
    assert_same_bits(run(captured(model, 4, initial(model, 4)), x=x, hx=hx), model(x, hx))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bidirectional", [False, True], ids=["one direction", "both directions"])
def test_packed_sequences_are_taken_apart_too(kind: str, bidirectional: bool) -> None:
    rnn = Stacked(kind, num_layers=3, bidirectional=bidirectional).rnn
    packed = pack_sequence([torch.randn(length, 4) for length in (5, 3, 2)])
    states = [torch.randn(6 if bidirectional else 3, 3, 6) for _ in range(2 if kind == "lstm" else 1)]
    call = getattr(aten, kind).data  # torch.export does not capture it: its sizes depend on values

    graph = fx.Graph()
    data, sizes, *hx = [graph.placeholder(f"input_{i}") for i in range(2 + len(states))]
    params = [graph.get_attr(name) for name in rnn._flat_weights_names]
    stack = graph.call_function(
        call, (data, sizes, hx if kind == "lstm" else hx[0], params, True, 3, 0.0, True, bidirectional)
    )
    graph.output(tuple(graph.call_function(operator.getitem, (stack, i)) for i in range(1 + len(states))))
    whole = fx.GraphModule(rnn, copy.deepcopy(graph))
    separate_layers(graph)
    layers = fx.GraphModule(rnn, graph)
    assert sum(node.target is call for node in graph.nodes) == 3

    results = [m(packed.data, packed.batch_sizes, *states) for m in (layers, whole)]
    assert_same_bits(*results)
    assert_same_bits(*(torch.autograd.grad(sum_of_squares(r), list(rnn.parameters())) for r in results))


@pytest.mark.slow
def test_only_dropout_between_layers_is_random() -> None:
    program = captured(Stacked("gru", num_layers=3, dropout=0.3), 4)
    random = [node for node in compute_nodes(program.graph) if is_random(node, program.graph_module)]
    assert [operator_name(node) for node in random] == ["dropout", "dropout"]
    assert not any(operator_name(n) == "dropout" for n in captured(Stacked("gru", dropout=0.3).eval(), 4).graph.nodes)


@pytest.mark.slow
def test_final_states_that_nobody_reads_are_not_made() -> None:
    class OutputOnly(Stacked):
        def forward(self, x: torch.Tensor, hx: Any = None) -> Any:
            return self.head(self.rnn(x)[0])

    names = [operator_name(n) for n in compute_nodes(captured(OutputOnly("lstm"), 4).graph)]
    assert "cat" not in names
    assert names.count("getitem") == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_new_nodes_are_described_like_their_neighbours(kind: str) -> None:
    """Shapes, dtypes and open sizes are those seen in runs of two batch sizes."""
    program = captured(Stacked(kind, batch_first=True, bidirectional=True, dropout=0.3), 4)
    with torch.no_grad():
        four, seven = (observe(program.graph_module, [torch.randn(b, 3, 4)]) for b in (4, 7))
    compared = 0
    for node in compute_nodes(program.graph):
        assert operator_name(node) == "sym_size" or node.meta["nn_module_stack"]
        for fake, a, b in zip(*(tree_leaves(v) for v in (node.meta["val"], four[node], seven[node])), strict=True):
            if isinstance(a, torch.Tensor):
                open_dims = [isinstance(size, torch.SymInt) for size in fake.shape]
                assert open_dims == [x != y for x, y in zip(a.shape, b.shape, strict=True)]
                assert all(size == x for size, x, free in zip(fake.shape, a.shape, open_dims, strict=True) if not free)
                assert fake.dtype == a.dtype
                compared += 1
    assert compared > 10
    assert [operator_keys(program)[n] for n in recurrent(program)] == [f"rnn/{kind}#0", f"rnn/{kind}#1"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize(
    ("bidirectional", "batch_first"), [(False, False), (True, False), (True, True)], ids=["one", "both", "batch first"]
)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_pipeline_cut_between_layers_trains_like_the_model(
    kind: str, bidirectional: bool, batch_first: bool, training: bool
) -> None:
    model = Stacked(kind, num_layers=3, bidirectional=bidirectional, batch_first=batch_first).train(training)
    original = copy.deepcopy(model)
    program = captured(model, 7)
    keys = list(operator_keys(program).values())
    cut = keys.index(f"rnn/{kind}#1")
    plan = Plan((Stage(("cpu:0",), tuple(keys[:cut])), Stage(("cpu:1",), tuple(keys[cut:]))), n_microbatches=3)
    assert [plan.assign(program)[n] for n in recurrent(program)] == [0, 1, 1]

    batch_dim = 0 if batch_first else 1
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan, batch_dim=batch_dim)
    for samples in (7, 5):  # no multiples of three
        x = inputs(model, samples)
        found, expected = pm(x), original(x)
        assert_same_outputs(found, expected, 1e-6)
        sum_of_squares(found).backward()
        sum_of_squares(expected).backward()
        assert_same_gradients(gradients(pm), gradients(original), 1e-6)
    pm.close()
