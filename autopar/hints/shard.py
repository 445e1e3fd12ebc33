"""The user's `shard()`: some operators' layouts are asked for, the search finds the rest (as mindspore.shard does).

    autopar.shard(model.fc, in_strategy=((4, 1),), parameter_plan={"weight": (1, 1)})     a module: returned, marked
    matmul = autopar.shard(torch.matmul, in_strategy=((4, 1), (1, 1)))                    a function: to call in forward
    mesh = autopar.Layout((2, 2, 2), ("dp", "sp", "mp"))
    autopar.shard(model.block, in_strategy=(mesh(("dp", "sp"), "None", "mp"),))           by names of a mesh's axes

A strategy has one entry a tensor: into how many parts each dimension is cut, or which axes of a mesh cut it. Devices
that it leaves over do the same work again. What is checked here is what needs no graph; the rest is checked when the
model has been captured (`search.sharding_resolve`).
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, overload

from torch import nn

from autopar.errors import InputError
from autopar.hints.layout import Arranged, Cut, Layout, ShardHint
from autopar.hints.store import hints_of, mark

_Module = TypeVar("_Module", bound=nn.Module)
_KEY = "shard"


class _Interceptor(threading.local):
    call: Callable[..., Any] | None = None  # (function, hint, args, kwargs) -> what the function returns


_interceptor = _Interceptor()


@contextmanager
def sharded_calls_through(call: Callable[..., Any]) -> Iterator[None]:
    """Inside, calls of sharded functions on this thread go through `call(function, hint, args, kwargs)`."""
    before, _interceptor.call = _interceptor.call, call
    try:
        yield
    finally:
        _interceptor.call = before


class ShardedFunction:
    """A function whose calls are sharded as asked where a model that calls it is captured; elsewhere the function."""

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


def shard(
    target: Any, in_strategy: Any = None, out_strategy: Any = None, parameter_plan: Mapping[str, Any] | None = None
) -> Any:
    """Ask how a module's or a function's tensors are split over the devices; returns the module, or a function to call.

    If it is a single operator, that operator works on its inputs as they are asked for; what is more is brought into
    these layouts where it begins. Everything not asked for is chosen by the search.

    Args:
        target: an nn.Module (the hint holds for each of its calls), or a function; of a function call what this returns
            in `forward` (every call of it is by itself; elsewhere it just calls the function).
        in_strategy: a tuple with one entry a tensor input, in the order of the arguments: a tuple with the number of
            parts of every dimension, a `Layout` applied to axis names, or None (free). None: all are free.
        out_strategy: the same of the tensors that it returns, as they leave it (added up, if they were sums).
        parameter_plan: modules only: names of parameters, relative to the module, and how each is stored.

    Raises:
        InputError: lists everything that is wrong. What only the captured model shows is told when it is planned, by
            a PlanError.
    """
    is_module = isinstance(target, nn.Module)
    name = f"shard({type(target).__name__ if is_module else getattr(target, '__name__', target)!s})"
    problems: list[str] = []
    if not callable(target):
        raise InputError(f"shard takes a torch.nn.Module or a function, got {type(target).__name__}")
    if isinstance(target, ShardedFunction):
        raise InputError(f"{name}: it is sharded already, as {target.hint}; give the function itself")
    if in_strategy is None and out_strategy is None and not parameter_plan:
        problems.append("nothing is asked for; give in_strategy, out_strategy or parameter_plan")
    inputs = _side("in_strategy", in_strategy, problems)
    outputs = _side("out_strategy", out_strategy, problems)
    plan = _plan(parameter_plan, target, problems)
    hint = ShardHint(inputs, outputs, plan)
    problems += _disagreements(hint)
    if is_module and _KEY in hints_of(target) and hint_of(target) != hint and not problems:
        problems.append(f"the module is sharded already, as {hint_of(target)}; autopar.clear_hints takes that off")
    if problems:
        raise InputError(f"{name}: " + "; ".join(problems))
    if not is_module:
        return ShardedFunction(target, hint)
    mark(target, _KEY, hint.plain())
    return target


def hint_of(module: nn.Module) -> ShardHint | None:
    """What `shard` asked of a module; None if it did not."""
    plain = hints_of(module).get(_KEY)
    return None if plain is None else ShardHint.parse(plain)


def hinted_modules(model: nn.Module) -> dict[str, tuple[nn.Module, ShardHint]]:
    """The modules of a model that `shard` was called for, by path."""
    found = ((path, module, hint_of(module)) for path, module in model.named_modules())
    return {path: (module, hint) for path, module, hint in found if hint is not None}


def unwrap_functions(module: nn.Module) -> None:
    """Put the functions themselves where attributes of `module` are sharded ones."""
    for name, value in list(vars(module).items()):
        if isinstance(value, ShardedFunction):
            setattr(module, name, value.function)


# -- what can be checked without a graph ------------------------------------------------------------------------------


def _side(name: str, given: Any, problems: list[str]) -> tuple[Cut | None, ...] | None:
    if given is None:
        return None
    if isinstance(given, Arranged):
        problems.append(f"{name} must have one entry a tensor; write ({given},)")
        return None
    if not isinstance(given, (tuple, list)) or not given:
        problems.append(f"{name} must be a tuple with one entry a tensor, as ((4, 1),), got {given!r}")
        return None
    if all(isinstance(entry, int) for entry in given):
        problems.append(f"{name} must have one entry a tensor; write ({tuple(given)},) instead of {given!r}")
        return None
    cuts = (None if cut is None else _cut(f"{name}[{i}]", cut, problems) for i, cut in enumerate(given))
    return tuple(cuts)


def _cut(where: str, given: Any, problems: list[str]) -> Cut | None:
    if isinstance(given, Arranged):
        return given
    if isinstance(given, Layout):
        problems.append(f"{where} is a Layout; apply it to a name for every dimension, as layout({given.names[0]!r})")
        return None
    if not isinstance(given, (tuple, list)):
        problems.append(f"{where} must be a tuple with the number of parts of every dimension, got {given!r}")
        return None
    wrong = [(d, n) for d, n in enumerate(given) if type(n) is not int or n < 1]
    for d, n in wrong:
        problems.append(f"{where}, dimension {d}: {n!r} parts; give a whole number of at least 1 (1: not cut)")
    return None if wrong else tuple(given)


def _plan(given: Any, target: Any, problems: list[str]) -> tuple[tuple[str, Cut], ...]:
    if given is None:
        return ()
    if not isinstance(target, nn.Module):
        problems.append("parameter_plan is for modules; a function has no parameters, give its in_strategy")
        return ()
    if not isinstance(given, Mapping):
        problems.append(f"parameter_plan must be a dict from names of parameters to strategies, got {given!r}")
        return ()
    known = dict(target.named_parameters(remove_duplicate=False))
    found = []
    for name, cut in given.items():
        if name not in known:
            problems.append(
                f"parameter_plan names {name!r}, but the parameters are {', '.join(map(repr, known)) or 'none'}"
            )
            continue
        parsed = _cut(f"parameter_plan[{name!r}]", cut, problems)
        if parsed is None:
            continue
        shape = tuple(known[name].shape)
        problems += [f"parameter_plan[{name!r}]: {p}" for p in misfits(parsed, shape)]
        found.append((name, parsed))
    return tuple(found)


def misfits(cut: Cut, shape: Sequence[int]) -> Iterator[str]:
    """Why a tensor of this shape cannot be cut like this; nothing if it can."""
    slices = slices_of(cut)
    if len(slices) != len(shape):
        yield f"{cut} has {len(slices)} entries for the {len(shape)} dimensions of a tensor of shape {tuple(shape)}"
        return
    for d, (size, n) in enumerate(zip(shape, slices, strict=True)):
        if size % n:
            possible = [k for k in range(1, n + 1) if size % k == 0]
            told = f"{n} parts" if not isinstance(cut, Arranged) else f"{n} parts ({' x '.join(cut.dims[d])})"
            yield (
                f"dimension {d} of shape {tuple(shape)} has {size} entries, which do not come apart into {told}; "
                f"{', '.join(map(str, possible))} would work"
            )


def slices_of(cut: Cut) -> tuple[int, ...]:
    """The number of parts of every dimension."""
    return cut.slices if isinstance(cut, Arranged) else cut


def _disagreements(hint: ShardHint) -> Iterator[str]:
    """Layouts of one hint that are not over the same mesh, and slices that its Layouts have no devices for."""
    layouts = list(dict.fromkeys(cut.layout for _, cut in hint.cuts() if isinstance(cut, Arranged)))
    if len(layouts) > 1:
        yield f"all Layouts of a model must have one mesh, here are {' and '.join(map(str, layouts))}"
    for where, cut in hint.cuts():
        n = math.prod(slices_of(cut))
        if len(layouts) == 1 and layouts[0].size % n:
            yield f"{where}: {cut} are {n} parts, which do not divide the {layouts[0].size} devices of {layouts[0]}"
