r"""Program x stage of every operator -> one fx.GraphModule a stage.

```
   program:  x -> a -> b -> c -> out           stage 0:  (x)    -> a, b       -> (b, a)
                   \-----------^    cut after b  stage 1:  (b, a) -> c          -> (out)
```
A stage takes the model inputs and the earlier stages' values that it reads, each sent by the stage that made it,
and returns the values that later stages or the caller read. The model's outputs are returned by the last stage.
Parameters keep their names and are the model's own tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from autopar.analysis.operators import (
    compute_nodes,
    move_constants,
    on_device,
    operator_keys,
    replicable_nodes,
    unrepeatable_nodes,
    written_arguments,
)
from autopar.capture.module_hooks import is_hook_point
from autopar.capture.program import Program, describe
from autopar.errors import PlanError
from autopar.lower.collectives import spread
from autopar.lower.deferred_batch_norm import DeferredNorm, defer_batch_norms
from autopar.lower.random_operators import lower_random
from autopar.lower.sharded import Piece, Sharded, shard
from autopar.sharding.stage_sharding import StageSharding
from cost_models.graphs import get_attribute


@dataclass(frozen=True)
class StageProgram:
    """One stage: `module(*inputs)` gives a tuple of `outputs`."""

    index: int
    module: fx.GraphModule
    model_inputs: tuple[int, ...]  # which flat inputs of the model come first, in order
    received: tuple[tuple[int, int], ...]  # (stage, position in its outputs) of the inputs that follow
    outputs: tuple[str, ...]  # values returned, by name
    parameters: tuple[str, ...]  # names, in the program, of the tensors that it reads
    written_buffers: tuple[str, ...]  # those of them that it overwrites (running statistics)
    random: bool  # draws random numbers
    hooked: bool  # runs hooks of modules
    deferred: tuple[DeferredNorm, ...]  # batch norms whose running statistics are updated after the batch
    unrepeatable: str  # the operator for which the stage cannot be run again for its backward; "" if there is none
    pieces: tuple[Piece, ...] = ()  # what its devices hold of its parameters
    shards: int = 1  # devices that compute a micro-batch together
    multiple: int = 1  # of which the samples of a micro-batch must be one, so that they come apart evenly
    undivided: tuple[str, ...] = ()  # operators that all of these devices do, for sizes that do not come apart

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """Stages that send to this one, in ascending order."""
        return tuple(sorted({stage for stage, _ in self.received}))


@dataclass(frozen=True)
class Lowered:
    """All stages, and where the flat outputs of the model are among the last stage's outputs."""

    stages: tuple[StageProgram, ...]
    results: tuple[Any, ...]  # for every flat output: position in the last stage's outputs, or Constant

    @property
    def random(self) -> bool:
        return any(stage.random for stage in self.stages)

    @property
    def multiple(self) -> int:
        """Of which the samples of every micro-batch must be one."""
        return math.lcm(*(stage.multiple for stage in self.stages))

    @property
    def deferred(self) -> tuple[DeferredNorm, ...]:
        return tuple(norm for stage in self.stages for norm in stage.deferred)


@dataclass(frozen=True)
class Constant:
    """A flat output that is no tensor of the graph."""

    value: Any


def lower(
    program: Program,
    stage_of: Mapping[fx.Node, int],
    storages: Mapping[str, frozenset[int]],
    *,
    defer_norms: bool = False,
    shardings: Sequence[StageSharding | None] = (),
) -> Lowered:
    """Split `program` by `stage_of` (for every node that computes; replicable ones may be left out).

    `storages` (of `batching.study`) tells which values share memory: a stage that overwrites a value it received
    starts from a clone, so that the sender's copy stays whole. `defer_norms`: running statistics of batch norms are
    left to be updated after the batch. `shardings`: of every stage (default: none is sharded).
    Raises PlanError where a value would have to flow backwards.
    """
    graph = program.graph
    replicable = replicable_nodes(program)
    n_stages = max((stage_of[n] for n in compute_nodes(graph) if n not in replicable), default=0) + 1
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    last = n_stages - 1

    def home(node: fx.Node) -> int | None:
        """The stage that makes `node`, or None for what every stage has or makes itself."""
        shared = node in replicable or node.op in ("placeholder", "get_attr", "output")
        return None if shared else stage_of[node]

    # needed[s]: values that stage s reads; what other stages send is the part with another home.
    needed: list[set[fx.Node]] = [set() for _ in range(n_stages)]

    def need(node: fx.Node, stage: int) -> None:
        if node in needed[stage]:
            return
        needed[stage].add(node)
        made = home(node)
        if made is None:
            for source in node.all_input_nodes:
                need(source, stage)
        elif made > stage:
            raise PlanError(
                f"stage {stage} reads {describe(node)}, which stage {made} makes: values only flow to later stages; "
                f"put it on stage {stage} or earlier"
            )

    for node in compute_nodes(graph):
        made = home(node)
        if made is not None:
            needed[made].add(node)
            for source in node.all_input_nodes:
                need(source, made)
    for result in results:
        if isinstance(result, fx.Node):
            need(result, last)

    sent: list[list[fx.Node]] = [[] for _ in range(n_stages)]
    for node in graph.nodes:
        made = home(node)
        if made is not None and any(node in needed[s] for s in range(n_stages) if s != made):
            sent[made].append(node)
    for result in dict.fromkeys(r for r in results if isinstance(r, fx.Node)):
        if result not in sent[last]:
            sent[last].append(result)
    meshes = dict(enumerate(shardings))
    stages = tuple(
        _build(program, s, needed[s], sent, home, storages, defer_norms, meshes.get(s)) for s in range(n_stages)
    )
    places = {node: position for position, node in enumerate(sent[last])}
    return Lowered(stages, tuple(places[r] if isinstance(r, fx.Node) else Constant(r) for r in results))


def _build(
    program: Program,
    stage: int,
    needed: set[fx.Node],
    sent: list[list[fx.Node]],
    home: Any,
    storages: Mapping[str, frozenset[int]],
    defer_norms: bool,
    sharding: StageSharding | None,
) -> StageProgram:
    source_module = program.graph_module
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    targets = {argument for node in needed if home(node) == stage for argument in written_arguments(node)}
    written = {pointer for argument in targets for pointer in storages.get(argument.name, ())}

    def receive(node: fx.Node) -> None:
        copy = graph.placeholder(node.name)
        copy.meta = dict(node.meta)
        copies[node] = copy

    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    model_inputs = [(i, n) for i, n in enumerate(placeholders) if n in needed]
    received = [(s, i, n) for s in range(stage) for i, n in enumerate(sent[s]) if n in needed]
    for _, node in model_inputs:
        receive(node)
    for _, _, node in received:
        receive(node)
    for node in list(copies):
        if written & storages.get(node.name, frozenset()):
            clone = graph.call_function(torch.ops.aten.clone.default, (copies[node],))
            clone.meta = dict(node.meta)
            copies[node] = clone
    parameters: list[str] = []
    overwritten: list[str] = []
    for node in program.graph.nodes:
        if node not in needed or node in copies or node.op == "placeholder":
            continue
        copies[node] = graph.node_copy(node, lambda n: copies[n])
        if node.op == "get_attr" and isinstance(get_attribute(source_module, str(node.target)), torch.Tensor):
            parameters.append(str(node.target))
            if node in targets or written & storages.get(node.name, frozenset()):  # whole, or through a view
                overwritten.append(str(node.target))
        elif node.op == "call_module":
            child = source_module.get_submodule(str(node.target))
            tensors = [name for name, _ in [*child.named_parameters(), *child.named_buffers()]]
            parameters += [f"{node.target}.{name}" for name in tensors]
            if child.training:
                overwritten += [f"{node.target}.{name}" for name, _ in child.named_buffers()]
    graph.output(tuple(copies[n] for n in sent[stage]))
    unrepeatable = [*unrepeatable_nodes(program.graph), *_written_through_views(program.graph, storages)]
    deferred = defer_batch_norms(graph, source_module) if defer_norms else ()
    later = {name for norm in deferred for name in (norm.mean, norm.var, norm.tracked)}
    shards = sharding.size if sharding is not None else 1
    made = Sharded(graph, tuple(Piece(name, name, 0) for name in dict.fromkeys(parameters)))
    if sharding is not None and shards > 1:
        keys = {copies[node].name: key for node, key in operator_keys(program).items() if node in copies}
        made = shard(graph, source_module, sharding, keys, storages)
    random = lower_random(made.graph, source_module)
    root = _attributes(source_module, made.graph, made.pieces)
    module = fx.GraphModule(root, made.graph, class_name=f"Stage{stage}")
    return StageProgram(
        stage,
        module,
        tuple(i for i, _ in model_inputs),
        tuple((s, i) for s, i, _ in received),
        tuple(n.name for n in sent[stage]),
        tuple(dict.fromkeys(parameters)),
        tuple(name for name in dict.fromkeys(overwritten) if name not in later),
        random,
        any(is_hook_point(node) for node in made.graph.nodes),
        deferred,
        next((describe(node) for node in unrepeatable if home(node) == stage), ""),
        made.pieces,
        shards,
        made.multiple,
        made.undivided,
    )


def _written_through_views(graph: fx.Graph, storages: Mapping[str, frozenset[int]]) -> Iterator[fx.Node]:
    """Operators that write into a view of a buffer that others read: as unrepeatable as those that write it whole."""

    def memory(nodes: Iterable[fx.Node]) -> frozenset[int]:
        return frozenset(pointer for node in nodes for pointer in storages.get(node.name, ()))

    buffers = memory(node for node in graph.nodes if node.op == "get_attr")
    for node in compute_nodes(graph):
        written = buffers & memory(a for a in written_arguments(node) if a.op != "get_attr")
        family = {n for n in graph.nodes if written & storages.get(n.name, frozenset())} if written else set()
        if any(user not in family for n in family for user in n.users):
            yield node


def _attributes(source: fx.GraphModule, graph: fx.Graph, pieces: Sequence[Piece]) -> dict[str, Any]:
    """What the graph reads by name. Constants become buffers, so that moving a stage moves them."""
    parts = {piece.attribute: piece for piece in pieces if piece.layout}
    root: dict[str, Any] = {}
    for node in graph.nodes:
        name = str(node.target)
        if node.op == "get_attr" and name in parts:
            whole = get_attribute(source, parts[name].name)
            part = parts[name].taken(whole)
            root[name] = nn.Parameter(part, whole.requires_grad) if isinstance(whole, nn.Parameter) else part
        elif node.op == "get_attr":
            root[name] = get_attribute(source, name)
        elif node.op == "call_module":
            root[name] = source.get_submodule(name)
    return root


def replica(
    stage: StageProgram,
    tensor_of: Mapping[str, torch.Tensor],
    devices: Sequence[torch.device],
    captured: torch.device,
) -> fx.GraphModule:
    """A copy of the stage's module over the tensors `tensor_of` (by name in its graph), for other devices (one, or as
    many as it has shards) or another thread."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(stage.module.graph, {}))
    for node in graph.nodes:
        move_constants([node], captured, devices[node.meta.get("device", 0)])
        if node.target is spread:
            node.kwargs = {**node.kwargs, "devices": tuple(devices)}
    device = devices[0]
    root: dict[str, Any] = {}
    for node in graph.nodes:
        name = str(node.target)
        if node.op == "get_attr":
            value = get_attribute(stage.module, name)
            if isinstance(value, fx.GraphModule):
                value = on_device(value, captured, device)
            root[name] = tensor_of[name] if isinstance(value, torch.Tensor) else value
        elif node.op == "call_module":
            root[name] = rebuilt(stage.module.get_submodule(name), name, tensor_of)
    return fx.GraphModule(root, graph, class_name=f"Stage{stage.index}")


def rebuilt(module: nn.Module, path: str, tensor_of: Mapping[str, torch.Tensor]) -> nn.Module:
    """A copy of a module tree with `tensor_of[path.name]` for every parameter and buffer."""
    new = module.__new__(type(module))
    new.__dict__ = dict(module.__dict__)
    new._parameters = {k: tensor_of[f"{path}.{k}"] if v is not None else None for k, v in module._parameters.items()}  # type: ignore[misc]
    new._buffers = {k: tensor_of[f"{path}.{k}"] if v is not None else None for k, v in module._buffers.items()}
    new._modules = {
        k: rebuilt(v, f"{path}.{k}", tensor_of) if v is not None else None for k, v in module._modules.items()
    }
    return new
