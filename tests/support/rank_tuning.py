"""Jobs of ranks that run plans before one is followed."""

from __future__ import annotations

import gc
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from rank_behaviour import message_of
from torch import nn
from torch.nn import functional

import autopar
from autopar import Plan
from autopar.analysis import batching
from autopar.errors import AutoparWarning
from autopar.runtime.ranks import trials
from autopar.runtime.ranks.parameters import own
from autopar.runtime.ranks.world import World

X, Y = torch.arange(192.0).reshape(16, 12) / 192, torch.ones(16, 12)
CALL: dict[str, Any] = {"example_args": (X,), "target": Y, "loss_fn": functional.mse_loss}


def layers() -> nn.Sequential:
    """With what a step changes: statistics, and random numbers."""
    torch.manual_seed(0)
    body = [layer for _ in range(4) for layer in (nn.Linear(12, 12), nn.Tanh())]
    return nn.Sequential(nn.BatchNorm1d(12), *body, nn.Dropout(0.0), nn.Linear(12, 12))


def on_a_mesh(zero: int) -> Plan:
    """Both ranks as one mesh: with `zero`, data parallel with optimizer states in parts; without, tensor parallel."""
    degrees: dict[str, int] = {"data": 2, "zero": zero} if zero else {"tensor": 2}
    return Plan.by_hand(layers().eval(), None, **degrees, micro_batch=8, **CALL)


def halves(m: int = 2) -> Plan:
    return Plan.from_split({**{str(i): 0 for i in range(5)}, **{str(i): 1 for i in range(5, 11)}}, n_microbatches=m)


@contextmanager
def steps_taking(seconds: Mapping[str, float]) -> Iterator[list[str]]:
    """Steps run, and take `seconds` by name of their plan on this rank, others one second. Yields the names."""
    ran: list[str] = []
    step = trials.Trials.step

    def timed(self: trials.Trials, name: str) -> float:
        assert 0 < step(self, name) < math.inf
        ran.append(name)
        return seconds.get(name, 1.0)

    with patch.object(trials.Trials, "step", timed):
        yield ran


def tuned(options: dict[str, Any], by_rank: list[dict[str, float]]) -> dict[str, Any]:
    """A plan for which steps ran that took the seconds `by_rank`, and what is left of that."""
    model = layers()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    numbers, tensors = torch.get_rng_state(), {id(t) for t in model.parameters()}
    with steps_taking(by_rank[dist.get_rank()]) as ran:
        plan = autopar.plan(model, cache=False, **options, **CALL)
    changed = [name for name, value in model.state_dict().items() if not torch.equal(before[name], value.cpu())]
    changed += [f"gradient of {name}" for name, p in model.named_parameters() if p.grad is not None]
    changed += [] if torch.equal(numbers, torch.get_rng_state()) else ["random state"]
    changed += [] if tensors == {id(t) for t in model.parameters()} else ["parameters"]
    return {
        "decision": plan.without_predictions("compared").to_json(),
        "devices": plan.used_devices,
        "notes": plan.notes,
        "measured": plan.measured_step_time,
        "predicted": plan.predicted_step_time,
        "scale": plan.time_scale,
        "ran": ran,
        "changed": changed,
    }


def tuned_on_a_mesh(zero: int) -> tuple[list[str], tuple[str, ...], float, float]:
    """What trials of a sharded candidate changed of the model, notes, the plain model's loss, and a first step's."""
    model = layers().eval()
    plain = functional.mse_loss(model(X), Y).item()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with steps_taking({"mine": 0.5}):
        plan = autopar.plan(model, cache=False, tune=1, candidates={"mine": on_a_mesh(zero)}, **CALL)
    changed = [name for name, value in model.state_dict().items() if not torch.equal(before[name], value)]
    pm = autopar.parallelize(model, plan=plan)
    return changed, plan.notes, plain, pm.train_step(X, target=Y, loss_fn=functional.mse_loss).item()


def trained(options: dict[str, Any]) -> tuple[list[float], list[float], int]:
    """The plain model's loss, and the gradient of what the loss trains besides; the same of a first step on ranks; and
    how many models ranks still hold parts of."""
    model, tau = layers().eval(), nn.Parameter(torch.tensor(2.0))

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(output * tau, target)

    loss = loss_fn(model(X), Y)
    loss.backward()
    plain = [loss.item(), gradient_of(tau)]
    tau.grad = None
    model.zero_grad()
    pm = autopar.parallelize(model, cache=False, **options)
    step = pm.train_step(X, target=Y, loss_fn=loss_fn)
    gc.collect()
    return plain, [step.item(), gradient_of(tau)], len(list(own._of_this_process))


def gradient_of(number: torch.Tensor) -> float:
    assert number.grad is not None
    return number.grad.item()


def remembered() -> tuple[list[str], list[str], bool]:
    """The plans that ran for a first call and for the same again, and whether both were planned alike."""
    with steps_taking({}) as first:
        one = autopar.plan(layers(), **CALL)
    with steps_taking({}) as second:
        again = autopar.plan(layers(), **CALL)
    return first, second, one.to_json() == again.to_json()


def without_values_on_rank_1(tune: Any) -> str:
    """The message of a plan's search with a model that has values on rank 0 alone, or the plan's notes."""
    model = layers()
    if dist.get_rank():
        with torch.device("meta"):
            model = layers()
    found: list[str] = []

    def plan() -> None:
        pm = autopar.parallelize(model, cache=False, tune=tune, **CALL)
        assert pm.plan is not None
        found.extend(pm.plan.notes)

    return message_of(plan) or "; ".join(found)


def with_little_memory() -> tuple[str, ...]:
    """Notes of a plan on ranks with hardly more memory than the model needs."""
    model = layers()
    own = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    lacking = trials.PlansOnRanks.lacking

    def with_less(self: trials.PlansOnRanks, plans: Mapping[str, Plan]) -> str:
        self._devices = [replace(device, memory=own + 1) for device in self._devices]
        return lacking(self, plans)

    with patch.object(trials.PlansOnRanks, "lacking", with_less), steps_taking({}) as ran:
        plan = autopar.plan(model, cache=False, **CALL)
    assert not ran
    return plan.notes


def fails_on_rank_1() -> None:
    """The second step that is measured fails on rank 1, whose process then ends."""
    step, ran = trials.Trials.step, []

    def failing(self: trials.Trials, name: str) -> float:
        ran.append(name)
        if len(ran) == 2 and dist.get_rank() == 1:
            raise MemoryError("no memory left")
        return step(self, name)

    with patch.object(trials.Trials, "step", failing):
        if dist.get_rank() == 0:
            autopar.plan(layers(), cache=False, tune=2, **CALL)
        with pytest.raises(MemoryError):
            autopar.plan(layers(), cache=False, tune=2, **CALL)
    os._exit(1)


def refused_on_all() -> tuple[str, float]:
    """The error of plans that ranks cannot run, and the loss of a call right after it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 12, sparse=True), nn.Linear(12, 12))
    numbers, target = torch.arange(160).reshape(16, 10) % 10, torch.ones(16, 10, 12)
    call: dict[str, Any] = {"example_args": (numbers,), "target": target, "loss_fn": functional.mse_loss}
    message = message_of(lambda: autopar.plan(model, cache=False, tune=2, **call))
    pm = autopar.parallelize(layers().eval(), plan=halves())
    return message, pm.train_step(X, target=Y, loss_fn=functional.mse_loss).item()


def verified() -> tuple[int, int, list[str]]:
    """How many outputs were compared because of `verify` at a first call, and at one of another mode; warnings of the
    latter."""
    compared = []
    proven = batching._proven

    def counting(program: Any, index: int, output: Any, proof: Any, verify: bool) -> Any:
        found = proven(program, index, output, proof, verify)
        compared.append(found is None)
        return found

    model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(4)))
    with patch.object(batching, "_proven", counting), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AutoparWarning)
        plan = Plan.from_split({"0": 0, "1": 0, "2": 1, "3": 1}, n_microbatches=2)
        pm = autopar.parallelize(model, plan=plan, verify=True)
        pm(X)
        first, second = sum(compared), len(compared)
        del caught[:]
        pm.eval()
        with torch.no_grad():
            pm(X[:10])
    return first, sum(compared[second:]), [str(one.message) for one in caught]


def meshes_shared() -> tuple[int, int]:
    """Meshes that the job has after a first module with a plan, and after a second one."""
    found = []
    for _ in range(2):
        pm = autopar.parallelize(layers().eval(), plan=halves())
        pm.train_step(X, target=Y, loss_fn=functional.mse_loss)
        world: World = pm.world
        found.append(len(world._meshes))
    return found[0], found[1]
