"""What scripts do wrong, or on some ranks only: errors that they catch, hooks of one rank, lists without parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rank_behaviour import message_of
from rank_cases import Job, mlp
from rank_training import gradient_error, ready
from torch import nn
from torch.nn import functional

import autopar
from autopar import AutoparError
from autopar.analysis.example import LossFunction
from autopar.capture import export
from autopar.errors import CheckpointError
from autopar.runtime.checkpoints.participants import participants
from autopar.runtime.ranks.one_message import is_on_all_ranks
from autopar.runtime.ranks.whole_state import whole_state_dict

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


_SCALERS = {"global": torch.amp.GradScaler("cpu", init_scale=8.0)}
_SCALER = _SCALERS["global"]


def loss_with_a_late_scale(where: str) -> dict[str, Any]:
    """A training step whose loss uses a scaler that sets itself up at its first call."""
    original, pm, x = ready(Job("mlp", "chain"))
    for scaler in (_SCALER, inner := torch.amp.GradScaler("cpu", init_scale=8.0)):
        scaler._scale = scaler._growth_tracker = None
    losses: dict[str, LossFunction] = {
        "a global": lambda y, t: _SCALER.scale(functional.mse_loss(y, t)),
        "a dictionary": lambda y, t: _SCALERS["global"].scale(functional.mse_loss(y, t)),
        "a closure": lambda y, t: inner.scale(functional.mse_loss(y, t)),
    }
    loss = pm.train_step(x, target=x, loss_fn=losses[where])
    wanted = 8 * functional.mse_loss(original(x), x)
    wanted.backward()
    return {"loss": (loss - wanted).abs().item(), "error": gradient_error(pm, original)}


def changed_on_one_rank(what: str, data: str) -> list[str]:
    """What a step raises after a change of the model on rank 0 alone, and what the next one raises without it."""
    _, pm, x = ready(Job("mlp", "replicas 2"), data=data)
    model, found = pm.unwrap(), []

    def step() -> None:
        pm.train_step(x, target=x, loss_fn=functional.mse_loss)

    step()
    first = dist.get_rank() == 0
    before = model[1]
    if first and what == "hook":
        hook = model[0].register_forward_hook(lambda *_: None)
    elif first and what == "mode":
        before.eval()
    elif first and what == "module":
        model[1] = copy.deepcopy(before)
    elif first and what == "default":
        torch.set_default_dtype(torch.float64)
    found.append(message_of(step))
    torch.set_default_dtype(torch.float32)
    if first and what == "hook":
        hook.remove()
    before.train()
    model[1] = before
    found.append(message_of(step))
    return found


def passed_otherwise(by_keyword: bool) -> str:
    """The last rank passes the same argument by keyword, or in a list instead of a tuple."""
    pm = autopar.parallelize(Wrapped(), tune=0)
    x, is_last = torch.ones(4, 8), dist.get_rank() == dist.get_world_size() - 1
    pm(x)
    if by_keyword:
        return message_of(lambda: pm(x=x) if is_last else pm(x))
    return message_of(lambda: pm([x]) if is_last else pm((x,)))


class Wrapped(nn.Module):
    """Its input may be in a list or tuple."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        return self.linear(x[0] if isinstance(x, (list, tuple)) else x)


def loss_of_its_own(plan: str, what: str) -> dict[str, Any]:
    """The last rank goes back from another loss of the same outputs: what that raises, whether it counts as one that
    rank 0 shows, and the error of the gradients after all ranks then go back from the same loss, or after it raised
    nothing."""
    original, pm, x = ready(Job("mlp", plan))
    last = dist.get_rank() == dist.get_world_size() - 1
    target = {"target": x + 1, "order": x.flip(0)}.get(what, x) if last else x
    factor = {"scale": 2.0, "overflow": torch.inf, "rounding": 1 + 1e-11}.get(what, 1.0) if last else 1.0
    first = raised_by(lambda: (factor * functional.mse_loss(pm(x), target)).backward())
    if first[0]:
        functional.mse_loss(pm(x), x).backward()
    functional.mse_loss(original(x), x).backward()
    return {"raised": first, "error": gradient_error(pm, original)}


def gone_back_on_some_outputs() -> str:
    """What is raised where the last rank's loss leaves one of the outputs out."""
    torch.manual_seed(0)
    first, second = nn.Linear(12, 12), TwoHeads()
    plan = autopar.Plan.from_split({"0": 0, "1": 1}, n_microbatches=2)
    pm, x = autopar.parallelize(nn.Sequential(first, second), plan=plan), torch.randn(8, 12)

    def step() -> None:
        one, other = pm(x)
        loss = one.square().mean()
        (loss if dist.get_rank() else loss + other.square().mean()).backward()

    return message_of(step)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(12, 3), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one(x), self.other(x)


def another_batch_after_evaluations(call: str) -> str:
    """What the first training call raises, whose batch is another one on every rank, after many evaluations."""
    _, pm, x = ready(Job("mlp", "replicas 2"))
    for _ in range(4):
        with torch.no_grad():
            pm(x)
    own = x + dist.get_rank()
    if call == "train_step":
        return message_of(lambda: pm.train_step(x, target=own, loss_fn=functional.mse_loss))
    return message_of(lambda: pm(own))


def clipped_with_another_model(what: str) -> dict[str, float]:
    """Errors of clipping with two models on ranks: the first layer of one, or all parameters of both."""
    original, pm, x = ready(Job("mlp", "chain"))
    other, second, _ = ready(Job("mlp", "chain"))
    for pipelined, plain, scale in ((pm, original, 1.0), (second, other, 3.0)):
        pipelined.train_step(x, target=x, loss_fn=lambda y, t, scale=scale: scale * functional.mse_loss(y, t))
        (scale * functional.mse_loss(plain(x), x)).backward()
    if what == "a layer":  # none of it is on the last rank
        ours = [p for name, p in pm.named_parameters() if name.startswith("0.")]
        theirs = list(original[0].parameters())
    else:
        ours = [*pm.parameters(), *second.parameters()]
        theirs = [*original.parameters(), *other.parameters()]
    norm = autopar.clip_grad_norm_(ours, 1e-3)
    wanted = nn.utils.clip_grad_norm_(theirs, 1e-3)
    errors = [gradient_error(pm, original), gradient_error(second, other)]
    return {"norm": abs(norm.item() / wanted.item() - 1), "gradients": max(errors)}


def clipped_differently(name: str, values: list[Any]) -> tuple[str, bool, float]:
    """What clipping raises where rank r passes `values[r]`, whether it counts as one that rank 0 shows, and the error
    of the gradients after ranks then clip alike."""
    original, pm, x = ready(Job("mlp", "chain"))
    pm.train_step(x, target=x, loss_fn=functional.mse_loss)
    functional.mse_loss(original(x), x).backward()
    options: dict[str, Any] = {"max_norm": 1e-3, name: values[dist.get_rank()]}
    _, message, is_shown_by_first = raised_by(lambda: autopar.clip_grad_norm_(pm, **options))
    options[name] = values[0]
    autopar.clip_grad_norm_(pm, **options)
    nn.utils.clip_grad_norm_(original.parameters(), **options)
    return message, is_shown_by_first, gradient_error(pm, original)


def clipped_between() -> list[str]:
    """What clipping a layer, of which the last rank has nothing, raises while gradients wait, and of which ranks."""
    pms = [ready(Job("mlp", plan)) for plan in ("replicas 2,1", "replicas 2,1")]
    for _, pm, x in pms:
        pm.train_step(x, target=x, loss_fn=functional.mse_loss)
        pm.zero_grad()
    _, pm, x = pms[0]
    with pm.accumulate():
        pm.train_step(x, target=x, loss_fn=functional.mse_loss)
    ours = [p for name, p in pm.named_parameters() if name.startswith("0.")]
    return [str(len(ours)), message_of(lambda: autopar.clip_grad_norm_(ours, 1.0))]


def refused_where_a_rank_goes_on() -> tuple[str, bool]:
    """What a step of torch's own scaler raises, which the first rank skips for its gradients, and whether the error
    counts as one that rank 0 shows."""
    _, pm, x = ready(Job("mlp", "chain"))
    pm.train_step(x, target=x, loss_fn=functional.mse_loss)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    if dist.get_rank() == 0:
        next(pm.parameters()).grad.to_local().fill_(torch.inf)
    _, text, is_shown_by_first = raised_by(lambda: scaler.step(torch.optim.SGD(pm.parameters(), lr=0.1)))
    return text, is_shown_by_first


def raised_by(call: Callable[[], Any]) -> tuple[str, str, bool]:
    """Class and message of the error that `call` raises, and whether it counts as one that rank 0 shows."""
    try:
        call()
    except AutoparError as error:
        return type(error).__name__, str(error), is_on_all_ranks(error)
    return "", "", False


def empty_batch() -> tuple[str, str, bool]:
    """Of a call after the first one."""
    _, pm, x = ready(Job("mlp", "chain"))
    pm.train_step(x, target=x, loss_fn=functional.mse_loss)
    return raised_by(lambda: pm.train_step(x[:0], target=x[:0], loss_fn=functional.mse_loss))


def raised_together() -> list[tuple[str, str, bool]]:
    """Errors in planning and in checkpoints, of one rank or of all."""
    torch.manual_seed(0)
    pm, x, team = autopar.parallelize(mlp(), memory_limit=10), torch.randn(8, 12), participants()

    def fails(error: Exception) -> None:
        if dist.get_rank() == 1:
            raise error

    return [
        raised_by(lambda: pm.train_step(x, target=x, loss_fn=functional.mse_loss)),
        raised_by(lambda: team.done("writing", lambda: fails(OSError("no space")))),
        raised_by(lambda: team.done("reading", lambda: fails(CheckpointError("a mistake of rank 1")))),
    ]


def different_calls(folder: Path) -> dict[str, str]:
    """What is raised where ranks make two calls at the same time, by their names, rank 0's first; and by a call after
    all of these that all ranks make."""
    _, pm, x = ready(Job("mlp", "replicas 2"))
    optimizer, scaler = torch.optim.SGD(pm.parameters(), lr=0.1), autopar.GradScaler(init_scale=1.0)

    def step() -> None:
        pm.train_step(x, target=x, loss_fn=functional.mse_loss)

    calls: dict[str, Callable[[], Any]] = {
        "train_step": step,
        "forward": lambda: pm(x),
        "clip_grad_norm_": lambda: autopar.clip_grad_norm_(pm, 1.0),
        "GradScaler.step or unscale_": lambda: scaler.unscale_(optimizer),
        "save": lambda: autopar.save(folder, pm, step=1),
        "load": lambda: autopar.load(folder, pm),
        "whole_state_dict": lambda: whole_state_dict(pm),
    }
    step()
    found, names = {}, [*calls]
    for pair in zip(names, [*names[2:], *names[:2]], strict=True):
        found[" / ".join(pair)] = message_of(calls[pair[dist.get_rank()]])
    return found | {"": message_of(step)}


def loss_of_another_dtype(dtype: torch.dtype) -> str:
    """The message for a loss that counts, without a gradient."""
    _, pm, x = ready(Job("mlp", "chain"))
    return message_of(lambda: pm.train_step(x, target=x, loss_fn=lambda y, t: (y > t).sum().to(dtype)))


def called_as_a_whole(plan: str) -> dict[str, Any]:
    """A model that torch.export refuses and symbolic_trace takes, so that its graph calls modules."""
    traced = export._export

    def refusing(module: nn.Module, *args: Any) -> Any:
        if isinstance(module, nn.Sequential):
            raise RuntimeError("not today")
        return traced(module, *args)

    with mock.patch.object(export, "_export", refusing):
        original, pm, x = ready(Job("mlp", plan))
        message = message_of(lambda: pm.train_step(x, target=x, loss_fn=functional.mse_loss))
    functional.mse_loss(original(x), x).backward()
    return {"message": message, "error": None if message else gradient_error(pm, original)}
