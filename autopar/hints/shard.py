"""`shard()`: the user fixes the layouts of some tensors, and the search chooses all others (like mindspore.shard).

    autopar.shard(model.fc, in_strategy=((4, 1),), parameter_plan={"weight": (1, 1)})     a module: returned with a hint
    matmul = autopar.shard(torch.matmul, in_strategy=((4, 1), (1, 1)))                    a function: call the result
    mesh = autopar.Layout((2, 2, 2), ("dp", "sp", "mp"))
    autopar.shard(model.block, in_strategy=(mesh(("dp", "sp"), "None", "mp"),))           by the named axes of a mesh

A strategy has one entry per tensor: the number of parts of each dimension, or the mesh axes that split it. If the parts
are fewer than the devices, groups of devices repeat the same work. `shard` checks what needs no graph; planning checks
the rest against the captured model (`autopar.planner.hint_constraints.shard_hints`).
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, overload

from torch import nn

from autopar.errors import InputError
from autopar.errors.names import with_checked_names
from autopar.hints.layout import Layout, ShardHint, TensorLayout, TensorSplit, misfits, parts_of
from autopar.hints.store import add_hint, hints_of

_Module = TypeVar("_Module", bound=nn.Module)


class _Interceptor(threading.local):
    call: Callable[..., Any] | None = None  # (function, hint, args, kwargs) -> what the function returns


_interceptor = _Interceptor()


@contextmanager
def sharded_calls_through(call: Callable[..., Any]) -> Iterator[None]:
    """Inside, this thread runs each call of a sharded function as `call(function, hint, args, kwargs)`."""
    before, _interceptor.call = _interceptor.call, call
    try:
        yield
    finally:
        _interceptor.call = before


class ShardedFunction:
    """A function with a shard hint. The hint takes effect where a model that calls it is captured; any other call just
    runs the function."""

    def __init__(self, function: Callable[..., Any], hint: ShardHint) -> None:
        functools.update_wrapper(self, function)
        self.function, self.hint = function, hint

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _interceptor.call is None:
            return self.function(*args, **kwargs)
        return _interceptor.call(self.function, self.hint, args, kwargs)

    def __repr__(self) -> str:
        return f"shard({getattr(self.function, '__name__', self.function)}, {self.hint})"


@overload
def shard(
    target: _Module, in_strategy: Any = None, out_strategy: Any = None, parameter_plan: Mapping[str, Any] | None = None
) -> _Module: ...


@overload
def shard(
    target: Callable[..., Any],
    in_strategy: Any = None,
    out_strategy: Any = None,
    parameter_plan: Mapping[str, Any] | None = None,
) -> Callable[..., Any]: ...


@with_checked_names
def shard(
    target: Any, in_strategy: Any = None, out_strategy: Any = None, parameter_plan: Mapping[str, Any] | None = None
) -> Any:
    """Fix how the tensors of a module or a function are split over the devices.

    If the target is a single operator, that operator reads its inputs in the given layouts. If it is several operators,
    the inputs are brought into the given layouts where the first operators read them. The search chooses the layouts of
    all other tensors.

    Args:
        target: an nn.Module (the hint holds for each of its calls), or a function. Call the returned function in
            `forward`; the hint holds for each call separately.
        in_strategy: a tuple with one entry per tensor input, in the order of the arguments of `forward`. An entry is a
            tuple with the number of parts of each dimension, a `Layout` applied to axis names, or None (the search
            chooses). Default: the search chooses for all inputs.
        out_strategy: the same for the tensors that the target returns; partial sums are added up first.
        parameter_plan: for modules only: how each parameter is stored, by its name relative to the module.

    Returns:
        The module itself, or a function to call in place of `target`.

    Raises:
        InputError: lists everything that is wrong. Errors that only the captured model shows are raised as PlanError
            when the model is planned.
    """
    is_module = isinstance(target, nn.Module)
    if not callable(target):
        raise InputError(f"shard takes a torch.nn.Module or a function, got {type(target).__name__}")
    name = f"shard({type(target).__name__ if is_module else getattr(target, '__name__', target)!s})"
    if isinstance(target, ShardedFunction):
        raise InputError(f"{name}: the function already has the shard hint {target.hint}; give the function itself")
    problems: list[str] = []
    if in_strategy is None and out_strategy is None and not parameter_plan:
        problems.append("the hint is empty; give in_strategy, out_strategy or parameter_plan")
    inputs = _parse_side("in_strategy", in_strategy, problems)
    outputs = _parse_side("out_strategy", out_strategy, problems)
    hint = ShardHint(inputs, outputs, _parse_parameters(parameter_plan, target, problems))
    problems += _mesh_problems(hint)
    existing = hint_of(target) if is_module else None
    if existing is not None and existing != hint and not problems:
        problems.append(f"the module already has the shard hint {existing}; autopar.clear_hints removes it")
    if problems:
        raise InputError(f"{name}: " + "; ".join(problems))
    if not is_module:
        return ShardedFunction(target, hint)
    add_hint(target, shard=hint)
    return target


def hint_of(module: nn.Module) -> ShardHint | None:
    """The shard hint on a module; None without one."""
    return hints_of(module).shard


def hinted_modules(model: nn.Module) -> dict[str, tuple[nn.Module, ShardHint]]:
    """The modules of `model` that have a shard hint, by path."""
    hints = ((path, module, hint_of(module)) for path, module in model.named_modules())
    return {path: (module, hint) for path, module, hint in hints if hint is not None}


def unwrap_functions(module: nn.Module) -> None:
    """Replace sharded functions among the attributes of `module` by the functions that they wrap."""
    for name, value in list(vars(module).items()):
        if isinstance(value, ShardedFunction):
            setattr(module, name, value.function)


# -- checks that need no graph: each appends what is wrong to `problems` -----------------------------------------------


def _parse_side(name: str, strategy: Any, problems: list[str]) -> tuple[TensorSplit | None, ...] | None:
    """in_strategy or out_strategy, with one entry per tensor."""
    if strategy is None:
        return None
    if isinstance(strategy, TensorLayout):
        problems.append(f"{name} must have one entry per tensor; write ({strategy},)")
        return None
    if not isinstance(strategy, (tuple, list)) or not strategy:
        problems.append(f"{name} must be a tuple with one entry per tensor, such as ((4, 1),), got {strategy!r}")
        return None
    if all(isinstance(entry, int) for entry in strategy):
        problems.append(f"{name} must have one entry per tensor; write ({tuple(strategy)},) instead of {strategy!r}")
        return None
    return tuple(
        None if entry is None else _parse_split(f"{name}[{i}]", entry, problems) for i, entry in enumerate(strategy)
    )


def _parse_split(where: str, entry: Any, problems: list[str]) -> TensorSplit | None:
    """The split of one tensor; None if it is wrong. `where`: the argument as messages name it."""
    if isinstance(entry, TensorLayout):
        return entry
    if isinstance(entry, Layout):
        problems.append(f"{where} is a Layout; call it with a name per dimension, as in layout({entry.names[0]!r})")
        return None
    if not isinstance(entry, (tuple, list)):
        problems.append(f"{where} must be a tuple with the number of parts of each dimension, got {entry!r}")
        return None
    wrong = [(d, n) for d, n in enumerate(entry) if type(n) is not int or n < 1]
    for d, n in wrong:
        problems.append(f"{where}, dimension {d}: {n!r} parts; give a whole number of at least 1 (1: not split)")
    return None if wrong else tuple(entry)


def _parse_parameters(plan: Any, target: Any, problems: list[str]) -> tuple[tuple[str, TensorSplit], ...]:
    """parameter_plan as (name, split)."""
    if plan is None:
        return ()
    if not isinstance(target, nn.Module):
        problems.append("parameter_plan is for modules; a function has no parameters, use in_strategy")
        return ()
    if not isinstance(plan, Mapping):
        problems.append(f"parameter_plan must be a dict from parameter names to strategies, got {plan!r}")
        return ()
    parameters = dict(target.named_parameters(remove_duplicate=False))
    parsed = []
    for name, entry in plan.items():
        if name not in parameters:
            known = ", ".join(map(repr, parameters)) or "none"
            problems.append(f"parameter_plan names {name!r}, but the parameters are {known}")
            continue
        split = _parse_split(f"parameter_plan[{name!r}]", entry, problems)
        if split is not None:
            problems += [f"parameter_plan[{name!r}]: {p}" for p in misfits(split, tuple(parameters[name].shape))]
            parsed.append((name, split))
    return tuple(parsed)


def _mesh_problems(hint: ShardHint) -> Iterator[str]:
    """Layouts of different meshes in one hint, and numbers of parts that do not divide the devices of its mesh."""
    layouts = list(dict.fromkeys(split.layout for _, split in hint.splits() if isinstance(split, TensorLayout)))
    if len(layouts) > 1:
        yield f"all Layouts of a model must use one mesh, but here are {' and '.join(map(str, layouts))}"
    for where, split in hint.splits():
        n = math.prod(parts_of(split))
        if len(layouts) == 1 and layouts[0].size % n:
            yield f"{where}: {split} makes {n} parts, which do not divide the {layouts[0].size} devices of {layouts[0]}"
