"""What a pipelined module shows to code that looks at a model before it calls it.

Libraries such as transformers' Trainer read the signature of `forward`, the class of the model (`isinstance`, its name,
the labels that its `forward` takes) and whether it is spread over devices already. They shall see those of the model.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import nn

from cost_models.hardware.devices import Device

# Python looks these up on the type of an object, so that the pipelined module does not have them.
_CONTAINER_METHODS = ("__len__", "__iter__", "__getitem__")

_Function = TypeVar("_Function", bound=Callable[..., Any])


def left_to_python(function: _Function) -> _Function:
    """A method that torch.compile leaves alone: inside a compiled function it breaks the graph and runs as it is.

    `torch.compiler.disable` alone does that, too, but adds tens of microseconds to every call outside.
    """
    disabled = torch.compiler.disable(function)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (disabled if torch.compiler.is_compiling() else function)(*args, **kwargs)

    del run.__wrapped__  # as in `ModelForward.like`
    return cast(_Function, run)


class ModelForward:
    """`forward` of the class of a pipelined module: bound to one, it has the signature of the model's `forward`."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run
        self.__doc__ = run.__doc__

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            return self._run
        function = module.__dict__.get("_forward_function")
        return MethodType(self._run if function is None else function, module)

    def like(self, model: nn.Module) -> Callable[..., Any]:
        """The function with the signature and the documentation of `model.forward`.

        It has no `__wrapped__`: Accelerate follows that to undo its own wrappers, and would arrive at the plain model.
        """
        run = self._run

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return run(self, *args, **kwargs)

        forward.__doc__ = model.forward.__doc__ or run.__doc__
        forward.__qualname__ = f"{type(model).__qualname__}.forward"
        try:
            own = inspect.signature(model.forward)
        except (TypeError, ValueError):  # written in C
            return forward
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        rest = own.parameters.values()
        if any(p.name == "self" for p in rest):
            first = first.replace(name="pipelined_module")
        if any(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in rest):
            first = first.replace(kind=inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = own.replace(parameters=[first, *rest])  # type: ignore[attr-defined]
        return forward


def visible_class(model: nn.Module, pipelined: type) -> type:
    """The class that `isinstance` and `.__class__` show for a pipelined `model`.

    That is the model's, except for containers: who meets an nn.Sequential iterates over it.
    """
    shown = type(model)
    return pipelined if any(hasattr(shown, name) for name in _CONTAINER_METHODS) else shown


def device_map(devices: Sequence[Device]) -> dict[str, str] | None:
    """The `hf_device_map` of a module over `devices`: the sign for Trainer and Accelerate to leave its tensors there
    and not to replicate it over all GPUs. None on CPUs, where nothing is placed.

    Trainer looks for two different devices, or for one that is not its own. A single GPU is named without its number,
    which is neither.
    """
    places = list(dict.fromkeys(device.torch_device for device in devices))
    if all(place.type == "cpu" for place in places):
        return None
    accelerators = [place for place in places if place.type != "cpu"]
    if len(accelerators) == 1:
        places = [torch.device(place.type) if place == accelerators[0] else place for place in places]
    return {f"device {i}": str(place) for i, place in enumerate(places)}
