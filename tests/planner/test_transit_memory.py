"""What copies between GPUs hold: the planner counts the bytes that the runtime holds, action by action."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from pretend_gpus import PretendGpus, pipelined
from torch import nn
from torch.nn.functional import mse_loss

from autopar import Plan
from autopar.analysis.example import capture_example
from autopar.planner.arrangement import Conditions
from autopar.planner.predict import arranged, completed
from autopar.planner.rehearsed_memory import _Step
from autopar.runtime.step.transfers import Transfers
from autopar.schedule.clock import Action, Phase
from autopar.schedule.transit import COPIES_UNDER_WAY, InTransit, in_transit
from benchmarks.plan_memory import costs_of_bytes
from cost_models import Device, parse_devices


class Skips(nn.Module):
    """The last stage reads what the first one computes, and the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x)
        third = torch.relu(self.layers[2](torch.relu(self.layers[1](first)))) + first
        found: torch.Tensor = self.layers[3](third) * x
        return found


def plan_of(schedule: str, devices: list[Any], m: int = 6, **more: Any) -> Plan:
    n = len(devices)
    split = {f"layers.{i}": i * n // 4 for i in range(4)}
    return Plan.from_split(split, n_microbatches=m, schedule=schedule, devices=devices, **more)


TWO = ["cuda:0", "cuda:1"]
PLANS = {
    "gpipe": plan_of("gpipe", TWO),
    "1f1b": plan_of("1f1b", TWO),
    "zb-h1": plan_of("zb-h1", TWO),
    "three stages": plan_of("1f1b", [*TWO, "cuda:2"]),
    "recompute": plan_of("1f1b", TWO, recompute=(0, 1)),
    "replicas": plan_of("1f1b", [["cuda:0", "cuda:2"], "cuda:1"]),
    "interleaved": plan_of("interleaved-1f1b", TWO * 2),
}


def step_of(model: nn.Module, plan: Plan, x: torch.Tensor) -> _Step:
    """The plan on GPUs, with the bytes of its passes."""
    devices = [
        Device(name, torch.device(name), "GPU", 80 << 30, threads=1)
        for name in dict.fromkeys(name for stage in plan.stages for name in stage.devices)
    ]
    example = capture_example(model, parse_devices(["cpu"]), (x,), {}, loss_fn=mse_loss, target=x)
    costs = costs_of_bytes(example, devices)
    plan = completed(plan, example, costs)
    stage_of = {node.name: stage for node, stage in plan.assign(example.program, example.batching.storages).items()}
    atoms, arrangement = arranged(costs, plan, stage_of)
    assert costs.rehearsal is not None
    return _Step(costs, costs.rehearsal, atoms, arrangement, Conditions("none", loss_inside=True))


@pytest.mark.slow
@pytest.mark.usefixtures("shared_exports")
@pytest.mark.parametrize("name", PLANS)
def test_the_planner_counts_what_the_runtime_holds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, x = PLANS[name], torch.randn(12, 8)
    step = step_of(Skips(), plan, x)
    step.peaks()
    gpus = PretendGpus(monkeypatch)
    held: dict[str, list[int]] = defaultdict(list)  # by device: after each action of its worker

    def seen(transfers: Transfers, thread: int, place: str) -> None:
        tensors = [one.tensor for action in transfers._held.get(thread, ()) for one in action]
        mine = {t.untyped_storage()._cdata: t for t in tensors if str(t.device) == place}
        held[place].append(sum(t.untyped_storage().nbytes() for t in mine.values()))

    begin, finish = Transfers.begin_action, Transfers.finish
    threads: dict[int, str] = {}

    def watched(transfers: Transfers) -> None:
        place = threading.current_thread().name.removeprefix("autopar-")
        threads[threading.get_ident()] = place
        seen(transfers, threading.get_ident(), place)
        begin(transfers)

    def finished(transfers: Transfers) -> None:
        for thread, place in threads.items():
            seen(transfers, thread, place)
        finish(transfers)

    monkeypatch.setattr(Transfers, "begin_action", watched)
    monkeypatch.setattr(Transfers, "finish", finished)
    pm = pipelined(Skips(), plan)
    pm.prepare((x,), {}, loss_fn=mse_loss, target=x)
    with gpus.recording():
        there = gpus.on(x, "cuda:3"), gpus.on(x, "cuda:3")
        held.clear()
        threads.clear()
        pm.train_step(there[0], target=there[1], loss_fn=mse_loss)
    pm.close()
    gpus.close()
    for slot, device in enumerate(group.first for rank in step._arrangement.ranks for group in rank):
        actions = step._schedule.actions[slot]
        sent = [replace(one, counted=None) for one in step._sent_by(slot)]
        sent += [InTransit(step._input_bytes(a), a) for a in actions if a.phase is Phase.FORWARD]
        predicted = in_transit(actions, sent)
        begun = [nbytes for action, nbytes in zip(actions, predicted, strict=True) if action.phase is not Phase.WEIGHT]
        assert held[device][1:] == begun, device
        assert any(begun)


def test_bytes_are_held_for_some_actions_and_counted_once() -> None:
    forwards = [Action(Phase.FORWARD, 0, i) for i in range(8)]
    assert in_transit(forwards, [InTransit(5, forwards[1])]) == [0, *[5] * COPIES_UNDER_WAY, 0, 0, 0]
    assert in_transit(forwards, [InTransit(5, forwards[1], forwards[3])]) == [0, 0, 0, 0, 5, 0, 0, 0]
    assert in_transit(forwards, [InTransit(5, forwards[1], forwards[6])]) == [0] * 8
    assert in_transit(forwards, [InTransit(5, forwards[6]), InTransit(1, forwards[7])]) == [0] * 6 + [5, 6]
    weights = [forwards[0], Action(Phase.WEIGHT, 0, 0), *forwards[1:5]]
    assert in_transit(weights, [InTransit(5, forwards[0])]) == [5, 5, 5, 5, 5, 0]
