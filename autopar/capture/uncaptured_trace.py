"""Which parts of a model run uncaptured, and tracing the rest.

    trace -- refused in module 'a.b' --> rehearse with 'a.b' opaque --> trace -- refused again --> 'a' opaque ...
          -- a torch.autograd.Function --> rehearse, its calls opaque --> trace

The smallest module that a tracer refuses becomes one opaque operator. If it cannot (it takes or returns values that no
graph holds, or results whose shape depends on values), the module around it does, up to the whole model.
"""

from __future__ import annotations

import enum
import hashlib
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from autopar.capture import torch_private
from autopar.capture.held_tensors import HeldTensors
from autopar.capture.module_paths import ModulePaths, running_module
from autopar.capture.parameter_writes import ParameterWriteError
from autopar.capture.registrations import RegistrationError
from autopar.capture.rehearsal import (
    CallNames,
    Rehearsal,
    calls_through,
    function_subject,
    is_constant,
    rehearse,
)
from autopar.capture.source_code import source_code
from autopar.capture.uncaptured import Structure, TensorResult, Uncaptured
from autopar.errors import CaptureError, WrongCallError, users_line
from autopar.errors.names import with_article

_library = torch.library.Library("autopar_uncaptured", "DEF")
_library.define("call(Tensor[] tensors, SymInt[] sizes, str name) -> Tensor[]")
_CALL = torch.ops.autopar_uncaptured.call


class _Tracing(threading.local):
    """What the trace that runs in this thread knows of its opaque calls."""

    results: dict[str, Callable[[], list[torch.Tensor]]] | None = None


_tracing = _Tracing()


@torch.library.register_fake("autopar_uncaptured::call", lib=_library)
def _fake(tensors: list[torch.Tensor], sizes: list[int], name: str) -> list[torch.Tensor]:
    assert _tracing.results is not None
    return _tracing.results[name]()


class RefusedError(CaptureError):
    """A tracer refused a part of the model: the module at `path`, or all custom Functions (`functions`)."""

    def __init__(self, message: str, path: str, short: str = "", *, functions: bool = False) -> None:
        super().__init__(message)
        self.path = path
        self.short = (short or message)[:200]  # the reason alone
        self.functions = functions


class RehearsalError(CaptureError):
    """The model does not run on an example some of whose tensors have no values, which right code may ask for."""


@dataclass(frozen=True)
class Opaque:
    """The parts of a model that run uncaptured."""

    reasons: Mapping[str, str] = field(default_factory=dict)  # path of a module -> why
    functions: bool = False  # calls of custom autograd Functions outside of these modules

    def __bool__(self) -> bool:
        return bool(self.reasons) or self.functions

    def after(self, refused: RefusedError, model: nn.Module) -> Opaque | None:
        """More parts, after a tracer refused with these; None if there are none left."""
        if refused.functions and not self.functions:
            return replace(self, functions=True)
        # A module may have several names, and one of them counts.
        paths = ModulePaths(model.named_modules())
        path = paths.of(model.get_submodule(refused.path)) or ""
        why, around = refused.short, next((p for p in (path, *_ancestors(path)) if p in self.reasons), None)
        if around is not None:
            if not around:
                return None
            # Code outside may call a module inside of an opaque part without calling that part itself.
            path, why = _parent(around), self.reasons[around]
        while path and not _has_forward(model.get_submodule(path)):
            path = _parent(path)
        alike = [path, *(_alike(model, path) if path else [])]
        reasons = {**self.reasons, **{p: why for p in alike if p not in self.reasons}}
        outermost = {p: why for p, why in reasons.items() if not any(outer in reasons for outer in _ancestors(p))}
        assert outermost.keys() != self.reasons.keys(), f"autopar found no further part to run uncaptured: {refused}"
        return replace(self, reasons=outermost)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _ancestors(path: str) -> Iterator[str]:
    """The paths of all modules around one, up to the root."""
    while path:
        path = _parent(path)
        yield path


def _has_forward(module: nn.Module) -> bool:
    """Whether a module can be called; a ModuleList or ModuleDict only holds others."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _alike(model: nn.Module, path: str) -> list[str]:
    """The paths of all modules of the same class and settings: what one tracer refused in one, it refuses in all."""
    own = model.get_submodule(path)

    def settings(module: nn.Module) -> dict[str, Any]:
        plain = (bool, int, float, str, type(None))
        return {k: v for k, v in vars(module).items() if isinstance(v, plain) and k != "_is_full_backward_hook"}

    text, chosen = repr(own), settings(own)
    return [
        name
        for name, module in model.named_modules()
        if type(module) is type(own) and settings(module) == chosen and repr(module) == text and name
    ]


@dataclass
class OpaqueCalls:
    """The opaque calls of a trace, by name."""

    rehearsal: Rehearsal
    operators: dict[str, Uncaptured] = field(default_factory=dict)


def rehearsed(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dims: Sequence[int | None], opaque: Opaque
) -> OpaqueCalls:
    """What the opaque parts return. Raises WrongCallError or RehearsalError if the model does not run."""
    try:
        return OpaqueCalls(rehearse(model, args, kwargs, dims, opaque.reasons.keys(), opaque.functions))
    except (ParameterWriteError, RegistrationError):
        raise
    except Exception as error:
        text = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        line = users_line(error)
        tensors = [*model.parameters(), *model.buffers(), *torch_private.tree_leaves((args, kwargs))]
        without_values = any(isinstance(x, torch.Tensor) and x.is_meta for x in tensors)
        raise (RehearsalError if without_values else WrongCallError)(
            f"the model itself raised {type(error).__name__} on this call{f' at {line}' if line else ''}: {text}; "
            "give inputs that it runs on"
        ) from error


def inside(model: nn.Module, opaque: Opaque) -> set[nn.Module]:
    """The opaque modules' inner modules, which run as they are. (The hooks of opaque modules themselves are marked.)"""
    found: set[nn.Module] = set()
    for path in opaque.reasons:
        module = model.get_submodule(path)
        found |= {m for m in module.modules() if m is not module}
    return found


@contextmanager
def traced_as_calls(
    model: nn.Module, opaque: Opaque, calls: OpaqueCalls | None, dims: Sequence[int | None]
) -> Iterator[None]:
    """Inside, while the model is traced, its opaque parts leave one call each. Raises RefusedError for a part that
    cannot be one operator."""
    if calls is None:
        with torch_private.custom_functions_through(_refuse_function, _without_checkpoint):
            yield
        return
    tracer = _Tracer(model, calls, dims)
    handle = model.register_forward_pre_hook(tracer.start, with_kwargs=True)
    before, _tracing.results = _tracing.results, tracer.results
    try:
        with ExitStack() as stack:
            stack.enter_context(calls_through(model, opaque.reasons.keys(), tracer.module_call))
            through = tracer.function_call if opaque.functions else _refuse_function
            stack.enter_context(torch_private.custom_functions_through(through, _without_checkpoint))
            yield
    finally:
        _tracing.results = before
        handle.remove()


def _refuse_function(cls: type, apply: Any, args: Any, kwargs: Any) -> Any:
    raise RefusedError(
        f"torch.autograd.Function '{cls.__qualname__}' defines its own backward, which a captured graph loses; "
        "write it with operators, or register it (torch.library.custom_op and register_autograd)",
        "",
        functions=True,
    )


def _without_checkpoint(_: type, __: Any, args: Any, ___: Any) -> Any:
    """What a reentrant checkpoint computes: its Function runs it without gradients, and again in a backward of its own,
    which a graph would lose. It has no gradients where none of its arguments has."""
    function, _, *inputs = args
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    with torch.set_grad_enabled(torch.is_grad_enabled() and (not tensors or any(t.requires_grad for t in tensors))):
        return function(*inputs)


class _Tracer:
    """Turns opaque calls into calls of one torch operator while a model is traced."""

    def __init__(self, model: nn.Module, calls: OpaqueCalls, dims: Sequence[int | None]) -> None:
        self.results: dict[str, Callable[[], list[torch.Tensor]]] = {}
        self._calls, self._dims, self._names = calls, dims, CallNames()
        self._model = model
        self._samples: Any = None  # symbolic, where the batch may have any size

    def start(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A trace begins. (Export may begin several.)"""
        self._names.reset()
        self._calls.operators.clear()
        leaves = torch_private.tree_leaves((args, dict(sorted(kwargs.items()))))
        sizes = [leaf.shape[dim] for leaf, dim in zip(leaves, self._dims, strict=True) if dim is not None]
        self._samples = sizes[0] if sizes else 0

    def module_call(
        self, path: str, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        held = self._calls.rehearsal.held[path]
        return self._call(path, path, type(module), held, args, kwargs)

    def function_call(self, cls: type, apply: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        path = running_module(self._model) or ""
        return self._call(function_subject(cls), path, cls, None, args, kwargs)

    def _call(
        self,
        subject: str,
        path: str,
        cls: type,
        held: HeldTensors | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        name = self._names.next(subject)
        what = f"module '{path or '(root)'}'" if subject == path else f"torch.autograd.Function '{cls.__qualname__}'"
        call = self._calls.rehearsal.calls.get(name)
        inputs, tensors, sizes = Structure.of((args, kwargs))
        why = "is called in the trace only" if call is None else call.refused or _refused_inputs(inputs)
        if not why and call is not None and len(call.input_sizes) != len(tensors):
            why = "takes other tensors in the trace than when it runs"
        if why or call is None:
            raise RefusedError(f"{what} cannot run as one operator, because it {why}", path)
        effects = call.effects
        if not torch.is_grad_enabled() and (effects.random or effects.written or effects.stateful):
            # A nested graph; its random numbers and writes would be out of reach.
            raise RefusedError(f"{what} cannot run as one operator under no_grad, because it has effects", path)
        self._calls.operators[name] = Uncaptured(
            _Apply(cls),
            held,
            path,
            cls.__name__,
            inputs,
            call.outputs,
            call.input_sizes,
            call.input_gradients,
            call.results,
            effects,
            _identity(cls),
        )
        self.results[name] = lambda: [self._empty(result) for result in call.results]
        own = held.current() if held is not None else []
        returned = _CALL([*tensors, *own], sizes, name)
        return call.outputs.together(returned)

    def _empty(self, result: TensorResult) -> torch.Tensor:
        sizes = [base + slope * self._samples if slope else base for base, slope in result.sizes]
        tensor = torch.empty([sizes[d] for d in result.order], dtype=result.dtype, device=result.device)
        return tensor.permute(sorted(range(len(sizes)), key=lambda d: result.order[d]))


class _Apply:
    """The apply of an autograd.Function, as it is when it is called."""

    def __init__(self, cls: Any) -> None:
        self._cls = cls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._cls.apply(*args, **kwargs)


def _refused_inputs(inputs: Structure) -> str:
    for constant in inputs.constants:
        if not (is_constant(constant) or isinstance(constant, enum.Enum)):
            return f"takes {with_article(type(constant).__name__)}, which a graph cannot hold"
    return ""


def _identity(cls: type) -> str:
    """A hash of the code of a class, by which cached times are found again."""
    code = source_code(cls) or f"{cls.__module__}.{cls.__qualname__}"
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def is_opaque_call(node: fx.Node) -> bool:
    """Whether a node is a call that `traced_as_calls` left."""
    return node.target is _CALL.default


def join(module: fx.GraphModule, calls: OpaqueCalls | None) -> None:
    """Replace the calls that `traced_as_calls` left in a graph, and in the graphs nested in it, by their operators."""
    if calls is None:
        return
    for node in module.graph.nodes:
        if is_opaque_call(node):
            tensors, sizes, name = node.args
            uncaptured = calls.operators[str(name)]
            n = len(uncaptured.inputs.tensors)
            node.target, node.args = uncaptured, (*tensors[:n], *sizes, *tensors[n:])
            if uncaptured.held is not None:  # its own code, not the call
                code = type(uncaptured.held.modules[0]).forward.__code__
                where = f'  File "{code.co_filename}", line {code.co_firstlineno}, in forward\n'
                node.meta["stack_trace"] = node.meta.get("stack_trace", "") + where
            assert all(user.target is operator.getitem for user in node.users)
    for child in module.children():
        if isinstance(child, fx.GraphModule):
            join(child, calls)
    module.recompile()
