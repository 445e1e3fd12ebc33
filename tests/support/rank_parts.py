"""What the model itself is asked for on ranks that have a part of it: to run, and to load a state."""

from __future__ import annotations

import copy
from typing import Any

import torch
from rank_behaviour import message_of
from rank_cases import Job
from rank_training import ready
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional


def _step(pm: Any, x: torch.Tensor) -> float:
    return float(pm.train_step(x, target=x, loss_fn=functional.mse_loss))


def called_by_itself(plan: str) -> dict[str, Any]:
    """What the model and a copy of it raise when they are called; the calls of the user's hooks on the root, and what
    evaluating through `pm` is off."""
    original, pm, x = ready(Job("mlp", plan))
    model, calls = pm.unwrap(), []
    before = [name for name, _ in model.named_modules()]
    model.register_forward_pre_hook(lambda *_: calls.append("first"))
    model.register_forward_pre_hook(lambda *_: calls.append("second"))
    _step(pm, x)
    pm.zero_grad()  # torch cannot copy gradients of DTensors
    found = {
        "model": message_of(lambda: model(x)),
        "copy": message_of(lambda: copy.deepcopy(model)(input=x)),
        "same modules": before == [name for name, _ in model.named_modules()],
        "same keys": set(model.state_dict()) == set(pm.state_dict()) == {name for name, _ in pm.named_parameters()},
    }
    with torch.no_grad():
        error = (pm(x) - original(x)).abs().max().item()
    return found | {"calls": calls, "error": error}


def called_with_whole_tensors() -> float:
    """What the model is off that runs with whole tensors in the places of its parameters."""
    original, pm, x = ready(Job("mlp", "replicas 2"))
    _step(pm, x)
    whole = {name: p.full_tensor() for name, p in pm.named_parameters()}
    found = torch.func.functional_call(pm.unwrap(), whole, (x,))
    return (found - original(x)).abs().max().item()


def loaded_again(plan: str, by: str) -> dict[str, Any]:
    """A rank's own state, kept and loaded after more steps: the loss then, beside that of the state, and what wrong
    states raise. `by`: whose load_state_dict."""
    _, pm, x = ready(Job("mlp", plan))
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.5)

    def step() -> float:
        optimizer.zero_grad()
        loss = _step(pm, x)
        optimizer.step()
        return loss

    step()
    best = {name: value.detach().clone() for name, value in pm.state_dict().items()}
    wanted, _ = step(), step()
    target: nn.Module = pm if by == "pm" else pm.unwrap()
    target.load_state_dict(best)
    again = step()
    name, part = next((name, value) for name, value in best.items() if value.dim() == 2)
    assert isinstance(part, DTensor)
    try:
        target.load_state_dict({one: value for one, value in best.items() if one != name})
        missing = ""
    except RuntimeError as error:
        missing = str(error)
    target.load_state_dict(best)  # torch has loaded the others
    zeros = {one: torch.zeros_like(value) for one, value in best.items()}
    whole = part.redistribute(placements=[Replicate()] * part.device_mesh.ndim)
    return {
        "losses": (wanted, again),
        "name": name,
        "missing": missing,
        "plain": message_of(lambda: target.load_state_dict(zeros | {name: torch.zeros(part.shape)})),
        "assigned": message_of(lambda: target.load_state_dict(zeros, assign=True)),
        "other placements": ""
        if whole.placements == part.placements
        else message_of(lambda: target.load_state_dict(zeros | {name: whole})),
        "loss": step(),  # nothing of these was loaded
    }


def loaded_whole(by: str) -> str:
    """What the state of the whole model raises."""
    original, pm, x = ready(Job("mlp", "chain"))
    _step(pm, x)
    target: nn.Module = pm if by == "pm" else pm.unwrap()
    return message_of(lambda: target.load_state_dict(original.state_dict()))


def needs_the_model() -> list[str]:
    """What a transform, and a second derivative, raise."""
    _, pm, x = ready(Job("mlp", "chain"))

    def twice() -> None:
        given = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(pm(given).square().mean(), given, create_graph=True)
        gradient.square().sum().backward()

    return [message_of(lambda: torch.func.vmap(lambda row: pm(row[None]))(x)), message_of(twice)]
