r"""Split a recurrent operator into one operator per layer, so that a pipeline may be cut between the layers.

Export captures nn.LSTM, nn.GRU and nn.RNN as one operator, for any number of stacked layers:

```
   x, hx --> lstm(num_layers=2) --> y, h_n, c_n          becomes

   hx[0:1] --.                             hx[1:2] --.
   x --> lstm(num_layers=1) --> dropout --> lstm(num_layers=1) --> y
                |                             |
                `-- h, c --> cat <-- h, c ----'
                              `--> h_n, c_n
```

torch's CPU operators loop over the layers in the same order, so results are equal bit by bit. A bidirectional layer
stays one operator, with two rows of states.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

_RECURRENT = (aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu)


def separate_layers(graph: fx.Graph) -> None:
    """Replace every recurrent operator of several layers by one operator per layer.

    In training, dropout between layers becomes an operator of its own. Final states are concatenated only if they are
    read. New nodes keep the module and source line of the operator, and get values of symbolic size (`meta["val"]`) if
    it has them.
    """
    for node in list(graph.nodes):
        recurrent = getattr(node.target, "overloadpacket", None) in _RECURRENT
        if recurrent and not node.kwargs and all(user.target is operator.getitem for user in node.users):
            _correct(node)
            with graph.inserting_before(node):
                _separate(graph, node)


def _correct(node: fx.Node) -> None:
    """Correct `meta["val"]`: final states have the sizes of the initial ones, but torch 2.11 records other sizes."""
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
        sizes = [args.pop(0)]  # batch size at every step of a packed sequence
    hx, params, has_biases, n_layers, dropout, train, bidirectional, *batch_first = args
    if n_layers == 1:
        return
    values = node.meta.get("val")  # of (y, h_n) or (y, h_n, c_n)
    origin: dict[str, Any] = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}
    rows = 2 if bidirectional else 1  # rows of the states per layer
    each = len(params) // n_layers

    def call(target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
        new = graph.call_function(target, args)
        new.meta = dict(origin) if value is None else origin | {"val": value}
        return new

    def item(results: fx.Node, index: int) -> fx.Node:
        return call(operator.getitem, (results, index), results.meta["val"][index] if values else None)

    def narrowed(state: Any, layer: int) -> Any:
        return state.narrow(0, layer * rows, rows)

    def initial(state: fx.Node, layer: int) -> fx.Node:
        value = narrowed(state.meta["val"], layer) if values else None
        return call(aten.slice.Tensor, (state, 0, layer * rows, (layer + 1) * rows), value)

    # Each getitem directly follows its tuple, because no cut may separate them.
    users: list[tuple[fx.Node, Any]] = [(user, user.args[1]) for user in node.users]
    items: dict[int, list[fx.Node]] = {0: []} | {index: [] for _, index in users}  # by layer
    for layer in range(n_layers):
        if layer and train and dropout > 0:
            x = call(aten.dropout.default, (x, dropout, True), x.meta.get("val"))
        state = initial(hx, layer) if isinstance(hx, fx.Node) else [initial(s, layer) for s in hx]
        weights = params[layer * each : (layer + 1) * each]
        options = (has_biases, 1, 0.0, train, bidirectional, *batch_first)
        value = (values[0], *(narrowed(v, layer) for v in values[1:])) if values else None
        results = call(node.target, (x, *sizes, state, weights, *options), value)
        for index, by_layer in items.items():
            by_layer.append(item(results, index))
        x = items[0][-1]
    for user, index in users:
        user.replace_all_uses_with(call(aten.cat.default, (items[index], 0), user.meta.get("val")) if index else x)
        graph.erase_node(user)
    graph.erase_node(node)
