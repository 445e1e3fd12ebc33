"""Models that are changed around their placing on ranks: hooks, assigned tensors, frozen parameters. Each returns what
its test compares."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rank_behaviour import message_of
from rank_cases import Job
from rank_training import gradient_error, ready
from torch import nn
from torch.nn import functional

import autopar
from autopar import Plan


class Scaled(nn.Module):
    """A buffer that the last stage reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x))) * self.scale


def scaled() -> tuple[nn.Module, Any, torch.Tensor]:
    """The plain model, the same on two ranks, placed, and a batch."""
    torch.manual_seed(3)
    model, x = Scaled(), torch.randn(8, 12)
    original = copy.deepcopy(model)
    pm = autopar.parallelize(model, plan=Plan.from_split({"a": 0, "b": 1}, n_microbatches=2))
    with torch.no_grad():
        pm(x)
    return original, pm, x


def step(pm: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = pm.train_step(x, target=x, loss_fn=functional.mse_loss)
    return loss


def both_step(pm: Any, original: nn.Module, x: torch.Tensor) -> float:
    """The error of the gradients of one more step."""
    step(pm, x)
    functional.mse_loss(original(x), x).backward()
    return gradient_error(pm, original)


def hooks_from_before(plan: str, call: str) -> dict[str, Any]:
    """Hooks and attributes that parameters had before they were placed; `plan`: of rank_cases."""
    torch.manual_seed(3)
    original, pm, x = ready(Job("mlp", plan))
    seen: dict[str, list[str]] = {"ranks": [], "one": []}
    handles = []
    for who, model in (("ranks", pm.unwrap()), ("one", original)):
        for name, p in model.named_parameters():
            p.register_hook(lambda gradient, name=name: gradient * len(name))
            handles.append(p.register_hook(torch.zeros_like) if name == "0.bias" else None)
            p.register_post_accumulate_grad_hook(lambda p, name=name, who=who: seen[who].append(f"{name} {p.tag}"))
            p.tag = f"of {name}"

    def backward() -> float:
        if call == "train_step":
            return both_step(pm, original, x)
        functional.mse_loss(pm(x), x).backward()
        functional.mse_loss(original(x), x).backward()
        return gradient_error(pm, original)

    errors = [backward()]
    for handle in filter(None, handles):
        handle.remove()
    errors.append(backward())
    own = {name for name, _ in pm.named_parameters()}
    return {
        "errors": errors,
        "seen": sorted(seen["ranks"]),
        "wanted": sorted(text for text in seen["one"] if text.split()[0] in own),
    }


def assigned_buffers() -> list[float]:
    """Errors of outputs after a buffer was assigned anew, also where the rank had lost its name."""
    original, pm, x = scaled()
    errors = []
    for value in (3.0, 4.0, 5.0):
        for model in (pm.unwrap(), original):
            model.scale = torch.tensor(value)
        for n in (8, 3):  # a batch of another size is captured anew
            with torch.no_grad():
                errors.append((pm(x[:n]) - original(x[:n])).abs().max().item())
        errors.append(both_step(pm, original, x))
        pm.zero_grad()
        original.zero_grad()
        with torch.no_grad():  # in place, as a stage may
            for model in (pm.unwrap(), original):
                if hasattr(model, "scale"):
                    model.scale.mul_(2.0)
            errors.append((pm(x) - original(x)).abs().max().item())
    return errors


def changes_refused() -> dict[str, str]:
    """Messages for changes of a placed model that ranks do not follow."""
    rank, found = dist.get_rank(), {}

    def after(change: Callable[[Any], Any], training: bool = False) -> str:
        _, pm, x = scaled()
        change(pm)
        return message_of(lambda: step(pm, x) if training else pm(x))

    def weight(pm: Any) -> None:
        pm.unwrap().b.weight = nn.Parameter(torch.full((12, 12), 0.1))

    found["parameter"] = after(weight)
    found["on one rank"] = after(lambda pm: weight(pm) if rank == 1 else None)
    found["module"] = after(lambda pm: setattr(pm.unwrap(), "b", nn.Linear(12, 12)), training=True)
    found["dtype"] = after(lambda pm: pm.double())
    found["shape"] = after(lambda pm: setattr(pm.unwrap(), "scale", torch.ones(12)))
    found["removed"] = after(lambda pm: setattr(pm.unwrap(), "scale", None))
    return found


def goes_on_after_a_refusal() -> float:
    """The error of a step after a refused change was taken back."""
    original, pm, x = scaled()
    pm.double()
    message = message_of(lambda: step(pm, x))
    assert "'a.weight'" in message or "'b.weight'" in message, message
    pm.float()
    return both_step(pm, original, x)
