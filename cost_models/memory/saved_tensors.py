"""Hooks on tensors that autograd saves, and code that cannot run under them.

Passes count what is kept for a backward, or keep nothing, by hooks. A user's code that differentiates inside of its
forward needs what it saves there (`torch.autograd.grad`), or refuses to run under any hooks (`torch.func.grad`). So
hooks can be put aside while such code runs:

    with hooked(pack, unpack, forget=True):      every operator keeps nothing,
        ...
        with put_aside():                        but not these
            user_code()
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


class _Hooks(NamedTuple):
    entered: torch.autograd.graph.saved_tensors_hooks
    forget: bool


class _Thread(threading.local):
    def __init__(self) -> None:
        self.hooks: list[_Hooks] = []  # the innermost is the last


_THREAD = _Thread()


@contextmanager
def hooked(
    pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor], *, forget: bool = False
) -> Iterator[None]:
    """Inside, `torch.autograd.graph.saved_tensors_hooks(pack, unpack)`, which can be put aside. `forget`: `pack` keeps
    nothing, so that nothing inside can be differentiated."""
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
    with hooks:
        _THREAD.hooks.append(_Hooks(hooks, forget))
        try:
            yield
        finally:
            _THREAD.hooks.pop()


def are_hooked() -> bool:
    """Whether hooks of `hooked` apply in this thread."""
    return bool(_THREAD.hooks)


def are_forgotten() -> bool:
    """Whether some of them keep nothing."""
    return any(one.forget for one in _THREAD.hooks)


@contextmanager
def put_aside() -> Iterator[None]:
    """Inside, none of the hooks of `hooked` apply in this thread; other hooks may lie outside of them alone."""
    mine, _THREAD.hooks = _THREAD.hooks, []
    for one in reversed(mine):
        one.entered.__exit__()
    try:
        yield
    finally:
        for one in mine:
            one.entered.__enter__()
        _THREAD.hooks = mine
