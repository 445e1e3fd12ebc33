"""Optimizers outside of torch, whose states have names and places that those of torch do not have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class Momentum(torch.optim.Optimizer):
    """Keeps a sum of gradients in the state `key` of each parameter; `inside`: of a container in it."""

    def __init__(self, parameters: Iterable[Any], key: Any = "sum", inside: type | None = None) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.key, self.inside = key, inside

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if self.key not in state:
                    zeros = torch.zeros_like(p)
                    state[self.key] = zeros if self.inside is None else self.inside([zeros])
                sums = state[self.key] if self.inside is None else state[self.key][0]
                sums.mul_(0.9).add_(p.grad)
                p.add_(sums, alpha=-group["lr"] * self.scale())

    def scale(self) -> float:
        return 1.0


class Slowing(Momentum):
    """Divides its steps by the number of steps, which is a state of no parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        state = self.state["all"]  # type: ignore[index]
        state["n"] = state.get("n", 0) + 1
        super().step(closure)

    def scale(self) -> float:
        return 1.0 / self.state["all"]["n"]  # type: ignore[index]


CUSTOM = {
    "a name with dots": lambda ps: Momentum(ps, "ema.of.gradients"),
    "a name with brackets": lambda ps: Momentum(ps, "sum[0]"),
    "a number": lambda ps: Momentum(ps, 0),
    "in a list": lambda ps: Momentum(ps, 7, list),
    "of no parameter": Slowing,
}
