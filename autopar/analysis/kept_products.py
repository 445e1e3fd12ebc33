"""What a layer keeps that runs the rest of its operators again, operator by operator.

    norm -> q, k, v -> attention -> out -> + -> norm -> gate, up -> * -> down -> +
            1  2  3        o        4                    5    6         7              kept: 1, 3, 5, 7 and o

Products cost most to make again for the bytes of their results, so that every second one is kept, and so is attention
in one operator; all that is cheap runs again (torchtitan, `selective_ac_option = "op"`, torchtitan/models/llama/
parallelize_llama.py, 2024: the list of saved operators, and its count of products). There only products without a
bias count; here all that read a parameter do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from torch import fx

from autopar.analysis.operators import operator_name

Kept = Literal["product", "attention"]

_PRODUCTS = {"linear", "mm", "matmul", "addmm"}
_ATTENTION = "scaled_dot_product"  # in the name of an operator that is the whole attention


def kept_products(layer: Iterable[fx.Node], overwritten: Callable[[fx.Node], bool]) -> dict[fx.Node, Kept]:
    """The operators of a layer whose results are kept. `layer`: in program order.

    `overwritten`: whether the memory of a result is written later, so that it would not be what it was.
    """
    found: dict[fx.Node, Kept] = {}
    products = 0
    for node in layer:
        if node.op != "call_function":
            continue
        name = operator_name(node)
        if _ATTENTION in name and not overwritten(node):
            found[node] = "attention"
        elif name in _PRODUCTS and any(_of_parameters(source) for source in node.all_input_nodes):
            products += 1
            if products % 2 and not overwritten(node):
                found[node] = "product"
    return found


def _of_parameters(node: fx.Node) -> bool:
    """Whether it is a parameter or a constant, or a view of one, such as a transposed weight."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node.op == "get_attr"
