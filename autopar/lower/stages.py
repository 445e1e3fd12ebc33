r"""Program x stage of every operator -> one fx.GraphModule per stage.

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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from autopar.analysis.attention import attention_cores
from autopar.analysis.blocks import Blocks, written_through_views
from autopar.analysis.buffer_writes import unrepeatable_nodes
from autopar.analysis.kept_products import Kept
from autopar.analysis.operators import (
    move_constants,
    on_device,
    operator_keys,
    written_arguments,
)
from autopar.capture.module_hooks import is_hook_point
from autopar.capture.node_names import describe
from autopar.capture.program import Program
from autopar.capture.uncaptured import Uncaptured, uncaptured, uncaptured_in
from autopar.lower.collectives import spread
from autopar.lower.deferred_batch_norm import DeferredNorm, defer_batch_norms, deferred_counters
from autopar.lower.device_values import GROUP, KEPT
from autopar.lower.random_operators import lower_random
from autopar.lower.regather import kept_as_shards
from autopar.lower.sharded import Piece, Sharded, shard
from autopar.lower.stage_values import StageValues, stage_values
from autopar.plan.recompute import Recompute
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
    hooked: bool  # runs hooks of modules, or uncaptured code that may have some
    uncaptured: bool  # runs uncaptured modules, whose backward may not come in parts
    deferred: tuple[DeferredNorm, ...]  # batch norms whose running statistics are updated after the batch
    unrepeatable: str  # the operator for which the stage cannot be run again for its backward; "" if there is none
    pieces: tuple[Piece, ...] = ()  # what its devices hold of its parameters
    shards: int = 1  # devices that compute a micro-batch together
    multiple: int = 1  # the number of samples in a micro-batch must be a multiple of this to be cut evenly
    layerwise: bool = False  # its layers run again for their backward, each as one
    reruns: bool = False  # groups of its operators run again for their backward
    regathers: bool = False  # keeps shards of what it gathers, and gathers that again in the backward
    undivided: tuple[str, ...] = ()  # operators that all of these devices do whole: they cannot be cut as planned

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
        """The number of samples in every micro-batch must be a multiple of this."""
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
    recompute: Sequence[Recompute] = (),
    of_other_call: bool = False,
) -> Lowered:
    """Split `program` by `stage_of` (for every node that computes; replicable ones may be left out).

    `storages` (of `batching.study`): the memory of every value. A stage that overwrites the memory of a value that it
    received starts from a clone, so that the copy of the sender stays whole. `defer_norms`: running statistics of batch
    norms are updated after the batch. `shardings`: one per stage (default: none is sharded). `recompute`: one per
    stage; it decides which groups of operators run again in the backward (`rerun_groups`). `of_other_call`: the
    shardings were found for another call, whose operators may be others (`StrategyChoices`).
    Raises PlanError where a value would have to flow backwards.
    """
    flat = list(program.graph.output_node().args[0])  # type: ignore[arg-type]
    results = list(dict.fromkeys(result for result in flat if isinstance(result, fx.Node)))
    values = stage_values(program, stage_of, results)
    source = _Source(program, values, storages, operator_keys(program), defer_norms, tuple(recompute), of_other_call)
    by_stage = dict(enumerate(shardings))
    stages = tuple(_StageBuilder(source, s).build(by_stage.get(s)) for s in range(len(values.needed)))
    positions = {node: position for position, node in enumerate(values.sent[-1])}
    return Lowered(stages, tuple(positions[r] if isinstance(r, fx.Node) else Constant(r) for r in flat))


@dataclass(frozen=True)
class _Source:
    """What all stages are built from."""

    program: Program
    values: StageValues
    storages: Mapping[str, frozenset[int]]  # memory of every value, by name
    keys: Mapping[fx.Node, str]  # of operators
    defer_norms: bool
    recompute: tuple[Recompute, ...]  # of each stage; (): nothing
    of_other_call: bool  # the shardings

    @cached_property
    def deferred_counters(self) -> frozenset[str]:
        """Buffers that count batches, once per batch instead of once per micro-batch."""
        return deferred_counters(self.program.graph) if self.defer_norms else frozenset()

    @cached_property
    def unrepeatable(self) -> list[fx.Node]:
        """Operators that cannot run a second time for the backward."""
        graph = self.program.graph
        return [*unrepeatable_nodes(graph), *written_through_views(graph, self.storages)]

    @cached_property
    def blocks(self) -> Blocks:
        return Blocks(self.program, self.storages)

    @cached_property
    def kept(self) -> dict[fx.Node, Kept]:
        """Operators whose results layers keep that run the rest again."""
        return {node: kind for layer in self.blocks.layers for node, kind in self.blocks.kept_of(layer).items()}

    @cached_property
    def cores(self) -> tuple[frozenset[fx.Node], ...]:
        return attention_cores(self.program.graph)

    def mode(self, stage: int) -> Recompute:
        return self.recompute[stage] if self.recompute else Recompute.NONE

    def groups(self, stage: int, copied: Collection[fx.Node]) -> Iterator[frozenset[fx.Node]]:
        """What runs again of a stage's operators, group by group. `copied`: values that the stage has copied."""
        mode = self.mode(stage)
        needed, home = self.values.needed[stage], self.values.home
        if mode == Recompute.SELECTIVE:
            yield from (frozenset(n for n in core if home.get(n) == stage) for core in self.cores)
        for layer in self.blocks.layers if mode.by_layer else ():
            part = frozenset(node for node in layer if node in needed and home.get(node, stage) == stage)
            alone = {node for node in copied if part.issuperset(n for n in node.users if n in needed)}
            if any(node in home for node in part) and self.blocks.runs_again(part, alone):
                yield part | alone


class _StageBuilder:
    """Builds one stage: receives its inputs, copies its operators, returns what it sends."""

    def __init__(self, source: _Source, stage: int) -> None:
        self.source, self.stage = source, stage
        self.module, self.values = source.program.graph_module, source.values
        self.needed = source.values.needed[stage]
        self.graph, self.copies = fx.Graph(), dict[fx.Node, fx.Node]()
        mine = (node for node in self.needed if source.values.home.get(node) == stage)
        self.targets = {argument for node in mine for argument in written_arguments(node)}  # that operators overwrite
        self.written = {memory for argument in self.targets for memory in source.storages.get(argument.name, ())}
        self.parameters: dict[str, None] = {}  # names, in order
        self.overwritten: dict[str, None] = {}
        self.cloned: set[fx.Node] = set()  # received values that it overwrites

    def build(self, sharding: StageSharding | None) -> StageProgram:
        model_inputs, received = self._receive()
        self._copy_operators()
        self._mark_groups()
        sent = self.values.sent[self.stage]
        self.graph.output(tuple(self.copies[node] for node in sent))
        counters = self.source.deferred_counters
        deferred = defer_batch_norms(self.graph, self.module, counters) if self.source.defer_norms else ()
        deferred_buffers = {name for norm in deferred for name in (norm.mean, norm.var, norm.tracked)}
        sharded = self._sharded(sharding)
        random = lower_random(sharded.graph, self.module)
        root = _attributes(self.module, sharded.graph, sharded.pieces)
        opaque = _opaque_parts(sharded.graph, self.module)
        unrepeatable = (n for n in self.source.unrepeatable if self.values.home.get(n) == self.stage)
        return StageProgram(
            index=self.stage,
            module=fx.GraphModule(root, sharded.graph, class_name=f"Stage{self.stage}"),
            model_inputs=model_inputs,
            received=received,
            outputs=tuple(node.name for node in sent),
            parameters=tuple(self.parameters),
            written_buffers=tuple(name for name in self.overwritten if name not in deferred_buffers),
            random=random,
            hooked=any(is_hook_point(n) for n in sharded.graph.nodes) or bool(opaque),
            uncaptured=any(part.held is not None for part in opaque),
            deferred=deferred,
            unrepeatable=next((describe(node) for node in unrepeatable), ""),
            pieces=sharded.pieces,
            shards=sharding.size if sharding is not None else 1,
            multiple=sharded.multiple,
            undivided=sharded.undivided,
            layerwise=self.source.mode(self.stage).by_layer,
            reruns=any(node.meta.get(GROUP) is not None for node in sharded.graph.nodes),
            regathers=any(node.target is kept_as_shards for node in sharded.graph.nodes),
        )

    def _receive(self) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        """A placeholder for every model input and every value of an earlier stage; returns where they come from."""
        placeholders = [node for node in self.source.program.graph.nodes if node.op == "placeholder"]
        inputs = [(i, node) for i, node in enumerate(placeholders) if node in self.needed]
        received = list(self.values.received(self.stage))
        for node in [*(node for _, node in inputs), *(node for _, _, node in received)]:
            self.copies[node] = self.graph.placeholder(node.name)
            self.copies[node].meta = dict(node.meta)
        for node, copy in list(self.copies.items()):
            if self.written & self.source.storages.get(node.name, frozenset()):
                clone = self.graph.call_function(torch.ops.aten.clone.default, (copy,))
                clone.meta = dict(node.meta)
                self.copies[node] = clone
                self.cloned.add(node)
        return tuple(i for i, _ in inputs), tuple((s, i) for s, i, _ in received)

    def _copy_operators(self) -> None:
        for node in self.source.program.graph.nodes:
            if node not in self.needed or node in self.copies or node.op == "placeholder":
                continue
            self.copies[node] = self.graph.node_copy(node, lambda n: self.copies[n])
            if node.op == "get_attr" and isinstance(get_attribute(self.module, str(node.target)), torch.Tensor):
                self.parameters[str(node.target)] = None
                # The operator writes it whole, or through a view.
                if node in self.targets or self.written & self.source.storages.get(node.name, frozenset()):
                    self.overwritten[str(node.target)] = None
            elif node.op == "call_module":
                child = self.module.get_submodule(str(node.target))
                buffers = [f"{node.target}.{name}" for name, _ in child.named_buffers()]
                tensors = [*(f"{node.target}.{name}" for name, _ in child.named_parameters()), *buffers]
                self.parameters.update(dict.fromkeys(tensors))
                self.overwritten.update(dict.fromkeys(buffers if child.training else ()))

    def _mark_groups(self) -> None:
        for number, group in enumerate(self.source.groups(self.stage, self.cloned)):
            for node in group:
                self.copies[node].meta[GROUP] = number
                if self.source.mode(self.stage) == Recompute.OPERATORS and node in self.source.kept:
                    self.copies[node].meta[KEPT] = self.source.kept[node]

    def _sharded(self, sharding: StageSharding | None) -> Sharded:
        if sharding is None or sharding.size == 1:
            return Sharded(self.graph, tuple(Piece(name, name, 0) for name in self.parameters))
        keys = {self.copies[node].name: key for node, key in self.source.keys.items() if node in self.copies}
        storages, of_other_call = self.source.storages, self.source.of_other_call
        return shard(self.graph, self.module, sharding, keys, storages, of_other_call=of_other_call)


def _opaque_parts(graph: fx.Graph, module: fx.GraphModule) -> list[Uncaptured]:
    """The opaque operators of a stage's graph, and of the graphs nested in it."""
    nested = [getattr(module, str(node.target), None) for node in graph.nodes if node.op == "get_attr"]
    parts = [part for child in nested if isinstance(child, fx.GraphModule) for part in uncaptured_in(child)]
    return parts + [part for node in graph.nodes if (part := uncaptured(node)) is not None]


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
