"""Model -> Program: one flat torch.fx graph with the original parameter names and a symbolic batch.

torch.export (non-strict) does the work and torch.fx.symbolic_trace is the fallback for what it refuses. Training and
evaluation are two captures, because dropout and batch norm are baked into the graph.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import operator
import re
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim

from autopar import _torch
from autopar.errors import CaptureError, InputError
from autopar.tidy import tidy

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Input:
    """One leaf of the call's (args, kwargs), in flatten order."""

    path: str  # e.g. "kwargs['input_ids']"
    name: str  # placeholder in the graph
    value: Any  # what a non-tensor leaf was at capture: part of the signature; None for tensors
    shape: tuple[int, ...] | None  # of a tensor leaf at capture
    dtype: torch.dtype | None
    batch_dim: int | None  # the dimension that counts samples; None for what all micro-batches share


@dataclass(frozen=True)
class Program:
    """A captured model: a flat graph (placeholders in, one tuple out) over the model's own parameters."""

    graph_module: fx.GraphModule
    inputs: tuple[Input, ...]
    in_spec: _torch.TreeSpec
    out_spec: _torch.TreeSpec
    training: bool
    batch_size: int  # samples in the call that was captured; 0 if no input has a batch dimension
    any_batch: bool  # the graph runs at other batch sizes, too
    n_outputs: int  # flat outputs of the model; the graph returns what `weights` points to after them
    weights: dict[int, int]  # flat output (a mean over elements) -> place of the number of elements that it averages

    @property
    def graph(self) -> fx.Graph:
        return self.graph_module.graph

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], int] | None:
        """The flat inputs of a call and its batch size, or None where the call has another signature."""
        leaves, spec = _torch.tree_flatten((args, dict(sorted(kwargs.items()))))
        if spec != self.in_spec:
            return None
        sizes = set()
        for leaf, expected in zip(leaves, self.inputs, strict=True):
            if expected.shape is None:
                if type(leaf) is not type(expected.value) or leaf != expected.value:
                    return None
                continue
            if not isinstance(leaf, torch.Tensor) or leaf.dtype != expected.dtype or leaf.dim() != len(expected.shape):
                return None
            for dim, (size, seen) in enumerate(zip(leaf.shape, expected.shape, strict=True)):
                if dim == expected.batch_dim:
                    sizes.add(size)
                elif size != seen:
                    return None
        if len(sizes) > 1 or (not self.any_batch and sizes and sizes != {self.batch_size}):
            return None
        return leaves, sizes.pop() if sizes else 0


def module_path(node: fx.Node) -> str:
    """Path of the innermost module that `node` came from, "" for the root."""
    stack = node.meta.get("nn_module_stack")
    path = str(list(stack.values())[-1][0]) if stack else ""
    return re.sub(r"@\d+$", "", path)  # export numbers the second call of the same module


def source_line(node: fx.Node) -> str:
    """`file:line` of the user's code that made `node`, "" if unknown."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    outside = [(name, line) for name, line in lines if "/torch/nn/" not in name]
    chosen = (outside or lines)[-1:]
    return f"{chosen[0][0]}:{chosen[0][1]}" if chosen else ""


def describe(node: fx.Node) -> str:
    """`aten.relu in layer1.0 (model.py:12)`: how messages name an operator."""
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    name = str(node.target) if isinstance(node.target, torch._ops.OpOverload) else target
    line = source_line(node)
    return f"{name} in module '{module_path(node) or '(root)'}'" + (f" ({line})" if line else "")


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    batch_dim: int | dict[str, int | None] | None = None,
) -> Program:
    """Capture `model` as it is now (training or evaluation) for inputs like `args`, `kwargs`.

    `batch_dim`: the batch dimension of every tensor input whose size there equals the batch (default 0), or a dict
    from the names of inputs (a keyword, or a parameter of `forward`) to their batch dimension (None: shared by all
    samples). Raises CaptureError; the model is left as it was.
    """
    kwargs = dict(sorted(kwargs.items()))
    leaves, in_spec = _torch.tree_flatten((args, kwargs))
    dims, batch = find_batch(model, args, kwargs, leaves, batch_dim)
    # One row would be burned into the graph as a constant: trace with two.
    traced = [
        torch.cat([leaf, leaf], dim) if batch == 1 and dim is not None else leaf
        for leaf, dim in zip(leaves, dims, strict=True)
    ]
    t_args, t_kwargs = _torch.tree_unflatten(traced, in_spec)
    try:
        module, out_spec = _export(model, t_args, t_kwargs, traced, dims, in_spec)
    except Exception as error:  # export raises what it likes; the fallback decides
        log.info("torch.export refused the model (%s); trying torch.fx.symbolic_trace", _first_line(error))
        try:
            module, out_spec = _symbolic_trace(model, t_args, t_kwargs)
        except Exception as second:
            raise _capture_error(model, error) from second
    module = tidy(module)
    placeholders = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    inputs = tuple(
        Input(path, name, None, tuple(leaf.shape), leaf.dtype, dim)
        if isinstance(leaf, torch.Tensor)
        else Input(path, name, leaf, None, None, None)
        for path, name, leaf, dim in zip(_torch.tree_paths((args, kwargs)), placeholders, leaves, dims, strict=True)
    )
    n_outputs = out_spec.num_leaves
    weights = {o: n_outputs + i for i, o in enumerate(module.graph.output_node().meta.get("weighted", ()))}
    return Program(module, inputs, in_spec, out_spec, model.training, batch, batch > 0, n_outputs, weights)


def find_batch(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leaves: list[Any],
    batch_dim: int | dict[str, int | None] | None,
) -> tuple[list[int | None], int]:
    """The batch dimension of every leaf (None: shared) and the batch size (0: none).

    The batch is the size at `batch_dim` of the first tensor that has such a dimension; other tensors are batched
    if they have the same size there.
    """
    names = _leaf_names(model, args, kwargs)
    chosen: list[int | None]
    if isinstance(batch_dim, dict):
        unknown = set(batch_dim) - set(names)
        if unknown:
            raise InputError(f"batch_dim names {sorted(unknown)}, but the inputs are {sorted(set(names))}")
        chosen = [batch_dim.get(name) for name in names]
    else:
        chosen = [0 if batch_dim is None else batch_dim] * len(leaves)
    size: int | None = None
    dims: list[int | None] = []
    for leaf, name, dim in zip(leaves, names, chosen, strict=True):
        fits = isinstance(leaf, torch.Tensor) and dim is not None and -leaf.dim() <= dim < leaf.dim()
        if not fits:
            if isinstance(batch_dim, dict) and dim is not None:
                raise InputError(f"batch_dim gives input '{name}' dimension {dim}, which it does not have")
            dims.append(None)
            continue
        assert dim is not None
        dim %= leaf.dim()
        if size is None:
            size = leaf.shape[dim]
            if size == 0:
                raise InputError(f"input '{name}' has no samples: shape {tuple(leaf.shape)}; give at least one")
        if leaf.shape[dim] == size:
            dims.append(dim)
        elif isinstance(batch_dim, dict):
            raise InputError(f"input '{name}' has {leaf.shape[dim]} samples at dimension {dim}, others have {size}")
        else:
            dims.append(None)
    return dims, size or 0


def _leaf_names(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """For every leaf, the parameter of `forward` that it was passed for."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    names = []
    for index, arg in enumerate(args):
        named = index < len(parameters) and parameters[index].kind is not inspect.Parameter.VAR_POSITIONAL
        names += [parameters[index].name if named else f"args[{index}]"] * len(_torch.tree_leaves(arg))
    for key, value in kwargs.items():
        names += [key] * len(_torch.tree_leaves(value))
    return names


def _export(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leaves: list[Any],
    dims: list[int | None],
    in_spec: _torch.TreeSpec,
) -> tuple[fx.GraphModule, _torch.TreeSpec]:
    dynamic = [
        ({} if dim is None else {dim: Dim.AUTO}) if isinstance(leaf, torch.Tensor) else None
        for leaf, dim in zip(leaves, dims, strict=True)
    ]
    # A tuple for positional and a dict for keyword arguments, merged by parameter name as export wants it.
    shapes_args, shapes_kwargs = _torch.tree_unflatten(dynamic, in_spec)
    parameters = list(inspect.signature(model.forward).parameters.values())
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters[: len(args) + 1]):
        shapes: Any = (*shapes_args, *shapes_kwargs.values()) if shapes_kwargs else ((shapes_args),)
    else:
        shapes = {p.name: s for p, s in zip(parameters, shapes_args, strict=False)}
        extra = {key: value for key, value in shapes_kwargs.items() if key not in {p.name for p in parameters}}
        shapes |= {key: value for key, value in shapes_kwargs.items() if key not in extra}
        if extra:
            keyword = next(p.name for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD)
            shapes[keyword] = extra
    for attempt in range(4):
        try:
            with _quiet():
                exported = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
            break
        except RuntimeError as error:
            if attempt == 3 or not _torch.register_output_type(error, model):
                raise
    module = exported.module()
    assert isinstance(module, fx.GraphModule)
    return module, exported.call_spec.out_spec


def _symbolic_trace(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[fx.GraphModule, _torch.TreeSpec]:
    """torch.fx.symbolic_trace with everything but this call's tensors made constant."""
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    names = {p.name: p for p in inspect.signature(model.forward).parameters.values()}
    constants = {
        name: (bound.arguments.get(name, p.default))
        for name, p in names.items()
        if not isinstance(bound.arguments.get(name), torch.Tensor)
    }
    if any(isinstance(leaf, torch.Tensor) for leaf in _torch.tree_leaves(constants)):
        raise CaptureError("torch.fx.symbolic_trace takes no nested inputs")
    tracer = fx.Tracer()
    tracer.record_stack_traces = True
    graph = tracer.trace(model, concrete_args=constants)
    module = fx.GraphModule(model, graph)
    module.graph.set_codegen(fx.graph.CodeGen())
    order = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node in order:  # concrete_args leaves placeholders behind, with asserts on them; the signature covers both
        if node.target not in bound.arguments:
            for user in list(node.users):
                module.graph.erase_node(user)
            module.graph.erase_node(node)
    result = graph.output_node().args[0]
    flat, out_spec = _torch.tree_flatten(result)
    graph.output_node().args = (tuple(flat),)
    return module, out_spec


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Export's own warnings, log lines and half-made graphs speak of its internals; its errors are shown whole."""
    loggers = [logging.getLogger(name) for name in ("torch.fx.experimental.symbolic_shapes", "torch.export")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _capture_error(model: nn.Module, error: BaseException) -> CaptureError:
    """`error` of torch.export as ours: the module and line where it happened, and what to change."""
    if isinstance(error, CaptureError):
        return error
    paths = {id(module): name or "(root)" for name, module in model.named_modules()}
    where, line = "(root)", ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None  # `self`, whatever its name
        if id(owner) in paths and frame.f_code.co_name not in ("_call_impl", "_wrapped_call_impl"):
            where, line = paths[id(owner)], f"{frame.f_code.co_filename}:{number}"
    text = str(error)
    if "data-dependent" in text or "DataDependent" in type(error).__name__ or "unbacked" in text:
        advice = "it decides on a tensor's values; use torch.where or torch.cond, or decide outside the model"
    elif "in output, which is not a known type" in text:
        advice = "return tensors, tuples, dicts or dataclasses, or register the class (torch.export.register_dataclass)"
    elif isinstance(error, TypeError):
        advice = "check that the example inputs are those that the model takes"
    else:
        advice = "make this part traceable by torch.export, or move it out of the model"
    return CaptureError(
        f"cannot capture module '{where}'" + (f" at {line}" if line else "") + f": {_first_line(error)}; {advice}"
    )


def is_getitem(node: fx.Node) -> bool:
    """Whether `node` takes an item out of a tuple."""
    return node.op == "call_function" and node.target is operator.getitem
