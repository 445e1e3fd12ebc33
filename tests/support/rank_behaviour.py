"""What ranks do beside training by a plan: further calls, and what they refuse. Each returns what its test compares."""

from __future__ import annotations

import copy
import gc
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_cases import SPLITS, mlp
from torch import nn
from torch.nn import functional

import autopar
from autopar import AutoparError, Plan
from autopar.capture import torch_private_ranks
from autopar.capture.torch_private_ranks import part_of
from autopar.lower import process_groups
from autopar.plan.step_work import StepWork
from autopar.runtime.ranks.faults import watcher
from autopar.runtime.ranks.world import joined


def message_of(call: Callable[[], Any]) -> str:
    """`ClassName: message` of the error of autopar that `call` raises; "" if it raises none."""
    try:
        call()
    except (AutoparError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def chain(**more: Any) -> Plan:
    return Plan.from_split(SPLITS["mlp"][dist.get_world_size()], **({"n_microbatches": 4} | more))


def ready(seed: int = 0, **options: Any) -> tuple[nn.Module, Any, torch.Tensor]:
    """A model, the same on ranks, and a batch."""
    torch.manual_seed(seed)
    model, x = mlp(), torch.randn(8, 12)
    return model, autopar.parallelize(model, **({"plan": chain()} | options)), x


def step(pm: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = pm.train_step(x, target=x, loss_fn=functional.mse_loss)
    return loss


def collectives() -> list[torch.Tensor]:
    """What each functional collective gives this rank of two, beside what it should give."""
    rank, group = dist.get_rank(), dist.group.WORLD.group_name
    own, parts = torch.tensor([1.0 + rank, 10.0]), torch.arange(4.0).view(4, 1) * (1 + rank)
    return [
        process_groups.all_reduce(own, "sum", group) - torch.tensor([3.0, 20.0]),
        process_groups.all_reduce(own, "max", group) - torch.tensor([2.0, 10.0]),
        process_groups.all_gather(own, 2, group) - torch.tensor([1.0, 10.0, 2.0, 10.0]),
        process_groups.reduce_scatter(parts, 2, group) - 3 * torch.arange(4.0).view(4, 1).chunk(2)[rank],
        process_groups.all_to_all(parts, 2, group)
        - torch.arange(4.0).view(4, 1).chunk(2)[rank].repeat(2, 1) * torch.tensor([1.0, 1.0, 2.0, 2.0]).view(4, 1),
    ]


def evaluation() -> list[float]:
    """Errors of further calls after a training step: other sizes and modes, accumulation, two backwards."""
    model, pm, x = ready()
    original = copy.deepcopy(model)
    errors = []

    def compare(found: torch.Tensor, wanted: torch.Tensor) -> None:
        errors.append((found - wanted).abs().max().item())

    for _ in range(2):  # gradients add up
        step(pm, x)
        functional.mse_loss(original(x), x).backward()
    loss = functional.mse_loss(pm(x), x)
    loss.backward(retain_graph=True)
    loss.backward()
    for _ in range(2):
        functional.mse_loss(original(x), x).backward()
    for name, p in pm.named_parameters():
        compare(p.grad.to_local(), original.get_parameter(name).grad)
    pm.eval()
    with torch.no_grad():
        compare(pm(x[:5]), original(x[:5]))
    with torch.inference_mode():
        compare(pm(x[:3]), original(x[:3]))
    pm.train()
    loss, outputs = pm.train_step(x, target=x, loss_fn=functional.mse_loss, return_outputs=True)
    compare(outputs, original(x).detach())
    pm.train_step(x, target=x, loss_fn=lambda y, t: (y - t).abs().amax())  # runs on the outputs of the whole batch
    return errors


def seen_by_hooks() -> list[tuple[int, ...]]:
    """The shapes that a hook on a layer of the last stage sees on this rank."""
    torch.manual_seed(0)
    model, seen = mlp(), []
    model[10].register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    pm = autopar.parallelize(model, plan=chain())
    step(pm, torch.randn(8, 12))
    return seen


def memory() -> dict[str, Any]:
    """What a rank still has after the placing."""
    model, pm, x = ready()
    before = list(model.parameters())
    step(pm, x)
    program = [p for stage in pm.stages for p in stage.parameters()]
    return {
        "names": [name for name, _ in pm.named_parameters()],
        "state": list(pm.state_dict()),
        "local": sum(part_of(p).untyped_storage().nbytes() for p in pm.parameters()),
        "left": sum(
            {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in [*before, *program]}.values()
        ),
        "is nan": all(bool(p.isnan().all()) for p in before),
    }


def refusals() -> dict[str, str]:
    """Messages by what was done."""
    rank, found = dist.get_rank(), {}
    other = ready(seed=rank)[1]
    found["weights"] = message_of(lambda: step(other, torch.ones(8, 12)))
    found["plan"] = message_of(lambda: step(*ready(plan=chain(schedule=("1f1b", "gpipe")[rank]))[1:]))
    counted = replace(chain(), work=StepWork(flops=1e6 + rank))  # predictions of two ranks may differ
    found["work"] = message_of(lambda: step(*ready(plan=counted)[1:]))
    found["options"] = message_of(lambda: ready(dynamic={"input": {1: (8, 16)}}))
    found["planning"] = message_of(lambda: step(*ready(plan=None, memory_limit=10)[1:]))
    _, pm, x = ready()
    found["content"] = message_of(lambda: step(pm, x + rank))
    found["shapes"] = message_of(lambda: step(pm, x[: 4 + rank]))
    found["kind"] = message_of(lambda: pm(x) if rank else step(pm, x))
    found["input gradient"] = message_of(lambda: pm(x.clone().requires_grad_(rank == 1)))
    with torch.autocast("cpu", enabled=rank == 1):
        found["autocast"] = message_of(lambda: pm(x))
    _, pm, x = ready()
    step(pm, x)
    found["copy"] = message_of(lambda: copy.deepcopy(pm))
    found["profile"] = message_of(lambda: pm.train_step(x, target=x, loss_fn=functional.mse_loss, profile=rank == 1))
    return found


class WritesParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)
        self.scale = nn.Parameter(torch.ones(12), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.mul_(1.01)
        return self.b(torch.tanh(self.a(x)) * self.scale)


def written_parameter() -> str:
    """The message for a model whose forward writes a parameter."""
    torch.manual_seed(0)
    plan = Plan.from_split({"a": 0, "b": 1}, n_microbatches=1)
    pm = autopar.parallelize(WritesParameter(), plan=plan)
    return message_of(lambda: step(pm, torch.randn(8, 12)))


def late_optimizer() -> str:
    """An optimizer that made a step before the parameters were placed."""
    model, pm, x = ready()
    optimizer = torch.optim.Adam(model.parameters())
    functional.mse_loss(model(x), x).backward()
    optimizer.step()
    optimizer.zero_grad()
    step(pm, x)
    return message_of(optimizer.step)


def loss_of_one_rank() -> str:
    """The message for a loss that only one rank can capture."""
    _, pm, x = ready()

    def loss_fn(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise ValueError("not here")
        return functional.mse_loss(y, target)

    return message_of(lambda: pm.train_step(x, target=x, loss_fn=loss_fn))


def fails_on_the_last_rank() -> None:
    """A hook of the last stage raises in the second step, and its rank's process then ends."""
    torch.manual_seed(0)
    model, x, failing = mlp(), torch.randn(8, 12), []

    def hook(*_: Any) -> None:
        if failing:
            raise ValueError("the user's own mistake")

    model[10].register_forward_hook(hook)
    pm = autopar.parallelize(model, plan=chain())
    step(pm, x)
    failing.append(1)
    with pytest.raises(ValueError, match="the user's own mistake"):
        step(pm, x)
    assert "an earlier call failed" in message_of(lambda: step(pm, x))
    os._exit(1)


def anew_in_one_process() -> bool:
    """The process group ends and starts again twice. Whether Python still writes signals to the watcher's socket."""
    for number in range(3):
        assert joined() is not None
        rank, size, store = dist.get_rank(), dist.get_world_size(), torch_private_ranks.default_store()
        dist.destroy_process_group()
        time.sleep(1.2)  # until the watcher has noticed
        gc.collect()
        dist.init_process_group("gloo", store=dist.PrefixStore(f"again {number}", store), rank=rank, world_size=size)
    assert joined() is not None
    assert watcher._signals is not None
    fd = watcher._signals[1].fileno()
    return signal.set_wakeup_fd(fd, warn_on_full_buffer=False) == fd
