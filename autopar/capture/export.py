"""torch.export, with torch.fx.symbolic_trace for what it refuses, and errors that name the user's code."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import os
import re
import traceback
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.utils.checkpoint
from torch import fx, nn
from torch.export import Dim

from autopar.capture import torch_private
from autopar.capture.buffer_assignments import Assignments, BufferAssignmentError
from autopar.capture.module_paths import ModulePaths
from autopar.capture.parameter_writes import ParameterWriteError
from autopar.capture.registrations import RegistrationError, registrations_refused
from autopar.capture.repeated_layers.trace_once import forget_traced_layers
from autopar.capture.symbolic_lengths import with_lengths
from autopar.capture.symbolic_trace import symbolically_traced
from autopar.capture.uncaptured_trace import RefusedError
from autopar.capture.unregistered import unregistered
from autopar.errors import InputError, issue_again
from cost_models.measuring.environment import readable_tf32

log = logging.getLogger(__name__)

# Files whose warnings are about tracing itself: torch, and contextlib, where a wrong stack level puts some of them.
_CHECKPOINT_FILE = inspect.getfile(torch.utils.checkpoint)
_TRACER_FILES = (os.path.dirname(inspect.getfile(torch)) + os.sep, inspect.getfile(contextlib))

# Running uncaptured would not help.
_LASTING = (BufferAssignmentError, ParameterWriteError, RegistrationError)

Tracers = Literal["export", "symbolic_trace", "both"]  # "both": symbolic_trace where export refuses


@dataclass(frozen=True)
class Traced:
    """A graph as the tracer returned it, before cleanup."""

    module: fx.GraphModule
    out_spec: torch_private.TreeSpec
    guards: Callable[..., Any]  # raises AssertionError for flat inputs that the graph does not fit
    unregistered: str = ""  # why the graph of a model must be refused (unregistered.py); a loss may have such tensors


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    symbols: Sequence[Collection[int | None]],
    in_spec: torch_private.TreeSpec,
    *,
    order: Sequence[str] | None = None,
    tracers: Tracers = "export",
) -> Traced:
    """Trace `model` for a call like this into one graph.

    `symbols`: for every flat input its dimensions with symbolic size; None for a Python int that is a symbol. `order`:
    of the keywords in the call (default: as in `kwargs`). Raises RefusedError, and ParameterWriteError or
    RegistrationError where the model's code changes what modules hold.
    """
    if tracers == "symbolic_trace":
        try:
            return Traced(*symbolically_traced(model, args, kwargs), _unguarded)
        except Exception as error:
            raise _refused(model, error) from error
    caught: list[warnings.WarningMessage] = []
    try:
        traced = with_lengths(lambda: _export(model, args, kwargs, symbols, in_spec, order or list(kwargs), caught))
    except _LASTING:
        raise
    except Exception as error:  # export may raise anything; then the fallback decides
        refused = _refused(model, error)
        _end_checkpoints(error)
        if isinstance(error, RefusedError) or tracers == "export":
            raise refused from error
        log.info("torch.export refused the model (%s); trying torch.fx.symbolic_trace", _first_line(error))
        try:
            return Traced(*symbolically_traced(model, args, kwargs), _unguarded)
        except Exception:
            raise refused from error
    issue_again(caught)
    return traced


def _end_checkpoints(error: BaseException) -> None:
    """End the checkpoints whose function has raised `error`. torch 2.11 leaves that to the garbage collector, and the
    next forward would run under their hooks on saved tensors."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename == _CHECKPOINT_FILE:
            for value in frame.f_locals.values():
                if isinstance(value, types.GeneratorType):
                    value.close()


def check_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise InputError if `model.forward` does not take these arguments."""
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        parameters = ", ".join(inspect.signature(model.forward).parameters)
        raise InputError(f"{type(model).__name__}.forward({parameters}): {error}") from None


@contextlib.contextmanager
def _plain_signature(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], order: Sequence[str]
) -> Iterator[list[str]]:
    """The names of this call's arguments, in order.

    torch.export does not support *args and **kwargs well. If `forward` has them, replace it inside by a function whose
    signature names every argument of this call, and which passes keywords on in their `order` in the call.
    """
    signature = inspect.signature(model.forward)
    kinds = inspect.Parameter
    variadic = [p for p in signature.parameters.values() if p.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)]
    positional = [
        p.name for p in signature.parameters.values() if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    names = [positional[i] if i < len(positional) else f"argument_{i}" for i in range(len(args))]
    if not variadic:
        yield [*names, *kwargs]
        return
    inner = model.forward

    def plain(*call_args: Any, **call_kwargs: Any) -> Any:
        return inner(*call_args, **{name: call_kwargs[name] for name in order})

    parameters = [kinds(n, kinds.POSITIONAL_ONLY) for n in names] + [kinds(n, kinds.KEYWORD_ONLY) for n in kwargs]
    plain.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    own = vars(model).get("forward")
    model.forward = plain
    try:
        yield [*names, *kwargs]
    finally:
        if own is None:
            del model.forward
        else:
            model.forward = own


class _UnknownOutputError(Exception):
    """The model returns a value that no graph can return."""

    def __init__(self, cls: type, output: Any) -> None:
        leaves = zip(torch_private.tree_paths(output), torch_private.tree_leaves(output), strict=True)
        entry = next((path for path, leaf in leaves if type(leaf) is cls), "")
        name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
        self.short = f"its output{entry} is a {name}"
        super().__init__(
            f"cannot capture module '(root)': {self.short}, which no graph returns; drop it from the output, or return "
            "it beside the model. A class that holds tensors may be a dataclass, or registered "
            "(torch.export.register_dataclass)"
        )


def _unguarded(*_: Any) -> None:
    """The guards of a graph without guards."""


def _export(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    symbols: Sequence[Collection[int | None]],
    in_spec: torch_private.TreeSpec,
    order: Sequence[str],
    caught: list[warnings.WarningMessage],
) -> Traced:
    """Trace with torch.export; put the warnings of the model's own code into `caught`."""
    leaves = torch_private.tree_leaves((args, kwargs))
    dynamic: list[Any] = [
        dict.fromkeys(dims, Dim.AUTO) if isinstance(leaf, torch.Tensor) else Dim.AUTO if dims else None
        for leaf, dims in zip(leaves, symbols, strict=True)
    ]
    shapes_args, shapes_kwargs = torch_private.shapes_tree(in_spec, dynamic)
    returned: list[Any] = []
    assignments = Assignments(model)
    for attempt in range(4):
        forget_traced_layers()
        watch = model.register_forward_hook(lambda *call: returned.append(call[-1]))
        try:
            with _quiet(caught), readable_tf32(), _plain_signature(model, args, kwargs, order) as names:
                shapes = dict(zip(names, [*shapes_args, *shapes_kwargs.values()], strict=True))
                with registrations_refused(model), assignments.recorded(), torch_private.grad_modes_kept():
                    exported = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
            break
        except (RuntimeError, TypeError) as error:
            if attempt == 3 or not torch_private.register_output_type(error, model):
                unknown = torch_private.unknown_output(error)
                if unknown is not None and returned:
                    raise _UnknownOutputError(unknown, returned[-1]) from error
                raise
        finally:
            watch.remove()
    module = exported.module()
    assert isinstance(module, fx.GraphModule)
    refused = unregistered(model, exported, module.graph)
    assignments.write(module)
    guards = getattr(module, "_guards_fn", None)
    return Traced(module, exported.call_spec.out_spec, guards if guards is not None else _unguarded, refused)


_TRACER_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch.export", "torch._subclasses.fake_tensor")


@contextlib.contextmanager
def _quiet(caught: list[warnings.WarningMessage]) -> Iterator[None]:
    """Hide export's own warnings, log lines and printed graphs, which are about its internals; errors still propagate.

    All other warnings go into `caught`.
    """
    loggers = [logging.getLogger(name) for name in _TRACER_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(record=True) as recorded, contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("always")
            yield
        caught[:] = [w for w in recorded if not w.filename.startswith(_TRACER_FILES)]
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _refused(model: nn.Module, error: BaseException) -> RefusedError:
    """`error` of torch.export as an error that names the module, the line and what to change."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, _UnknownOutputError):
        return RefusedError(str(error), "", error.short)
    paths = ModulePaths(model.named_modules())
    where, line = "", ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        path = paths.of_frame(frame)
        if path is not None and frame.f_code.co_name not in ("_call_impl", "_wrapped_call_impl"):
            where, line = path, f"{frame.f_code.co_filename}:{number}"
    text = str(error)
    if not where:  # export found out only after the module had run
        named = re.search(r"model attribute: ([\w.]+)\.\w+", text)
        where = named[1] if named and named[1] in dict(model.named_modules()) else ""
    if "data-dependent" in text or "DataDependent" in type(error).__name__ or "unbacked" in text:
        advice = "control flow depends on a tensor's values; use torch.where or torch.cond, or decide outside the model"
    elif isinstance(error, TypeError):
        advice = "check that the example inputs are what the model expects"
    else:
        advice = "make this part traceable by torch.export, or move it out of the model"
    at = f" at {line}" if line else ""
    message = f"cannot capture module '{where or '(root)'}'{at}: {_first_line(error)}; {advice}"
    return RefusedError(message, where, f"{os.path.basename(line)}: {_first_line(error)}")
