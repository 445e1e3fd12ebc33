r"""The leaves that a loss reads besides outputs and targets, found in its autograd graph.

```
   loss ── div ── sub ── output       ends: outputs and targets
             \        \─ target
              \─ tau                  a leaf of the loss: its `.grad` from before waits aside until the call has ended
```
What the backwards of the call leave in `.grad` is then the call's own part of the gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch


class Ends(NamedTuple):
    """Where the graph of a loss ends."""

    nodes: tuple[Any, ...]
    leaves: frozenset[int]  # by id


class LossLeaves:
    """Of one call on one process."""

    def __init__(self) -> None:
        self._aside: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}  # by id: leaf, `.grad` before the call

    @property
    def count(self) -> int:
        return len(self._aside)

    @staticmethod
    def ends(values: Iterable[Any]) -> Ends:
        """`values`: what the loss function is called with."""
        tensors = [x for x in values if isinstance(x, torch.Tensor) and x.requires_grad]
        nodes = tuple(x.grad_fn for x in tensors if x.grad_fn is not None)
        return Ends(nodes, frozenset(id(x) for x in tensors if x.grad_fn is None))

    def find(self, loss: torch.Tensor, ends: Ends) -> None:
        """Before the backward of `loss`: find its leaves and put their gradients aside."""
        if not loss.requires_grad:
            return
        if loss.grad_fn is None:
            self._found(loss, ends)
            return
        seen: set[Any] = set(ends.nodes)
        stack: list[Any] = [loss.grad_fn]
        while stack:
            node: Any = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if type(node).__name__ == "AccumulateGrad":
                self._found(node.variable, ends)
            else:
                stack.extend(one for one, _ in node.next_functions)

    def take(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Every leaf with its gradient of this call. `.grad` is what it was before."""
        found = []
        for leaf, before in self._aside.values():
            found.append((leaf, leaf.grad))
            leaf.grad = before
        self._aside.clear()
        return found

    def _found(self, leaf: torch.Tensor, ends: Ends) -> None:
        if id(leaf) not in ends.leaves and id(leaf) not in self._aside:
            self._aside[id(leaf)] = leaf, leaf.grad
            leaf.grad = None
