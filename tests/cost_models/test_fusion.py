"""Fused kernels: which operators become one, against the rules on graphs at random; what they move, against hand."""

from __future__ import annotations

from typing import Any

import networkx as nx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from torch.nn import functional

from autopar.analysis.node_values import observe
from cost_models.kernels.fusion import FusedWork, fused_groups, fused_work
from cost_models.kernels.kernel import COMPUTE_KINDS
from cost_models.kernels.operator_work import OperatorWork, count

META = torch.device("meta")
aten = torch.ops.aten
NBYTES = 32 * 32 * 4  # of every tensor below


class Fused:
    """The groups of a graph over tensors on the meta device."""

    def __init__(self, module: fx.GraphModule, *inputs: torch.Tensor, training: bool = True) -> None:
        self.nodes = [n for n in module.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
        self._work = count(module, 1, training=training, inputs=inputs)
        self._values = observe(module, list(inputs))
        self.groups = fused_groups(self.nodes, self.work, self._values.__getitem__)
        self._trained = {n for n in self.nodes if training}

    def work(self, node: fx.Node) -> OperatorWork:
        return self._work[node.name]

    def of(self, group: tuple[fx.Node, ...]) -> FusedWork:
        return fused_work(group, self.work, self._values.__getitem__, self._is_trained)

    def _is_trained(self, node: fx.Node) -> bool:
        return node in self._trained

    @property
    def names(self) -> list[list[str]]:
        return [[str(n.target).split(".")[1] for n in group] for group in self.groups]


def exported(model: nn.Module, *inputs: torch.Tensor) -> fx.GraphModule:
    return torch.export.export(model.to(META).train(), tuple(x.to(META) for x in inputs), strict=False).module()


class Block(nn.Module):
    """Attention scores, a residual with dropout and a norm, and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 128), nn.Linear(128, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = functional.softmax(self.first(x) / 8 + 1, dim=-1)
        x = self.norm(x + functional.dropout(scores @ x, 0.1))
        return x + self.down(functional.gelu(self.up(x)).view(32, 128))


def test_pointwise_operators_join_the_norms_around_them_and_never_a_product() -> None:
    fused = Fused(exported(Block(), torch.empty(32, 32)), torch.empty(32, 32, device=META))
    assert fused.names == [["div", "add", "softmax"], ["dropout", "add", "layer_norm"], ["gelu"], ["add"]]


def test_a_kernel_moves_what_enters_and_leaves_its_group() -> None:
    fused = Fused(exported(Block(), torch.empty(32, 32)), torch.empty(32, 32, device=META))
    scores, norm, gelu, residual = map(fused.of, fused.groups)
    assert (scores.forward.read, scores.forward.written) == (NBYTES, NBYTES)
    parameters = 2 * 32 * 4  # of the norm
    assert (norm.forward.read, norm.forward.written) == (2 * NBYTES + parameters, NBYTES)
    assert (gelu.forward.read, gelu.forward.written) == (4 * NBYTES, 4 * NBYTES)
    assert (residual.forward.read, residual.forward.written) == (2 * NBYTES, NBYTES)
    assert scores.forward.kind == "normalization"
    assert scores.backward is not None
    # It reads the input, to compute the group again, and the gradient of the result.
    assert (scores.backward.read, scores.backward.written) == (2 * NBYTES, NBYTES)
    assert scores.backward.kind == "normalization_backward"


def test_inference_has_no_backward() -> None:
    fused = Fused(exported(Block(), torch.empty(32, 32)), torch.empty(32, 32, device=META), training=False)
    assert [fused.of(group).backward for group in fused.groups] == [None] * len(fused.groups)


def test_a_gradient_of_a_parameter_is_added_up_by_autograd() -> None:
    fused = Fused(exported(Block(), torch.empty(32, 32)), torch.empty(32, 32, device=META))
    fused._trained |= {n for n in fused.nodes[0].graph.nodes if n.op == "get_attr"}
    assert [len(fused.of(group).accumulated) for group in fused.groups] == [0, 2, 0, 0]


def test_what_reads_a_sum_or_gathers_by_index_is_a_kernel_of_its_own() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(100, 32)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return (self.table(ids).tanh().sum(-1) + 1).exp()

    ids = torch.zeros(32, dtype=torch.long)
    fused = Fused(exported(Model(), ids), ids.to(META))
    assert fused.names == [["tanh", "sum"], ["add", "exp"]]


OPERATORS = st.lists(st.tuples(st.sampled_from(["tanh", "add", "softmax", "mm", "t"]), st.integers(0), st.integers(0)))


@given(OPERATORS)
def test_groups_follow_the_rules_on_any_graph(operators: list[tuple[str, int, int]]) -> None:
    graph = fx.Graph()
    made = [graph.placeholder("x")]
    for name, i, j in operators:
        a, b = made[i % len(made)], made[j % len(made)]
        calls: dict[str, Any] = {
            "tanh": lambda a=a: graph.call_function(aten.tanh.default, (a,)),
            "add": lambda a=a, b=b: graph.call_function(aten.add.Tensor, (a, b)),
            "softmax": lambda a=a: graph.call_function(aten.softmax.int, (a, -1)),
            "mm": lambda a=a, b=b: graph.call_function(aten.mm.default, (a, b)),
            "t": lambda a=a: graph.call_function(aten.t.default, (a,)),
        }
        made.append(calls[name]())
    graph.output(made[-1])
    fused = Fused(fx.GraphModule(nn.Module(), graph), torch.empty(32, 32, device=META))
    group_of: dict[fx.Node, int] = {}
    for number, group in enumerate(fused.groups):
        kinds = [kernel.kind for node in group for kernel in fused.work(node).forward]
        assert not set(kinds) & set(COMPUTE_KINDS)
        assert kinds.count("normalization") <= 1
        for node in group:
            assert group_of.setdefault(node, number) == number
        kernel = fused.of(group).forward
        assert kernel.nbytes <= sum(k.nbytes for node in group for k in fused.work(node).forward)
    products = {node for node in fused.nodes if node.target is aten.mm.default}
    views = {node for node in fused.nodes if node.target is aten.t.default}
    assert set(group_of) | products | views == set(fused.nodes)
    # Kernels can run one after another: merged, the graph has no cycle.
    merged, kernel_of = nx.DiGraph(), dict[fx.Node, Any](group_of)
    for node in fused.nodes:
        if node in views:  # free: part of what made its operand
            kernel_of[node] = kernel_of.get(node.all_input_nodes[0], node.all_input_nodes[0])
        ends = [(kernel_of.get(operand, operand), kernel_of.get(node, node)) for operand in node.all_input_nodes]
        merged.add_edges_from((before, after) for before, after in ends if before != after)
    assert nx.is_directed_acyclic_graph(merged)
    # No two groups that could be one, along an edge between them, are left apart without a reason.
    for node in group_of:
        for operand in node.all_input_nodes:
            if operand in group_of and group_of[operand] != group_of[node]:
                both = (*fused.groups[group_of[operand]], *fused.groups[group_of[node]])
                reductions = sum(n.target is aten.softmax.int for n in both)
                joined = nx.contracted_nodes(merged, group_of[operand], group_of[node], self_loops=False)
                assert reductions > 1 or not nx.is_directed_acyclic_graph(joined)


@pytest.mark.parametrize("model", [Block()])
def test_operators_of_no_group_are_products_or_views(model: nn.Module) -> None:
    fused = Fused(exported(model, torch.empty(32, 32)), torch.empty(32, 32, device=META))
    grouped = {node for group in fused.groups for node in group}
    for node in set(fused.nodes) - grouped:
        kernels = fused.work(node).forward
        assert not kernels or any(kernel.kind in COMPUTE_KINDS for kernel in kernels)


def test_operators_without_tensor_inputs_are_grouped_like_others() -> None:
    class Shifted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.eye(32, device=x.device)

    x = torch.zeros(32, 32, device=META)
    fused = Fused(exported(Shifted(), x), x)
    assert sorted(name for group in fused.names for name in group) == ["add", "eye"]
