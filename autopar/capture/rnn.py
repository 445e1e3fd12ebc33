r"""Recurrent operators of several layers, taken apart: one operator a layer, so that a pipeline may be cut in between.

nn.LSTM, nn.GRU and nn.RNN are captured as one operator, however many layers they stack:

```
   x, hx --> lstm(num_layers=2) --> y, h_n, c_n          becomes

   hx[0:1] --.                             hx[1:2] --.
   x --> lstm(num_layers=1) --> dropout --> lstm(num_layers=1) --> y
                |                             |
                `-- h, c --> cat <-- h, c ----'
                              `--> h_n, c_n
```

torch's own operators on the CPU loop over the layers in the same way, so the numbers are the same, bit by bit. A layer
that reads in both directions stays one operator, with two rows of states.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

_RECURRENT = (aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu)


def separate_layers(graph: fx.Graph) -> None:
    """Put one operator a layer in the place of every recurrent operator of several layers.

    Dropout between the layers becomes an operator of its own where the graph trains; final states are put together
    only where they are read. New nodes carry the module and the source line of the operator, and values of symbolic
    size (`meta["val"]`) where it has them.
    """
    for node in list(graph.nodes):
        recurrent = getattr(node.target, "overloadpacket", None) in _RECURRENT
        if recurrent and not node.kwargs and all(user.target is operator.getitem for user in node.users):
            _correct(node)
            with graph.inserting_before(node):
                _separate(graph, node)


def _correct(node: fx.Node) -> None:
    """Final states have the sizes of the initial ones; torch 2.11 records others in `meta["val"]`."""
    if "val" not in node.meta:
        return
    hx = node.args[2 if node.target._overloadname == "data" else 1]  # type: ignore[union-attr]
    states = [hx] if isinstance(hx, fx.Node) else list(hx)  # type: ignore[arg-type]
    values = (node.meta["val"][0], *(state.meta["val"] for state in states))
    node.meta["val"] = values
    for user in node.users:
        user.meta["val"] = values[user.args[1]]  # type: ignore[index]


def _separate(graph: fx.Graph, node: fx.Node) -> None:
    args: list[Any] = list(node.args)
    x, sizes = args.pop(0), []
    if node.target._overloadname == "data":  # type: ignore[union-attr]
        sizes = [args.pop(0)]  # of the batch at every step of a packed sequence
    hx, params, has_biases, n_layers, dropout, train, bidirectional, *batch_first = args
    if n_layers == 1:
        return
    values = node.meta.get("val")  # of (y, h_n) or (y, h_n, c_n)
    origin: dict[str, Any] = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}
    rows = 2 if bidirectional else 1  # of one layer in the states
    each = len(params) // n_layers

    def call(target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
        new = graph.call_function(target, args)
        new.meta = dict(origin) if value is None else origin | {"val": value}
        return new

    def item(made: fx.Node, index: int) -> fx.Node:
        return call(operator.getitem, (made, index), made.meta["val"][index] if values else None)

    def narrowed(state: Any, layer: int) -> Any:
        return state.narrow(0, layer * rows, rows)

    def initial(state: fx.Node, layer: int) -> fx.Node:
        value = narrowed(state.meta["val"], layer) if values else None
        return call(aten.slice.Tensor, (state, 0, layer * rows, (layer + 1) * rows), value)

    # Items stand right behind their tuple, because no cut may come between.
    users: list[tuple[fx.Node, Any]] = [(user, user.args[1]) for user in node.users]
    items: dict[int, list[fx.Node]] = {0: []} | {index: [] for _, index in users}  # by layer
    for layer in range(n_layers):
        if layer and train and dropout > 0:
            x = call(aten.dropout.default, (x, dropout, True), x.meta.get("val"))
        state = initial(hx, layer) if isinstance(hx, fx.Node) else [initial(s, layer) for s in hx]
        weights = params[layer * each : (layer + 1) * each]
        options = (has_biases, 1, 0.0, train, bidirectional, *batch_first)
        value = (values[0], *(narrowed(v, layer) for v in values[1:])) if values else None
        made = call(node.target, (x, *sizes, state, weights, *options), value)
        for index, made_before in items.items():
            made_before.append(item(made, index))
        x = items[0][-1]
    for user, index in users:
        user.replace_all_uses_with(call(aten.cat.default, (items[index], 0), user.meta.get("val")) if index else x)
        graph.erase_node(user)
    graph.erase_node(node)
