"""What torch.autocast does to one operator, said without autocast: which arguments it casts, and to which dtypes.

Torch does not publish which operators autocast casts, and the lists differ between its versions and devices. So the
operator runs twice on tensors without values, under autocast and with casts of its own; the kernels that both start,
with the dtypes of what they take and return, must be the same.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture import torch_private
from cost_models.measuring.autocast import Autocast

aten = torch.ops.aten


class _Trial(threading.local):
    """Whether this thread tries casts, which may fail."""

    runs = False


_trial = _Trial()
# torch logs every failure of an operator on tensors without values.
logging.getLogger("torch._subclasses.fake_tensor").addFilter(lambda _: not _trial.runs)

_CAST = aten._to_copy.default
# They move or copy elements without changing them, so a cast may come before or after.
_REARRANGE = frozenset({aten.clone.default, aten._unsafe_view.default, aten._reshape_alias.default})
# With values, these choose between kernels by what they are given, which does not show without.
_RECURRENT = frozenset({"aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"})


@dataclass(frozen=True)
class Casts:
    """How an operator that runs without autocast does what it does under one."""

    dtypes: Mapping[int, torch.dtype] = field(default_factory=dict)  # leaf of (args, kwargs) -> what it is cast to
    dtype: torch.dtype | None = None  # for the operator's own argument `dtype`


_Kernel = tuple[str, tuple[torch.dtype, ...], tuple[torch.dtype, ...]]


class _Kernels(TorchDispatchMode):
    """Notes the kernels that start inside, and the casts of `leaves`."""

    def __init__(self, leaves: list[Any]) -> None:
        super().__init__()
        self.started: list[_Kernel] = []
        self.casts: dict[int, torch.dtype] = {}
        self._places: dict[int, list[int]] = {}
        for place, leaf in enumerate(leaves):
            self._places.setdefault(id(leaf), []).append(place)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is _CAST and isinstance(result, torch.Tensor) and result.device == args[0].device:
            # A tensor that is passed twice is cast twice.
            self.casts |= dict.fromkeys(self._places.get(id(args[0]), ()), result.dtype)
        elif func.namespace != "prim" and not func.is_view and func not in _REARRANGE:
            taken, returned = tuple(_dtypes((args, kwargs))), tuple(_dtypes(result))
            self.started.append((str(func), taken, returned))
        return result


def _dtypes(tree: Any) -> Iterator[torch.dtype]:
    return (leaf.dtype for leaf in torch_private.tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def casts_of(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], autocast: Autocast
) -> tuple[Any, Casts | None]:
    """The operator's result under `autocast`, and the casts that replace it; None where no casts do.

    Tensors in `args` and `kwargs` have no values (they come from a FakeTensorMode), and are where autocast applies.
    """
    leaves, spec = torch_private.tree_flatten((args, kwargs))
    # For the trials: an operator may change the sizes of what it is given in place (`t_`).
    before = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    result, wanted, seen = _run(operator, args, kwargs, leaves, autocast)
    if operator._schema.name in _RECURRENT:
        return result, None
    for casts in _candidates(operator, args, kwargs, before, autocast.dtype, seen):
        fresh = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in before]
        cast = [leaf.to(casts.dtypes[i]) if i in casts.dtypes else leaf for i, leaf in enumerate(fresh)]
        own_args, own_kwargs = torch_private.tree_unflatten(cast, spec)
        if casts.dtype is not None:
            own_kwargs = {**own_kwargs, "dtype": casts.dtype}
        _trial.runs = True
        try:
            other, started, _ = _run(operator, own_args, own_kwargs, cast, None)
        except (RuntimeError, TypeError):  # such as operands of different dtypes
            continue
        finally:
            _trial.runs = False
        if started == wanted and list(_dtypes(other)) == list(_dtypes(result)):
            return result, casts
    return result, None


def _candidates(
    operator: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leaves: list[Any],
    lower: torch.dtype | None,
    seen: dict[int, torch.dtype],
) -> Iterator[Casts]:
    """What may replace autocast, the most frequent first. `seen`: casts that were made of the arguments."""
    yield Casts()
    if seen:
        yield Casts(seen)
    own = next((i for i, one in enumerate(operator._schema.arguments) if one.name == "dtype"), None)
    if own is not None and len(args) <= own and kwargs.get("dtype") is None:
        yield Casts({}, torch.float32)
    floats = [i for i, one in enumerate(leaves) if isinstance(one, torch.Tensor) and one.dtype.is_floating_point]
    for dtype in (lower, torch.float32):
        if dtype is not None:
            yield Casts({i: dtype for i in floats if leaves[i].dtype not in (dtype, torch.float64)})


@contextmanager
def _applied(autocast: Autocast) -> Iterator[None]:
    """As `autocast.applied`, also for devices that are not here."""
    device_type = autocast.device_type
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    try:
        torch.set_autocast_enabled(device_type, autocast.dtype is not None)
        torch.set_autocast_dtype(device_type, autocast.dtype or before[1])
        yield
    finally:
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])


def _run(
    operator: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leaves: list[Any],
    autocast: Autocast | None,
) -> tuple[Any, list[_Kernel], dict[int, torch.dtype]]:
    with nullcontext() if autocast is None else _applied(autocast), _Kernels(leaves) as kernels:
        result = operator(*args, **kwargs)
    return result, kernels.started, kernels.casts
