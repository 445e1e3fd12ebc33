"""Models whose forward writes its own parameters are refused, with the parameter's name.

A pipeline runs a forward once for every micro-batch, on replicas with copies of their own, and again where a stage
recomputes; planning runs it to measure it. A write would be repeated, lost, or change the model while it is planned.
Three ways to write are looked for:

    weight.clamp_(), weight.data.mul_()     in the captured graph: an operator that writes what aliases a parameter
    weight.data = ...                       an assignment while the model is captured
    both, in code that runs uncaptured      the parameters of such modules before and after they run
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from autopar.capture import torch_private
from autopar.capture.mode_blocks.calls import called_graph
from autopar.capture.module_state import same_view
from autopar.errors import CaptureError
from cost_models.graphs import get_attribute

_DATA: Any = torch.Tensor.data


class ParameterWriteError(CaptureError):
    """The forward of the model writes one of its parameters."""


def refusal(name: str, where: str) -> ParameterWriteError:
    return ParameterWriteError(
        f"the forward writes the parameter '{name}' ({where}). A pipeline runs a forward several times in a step, so "
        "that it would be written several times, or on copies. Write it after optimizer.step() instead, compute the "
        "changed weight without storing it (torch.nn.utils.parametrize), or make it a buffer"
    )


_Write = tuple[str, fx.Node]


def written_parameter(module: fx.GraphModule) -> _Write | None:
    """The first parameter that a traced graph writes, and the operator that does."""
    return _scanned(module, ())[0]


def unseen_write(module: fx.GraphModule) -> fx.Node | None:
    """The first operator within a block under no_grad or autocast that writes what the block got, where the rest of the
    graph does not read the block's result in its place: no edge of the graph shows that write."""
    order = {node: number for number, node in enumerate(module.graph.nodes)}
    for node in module.graph.nodes:
        region = called_graph(module, node)
        if region is None:
            continue
        inner, arguments = region
        for place, value in enumerate(arguments):
            if not isinstance(value, fx.Node):
                continue
            write, _ = _scanned(inner, ["written" if other == place else None for other in range(len(arguments))])
            if write is not None and (not node.users or any(order[user] > order[node] for user in value.users)):
                return write[1]
    return None


def _scanned(module: fx.GraphModule, given: Sequence[str | None]) -> tuple[_Write | None, str | None]:
    """The first write, and the parameter that a result may share memory with. `given`: for each input of the graph the
    parameter that it shares memory with."""
    aliases: dict[fx.Node, str] = {}  # nodes that share memory with a parameter -> its name
    inputs = iter(given)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            name = next(inputs, None)
            if name is not None:
                aliases[node] = name
            continue
        if node.op == "get_attr":
            if isinstance(get_attribute(module, str(node.target)), nn.Parameter):
                aliases[node] = str(node.target)
            continue
        shared = [source for source in node.all_input_nodes if source in aliases]
        if node.op == "output":
            return None, next((aliases[source] for source in shared), None)
        if not shared:
            continue
        region = called_graph(module, node)
        if region is not None:  # with a grad mode or autocast of its own
            inner, arguments = region
            found, result = _scanned(inner, [aliases.get(x) if isinstance(x, fx.Node) else None for x in arguments])
            if found is not None:
                return found, None
            if result is not None:
                aliases[node] = result
            continue
        written, aliased = _effects(node)
        for source in shared:
            if source in written:
                return (aliases[source], node), None
            if source in aliased:
                aliases[node] = aliases[source]
    return None, None


def _effects(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The arguments that a node writes, and those that its result may share memory with."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # from symbolic_trace: methods and functions by name
        first = [node.args[0]] if node.args and isinstance(node.args[0], fx.Node) else []
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        in_place = node.op == "call_method" and name.endswith("_") and not name.endswith("__")
        return (first if in_place else []), (first if name in _VIEWS or in_place else [])
    written: list[fx.Node] = []
    aliased: list[fx.Node] = []
    for argument, value in zip(schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and isinstance(value, fx.Node):
            (written if argument.alias_info.is_write else aliased).append(value)
    by_name = {argument.name: argument for argument in schema.arguments}
    for name, value in node.kwargs.items():
        info = by_name[name].alias_info if name in by_name else None
        if info is not None and isinstance(value, fx.Node):
            (written if info.is_write else aliased).append(value)
    return written, [*aliased, *written]


_VIEWS = {"getattr", "getitem", "detach", "view", "reshape", "t", "transpose", "permute", "flatten", "squeeze"}


_refusing: list[Callable[[nn.Parameter], None]] = []  # of all captures under way, in any thread
_lock = threading.Lock()


@contextmanager
def parameters_kept(model: nn.Module) -> Iterator[None]:
    """Inside, `parameter.data = ...` in this thread raises CaptureError and assigns nothing; on leaving, parameters
    require grad as before. `layer.to(dtype)` and the like leave layers alone that have this type: no write."""
    required = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    thread = threading.get_ident()

    def refuse(parameter: nn.Parameter) -> None:
        if threading.get_ident() == thread and (id(parameter) in names or torch_private.is_fake(parameter)):
            raise refusal(names.get(id(parameter)) or _name_of(parameter, model), "it assigns to its .data")

    with _lock:
        if not _refusing:
            nn.Parameter.data = property(_DATA.__get__, _assign)  # type: ignore[assignment]
            for name, original in _CASTS.items():
                setattr(nn.Module, name, _unless_done(original))
        _refusing.append(refuse)
    try:
        yield
    finally:
        with _lock:
            for parameter, before in required:
                parameter.requires_grad = before
            _refusing.remove(refuse)
            if not _refusing:
                del nn.Parameter.data
                for name, original in _CASTS.items():
                    setattr(nn.Module, name, original)


def _assign(parameter: nn.Parameter, value: torch.Tensor) -> None:
    if same_view(parameter, value):
        return
    for refuse in tuple(_refusing):
        refuse(parameter)
    _DATA.__set__(parameter, value)


_CASTS = {name: getattr(nn.Module, name) for name in ("to", "float", "double", "half", "bfloat16")}
_TYPES = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}


def _unless_done(cast: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """`cast` of a module, left out where it changes nothing: a tracer cannot follow how it replaces all parameters."""

    @functools.wraps(cast)
    def wanted(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        done = _has_already(module, [*args, *kwargs.values(), *filter(None, [_TYPES.get(cast.__name__)])])
        return module if done else cast(module, *args, **kwargs)

    return wanted


def _has_already(module: nn.Module, wanted: Sequence[Any]) -> bool:
    """Whether all tensors of a module have the types and devices in `wanted`; False if anything else is in it."""
    types = [one for one in wanted if isinstance(one, torch.dtype)]
    devices = [torch.device(one) for one in wanted if isinstance(one, (torch.device, str))]
    tensors = [*module.parameters(), *module.buffers()]
    return len(types) + len(devices) == len(wanted) and all(
        (all(x.dtype == one for one in types) or not (x.is_floating_point() or x.is_complex()))
        and all(x.device == one for one in devices)
        for x in tensors
    )


def _name_of(parameter: nn.Parameter, model: nn.Module) -> str:
    """Of a parameter that a tracer has put in the place of the model's."""
    return next((name for name, own in model.named_parameters() if own is parameter), "of the model")


class ParameterValues:
    """The parameters of some modules at one time, on the CPU."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._places = [(m, name, p) for m in modules for name, p in m._parameters.items() if p is not None]
        self._values = {id(p): p.detach().to("cpu", copy=True) for _, _, p in self._places}
        self._data = {id(p): p.detach() for _, _, p in self._places}

    def put_back(self) -> list[int]:
        """Set all parameters as they were; the ids of those that were not."""
        written = []
        with torch.no_grad():
            for module, name, parameter in self._places:
                now, before = module._parameters.get(name), self._values[id(parameter)]
                assigned = parameter.data_ptr() != self._data[id(parameter)].data_ptr()
                if now is parameter and not assigned and same_values(parameter.detach().cpu(), before):
                    continue
                written.append(id(parameter))
                module._parameters[name] = parameter
                _DATA.__set__(parameter, self._data[id(parameter)])
                _DATA.__get__(parameter).copy_(before)
        return written


def same_values(now: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether two tensors have the same shape and values, NaN in the same places."""
    return now.shape == before.shape and bool(((now == before) | ((now != now) & (before != before))).all())
