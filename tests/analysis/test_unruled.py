"""Which operators of the model families that autopar must run have no rule: every device would do them whole."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CASES, Case, clip, clip_inputs
from torch import fx

from autopar.analysis.rules.table import bind
from autopar.capture.program import capture
from cost_models.graphs import get_attribute, tensors_in

# A part of a graph with gradients off: angles of rotary embeddings, computed once for all layers.
KNOWN = {"call_with_grad_mode"}
BATCH = 4

FAMILIES = [*CASES, Case("clip", clip, clip_inputs, {}, {})]


def values_of(module: fx.GraphModule) -> Callable[[fx.Node], Any]:
    """Parameters, and what export recorded for a node or, for one that was added later, computed from that."""

    def value(node: fx.Node) -> Any:
        if node.op == "get_attr":
            return get_attribute(module, str(node.target))
        if "val" in node.meta or not isinstance(node.target, torch._ops.OpOverload):
            return node.meta.get("val")
        args, kwargs = fx.map_arg((node.args, node.kwargs), value)
        return node.target(*args, **kwargs)

    return value


def unruled(case: Case) -> dict[str, str]:
    """The operators without a rule, each with one of its calls."""
    module = capture(case.model().train(), (), case.inputs(BATCH)).graph_module
    value = values_of(module)
    found = {}
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem or not tensors_in(value(node)):
            continue
        if bind(node, value) is None:
            packet = getattr(node.target, "overloadpacket", node.target)
            found[packet.__name__] = f"{node.format_node()} -> {value(node)}"
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES, ids=[case.name.replace(" ", "-") for case in FAMILIES])
def test_every_operator_of_the_families_has_a_rule_but_those_known(case: Case) -> None:
    new = {name: call for name, call in unruled(case).items() if name not in KNOWN}
    advice = (
        "Operators without a rule are done whole by every device, and keep batches from being split. State what they "
        "do to their dimensions in autopar/rules (a line of index notation, with examples in tests/rule_examples.py "
        "that prove it), or name them in KNOWN with a reason.\n"
    )
    assert not new, advice + "\n".join(f"{name}: {call}" for name, call in new.items())


@pytest.mark.slow
def test_what_is_known_to_have_no_rule_still_has_none() -> None:
    llama = next(case for case in CASES if case.name == "llama")
    assert set(unruled(llama)) == KNOWN
