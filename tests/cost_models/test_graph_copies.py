"""Copies of graphs: over tensors of their own, and compiled into Python code only where something needs that."""

from __future__ import annotations

import copy
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import fx, nn

from cost_models.graphs import Uncompiled, private_copy, run_nodes


def traced() -> fx.GraphModule:
    torch.manual_seed(0)
    return fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))


def copied(module: fx.GraphModule) -> fx.GraphModule:
    return private_copy(module, torch.device("cpu"))


def test_a_copy_that_is_run_node_by_node_has_no_code() -> None:
    module, x = traced(), torch.randn(3, 4)
    private = copied(module)
    assert isinstance(private, Uncompiled)
    expected = module(x)
    graph = private.graph
    (output,) = [node for node in graph.nodes if node.op == "output"]
    output.args = ((output.args[0],),)
    torch.testing.assert_close(run_nodes(private, [x])[0], expected)
    assert "_code" not in private.__dict__


def test_a_copy_that_is_called_computes_what_the_graph_says_then() -> None:
    module, x = traced(), torch.randn(3, 4)
    private = copied(module)
    torch.testing.assert_close(private(x), module(x))
    assert "_code" in private.__dict__
    for node in private.graph.nodes:
        if node.op == "call_module" and isinstance(private.get_submodule(node.target), nn.Tanh):
            node.replace_all_uses_with(node.args[0])
            private.graph.erase_node(node)
            break
    private.recompile()
    linear, _, last = module.children()
    torch.testing.assert_close(private(x), last(linear(x)))


def test_each_copy_has_code_of_its_own() -> None:
    module, x = traced(), torch.randn(3, 4)
    one, other = copied(module), copied(traced())
    one(x)
    assert "_code" not in other.__dict__
    assert other.code == one.code, "made where it is read"
    torch.testing.assert_close(copy.deepcopy(other)(x), module(x))


class _Steps(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in range(60):
            x = (x.reshape(-1) * 2 + step).reshape(2, 2)
        return x


@pytest.mark.slow
def test_copies_of_one_graph_may_be_called_first_by_several_threads_at_once() -> None:
    """They share the graph's nodes, into which torch writes while it makes code."""
    module, x, n_threads = fx.symbolic_trace(_Steps()), torch.ones(2, 2, dtype=torch.float64), 4
    expected, interval = module(x), sys.getswitchinterval()
    start = threading.Barrier(n_threads)

    def call(private: fx.GraphModule) -> torch.Tensor:
        start.wait()
        result: torch.Tensor = private(x)
        return result

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(n_threads) as threads:
            for _ in range(20):
                for result in threads.map(call, [copied(module) for _ in range(n_threads)]):
                    assert torch.equal(result, expected)
    finally:
        sys.setswitchinterval(interval)
