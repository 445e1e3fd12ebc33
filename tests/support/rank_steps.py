"""Optimizers on ranks that make the same steps, or not: what the calls after them raise."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rank_behaviour import message_of
from rank_cases import MODELS, Job, loss_of, plan_of
from torch import nn

import autopar
from autopar.capture import torch_private_ranks
from autopar.runtime.ranks.due import Due

Make = Callable[[Any], torch.optim.Optimizer]


def _ready(model: str, plan: str) -> tuple[nn.Module, Any, torch.Tensor]:
    torch.manual_seed(0)
    build, inputs = MODELS[model]
    original, x = build(), inputs()
    made = plan_of(Job(model, plan, n_microbatches=2), original, x, dist.get_world_size())
    return original, autopar.parallelize(original, plan=made), x


def _step(model: str, pm: Any, x: torch.Tensor) -> None:
    pm.zero_grad()
    loss_of(model, pm(x), x).backward()


def _differing(what: str, parameters: Any, own: int) -> torch.optim.Optimizer:
    """As a script that does `what` by the rank makes it."""
    if what == "class" and own:
        return torch.optim.AdamW(parameters, lr=0.1)
    if what == "swapped":
        first, *rest = parameters
        rates = (0.1, 0.2) if own else (0.2, 0.1)
        return torch.optim.SGD([{"params": ps, "lr": lr} for ps, lr in zip(([first], rest), rates, strict=True)])
    if what == "groups" and own:
        first, *rest = parameters
        return torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=0.1)
    if what == "option" and own:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return torch.optim.SGD(parameters, lr=0.2 if what == "rate" and own else 0.1)


def steps_that_differ(model: str, plan: str, what: str, made: str) -> str:
    """What the second or third call raises. `made`: the optimizer, "before" or "after" the first call."""
    _, pm, x = _ready(model, plan)
    own = dist.get_rank()
    if made == "before":
        optimizer = _differing(what, pm.parameters(), own)
    _step(model, pm, x)
    if made == "after":
        optimizer = _differing(what, pm.parameters(), own)
    if not (what == "no step" and own):
        optimizer.step()
    if what == "value" and own:
        with torch.no_grad():
            torch_private_ranks.part_of(next(iter(pm.parameters()))).add_(0.1)
    return message_of(lambda: _step(model, pm, x))


def _said_by(calls: Callable[[], list[str]]) -> list[str]:
    """The messages that `calls` returns, and warnings about the ranks' optimizers."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        messages = calls()
    return messages + [str(one.message) for one in caught if "ranks differ" in str(one.message)]


def steps_that_differ_between_stages(what: str) -> list[str]:
    """What calls raise and warn of, where ranks hold different stages, and made their optimizers after the first."""
    _, pm, x = _ready("mlp", "chain")
    own = dist.get_rank()
    _step("mlp", pm, x)
    optimizer = _differing(what, pm.parameters(), own)

    def calls() -> list[str]:
        messages = []
        for _ in range(3):
            if not (what == "no step" and own):
                optimizer.step()
            messages.append(message_of(lambda: _step("mlp", pm, x)))
        return messages

    return _said_by(calls)


def steps_that_may_differ(what: str) -> list[str]:
    """What calls raise and warn of, where ranks train their stages in different ways, as a script for one process
    would."""
    _, pm, x = _ready("mlp", "chain")
    first, last = "0.weight", "10.weight"
    if what == "own option":  # that an optimizer changes by itself
        optimizers = [torch.optim.SGD(pm.parameters(), momentum=0.9)]
        optimizers[0].register_step_post_hook(
            lambda one, *_: one.param_groups[0].update(dampening=0.1 * dist.get_rank())
        )
    if what == "frozen stage":
        for name, p in pm.named_parameters():
            p.requires_grad_(int(name.split(".")[0]) < 6)
        optimizers = [torch.optim.SGD([p for p in pm.parameters() if p.requires_grad])]
    if what == "one layer":
        optimizers = [torch.optim.SGD([dict(pm.named_parameters())[last]])]
    if what == "a group later":
        named = dict(pm.named_parameters())
        optimizers = [torch.optim.SGD([p for name, p in named.items() if name != last])]
    if what == "two before":
        optimizers = [torch.optim.SGD([dict(pm.named_parameters())[name]]) for name in (first, last)]
    messages = [message_of(lambda: _step("mlp", pm, x))]
    here = dict(pm.named_parameters())
    if what == "two after":
        optimizers = [torch.optim.SGD([here[name]] if name in here else [torch.zeros(1)]) for name in (first, last)]
    if what == "a group later":
        optimizers[0].add_param_group({"params": [here[last]] if last in here else [], "lr": 0.01})
    if what == "rates by layer":
        rates = {first: 0.1, last: 0.2}
        optimizers = [torch.optim.SGD([{"params": [here[n]], "lr": rate} for n, rate in rates.items() if n in here])]
    if what == "rates by all layers":
        optimizers = [
            torch.optim.SGD([{"params": [p], "lr": 0.01 * (1 + int(n.split(".")[0]))} for n, p in here.items()])
        ]
    if what == "weights and biases":
        ends = ("weight", "bias")
        optimizers = [torch.optim.SGD([p for n, p in here.items() if n.endswith(end)]) for end in ends]
    if what == "the last stage":
        optimizers = [torch.optim.SGD(pm.parameters())] if last in here else []
    if what == "the last layer":
        optimizers = [torch.optim.SGD([here[last]])] if last in here else []
    if what == "frozen later":
        for name, p in here.items():
            p.requires_grad_(int(name.split(".")[0]) < 6)
        trained = [p for p in here.values() if p.requires_grad]
        optimizers = [torch.optim.SGD(trained or [torch.zeros(1)])]

    def calls() -> list[str]:
        for step in range(4):
            for every, optimizer in zip((1, 2), optimizers, strict=False):
                if step % every == 0:
                    optimizer.step()
            messages.append(message_of(lambda: _step("mlp", pm, x)))
        return messages

    return _said_by(calls)


def copies_that_round_differently() -> tuple[str, list[str]]:
    """What calls after a change of one bit on rank 1 raise, and warn of."""
    _, pm, x = _ready("mlp", "replicas 2")
    _step("mlp", pm, x)
    if dist.get_rank() == 1:
        with torch.no_grad():
            bits = torch_private_ranks.part_of(next(iter(pm.parameters()))).view(torch.int64)
            bits[0, 0] ^= 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        message = message_of(lambda: _step("mlp", pm, x))
    return message, [str(one.message) for one in caught if "drifted" in str(one.message)]


def copies_compared(model: str, plan: str, optimizer: str, threads: int) -> tuple[int, str]:
    """How many groups of copies are compared after every step, and what it raises. `threads`: of every rank."""
    before = torch.get_num_threads()
    Due.now = lambda *_, **__: True  # type: ignore[method-assign]
    torch.set_num_threads(threads)
    try:
        _, pm, x = _ready(model, plan)
        used = getattr(torch.optim, optimizer)(pm.parameters(), lr=0.01)
        message = ""
        for _ in range(3):
            message = message or message_of(lambda: _step(model, pm, x))
            used.step()
        message = message or message_of(lambda: _step(model, pm, x))
        return len(pm.placed_parameters.changes.steps._copies), message
    finally:
        torch.set_num_threads(before)
