"""What scripts do wrong, or on some ranks only: errors that they catch, hooks of one rank, lists without parameters."""

from __future__ import annotations

from typing import Any

import torch
from rank_behaviour import message_of
from rank_cases import Job
from rank_training import gradient_error, ready
from torch.nn import functional

NO_GRADIENT = "returned a loss without a gradient"


def caught_inside_accumulation(plan: str, inside: bool) -> dict[str, Any]:
    """A call of accumulate(), one whose loss has no gradient, whose error the script catches, and a last one.

    `inside`: the failing call is inside accumulate(), too.
    """
    original, pm, x = ready(Job("mlp", plan))

    def step() -> None:
        pm.train_step(x, target=x, loss_fn=functional.mse_loss)

    def fails() -> None:
        pm.train_step(x, target=x, loss_fn=lambda y, t: functional.mse_loss(y.detach(), t))

    with pm.accumulate():
        step()
        message = message_of(fails) if inside else ""
    if not inside:
        message = message_of(fails)
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
    refused = message_of(optimizer.step)
    step()
    for _ in range(2):
        functional.mse_loss(original(x), x).backward()
    return {"message": message, "step": refused, "error": gradient_error(pm, original)}
