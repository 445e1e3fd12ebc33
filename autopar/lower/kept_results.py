"""Results that a group of operators keeps although it runs again: those of operators that carry a kind in `meta[KEPT]`.

    first run     norm -> [linear] -> silu -> *        [ ]: the result of its product is put aside
    second run    norm -> [      ] -> silu -> *        it is taken from there; everything else is computed

torch's selective checkpoints ask for each kernel whether its result is kept. The operators say so by a flag of the
thread that runs them, so that kernels outside of them are never counted.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from autopar.analysis.kept_products import Kept

_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv"}
_ATTENTION = "_scaled_dot_product"
_REHEARSED = "new_empty"  # attention on the meta device allocates what the kernel would return (`device_kernels`)


class _Running(threading.local):
    kind: Kept | None = None  # of the operator that this thread runs


_running = _Running()


@contextmanager
def _of(kind: Kept) -> Iterator[None]:
    before, _running.kind = _running.kind, kind
    try:
        yield
    finally:
        _running.kind = before


@functools.cache
def keeping(function: Callable[..., Any], kind: Kept) -> Callable[..., Any]:
    """The same function, whose kernel's results a group keeps."""

    def kept(*args: Any, **kwargs: Any) -> Any:
        with _of(kind):
            return function(*args, **kwargs)

    return kept


def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Around the first run of a group, and around its second (`context_fn` of torch.utils.checkpoint.checkpoint)."""
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, kernel: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kind, name = _running.kind, kernel.overloadpacket.__name__
    if kind == "product":
        keeps = name in _PRODUCTS
    else:
        keeps = kind == "attention" and (name.startswith(_ATTENTION) or _is_rehearsed(name, kernel, args))
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def _is_rehearsed(name: str, kernel: Any, args: Any) -> bool:
    return name == _REHEARSED and isinstance(args[0], torch.Tensor) and args[0].is_meta
