"""Results of operators on the meta device, remembered: torch works out the shape of many of them in Python.

Equal layers of a model call the same operators on tensors of the same shapes. Such a call has results like those of the
first one: new tensors of the same shapes, strides and dtypes, each in a storage of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from cost_models.graphs import storage_key, tensors_in

_MOST = 4096  # calls that are remembered

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.layout, torch.memory_format, torch.device)


class _Result(NamedTuple):
    """A tensor that is all of its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class _NotDescribed(Exception):
    """An argument that this file knows nothing of."""


class MetaResults:
    """Calls operators, or repeats what an equal call returned."""

    def __init__(self) -> None:
        # By call; None: its results are no new tensors.
        self._known: dict[Any, _Result | tuple[_Result, ...] | None] = {}

    def of(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `func(*args, **kwargs)` returns. To be called without autograd: in a dispatch mode, or in no_grad."""
        if not _makes_tensors(func):
            return func(*args, **kwargs)
        try:
            described = tuple(map(_described, args)), tuple((name, _described(x)) for name, x in kwargs.items())
        except _NotDescribed:
            return func(*args, **kwargs)
        key = func, *described, torch.get_default_dtype()
        if key not in self._known:
            result = func(*args, **kwargs)
            if len(self._known) >= _MOST:
                del self._known[next(iter(self._known))]
            self._known[key] = _remembered(result, args, kwargs)
            return result
        known = self._known[key]
        if known is None:
            return func(*args, **kwargs)
        return known.empty() if isinstance(known, _Result) else tuple(one.empty() for one in known)


@cache
def _makes_tensors(func: Any) -> bool:
    """Whether the schema of an operator promises new tensors, which depend on no values."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return False
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    schema = func._schema
    aliases = any(argument.alias_info is not None for argument in (*schema.arguments, *schema.returns))
    return not (func.is_view or schema.is_mutable or aliases or tags.intersection(func.tags))


def _described(value: Any) -> Any:
    """What a result depends on; types too, as 1, 1.0 and True are equal to Python. Raises _NotDescribed."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        if not value.is_meta or value.is_complex() or value.layout is not torch.strided:
            raise _NotDescribed
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    if type(value) not in _PLAIN:
        raise _NotDescribed
    return type(value), value


def _remembered(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Result | tuple[_Result, ...] | None:
    """None unless the result, or each of a tuple of results, is a new tensor and all of its storage."""
    several = result if type(result) is tuple else (result,)
    if not all(type(one) is torch.Tensor and one.is_meta and not one.is_complex() for one in several):
        return None
    found = tuple(_Result(tuple(one.shape), one.stride(), one.dtype) for one in several)
    storages = [storage_key(one) for one in several]
    if len(set(storages)) < len(storages) or not {
        storage_key(t) for t in tensors_in((args, tuple(kwargs.values())))
    }.isdisjoint(storages):
        return None
    whole = all(
        again.empty().untyped_storage().nbytes() == one.untyped_storage().nbytes() and one.storage_offset() == 0
        for one, again in zip(several, found, strict=True)
    )
    return None if not whole else found if type(result) is tuple else found[0]
