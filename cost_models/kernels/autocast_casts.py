"""What torch.autocast casts, for meta tensors, which it leaves alone: it acts on the devices that compute.

    with torch.autocast("cpu", torch.bfloat16), AutocastCasts("cpu"):
        linear(x, weight)     x and weight float32 on the meta device: both are cast, and the result is bfloat16

Which arguments an operator casts, and to which dtype, is what torch itself does with tensors without values
(FakeTensorMode) on that device. Casts of parameters are kept for the next operator that reads them, as torch keeps them
until its outermost autocast context ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode  # torch has no public one
from torch.fx.node import map_aggregate
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # no public ones either

from cost_models.graphs import storage_key

_ATTENTION = (torch.ops.aten.scaled_dot_product_attention.default, functional.scaled_dot_product_attention)
_to_copy = torch.ops.aten._to_copy.default


class _Casts(NamedTuple):
    """Of one call."""

    arguments: Mapping[int, torch.dtype]  # by place among the tensors of the call
    results: tuple[torch.dtype, ...]  # of the tensors that it returns


_NOTHING = _Casts({}, ())
_known: dict[Any, _Casts] = {}


class AutocastCasts(TorchFunctionMode):
    """Inside, operators of meta tensors cast as torch.autocast of this thread does on devices of `device_type`."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        # By id of a parameter: the parameter, which keeps the id its own, and its cast.
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def kept(self) -> Iterator[torch.Tensor]:
        """The casts of parameters that are kept."""
        return (cast for _, cast in self._kept.values())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.is_autocast_enabled(self._device_type):
            return func(*args, **kwargs)
        tensors = _tensors_in((args, kwargs))
        if not any(t.is_meta and t.is_floating_point() for t in tensors):
            return func(*args, **kwargs)
        casts = self._casts_of(func, args, kwargs, tensors)
        if casts.arguments:
            new = iter([self._cast(t, casts.arguments.get(place)) for place, t in enumerate(tensors)])
            args, kwargs = map_aggregate((args, kwargs), lambda x: next(new) if isinstance(x, torch.Tensor) else x)
        result = func(*args, **kwargs)
        dtypes = iter(casts.results)
        return map_aggregate(result, lambda x: _in(x, next(dtypes, None)) if isinstance(x, torch.Tensor) else x)

    def _cast(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        if dtype is None or tensor.dtype == dtype:
            return tensor
        known = self._kept.get(id(tensor))
        if known is not None and known[1].dtype == dtype:
            return known[1]
        cast = tensor.to(dtype)
        # aten/src/ATen/autocast_mode.cpp, cached_cast
        lower = tensor.dtype == torch.float32 and dtype == torch.get_autocast_dtype(self._device_type)
        if lower and tensor.requires_grad and tensor.is_leaf and not tensor._is_view() and _keeps_casts():
            self._kept[id(tensor)] = tensor, cast
        return cast

    def _casts_of(self, func: Callable[..., Any], args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> _Casts:
        dtype = torch.get_autocast_dtype(self._device_type)
        kinds: list[Any] = []
        map_aggregate((args, kwargs), lambda x: kinds.append(_kind(x)))
        try:
            key = (self._device_type, dtype, func, *kinds)
            if key not in _known:
                _known[key] = _observed(func, args, kwargs, self._device_type)
            return _known[key]
        except TypeError:  # not hashable
            return _observed(func, args, kwargs, self._device_type)


def _kind(value: Any) -> Any:
    """What an argument decides about casts: of a tensor not its sizes."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim()
    return value if isinstance(value, torch.dtype) else type(value)


def _keeps_casts() -> bool:
    return torch.is_autocast_cache_enabled() and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def _in(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The result in the dtype that autocast gives it: some operators get that as an argument."""
    if dtype is None or tensor.dtype == dtype or not (dtype.is_floating_point and tensor.is_floating_point()):
        return tensor
    return tensor.to(dtype)


def _tensors_in(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_aggregate(values, lambda x: found.append(x) if isinstance(x, torch.Tensor) else None)
    return found


class _Watch(TorchDispatchMode):
    """Notes casts of the tensors of a call."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        # By storage, as composite operators cast views of their arguments.
        self._places = {storage_key(t): place for place, t in enumerate(tensors)}
        self.casts: dict[int, torch.dtype] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _to_copy and kwargs.get("dtype") is not None and storage_key(args[0]) in self._places:
            self.casts[self._places[storage_key(args[0])]] = kwargs["dtype"]
        return func(*args, **kwargs)


def _observed(func: Callable[..., Any], args: Any, kwargs: Any, device_type: str) -> _Casts:
    """What torch casts in a call on a device. Nothing where it cannot be called without values."""
    if func in (torch.Tensor.to, torch.Tensor.type, torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
        return _NOTHING  # the call is a cast itself
    if getattr(func, "__name__", "").startswith("__get__") or func in (torch.ops.aten.to.dtype, _to_copy):
        return _NOTHING

    if func in _ATTENTION:  # without values torch takes it apart, and casts the parts
        lower = torch.get_autocast_dtype(device_type)
        floating = [
            place
            for place, t in enumerate(_tensors_in((args, kwargs)))
            if t.is_floating_point() and t.dtype != torch.float64
        ]
        return _Casts(dict.fromkeys(floating, lower), (lower,))

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return torch.device(device_type) if isinstance(value, torch.device) else value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device_type)

    try:
        # Outside of all modes of the caller, which would count this call's kernels as its own.
        with _disable_current_modes(), FakeTensorMode(), torch.no_grad():
            args, kwargs = map_aggregate((args, kwargs), fake)
            tensors = _tensors_in((args, kwargs))
            with (
                torch.autocast(device_type, torch.get_autocast_dtype(device_type), cache_enabled=False),
                _Watch(tensors) as watch,
            ):
                result = func(*args, **kwargs)
    except Exception:  # whatever an operator raises without values, or of a type that torch does not know
        return _NOTHING
    return _Casts(watch.casts, tuple(t.dtype for t in _tensors_in(result)))
