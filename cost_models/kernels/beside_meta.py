"""Code on tensors of the meta device that also reads tensors with values: a loss with class weights, a teacher.

    cross_entropy(output, target, weight)     output, target: on the meta device; weight: the loss's own, on the CPU
                                              called with a copy of `weight` without values instead

torch refuses most operators if some of their tensors are on the meta device and others are not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree  # torch has no public one
from torch.utils._python_dispatch import _disable_current_modes  # nor a public way to run below all modes

from cost_models.graphs import on_meta


class BesideMeta(TorchFunctionMode):
    """Inside, a function of torch that is called with tensors on the meta device gets all of its tensors there.

    Copies have no history, and are what is written in the place of their originals. Functions of tensors with values
    alone run as they are.
    """

    def __init__(self) -> None:
        super().__init__()
        # By id of a tensor: the tensor, which keeps the id its own, and its copy.
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        there = {x.is_meta for x in _pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        if len(there) > 1:
            args, kwargs = _pytree.tree_map(self._there, (args, kwargs))
        return func(*args, **kwargs)

    def _there(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.is_meta:
            return value
        if id(value) not in self._copies:
            with _disable_current_modes():  # the tensor was there before: modes that count must not see its copy
                self._copies[id(value)] = value, on_meta(value)
        return self._copies[id(value)][1]
