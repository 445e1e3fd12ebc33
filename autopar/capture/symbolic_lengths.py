"""`len(tensor)` in a model's code while it is traced.

Python makes the result of `Tensor.__len__` an int, so that a tracer would take the number of samples of one call for a
constant: `x.view(len(x), -1)` would run at one batch size only. Inside, `len` returns what `x.shape[0]` does.
"""

from __future__ import annotations

import builtins
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

_len = builtins.len
_lock = threading.Lock()
_n_inside = 0


@contextlib.contextmanager
def symbolic_lengths() -> Iterator[None]:
    """Inside, on all threads, the length of a tensor whose first size is a symbol is this symbol."""
    global _n_inside
    with _lock:
        _n_inside += 1
        builtins.len = _length
    try:
        yield
    finally:
        with _lock:
            _n_inside -= 1
            if not _n_inside:
                builtins.len = _len


def _length(value: Any, /) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() and type(value).__len__ is torch.Tensor.__len__:
        size = value.shape[0]
        if isinstance(size, torch.SymInt):
            return size
    return _len(value)
