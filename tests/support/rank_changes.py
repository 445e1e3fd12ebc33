"""Models that are changed around their placing on ranks: hooks, assigned tensors, frozen parameters. Each returns what
its test compares."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_behaviour import message_of
from rank_cases import Job, mlp
from rank_training import gradient_error, parameter_error, ready
from torch import nn
from torch.nn import functional

import autopar
from autopar import Plan
from autopar.lower import process_groups
from autopar.runtime.ranks.faults.failure import described


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


def _layers_inside(plan_first: bool, hook: Callable[[nn.Module], None]) -> tuple[nn.Module, Any, torch.Tensor]:
    """The plain model and the same in two stages, which cut its only child in the middle, both with hooks."""
    torch.manual_seed(3)
    model, x = nn.Sequential(mlp()).double(), torch.randn(8, 12).double()
    original = copy.deepcopy(model)
    hook(original)
    if not plan_first:
        hook(model)
    plan = Plan.by_hand(model, None, example_args=(x,), pipeline=2, micro_batch=2)
    pm = autopar.parallelize(model, plan=plan)
    if plan_first:
        hook(model)
    return original, pm, x


def hooks_where_stages_meet(plan_first: bool) -> list[float]:
    """Errors of gradients where hooks change them: of every layer in turn (one of them begins the second stage), and of
    the module that both stages run. `plan_first`: the plan knows no hooks."""

    def doubled(module: nn.Module, gradients: Any, *_: Any) -> Any:
        return tuple(2 * g for g in gradients)

    def all_hooks(model: Any) -> None:
        for layer in model[0][1:]:  # the input of the first requires no gradient
            layer.register_full_backward_hook(doubled)
            layer.register_full_backward_pre_hook(doubled)
        model[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        model[0].register_forward_hook(lambda module, args, output: output * 3 + args[0])
        model[0].register_full_backward_pre_hook(doubled)

    original, pm, x = _layers_inside(plan_first, all_hooks)
    errors = [both_step(pm, original, x)]
    functional.mse_loss(pm(x), x).backward()
    functional.mse_loss(original(x), x).backward()
    return [*errors, gradient_error(pm, original)]


def hook_of_both_stages() -> None:
    """A full backward hook of a module in two stages: evaluations run, and the first training step ends the ranks."""
    original, pm, x = _layers_inside(True, lambda model: model[0].register_full_backward_hook(lambda *_: None) and None)
    with torch.no_grad():
        assert (pm(x) - original(x)).abs().max().item() < 1e-9
    both_step(pm, original, x)


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

    def data(pm: Any) -> None:
        for p in pm.parameters():
            p.data = p.data * 0.5

    found["data"] = after(data, training=True)
    found["data on one rank"] = after(lambda pm: data(pm) if rank == 1 else None)
    found["state of data"] = message_of(lambda: (data(pm := scaled()[1]), pm.state_dict()))
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
    before = [p.data for p in pm.parameters()]
    for p in pm.parameters():
        p.data = p.data * 0.5
    message = message_of(lambda: pm(x))
    assert "assigned to the .data" in message, message
    for p, values in zip(pm.parameters(), before, strict=True):
        p.data = values
    for model in (pm, original):
        for p in model.parameters():
            p.data.mul_(0.5)
    return both_step(pm, original, x)


def numbers_reduced(act: Callable[[], Any]) -> int:
    """Numbers that `act` all-reduces or scatters, on this rank."""
    counts: list[int] = []

    def counted(name: str) -> Callable[..., Any]:
        before = getattr(process_groups, name)

        def start(tensor: torch.Tensor, *args: Any) -> Any:
            counts.append(tensor.numel())
            return before(tensor, *args)

        return start

    with pytest.MonkeyPatch.context() as patch:
        for name in ("started_all_reduce", "started_reduce_scatter"):
            patch.setattr(process_groups, name, counted(name))
        act()
    return sum(counts)


def frozen_for_some_steps(plan: str, call: str) -> dict[str, Any]:
    """Three of six layers are frozen at first, then one other, then none."""
    torch.manual_seed(3)
    build = mlp()
    for layer in (0, 4, 8):
        build[layer].requires_grad_(False)
    build = build.double()
    original, x = copy.deepcopy(build), torch.randn(8, 12).double()
    n = dist.get_world_size()
    made: Any = {"n_microbatches": 4}
    if plan == "replicas":
        split = Plan.from_split({"": 0}, devices=[[f"cpu:{i}" for i in range(n)]], **made)
    else:
        split = Plan.by_hand(
            copy.deepcopy(build), ["cpu"] * n, example_args=(x,), micro_batch=2, data=n, zero=int(plan)
        )
    pm = autopar.parallelize(build, plan=split)
    ours, theirs = torch.optim.SGD(pm.parameters(), lr=0.1), torch.optim.SGD(original.parameters(), lr=0.1)

    def backward() -> None:
        if call == "train_step":
            step(pm, x)
        else:
            functional.mse_loss(pm(x), x).backward()

    errors, reduced = [], []
    for frozen in ((0, 4, 8), (2,), (), ()):
        for model in (pm.unwrap(), original):
            for layer in range(0, 12, 2):
                model[layer].requires_grad_(layer not in frozen)
        ours.zero_grad()
        theirs.zero_grad()
        reduced.append(numbers_reduced(backward))
        functional.mse_loss(original(x), x).backward()
        errors.append(gradient_error(pm, original))
        ours.step()
        theirs.step()
        errors.append(parameter_error(pm, original))
    return {"errors": errors, "reduced": reduced}


def frozen_between() -> list[float]:
    """Errors of gradients after parameters were frozen between a forward and its backward, between two forwards, and
    while gradients of accumulate() wait."""
    errors = []
    for what in ("before backward", "two calls", "accumulating"):
        original, pm, x = ready(Job("mlp", "replicas 2"))

        def freeze(frozen: bool, pm: Any = pm, original: nn.Module = original) -> None:
            for model in (pm.unwrap(), original):
                model[2].requires_grad_(not frozen)

        if what == "accumulating":
            with pm.accumulate():
                both_step(pm, original, x)
            freeze(True)
            errors.append(both_step(pm, original, x))
            freeze(False)
        else:
            losses = [functional.mse_loss(model(x), x) for model in (pm, original)]
            freeze(True)
            if what == "two calls":
                losses += [functional.mse_loss(model(x[:4]), x[:4]) for model in (pm, original)]
            for loss in losses:
                loss.backward()
            errors.append(gradient_error(pm, original))
            freeze(False)
        errors.append(both_step(pm, original, x))
    return errors


def frozen_on_one_rank() -> list[str]:
    """Messages where ranks freeze different parameters, before and after the placing."""
    found = []
    for placed in (False, True):
        _, pm, x = ready(Job("mlp", "replicas 2"))
        if placed:
            step(pm, x)
        if dist.get_rank() == 1:
            pm.unwrap()[2].weight.requires_grad_(False)
        found.append(message_of(lambda pm=pm, x=x: step(pm, x)))
    return found


def names_of_groups() -> dict[str, Any]:
    """The names that an optimizer has of its parameters, made of named ones before the placing."""
    _, pm, x = ready(Job("mlp", "chain"))
    named = list(pm.named_parameters())
    groups = [{"params": named[::2]}, {"params": named[1::2], "lr": 0.2}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    step(pm, x)
    optimizer.step()
    by_id = {id(p): name for name, p in pm.named_parameters()}
    return {
        "names": [group["param_names"] for group in optimizer.param_groups],
        "wanted": [[by_id[id(p)] for p in group["params"]] for group in optimizer.param_groups],
    }


def sparse_after_evaluation() -> dict[str, str]:
    """Messages for an embedding with sparse gradients, in a model that is evaluated first."""
    found = {}
    for call in ("train_step", "backward"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(32, 8, sparse=True), nn.Linear(8, 8)).eval()
        plan = replace(Plan.from_split({"0": 0, "1": 1}, n_microbatches=2), training=False)
        pm = autopar.parallelize(model, plan=plan)
        x = torch.randint(0, 32, (4, 3))
        with torch.no_grad():
            found[f"evaluated, {call}"] = message_of(lambda pm=pm, x=x: pm(x))

        def train(pm: Any = pm, x: torch.Tensor = x, call: str = call) -> None:
            target = torch.zeros(4, 3, 8)
            if call == "train_step":
                pm.train_step(x, target=target, loss_fn=functional.mse_loss)
            else:
                functional.mse_loss(pm(x), target).backward()

        found[call] = message_of(train)
        pm.unwrap()[0].requires_grad_(False)
        found[f"frozen, {call}"] = message_of(train)
    return found


def missing_attribute() -> str:
    """What is said of a buffer or parameter that the other rank has, where a script reads it by its attribute."""
    _, pm, _ = scaled()
    model = pm.unwrap()
    try:
        for tensor in (lambda: model.a.weight, lambda: model.scale):
            tensor().requires_grad_(False)
    except AttributeError as error:
        return described(error)
    return ""
