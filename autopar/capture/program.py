"""Model -> Program: one flat torch.fx graph with the original parameter names and a symbolic batch.

    model --export--> graph --mode_blocks--> --repeated_layers--> --shard_regions-->
          --cleanup--> --module_hooks--> Program

torch.export (non-strict) traces the model; torch.fx.symbolic_trace is the fallback for models that it refuses. Training
and evaluation are two captures, because dropout and batch norm are fixed in the graph.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from autopar.capture import module_hooks, shard_regions, torch_private
from autopar.capture.attention_masks import settle_masks
from autopar.capture.autocast_answers import Answer
from autopar.capture.call_answers import CallAnswer
from autopar.capture.call_inputs import common_device, find_batch, flattened, refuse_other_than_dense, tensors_of
from autopar.capture.cleanup import tidy
from autopar.capture.export import Traced, Tracers, check_call, trace
from autopar.capture.layers import repeated_layers
from autopar.capture.lost_effects import (
    LostEffectError,
    calls_with_out,
    refused_effects,
    warn_of_assignments,
    warn_of_lost_out,
    warn_of_other_generators,
)
from autopar.capture.mode_blocks.inlined import inline_blocks
from autopar.capture.module_state import Generators, own_generators
from autopar.capture.node_names import describe, module_path
from autopar.capture.parameter_writes import parameters_kept, refusal, unseen_write, written_parameter
from autopar.capture.registrations import contents_restored, refuse_reserved_names, refuse_uninitialized
from autopar.capture.rehearsal import WRITES_INPUT
from autopar.capture.repeated_layers.trace_once import copy_traced_layers, equal_layers_traced_once
from autopar.capture.uncaptured import Effects, uncaptured_in
from autopar.capture.uncaptured_trace import (
    Opaque,
    RefusedError,
    RehearsalError,
    inside,
    join,
    rehearsed,
    traced_as_calls,
)
from autopar.capture.work_shown import shown_work
from autopar.errors import CaptureError, WrongCallError
from autopar.hints.shard import hinted_modules

log = logging.getLogger(__name__)

_LEAST_SIZE = 2  # the tracer takes every symbolic size to be at least this: sizes of 0 and 1 broadcast


@dataclass(frozen=True)
class Input:
    """One leaf of the call's (args, kwargs), in flatten order."""

    path: str  # e.g. "kwargs['input_ids']"
    name: str  # placeholder in the graph
    value: Any  # of a non-tensor leaf at capture, part of the signature; None for tensors
    shape: tuple[int, ...] | None  # of a tensor leaf at capture
    dtype: torch.dtype | None
    batch_dim: int | None  # the dimension that counts samples; None for leaves that all micro-batches share
    any_number: bool = False  # a Python int that the graph takes as an input: calls may differ in it

    def same_type(self, leaf: Any) -> bool:
        """Whether a leaf differs from this one in its sizes or its value at most. (None is a leaf, too.)"""
        if self.shape is None:
            return type(leaf) is type(self.value)
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.is_nested:
            return False
        return leaf.dtype == self.dtype and leaf.dim() == len(self.shape)


class OpenSize(NamedTuple):
    """A size of a flat input that may differ between calls, or (`dim` None) an input that is a Python int."""

    leaf: int
    dim: int | None


@dataclass(frozen=True)
class Program:
    """A captured model: a flat graph (placeholders in, one tuple out) over the model's own parameters."""

    graph_module: fx.GraphModule
    inputs: tuple[Input, ...]
    in_spec: torch_private.TreeSpec
    out_spec: torch_private.TreeSpec  # of what the model returns
    training: bool
    batch_size: int  # number of samples in the captured call; 0 if no input has a batch dimension
    any_batch: bool  # whether the graph also runs at other batch sizes, except 1
    guards: Callable[..., Any]  # raises AssertionError for flat inputs that the model treats by other code
    # Flat outputs of the graph before the counts of `weights`: the model's, unless a tail makes those of them.
    n_outputs: int
    weights: dict[int, int]  # flat output that is a mean -> flat output with the number of elements averaged
    device: torch.device  # of the graph's constants: where all tensors were for the model's code at capture
    unregistered: str = ""  # why the program of a model must be refused: a tensor that it trains and does not know of
    shard_calls: tuple[shard_regions.ShardCall, ...] = ()  # calls with a shard hint
    # Paths of attributes that the model's code assigns, and of modules that run uncaptured.
    live: frozenset[str] = frozenset()
    uncaptured: tuple[str, ...] = ()  # what runs as opaque operators, and why, for messages
    layers: tuple[str, ...] = ()  # paths of the modules that the model repeats (`layers.repeated_layers`)
    autocast: tuple[Answer, ...] = ()  # what the model's code learned of torch.autocast, where it asked
    learned: tuple[CallAnswer, ...] = ()  # what it learned of gradients, settings and layouts

    @property
    def graph(self) -> fx.Graph:
        return self.graph_module.graph

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], int] | None:
        """The flat inputs of a call and its batch size; None if the call has another signature."""
        leaves, spec = flattened(args, kwargs)
        return self.bind_flat(leaves, spec)

    def bind_flat(self, leaves: list[Any], spec: torch_private.TreeSpec) -> tuple[list[Any], int] | None:
        """`bind` for a call that `flattened` has taken apart."""
        if spec != self.in_spec:
            return None
        numbers = frozenset(OpenSize(place, None) for place, one in enumerate(self.inputs) if one.any_number)
        batch = fitting_batch(leaves, self.inputs, numbers)
        if batch is None:
            return None
        if batch == self.batch_size and all(leaves[one.leaf] == self.inputs[one.leaf].value for one in numbers):
            return leaves, batch
        if batch != self.batch_size and (not self.any_batch or batch == 1):  # export specialises a size of 1
            return None
        try:
            self.guards(*leaves)
        except AssertionError:
            return None
        return leaves, batch


def fitting_batch(leaves: Sequence[Any], inputs: Sequence[Input], opened: Collection[OpenSize]) -> int | None:
    """The number of samples of a call that differs from the captured `inputs` in the batch and in `opened` alone.

    0 where no input has a batch dimension, None for any other call.
    """
    batches = set()
    for place, (leaf, seen) in enumerate(zip(leaves, inputs, strict=True)):
        if not seen.same_type(leaf):
            return None
        if seen.shape is None:
            # The tracer takes the symbol of a number to be at least 0.
            same = leaf == seen.value or (leaf != leaf and seen.value != seen.value)  # nan
            if not same and (OpenSize(place, None) not in opened or leaf < 0):
                return None
            continue
        for dim, (size, captured) in enumerate(zip(leaf.shape, seen.shape, strict=True)):
            if dim == seen.batch_dim:
                batches.add(size)
            elif size != captured and (OpenSize(place, dim) not in opened or size < _LEAST_SIZE):
                return None
    if len(batches) > 1:
        return None
    return int(batches.pop()) if batches else 0


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    batch_dim: int | dict[str, int | None] | None = None,
    trace_equal_layers_once: bool = False,
    open_sizes: Collection[OpenSize] = (),
    strict: bool = False,
    device: torch.device | None = None,
) -> Program:
    """Capture `model` in its current mode (training or evaluation) for inputs like `args`, `kwargs`.

    The model is unchanged afterwards.

    Args:
        batch_dim: the batch dimension of every tensor input whose size there equals the batch (default 0), or a dict
            from the names of inputs (a keyword, or a parameter of `forward`) to their batch dimension (None: shared by
            all samples).
        trace_equal_layers_once: trace only the first of equal layers, and copy its nodes for the others.
        open_sizes: sizes and Python ints, beside the batch, that become symbols where the model allows it. Such a
            program is specialised before use (`open_sizes.SymbolicProgram`).
        strict: raise CaptureError for a part that no tracer can capture, instead of running it as an opaque operator.
        device: where all tensors are for the model's code, wherever they are (default: `common_device`).

    Raises:
        CaptureError: no tracer can capture the model, and the rest cannot run uncaptured (or must not: `strict`).
        InputError: the arguments do not fit `forward`, or `batch_dim` does not fit the arguments.
    """
    order = tuple(kwargs)
    kwargs = dict(sorted(kwargs.items()))
    check_call(model, args, kwargs)
    refuse_reserved_names(model)
    refuse_uninitialized(model)
    refuse_other_than_dense(model, args, kwargs)
    leaves, in_spec = flattened(args, kwargs)
    dims, batch = find_batch(model, args, kwargs, leaves, batch_dim)
    call = _Call(model, args, kwargs, order, in_spec, dims, batch, frozenset(open_sizes))
    home = common_device(model, leaves) if device is None else device
    places = {tensor.device for tensor in [*tensors_of(model), *leaves] if isinstance(tensor, torch.Tensor)}
    elsewhere = contextlib.nullcontext() if places <= {home} and device is None else torch_private.fakes_on(home)
    with shown_work(f"capturing {type(model).__name__}"), elsewhere, parameters_kept(model):
        if open_sizes:
            found = _traced(call, Opaque(), trace_equal_layers_once)
        else:
            found = _traced_with_opaque_parts(call, trace_equal_layers_once, strict)
    traced, module = found.traced, found.module
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    paths = torch_private.tree_paths((args, kwargs))
    n_outputs = traced.out_spec.num_leaves
    symbolic = [_is_symbolic(node, dim) for node, dim in zip(placeholders, dims, strict=True) if dim is not None]
    return Program(
        module,
        tuple(itertools.starmap(_input, zip(paths, placeholders, leaves, dims, strict=True))),
        in_spec,
        traced.out_spec,
        model.training,
        batch,
        any_batch=batch > 1 and all(symbolic),
        guards=traced.guards,
        unregistered=traced.unregistered,
        n_outputs=n_outputs,
        weights={o: n_outputs + i for i, o in enumerate(module.graph.output_node().meta.get("weighted", ()))},
        shard_calls=found.shard_calls,
        uncaptured=_uncaptured_parts(module, found.opaque),
        live=found.live,
        layers=repeated_layers(model),
        device=home,
    )


@dataclass(frozen=True)
class _Call:
    """What is captured."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]  # by name
    order: tuple[str, ...]  # of the keywords, as they were given
    in_spec: torch_private.TreeSpec
    dims: list[int | None]  # batch dimension of every flat input
    batch: int
    open_sizes: frozenset[OpenSize]  # that become symbols, beside the batch

    def symbols(self, dims: list[int | None]) -> list[frozenset[int | None]]:
        """For every flat input, its dimensions with symbolic size; None for a Python int. `dims`: of the batch."""
        return [
            frozenset(size.dim for size in self.open_sizes if size.leaf == place) | ({dim} - {None})
            for place, dim in enumerate(dims)
        ]


# Functions of derivatives inside of the model, and of transforms, such as vmap.
_ONLY_AS_A_WHOLE = ("torch.autograd.", "torch._functorch.", "torch._C._functorch.")


@dataclass(frozen=True)
class _Found:
    """A trace that succeeded, and its cleaned graph."""

    traced: Traced
    module: fx.GraphModule
    shard_calls: tuple[shard_regions.ShardCall, ...]
    opaque: Opaque
    live: frozenset[str]


def _traced_with_opaque_parts(call: _Call, equal_layers_once: bool, strict: bool) -> _Found:
    """Trace; while export refuses a part, make this part opaque and trace again.

    The whole model is the last part. If a call changes nothing, symbolic_trace is tried before that: it takes some
    models that export refuses, but drops what their code does besides returning a result.
    """
    if strict:
        try:
            return _traced(call, Opaque(), equal_layers_once, "both")
        except RefusedError as refused:
            raise CaptureError(str(refused)) from refused.__cause__
    opaque, first, lost = Opaque(), None, False
    generators = Generators(own_generators(call.model.modules()))
    while True:
        try:
            return _traced(call, opaque, equal_layers_once and not opaque)
        except RefusedError as refused:
            generators.restore_others()
            following = opaque.after(refused, call.model)
            if following is None:
                either = f"{first}; it cannot run uncaptured either: {refused}" if first is not None else str(refused)
                raise CaptureError(either) from (refused.__cause__ or refused)
            log.info("%s; it will run uncaptured", refused)
            opaque, first, lost = following, first or refused, lost or isinstance(refused, LostEffectError)
        except (RehearsalError, WrongCallError) as error:
            # It ran because a part could not be captured: for these inputs, unless something else is wrong with it.
            kind = WrongCallError if isinstance(error, WrongCallError) else CaptureError
            raise kind(f"{error}. If it runs on these: {first}") from error.__cause__
        parts = [call.model.get_submodule(path) for path in opaque.reasons]
        # Later rooms know batch norm as a module of its own, which symbolic_trace leaves in the graph.
        norms = bool(parts) and all(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in parts)
        if not lost and (norms or ("" in opaque.reasons and _changes_nothing(call, opaque))):
            with contextlib.suppress(RefusedError):
                return _traced(call, Opaque(), False, "symbolic_trace")


def _changes_nothing(call: _Call, whole: Opaque) -> bool:
    """Whether a call of the model only returns a result. `whole`: the model as one operator."""
    try:
        found = rehearsed(call.model, call.args, call.kwargs, call.dims, whole).rehearsal.calls.values()
    except (RehearsalError, WrongCallError):
        return False
    return not any(one.effects != Effects() or one.refused == WRITES_INPUT for one in found)


def _traced(call: _Call, opaque: Opaque, equal_layers_once: bool, tracers: Tracers = "export") -> _Found:
    model = call.model
    # Export makes a size of 1 a constant: a graph captured for one sample serves no other batch size.
    dims = [None if call.batch == 1 else dim for dim in call.dims]
    calls = None
    if opaque:
        calls = rehearsed(model, call.args, call.kwargs, dims, opaque)
        dims = dims if calls.rehearsal.any_batch else [None] * len(dims)
    once = equal_layers_traced_once(model) if equal_layers_once else contextlib.nullcontext()
    with (
        contents_restored(model),
        module_hooks.marked(model, inside(model, opaque)) as marks,
        warn_of_assignments(model) as assigned,
        calls_with_out(model) as callers,
        refused_effects(model),
        warn_of_other_generators(),
        torch_private.no_global_hooks(),
        once,
        shard_regions.marked(hinted_modules(model)) as sharded_calls,
        traced_as_calls(model, opaque, calls, dims),
    ):
        symbols = call.symbols(dims)
        traced = trace(model, call.args, call.kwargs, symbols, call.in_spec, order=call.order, tracers=tracers)
    warn_of_lost_out(traced.module, callers)
    write, unseen = written_parameter(traced.module), unseen_write(traced.module)
    if write is not None:
        raise refusal(write[0], describe(write[1]))
    if unseen is not None:
        path = module_path(unseen)
        why = f"{describe(unseen)} writes in place under no_grad or autocast, which a graph does not show"
        raise RefusedError(why, path, why)
    for node in traced.module.graph.nodes:
        name = f"{getattr(node.target, '__module__', '')}.{getattr(node.target, '__qualname__', '')}"
        if node.op == "call_function" and name.startswith(_ONLY_AS_A_WHOLE):
            why = f"{describe(node)} calls {name}, whose operators do not run apart"
            raise RefusedError(why, module_path(node), why)
    inline_blocks(traced.module)
    if equal_layers_once:
        copy_traced_layers(traced.module, model)
    regions = shard_regions.borders(traced.module.graph, sharded_calls)
    join(traced.module, calls)
    module = tidy(traced.module)
    settle_masks(module, dims)
    shard_calls = shard_regions.settled(module.graph, regions, describe)
    module_hooks.join(module.graph, marks)
    module.recompile()
    return _Found(traced, module, shard_calls, opaque, frozenset({*assigned, *opaque.reasons}))


def _uncaptured_parts(module: fx.GraphModule, opaque: Opaque) -> tuple[str, ...]:
    """One sentence for each part of the model that is an opaque operator."""
    sentences = []
    for part in uncaptured_in(module):
        why = f" ({opaque.reasons[part.path]})" if part.held is not None else ", with its own backward"
        sentences.append(f"{part.place} runs uncaptured, as one operator{why}")
    return tuple(dict.fromkeys(sentences))


def _input(path: str, node: fx.Node, leaf: Any, dim: int | None) -> Input:
    if isinstance(leaf, torch.Tensor):
        return Input(path, node.name, None, tuple(leaf.shape), leaf.dtype, dim)
    return Input(path, node.name, leaf, None, None, None)


def _is_symbolic(node: fx.Node, dim: int) -> bool:
    """Whether an input's size is symbolic in the graph (after symbolic_trace, every size is)."""
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or isinstance(value.shape[dim], torch.SymInt)


def is_getitem(node: fx.Node) -> bool:
    """Whether `node` takes an item out of a tuple."""
    return node.op == "call_function" and node.target is operator.getitem
