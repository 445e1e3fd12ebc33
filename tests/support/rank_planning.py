"""What ranks do in tests of planning. Each returns what its test compares."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from rank_cases import mlp
from rank_checkpoints import message_of
from torch import nn
from torch.nn import functional
from uncaptured_models import CASES

import autopar
from autopar import Cluster, InputError, Plan, PlanError
from autopar.runtime.checkpoints.participants import participants
from autopar.runtime.ranks import planning
from autopar.runtime.ranks.messages.handling import measured_handling
from autopar.runtime.ranks.world import joined
from cost_models.measuring.process_links import measure_process_links, probe_process_links


def plans(options: dict[str, Any] | None = None) -> tuple[str, str, list[str]]:
    """What `autopar.plan` and a first call of `parallelize` plan, as JSON, and the notes."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))), torch.randn(32, 256)
    given: dict[str, Any] = {"example_args": (x,), "target": x, "loss_fn": functional.mse_loss, **(options or {})}
    made = autopar.plan(model, **given)
    pm = autopar.parallelize(model, **given)
    assert pm.plan is not None
    return made.to_json(), pm.plan.to_json(), list(made.notes)


def modes_after_planning() -> tuple[bool, bool, bool]:
    """After first calls, which plan: whether the output has gradients, whether they are on, inference mode off."""
    model, x = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), torch.randn(8, 16)
    with torch.no_grad():
        output = autopar.parallelize(copy.deepcopy(model), cache=False, tune=0)(x)
        after = torch.is_grad_enabled()
    with torch.inference_mode():
        autopar.parallelize(model, cache=False, tune=0)(x)
        return output.requires_grad, after, torch.is_grad_enabled() or not torch.is_inference_mode_enabled()


def links(hosts: list[int]) -> tuple[dict[Any, Any], bool, float]:
    """Measured links, and how far a message is from them right after."""
    world = joined()
    assert world is not None
    found = measure_process_links(hosts, world.control)
    return dict(found.links), found.shared, probe_process_links(hosts, found, world.control)


def handled() -> float:
    """Seconds that this rank takes for its end of a message."""
    world = joined()
    assert world is not None
    return measured_handling(world)


def followed() -> list[float]:
    """Losses of the plain model; by a plan made ahead for a cluster, on ranks; and by that plan, as the ranks followed
    it and saved it, in one process."""
    n = dist.get_world_size()
    torch.manual_seed(0)
    model, x = mlp(), torch.randn(8, 12)
    cluster = Cluster.preset("cpu", nodes=n)
    copies = [copy.deepcopy(model) for _ in range(2)]
    split = {str(i): i * n // 12 for i in range(12)}
    ahead = Plan.from_split(split, devices=[[device.name] for device in reversed(cluster.devices)], n_microbatches=4)
    ahead = dataclasses.replace(ahead, devices=tuple(device.name for device in cluster.devices))
    losses = [functional.mse_loss(model(x), x).item()]
    pm = autopar.parallelize(copies[0], plan=Plan.from_json(ahead.to_json()))
    losses.append(pm.train_step(x, target=x, loss_fn=functional.mse_loss).item())
    assert pm.plan is not None
    assert [stage.devices for stage in pm.plan.stages] == [(f"cpu:{n - 1 - i}",) for i in range(n)]
    alone = autopar.parallelize(copies[1], ["cpu"] * n, plan=Plan.from_json(pm.plan.to_json()))
    losses.append(alone.train_step(x, target=x, loss_fn=functional.mse_loss).item())
    return losses


def too_large_a_plan() -> str:
    """The error for a plan of more devices than there are ranks."""
    n = dist.get_world_size() + 1
    split = {str(i): i * n // 12 for i in range(12)}
    try:
        autopar.parallelize(
            mlp(), plan=Plan.from_split(split, devices=[[f"cpu:{i}"] for i in range(n)], n_microbatches=4)
        )
    except PlanError as error:
        return str(error)
    return ""


def plan_by_hand_of_uncaptured_code(number: int) -> str:
    """What a plan by hand raises on ranks for a case. Then one process runs the case, by `devices=`, as the model."""
    case = CASES[number]
    model, inputs = case.model(), case.inputs(6)
    original, plan = copy.deepcopy(model), Plan.from_split(case.split, n_microbatches=2)
    message = message_of(lambda: Plan.by_hand(model, None, example_args=inputs, pipeline=2))
    torch.testing.assert_close(autopar.parallelize(model, ["cpu", "cpu"], plan=plan)(*inputs), original(*inputs))
    return message


def passes_fail(where: str) -> list[str]:
    """Errors on a rank, when the passes of rank 1 fail; and when rank 0 fails with what cannot be pickled."""
    world = joined()
    assert world is not None
    measured: Any = planning.passes_of

    def fail(*_: object, **__: object) -> Any:
        raise MemoryError("no memory left")

    def failing(*_: object) -> Any:
        if where == "before":
            fail()

        def passes(device: object, workers: int, rows: int, companions: Any) -> None:
            companions.wait()
            if where == "amid":
                fail()
            companions.largest(1.0)
            fail()

        return passes

    def passing(*_: object) -> Any:
        def passes(device: object, workers: int, rows: int, companions: Any) -> None:
            companions.wait()
            companions.largest(1.0)

        return passes

    planning.passes_of = failing if world.rank == 1 else passing
    try:
        example: Any = None
        devices = world.devices([])
        messages = [
            message_of(
                lambda: planning.plan_together(
                    world, devices, example, lambda _, ranks: ranks.passes(range(world.size), 2, 4)
                )
            )
        ]
    finally:
        planning.passes_of = measured

    def unpicklable(*_: object) -> Any:
        error = ValueError("of rank 0")
        error.__dict__["what"] = lambda: None
        raise error

    messages.append(message_of(lambda: planning.plan_together(world, devices, example, unpicklable)))
    team = participants()
    messages.append(message_of(lambda: team.first("it fails", lambda: lambda: None)))
    return messages


def wrapped_in_ddp() -> str:
    """The error of a call through DistributedDataParallel."""
    torch.manual_seed(0)
    model, x = mlp(), torch.randn(8, 12)
    pm = autopar.parallelize(model, n_microbatches=2)
    try:
        nn.parallel.DistributedDataParallel(pm)(x)
    except InputError as error:
        return str(error)
    return ""
