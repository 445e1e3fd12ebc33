"""Facts about the operators of a captured graph on which search and lowering must agree.

Which nodes write into tensors, draw random numbers or require grad; which are cheap enough that every stage that needs
them computes them instead of receiving them; and how an operator is named across captures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import fx, nn

from autopar.capture.mode_blocks.calls import call_with_autocast, nested_block
from autopar.capture.module_hooks import is_hook_point
from autopar.capture.node_names import module_path
from autopar.capture.program import Program, is_getitem
from autopar.capture.uncaptured import uncaptured
from cost_models.graphs import get_attribute, may_have_gradient

# Operators whose results are worth sending to other stages instead of computing them again.
_HEAVY = {
    *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d", "convolution"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention", "embedding_bag"),
    *("lstm", "gru", "rnn_tanh", "rnn_relu", "_grouped_mm", "upsample_bilinear2d", "fft_fft", "sort", "topk"),
}
# Fraction of the backward's time that is saved without gradients of parameters, where an activation requires grad, too.
# 0.5 for all others. Measured on a CPU.
_SPARED = {
    **dict.fromkeys(("add", "add_", "sub", "sub_"), 1.0),  # only the parameter's gradient needs work, a sum
    # One kernel computes both, or the input's gradient needs the same sums: nothing is saved.
    **dict.fromkeys(("batch_norm", "group_norm", "instance_norm", "rms_norm", "prelu", "lstm"), 0.0),
}
# Places of a product's factors among its arguments; the gradient of a bias costs almost nothing.
_FACTORS = {
    **dict.fromkeys(("linear", "conv1d", "conv2d", "conv3d", "convolution"), slice(0, 2)),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), slice(0, 2)),
    **dict.fromkeys(("addmm", "addbmm", "baddbmm"), slice(1, 3)),
}
KEEP_STATISTICS = ("batch_norm", "instance_norm")  # running ones, which nothing else reads in training
_RANDOM_MODULES = (nn.modules.dropout._DropoutNd, nn.RNNBase, nn.MultiheadAttention, nn.RReLU)


def operator_name(node: fx.Node) -> str:
    """The operator without overload and namespace: `conv2d` for aten.conv2d.default."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is not None:
        return str(packet.__name__)
    return str(node.target).rpartition(".")[2] if isinstance(node.target, str) else str(node.target.__name__)


def operator_keys(program: Program) -> dict[fx.Node, str]:
    """Names of operators that are the same in every capture of the model: `encoder.layer.0.fc1/linear#0`.

    The number counts the operators of this name in this module, in program order.
    """
    counts: Counter[tuple[str, str]] = Counter()
    keys = {}
    for node in compute_nodes(program.graph):
        place = (module_path(node), operator_name(node))
        keys[node] = f"{place[0]}/{place[1]}#{counts[place]}"
        counts[place] += 1
    return keys


def compute_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that compute: all except placeholders, attributes and the output."""
    return [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments that `node` overwrites in place (batch norm's running statistics, and what the operators of a
    nested block overwrite, included)."""
    return list(dict.fromkeys(written for _, written in writes(node)))


def writes(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Pairs of an operator and an argument of `node` that it overwrites: `node` itself, or one of its nested block."""
    if (block := nested_block(node)) is None:
        yield from ((node, written) for written in _written_arguments(node))
        return
    module, arguments = block
    outside = dict(zip(module.graph.find_nodes(op="placeholder"), arguments, strict=True))
    for inner in module.graph.nodes:
        for operator, written in writes(inner):
            given = (outside.get(base) for base in bases(written))
            yield from ((operator, argument) for argument in given if isinstance(argument, fx.Node))


def _written_arguments(node: fx.Node) -> list[fx.Node]:
    """Of an operator without a nested block."""
    if (opaque := uncaptured(node)) is not None:
        return [n for n in opaque.written_operands(node.args) if isinstance(n, fx.Node)]
    if getattr(node.target, "_schema", None) is None:
        if node.op == "call_method" and str(node.target).endswith("_") and not str(node.target).endswith("__"):
            return node.all_input_nodes[:1]
        owner = node.graph.owning_module
        if node.op == "call_module" and owner is not None:
            in_place = getattr(owner.get_submodule(str(node.target)), "inplace", False)
            return node.all_input_nodes[:1] if in_place else []
        return []
    written: list[fx.Node] = []
    for index, name in _written_places(node.target):
        value = node.args[index] if index < len(node.args) else node.kwargs.get(name)
        written += [n for n in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(n, fx.Node)]
    # These write running statistics in training, which their schemas do not declare.
    if operator_name(node) in KEEP_STATISTICS and node.args[5]:
        written += [n for n in node.args[3:5] if isinstance(n, fx.Node)]
    return written


@cache
def _written_places(operator: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that a torch operator's schema says are written: their positions and names."""
    places = enumerate(operator._schema.arguments)
    return tuple((i, one.name) for i, one in places if one.alias_info is not None and one.alias_info.is_write)


def is_random(node: fx.Node, module: fx.GraphModule) -> bool:
    """Whether `node` draws random numbers with its arguments (dropout in evaluation does not)."""
    if (opaque := uncaptured(node)) is not None:
        return opaque.effects.random
    if node.op == "call_module":
        children = module.get_submodule(str(node.target)).modules()
        return any(isinstance(m, _RANDOM_MODULES) and bool(m.training and getattr(m, "dropout", 1)) for m in children)
    if isinstance(node.target, torch._ops.OpOverload):
        if torch.Tag.nondeterministic_seeded not in node.target.tags:
            return False
        name = operator_name(node)
        if name in ("dropout", "feature_dropout", "alpha_dropout", "dropout_", "native_dropout"):
            return bool(node.args[2] and node.args[1])
        if name == "scaled_dot_product_attention":
            return float(argument(node, 4, "dropout_p", 0.0)) > 0  # type: ignore[arg-type]
        if name in ("lstm", "gru", "rnn_tanh", "rnn_relu") and len(node.args) > 6:
            return _rnn_drops(node)
        return True
    return node.op in ("call_function", "call_method") and "dropout" in operator_name(node)


def argument(node: fx.Node, index: int, name: str, default: object) -> object:
    """An argument of a call that may be positional or a keyword."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def _rnn_drops(node: fx.Node) -> bool:
    """Whether a recurrent operator drops values between its layers.

    Its arguments are (input, hx, params, has_biases, num_layers, dropout, train, ...), with one more before `hx` for
    packed sequences.
    """
    first = 5 if isinstance(node.args[3], bool) else 6
    dropout, train = node.args[first : first + 2]
    return bool(train) and float(dropout) > 0  # type: ignore[arg-type]


def replicable_nodes(program: Program) -> set[fx.Node]:
    """Nodes that every stage that needs them computes itself, instead of receiving them.

    They depend on the model's inputs and constants only, not on parameters, and are cheap: position numbers, attention
    masks, sizes. Nodes that are written in place (also through views), draw random numbers or are heavy are not among
    them.
    """
    module = program.graph_module
    written = {base for node in module.graph.nodes for source in written_arguments(node) for base in bases(source)}
    result: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node.op == "placeholder":
            if node not in written:
                result.add(node)
        elif node.op == "get_attr":
            value = get_attribute(module, str(node.target))
            if not (isinstance(value, torch.Tensor) and value.requires_grad) and node not in written:
                result.add(node)
        elif (
            node.op in ("call_function", "call_method")
            and node not in written
            and not written_arguments(node)
            and operator_name(node) not in _HEAVY
            and not is_hook_point(node)
            and uncaptured(node) is None
            and not is_random(node, module)
            and all(source in result for source in node.all_input_nodes)
        ):
            result.add(node)
    return result


def bases(view: fx.Node) -> list[fx.Node]:
    """`view`, and what it is a view of, up to the node that owns the memory."""
    found = [view]
    while True:
        returns = getattr(getattr(view.target, "_schema", None), "returns", ())
        is_view = is_getitem(view) or any(r.alias_info is not None for r in returns)
        if not is_view or not view.args or not isinstance(view.args[0], fx.Node):
            return found
        view = view.args[0]
        found.append(view)


def requires_grad_nodes(module: fx.GraphModule) -> set[fx.Node]:
    """The nodes of a captured graph whose values require grad in training; the model's inputs do not require it."""
    result: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = get_attribute(module, str(node.target))
            if isinstance(value, torch.Tensor) and value.requires_grad:
                result.add(node)
        elif node.op == "call_module":
            if _trains(module, node) or any(source in result for source in node.all_input_nodes):
                result.add(node)
        elif any(source in result for source in node.all_input_nodes) and _differentiable(node):
            result.add(node)
    return result


def weight_shares(program: Program) -> dict[fx.Node, float]:
    """For every operator the fraction (0..1) of its backward's time that only gradients of parameters need.

    Zero-bubble schedules delay this part (Qi et al., Zero Bubble Pipeline Parallelism, 2023), because no other stage
    waits for it.

    - 0: the operator reads no trained parameter, or is an uncaptured module, whose backward comes in one part.
    - 1: none of its other inputs requires grad: a first layer, an embedding. Views of a parameter (`weight.t()`) count
      as the parameter.
    - 0.5: a product of an activation and a weight. For y = x w with shapes m x k and k x n, both gradients, dx = dy w'
      and dw = x' dy, need m k n multiplications; so do those of convolutions. Norms read the same values for both. For
      operators whose kernels compute both at once, or whose one gradient is free, see `_SPARED`.
    """
    grad, own = requires_grad_nodes(program.graph_module), _independent_of_inputs(program.graph)
    shares = {}
    for node in compute_nodes(program.graph):
        reads = [n for n in node.all_input_nodes if n in grad]
        weights = [n for n in reads if n in own]
        inside = node.op == "call_module" and _trains(program.graph_module, node)
        opaque = uncaptured(node)
        in_one_part = opaque is not None and opaque.held is not None
        if node not in grad or not (weights or inside) or in_one_part:
            shares[node] = 0.0
        elif len(weights) == len(reads):
            shares[node] = 1.0
        else:
            name = operator_name(node)
            factors = node.args[_FACTORS[name]] if name in _FACTORS else weights
            shares[node] = _SPARED.get(name, 0.5) if inside or any(n in weights for n in factors) else 0.0
    return shares


def _independent_of_inputs(graph: fx.Graph) -> set[fx.Node]:
    """Parameters, constants, and nodes that are computed only from them and from sizes."""
    result: set[fx.Node] = set()
    for node in graph.nodes:
        independent = node.op != "placeholder" and all(source in result for source in node.all_input_nodes)
        if independent or node.target is torch.ops.aten.sym_size.int:
            result.add(node)
    return result


def _trains(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether the module of a call_module node has trained parameters."""
    return any(p.requires_grad for p in module.get_submodule(str(node.target)).parameters())


def _differentiable(node: fx.Node) -> bool:
    """Whether the result of `node` may require grad: integers and sizes may not."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return may_have_gradient(value)
    return not isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def move_constants(nodes: Iterable[fx.Node], captured: torch.device, device: torch.device) -> None:
    """Let operators that name the device of the capture (arange, zeros, to) name `device` instead, and blocks under
    autocast its type: elsewhere, autocast of the capture's type would change nothing. Without values they keep the type
    that they had."""
    if device == captured:
        return

    def moved(value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == captured.type:
            return device
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            return type(value)(moved(v) for v in value)
        return value

    for node in nodes:
        node.args = tuple(moved(a) for a in node.args)
        if node.target is call_with_autocast and node.args[0] == captured.type and device.type != "meta":
            node.args = (device.type, *node.args[1:])
        node.kwargs = {k: moved(v) for k, v in node.kwargs.items()}


def on_device(module: fx.GraphModule, captured: torch.device, device: torch.device) -> fx.GraphModule:
    """A copy of `module` that creates its constants, and those of nested graphs, on `device`; parameters stay."""
    if device == captured:
        return module
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    move_constants(graph.nodes, captured, device)
    moved = fx.GraphModule(module, graph)
    for name, child in list(moved.named_children()):
        if isinstance(child, fx.GraphModule):
            setattr(moved, name, on_device(child, captured, device))
    return moved


def write_order(program: Program, storages: dict[str, frozenset[int]]) -> list[tuple[fx.Node, fx.Node]]:
    """Pairs (reader, writer): a node that reads a tensor, and a node that overwrites its storage later.

    Data flow alone does not order them. A writer in an earlier stage than the reader would change the tensor before it
    is sent. `storages`: node name -> keys of its storages.
    """
    order = {node: index for index, node in enumerate(program.graph.nodes)}
    pairs = []
    for writer in compute_nodes(program.graph):
        for source in written_arguments(writer):
            shared = storages.get(source.name, frozenset())
            family = [n for n in order if n is source or storages.get(n.name, frozenset()) & shared]
            readers = {user for n in family for user in n.users if order[user] < order[writer]}
            pairs += [(reader, writer) for reader in sorted(readers, key=order.__getitem__)]
    return pairs


def fused_groups(program: Program, storages: dict[str, frozenset[int]]) -> list[set[fx.Node]]:
    """Nodes that no cut may separate.

    1. A tuple and the nodes that take items out of it.
    2. All users of a buffer that is written, also of what an earlier write returned: its only copy is in one stage.
    3. The views of a storage, if it is written through one of them and read through another one later: what a stage
       sends is a copy, and another stage that writes into its copy does not change this one. Readers after the write
       may be in later stages, which get the memory as it is at the end of this stage. (A tensor that is only
       overwritten as a whole, as by `relu_`, needs no group: lowering clones it for the writer.)
    """
    graph = program.graph
    order = {node: index for index, node in enumerate(graph.nodes)}
    groups: list[set[fx.Node]] = []
    writers: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if is_getitem(node):  # 1
            groups.append({node.all_input_nodes[0], node})
        for source in written_arguments(node):
            writers.setdefault(source, []).append(node)
    for source, nodes in writers.items():
        shared = storages.get(source.name, frozenset())
        alike = [n for n in graph.nodes if n is source or storages.get(n.name, frozenset()) & shared]
        buffers = {n.target for n in alike if n.op == "get_attr"}
        if buffers:  # 2
            same = [n for n in graph.nodes if n in alike or (n.op == "get_attr" and n.target in buffers)]
            readers = {user for n in same for user in n.users if user.op != "output"}
            groups.append(readers | {n for n in same if n.op not in ("placeholder", "get_attr")})
            continue
        family = [
            n
            for n in graph.nodes
            if n.op != "get_attr" and storages.get(n.name, frozenset()) & shared and n is not source and n not in nodes
        ]
        for writer in nodes:  # 3
            read_later = {
                user for n in (*family, source) for user in n.users if order[user] > order[writer] and n is not writer
            }
            views = [n for n in family if order[n] < order[writer]]
            if views and read_later:
                groups.append({n for n in (*views, source, writer) if n.op not in ("placeholder", "get_attr")})
    return [group for group in groups if len(group) > 1]
