"""The arguments of the public calls, checked: the model, the devices, the example."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from autopar.analysis.example import Example, LossFunction
from autopar.capture.registrations import refuse_uninitialized
from autopar.capture.torch_private import is_fake
from autopar.errors import InputError
from autopar.options import AHEAD_ONLY, Data
from autopar.plan.plan import Plan
from autopar.runtime.call_checks import check_model
from autopar.runtime.initial_values.missing_values import is_hollow
from autopar.runtime.ranks.parameters.model_tables import check_plain, check_plain_on
from autopar.runtime.ranks.world import World
from cost_models import Cluster, Device, DeviceError, parse_devices

Devices = Sequence[str | torch.device] | str | torch.device | Cluster | None
Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments


def refuse_estimated(options: Mapping[str, Any]) -> None:
    """Raise InputError for options that only say how a step runs on a cluster that is not at hand."""
    estimated = [name for name in AHEAD_ONLY if options.get(name) is not None]
    if estimated:
        raise InputError(
            f"{', '.join(estimated)}: only for a cluster that is not at hand; devices at hand are measured as they run"
        )


def check_module(model: object) -> None:
    """Raise InputError for what is no module, or one that cannot run as a pipeline."""
    if not isinstance(model, nn.Module):
        if isinstance(model, type) and issubclass(model, nn.Module):
            raise InputError(f"model is the class {model.__name__}; give an object of it, {model.__name__}(...)")
        raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    check_model(model)


def check_plan(plan: object, name: str = "plan") -> None:
    """Raise InputError for what is neither a plan nor None."""
    if plan is not None and not isinstance(plan, Plan):
        file = "; Plan.load(path) reads a file" if isinstance(plan, (str, Path)) else ""
        raise InputError(f"{name} must be a Plan, got {type(plan).__name__}{file}")


def check_data(data: object, devices: Devices) -> None:
    """Raise InputError for what ranks cannot pass to calls."""
    if data not in get_args(Data):
        raise InputError(f"data must be one of {', '.join(map(repr, get_args(Data)))}, got {data!r}")
    if data == "per-rank" and devices is not None:
        raise InputError(
            "data='per-rank' is for one process a device (torchrun, without devices=); in one process, every call has "
            "the whole batch"
        )


def devices_at_hand(
    model: nn.Module, devices: Devices, optimizer: object = None, world: World | None = None
) -> tuple[Device, ...]:
    """The devices to run on, with `world` one a rank.

    What the model and its optimizer hold there already counts as available: plans count it. Raises InputError for a
    model without values: it cannot run; on ranks also for a model that a plan has placed already.
    """
    if world is not None:
        check_plain_on(world, model)
    refuse_uninitialized(model)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta or is_fake(tensor):
            raise InputError(
                f"'{name}' has no values (it is on the meta device, or fake): load the model's weights to run it here, "
                "or give autopar.plan a Cluster.preset(...) to plan ahead"
            )
    if world is not None:
        return world.devices(tensors_of_training(model, optimizer))
    if not isinstance(devices, Cluster):
        return parse_devices(devices, tensors_of_training(model, optimizer))
    if not devices.at_hand:
        raise DeviceError(f"{devices.title} is not at hand: autopar.plan makes plans for it, to run where it is")
    return devices.at_hand


def recapturing(captured: Callable[[nn.Module], Example], world: World | None) -> Callable[[nn.Module], Example]:
    """`captured`, for later changes of a plan: on ranks it refuses a model that a plan has placed in the meantime."""

    def recaptured(model: nn.Module) -> Example:
        if world is not None:  # without the other ranks: one rank may change a plan alone
            check_plain(model)
        return captured(model)

    return recaptured


def tensors_of_training(model: nn.Module, optimizer: object) -> Iterator[torch.Tensor]:
    """Parameters and buffers in memory, gradients, and the optimizer's states."""
    yield from (buffer for buffer in model.buffers() if not is_hollow(buffer))
    for parameter in model.parameters():
        if not is_hollow(parameter):
            yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    if isinstance(optimizer, torch.optim.Optimizer):
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def need_example(what: str, args: tuple[Any, ...] | None, kwargs: dict[str, Any] | None) -> Call:
    """The example call. Raises InputError, naming the use (`what`), if there is none."""
    if args is None and kwargs is None:
        raise InputError(f"{what} needs an example call: give example_args= or example_kwargs=")
    return example_call(args, kwargs)


def example_call(args: tuple[Any, ...] | None, kwargs: dict[str, Any] | None) -> Call:
    """Positional and keyword arguments; empty where not given. Raises InputError for other types."""
    if args is not None and not isinstance(args, (tuple, list)):
        raise InputError(f"example_args must be a tuple of arguments, got {type(args).__name__}; write (x,)")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise InputError(f"example_kwargs must be a dict of keyword arguments, got {type(kwargs).__name__}")
    return tuple(args or ()), dict(kwargs or {})


def check_loss_and_target(
    loss_fn: LossFunction | None, target: object, call: tuple[nn.Module, Mapping[str, Any]] | None = None
) -> None:
    """Raise InputError for one without the other, and for a loss that is no function.

    `call`: the model and the keyword arguments for its forward, which may include a misspelt `target` or `loss_fn`.
    """
    if loss_fn is not None and not callable(loss_fn):
        raise InputError(
            f"loss_fn must be a function of (output, target) that returns the loss, such as "
            f"torch.nn.functional.mse_loss, got {loss_fn!r}"
        )
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        raise InputError(f"loss_fn is the class {loss_fn.__name__}; give one of its objects, {loss_fn.__name__}()")
    if (target is None) == (loss_fn is None):
        return
    given, missing, what = "loss_fn", "target", "what loss_fn(output, target) compares the output with"
    if loss_fn is None:
        given, missing, what = "target", "loss_fn", "the function that makes a loss of output and target"
    unknown = "" if call is None else _not_of_forward(*call)
    raise InputError(
        f"{given} needs {missing}=: {what}; or give neither, if the model itself returns its loss{unknown}"
    )


def _not_of_forward(model: nn.Module, kwargs: Mapping[str, Any]) -> str:
    """A sentence that names keyword arguments unknown to the model's forward; "" if there are none."""
    with contextlib.suppress(TypeError, ValueError):  # a forward in C has no signature
        parameters = inspect.signature(model.forward).parameters
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            unknown = [repr(name) for name in kwargs if name not in parameters]
            if unknown:
                return f". {type(model).__name__}.forward has no argument {' or '.join(unknown)}"
    return ""
