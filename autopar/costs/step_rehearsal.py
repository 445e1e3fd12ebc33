"""What the stages of a plan hold, from a rehearsal of their passes on the meta device.

    program, stage of every operator --lower--> stage graphs --micro_batch_memory--> bytes of each pass

The stages are lowered as they are to run them, so that copies at their heads, gradients between them and the loss in
the last one are those of a step. Equal stages, and stages that occur in several plans, are rehearsed once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from autopar.analysis.batching import Batching
from autopar.analysis.example import Example
from autopar.analysis.loss_tensors import gradients_aside, trained_tensors
from autopar.analysis.operators import compute_nodes
from autopar.capture import torch_private
from autopar.capture.program import Program
from autopar.costs.cost_table import Calls, LossNeedsValues
from autopar.errors import first_line
from autopar.lower.device_values import GROUP, KEPT
from autopar.lower.rerun_groups import rerunning
from autopar.lower.size_values import SizeSplit, split_by_sizes
from autopar.lower.split_backward import input_part
from autopar.lower.stages import Constant, Lowered, StageProgram, lower
from autopar.plan.recompute import Recompute
from cost_models.graphs import Loss, get_attribute, on_meta, storage_key, tensors_in
from cost_models.hardware.devices import Device
from cost_models.measuring.autocast import Autocast, autocasts
from cost_models.measuring.convolution_workspaces import workspaces_on
from cost_models.memory.micro_batch_memory import (
    MicroBatchMemory,
    PassConditions,
    SplitBackward,
    TensorSpec,
    micro_batch_memory,
)

log = logging.getLogger(__name__)


class NotRehearsed(Exception):
    """A step whose passes cannot be rehearsed; the message says why."""


@dataclass(frozen=True)
class HeldTensor:
    """A parameter or buffer that a stage reads."""

    storage: int  # what tied tensors have in common
    shape: tuple[int, ...]
    itemsize: int  # bytes of an element
    nbytes: int
    trained: bool


@dataclass(frozen=True)
class RehearsedStage:
    """A stage of a lowered plan, apart from its passes."""

    held: tuple[HeldTensor, ...]
    reads: Mapping[int, int]  # of the model's inputs: its number -> bytes of the whole batch
    sends: Mapping[int, tuple[int, ...]]  # stage that reads its outputs -> which of them


class StepRehearsal:
    """Rehearses steps of a program, for one example call. Results are kept."""

    def __init__(
        self,
        program: Program,
        batching: Batching,
        leaves: Sequence[Any],
        device_types: Mapping[str, str],
        *,
        training: bool,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        target: Any = None,
        target_dims: tuple[int | None, ...] = (),
        loss_inside: bool = False,
        autocasts: Mapping[str, Autocast] | None = None,
        threads: Mapping[str, int] | None = None,
        gpus: Mapping[str, torch.device] | None = None,
        places: Mapping[str, torch.device] | None = None,
    ) -> None:
        """`device_types`: device kind -> "cpu" or "cuda". `loss_inside`: micro-batches have losses of their own; else
        the caller computes it on the outputs of the whole batch. `autocasts`: by device type, what steps run under;
        None: off. `threads`: of operators on a CPU, by device kind; several where they are not known. `gpus`: by device
        kind, a GPU at hand, on which convolutions run to see their workspaces. `places`: of devices at hand, by name,
        where their tensors lie."""
        self.program, self.batching, self.training = program, batching, training
        self.device_types = device_types
        self._autocasts, self._threads, self._gpus = autocasts or {}, threads or {}, gpus or {}
        self.loss_inside = loss_inside
        self._places = places or {}
        self._lie_on = tuple(x.device if isinstance(x, torch.Tensor) else None for x in leaves)
        target = torch_private.tree_map(on_meta, target)
        self._calls = Calls(program, [on_meta(x) for x in leaves], loss_fn, target, target_dims)
        self._targets = tuple(tensors_in(list(torch_private.tree_leaves(target)))) if loss_fn is not None else ()
        self._beside = tuple(trained_tensors(loss_fn).values())  # they would get gradients without values
        self._lowered: dict[tuple[Any, ...], Lowered] = {}
        self._known: dict[Any, MicroBatchMemory] = {}
        self._outputs: dict[tuple[int, int, str], tuple[Any, ...]] = {}  # by stage, rows and device kind
        self._signatures: dict[int, tuple[Any, ...]] = {}
        self._splits: dict[int, SizeSplit | None] = {}

    @classmethod
    def of(
        cls,
        example: Example,
        device_types: Mapping[str, str],
        autocasts: Mapping[str, Autocast] | None = None,
        threads: Mapping[str, int] | None = None,
        gpus: Mapping[str, torch.device] | None = None,
        places: Mapping[str, torch.device] | None = None,
    ) -> StepRehearsal:
        return cls(
            example.program,
            example.batching,
            example.leaves,
            device_types,
            training=example.training,
            loss_fn=example.loss,
            target=example.target,
            target_dims=example.target_dims,
            loss_inside=example.stage_loss is not None,
            autocasts=autocasts,
            threads=threads,
            gpus=gpus,
            places=places,
        )

    @classmethod
    def at_hand(cls, example: Example, devices: Sequence[Device]) -> StepRehearsal:
        """Steps on these devices, under the caller's autocast."""
        types = {device.kind: device.torch_device.type for device in devices}
        threads = {device.kind: device.threads for device in devices}
        gpus = {device.kind: device.torch_device for device in devices if device.torch_device.type == "cuda"}
        places = {device.name: device.torch_device for device in devices}
        return cls.of(example, types, autocasts(types.values()), threads, gpus, places)

    @property
    def has_tail(self) -> bool:
        """Whether more code follows the outputs, which returns gradients for all of them (`batch_tail`)."""
        return self.batching.tail is not None

    @property
    def target_bytes(self) -> int:
        """Of the targets of the whole batch."""
        return _storage_bytes(self._targets)

    def there(self, device: str, kind: str) -> frozenset[int]:
        """Which of the model's inputs lie where a device computes when a step begins: it reads views of the caller's
        batch, and of the others copies. CPUs read all of them where they are, and GPUs that are not at hand none."""
        if self.device_types[kind] == "cpu":
            return frozenset(range(len(self._lie_on)))
        place = self._places.get(device)
        return frozenset(number for number, lies in enumerate(self._lie_on) if lies is not None and lies == place)

    # -- stages -----------------------------------------------------------------------------------------------------

    def lowered(self, stage_of: Mapping[str, int], recompute: Sequence[int] = ()) -> Lowered:
        """The stages of a plan. `stage_of`: node of the program that computes -> stage; replicable ones may be left
        out. `recompute`: of each stage, a `Recompute`."""
        nodes = compute_nodes(self.program.graph)
        modes = tuple(map(Recompute, recompute)) if self.training else ()
        if not any(mode == Recompute.SELECTIVE or mode.by_layer for mode in modes):
            modes = ()  # whole stages run again as they are
        key = (*(stage_of.get(node.name, -1) for node in nodes), modes)
        if key not in self._lowered:
            stages = {node: stage_of[node.name] for node in nodes if node.name in stage_of}
            self._lowered[key] = lower(self.program, stages, self.batching.storages, recompute=modes)
        return self._lowered[key]

    def stage(self, lowered: Lowered, index: int) -> RehearsedStage:
        """What does not depend on micro-batches."""
        stage = lowered.stages[index]
        own = [get_attribute(self.program.graph_module, name) for name in stage.parameters]
        held = {
            storage_key(t): HeldTensor(
                storage_key(t), tuple(t.shape), t.element_size(), t.numel() * t.element_size(), t.requires_grad
            )
            for t in own
        }
        reads = {i: _storage_bytes(tensors_in(self._calls.leaves[i])) for i in stage.model_inputs}
        sends = {
            later.index: tuple(position for source, position in later.received if source == index)
            for later in lowered.stages
            if index in later.sources
        }
        return RehearsedStage(tuple(held.values()), reads, sends)

    def passes(
        self,
        lowered: Lowered,
        index: int,
        rows: int,
        kind: str,
        there: Collection[int] = (),
        *,
        recompute: bool = False,
        several: bool = True,
        in_parts: bool = False,
    ) -> MicroBatchMemory:
        """The passes of a micro-batch of `rows` samples through a stage on a device of `kind`.

        `there`: which of the model's inputs are views of the caller's batch, which is not counted here. `several`:
        other micro-batches come before or after it. `in_parts`: backwards come in two parts. Raises NotRehearsed for an
        operator that needs the values of tensors.
        """
        stage, device_type = lowered.stages[index], self.device_types[kind]
        in_parts = in_parts and not stage.uncaptured  # the runtime has whole backwards there
        inputs = self._stage_inputs(lowered, stage, rows, kind)
        if stage.layerwise and any(isinstance(x, TensorSpec) and x.requires_grad for x in inputs):
            in_parts = False
        last = index == len(lowered.stages) - 1
        loss = self._loss(lowered, rows) if last and self.training and self.loss_inside else None
        autocast = self._autocasts.get(device_type, Autocast(device_type))
        passes = PassConditions(
            tuple(inputs),
            held=frozenset(place for place, i in enumerate(stage.model_inputs) if i in there),
            start="loss" if loss is not None else "received" if not last else "tail" if self.has_tail else "caller",
            recompute=recompute,
            training=self.training,
            device_type=device_type,
            threads=self._threads.get(kind, PassConditions.threads),
            autocast=autocast.dtype,
            autocast_cache=autocast.cache,
        )
        gpu = self._gpus.get(kind)
        key = (self._signature(stage), passes, gpu, loss is not None and rows, several, in_parts)
        if key not in self._known:
            whole = replace(passes, loss=loss, known=self._targets)
            split = input_part if in_parts else None
            try:
                with torch.device("cpu"), gradients_aside(self._beside):
                    self._known[key] = self._rehearsed(stage, whole, several, split, gpu)
            except LossNeedsValues as error:
                raise NotRehearsed(str(error)) from error
            except RuntimeError as error:  # torch's for what has no result without values; NotImplementedError is one
                raise NotRehearsed(
                    f"an operator of stage {index} needs values: {first_line(error).split('. ')[0]}"
                ) from error
        self._outputs[id(stage), rows, kind] = self._known[key].outputs
        return self._known[key]

    def outputs(self, lowered: Lowered, index: int, rows: int, kind: str) -> tuple[Any, ...]:
        """Of a stage, for `rows` samples: a TensorSpec for each tensor."""
        key = id(lowered.stages[index]), rows, kind  # stages live as long as this: `_lowered` holds them
        return self._outputs[key] if key in self._outputs else self.passes(lowered, index, rows, kind).outputs

    def _rehearsed(
        self,
        stage: StageProgram,
        passes: PassConditions,
        several: bool,
        split: SplitBackward | None,
        gpu: torch.device | None,
    ) -> MicroBatchMemory:
        """What follows from the sizes of its inputs alone, a stage computes once. One whose layers run again is
        rehearsed as if every micro-batch did, which states no less."""
        rehearsed = partial(micro_batch_memory, several=several, workspaces=workspaces_on(gpu) if gpu else None)
        if stage.reruns:
            return rehearsed(stage.module, passes, split=split, reruns=_rerunning)
        key = id(stage)
        if key not in self._splits:
            self._splits[key] = split_by_sizes(stage.module) if stage.shards == 1 else None
        apart = self._splits[key]
        if apart is None:
            return rehearsed(stage.module, passes, split=split)
        sizes = [passes.inputs[place].shape[dim] for place, dim in apart.sizes]
        return rehearsed(apart.rest, passes, split=split, shared=(apart.values, sizes))

    def _stage_inputs(self, lowered: Lowered, stage: StageProgram, rows: int, kind: str) -> list[Any]:
        pieces = self._calls.inputs(rows)
        own = [_spec(pieces[i]) for i in stage.model_inputs]
        sent = {source: self.outputs(lowered, source, rows, kind) for source in stage.sources}
        return [*own, *(sent[source][position] for source, position in stage.received)]

    def _loss(self, lowered: Lowered, rows: int) -> Loss | None:
        """The loss of a micro-batch, of what the last stage returns."""
        loss = self._calls.loss(rows)
        if loss is None:
            return None
        results = lowered.results

        def of_stage(outputs: tuple[Any, ...]) -> torch.Tensor:
            return loss(tuple(r.value if isinstance(r, Constant) else outputs[r] for r in results))

        return of_stage

    def _signature(self, stage: StageProgram) -> tuple[Any, ...]:
        key = id(stage)  # stages live as long as this: `_lowered` holds them
        if key not in self._signatures:
            self._signatures[key] = tuple(_described(stage.module))
        return self._signatures[key]

    # -- the whole batch --------------------------------------------------------------------------------------------

    def whole_outputs(self, lowered: Lowered, rows: int, kind: str) -> list[TensorSpec]:
        """The model's outputs for the whole batch, joined from micro-batches of `rows` samples."""
        last = len(lowered.stages) - 1
        outputs = self.outputs(lowered, last, rows, kind)
        batch, found = max(self.program.batch_size, 1), []
        for result, how in zip(lowered.results, self.batching.outputs, strict=True):
            spec = None if isinstance(result, Constant) else outputs[result]
            if not isinstance(spec, TensorSpec):
                continue
            shape = list(spec.shape)
            if how.combine == "cat" and how.batch_dim is not None:
                shape[how.batch_dim] = shape[how.batch_dim] // rows * batch
            with torch.device("meta"):
                found.append(
                    replace(TensorSpec.of(torch.empty(shape, dtype=spec.dtype)), requires_grad=spec.requires_grad)
                )
        return found


def _rerunning(module: fx.GraphModule, again: Callable[[], AbstractContextManager[Any]]) -> fx.GraphModule:
    return rerunning(module, again=again)


def _spec(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return replace(TensorSpec.of(torch.empty_like(value)), requires_grad=value.requires_grad)


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum({storage_key(t): t.untyped_storage().nbytes() for t in tensors}.values())


def _described(module: fx.GraphModule) -> Iterable[Any]:
    """What two stages must have in common to hold the same bytes: operators, connections and shapes."""
    number = {node: index for index, node in enumerate(module.graph.nodes)}
    first: dict[int, int] = {}  # storage -> first node that reads it
    for node, index in number.items():
        target: Any = node.target
        if node.op == "get_attr":
            value = get_attribute(module, str(node.target))
            target = id(value)
            if isinstance(value, torch.Tensor):
                same = first.setdefault(storage_key(value), index)
                target = (tuple(value.shape), value.stride(), value.dtype, value.requires_grad, same)
        elif node.op == "call_module":
            target = id(module.get_submodule(str(node.target)))
        elif node.op in ("placeholder", "output"):
            target = None
        args = map_aggregate((node.args, node.kwargs), lambda x: f"%{number[x]}" if isinstance(x, fx.Node) else x)
        yield node.op, target, repr(args), node.meta.get(GROUP), node.meta.get(KEPT)
