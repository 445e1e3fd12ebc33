"""Trainings whose ranks log what they exchange: models with frozen layers, unused outputs, gradients that are None."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from collective_log import CollectiveLog, logged
from rank_cases import of_rank_0
from torch import nn
from torch.nn import functional

import autopar
from autopar import AutoparError, Plan
from autopar.runtime.ranks.messages.channels import ExchangeChannel
from autopar.runtime.ranks.messages.exchange_wire import ExchangeWire
from autopar.runtime.ranks.messages.wire import Wire
from autopar.runtime.ranks.world import World
from autopar.schedule.builders import INTERLEAVED

WIDTH = 32


@dataclass(frozen=True)
class Order:
    """A model, a plan, and the calls."""

    n_blocks: int = 4
    frozen: tuple[int, ...] = ()  # blocks without gradients
    unused: tuple[int, ...] = ()  # blocks whose result nothing reads
    skips: tuple[int, ...] = ()  # blocks that also read the first block's result
    tied: bool = False  # the last block has the first one's weight
    plan: str = "chain"  # or "chunks", "replicas", "data", "tensor", "zero"
    schedule: str = "1f1b"
    n_microbatches: int = 2
    batches: tuple[int, ...] = (8, 5)
    call: str = "train_step"


class Blocks(nn.Module):
    def __init__(self, order: Order) -> None:
        super().__init__()
        self.order = order
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(order.n_blocks))
        for i in order.frozen:
            self.blocks[i].requires_grad_(False)
        if order.tied:
            self.blocks[-1].weight = self.blocks[0].weight

    def forward(self, x: torch.Tensor) -> Any:
        first, aside = None, []
        for i, block in enumerate(self.blocks):
            found = torch.tanh(block(x))
            if i in self.order.unused:
                aside.append(found)
                continue
            x = found + first if i in self.order.skips and first is not None else found
            first = x if first is None else first
        return x, aside


def plan_of(order: Order, model: nn.Module) -> Plan:
    n, made = dist.get_world_size(), {"n_microbatches": order.n_microbatches, "schedule": order.schedule}
    names = [f"cpu:{i}" for i in range(n)]

    def split(stages: int) -> dict[str, int]:
        return {f"blocks.{i}": i * stages // order.n_blocks for i in range(order.n_blocks)}

    if order.plan == "chunks":
        made["schedule"] = order.schedule if order.schedule in INTERLEAVED else "interleaved-1f1b"
        return Plan.from_split(split(2 * n), **made)
    if order.plan == "replicas":
        devices = [names[:1], names[1:]] if n > 2 else [names]
        return Plan.from_split(split(len(devices)), devices=devices, **made)
    if order.plan in ("data", "tensor", "zero", "mixed"):
        degrees = {"tensor": {"tensor": n}, "mixed": {"tensor": n // 2, "pipeline": 2}}.get(order.plan, {"data": n})
        more = {"zero": {"zero": 3}, "tensor": {"zero": 0}}.get(order.plan, {})
        x = torch.randn(12, WIDTH, dtype=torch.float64)  # which two, three and four ranks divide evenly
        by_hand: dict[str, Any] = {"example_args": (x,), "schedule": order.schedule, **degrees, **more}
        return of_rank_0(lambda: Plan.by_hand(model, ["cpu"] * n, **by_hand))
    return Plan.from_split(split(n), **made)


def exchanged(order: Order) -> tuple[CollectiveLog, float, str]:
    """Train two steps a batch, and evaluate: the rank's log, its largest error against the plain model, and what
    autopar refused, which must be the same on all ranks."""
    torch.manual_seed(0)
    model = Blocks(order).double()
    log = CollectiveLog()
    try:
        plan = plan_of(order, copy.deepcopy(model))
        with logged() as log:
            error = _compared(order, model, plan)
    except AutoparError as refused:
        return log, 0.0, f"{type(refused).__name__}: {refused}"
    return log, error, ""


def _compared(order: Order, model: nn.Module, plan: Plan) -> float:
    original = copy.deepcopy(model)
    pm = autopar.parallelize(model, plan=plan, cache=False)
    ours = torch.optim.AdamW(model.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(original.parameters(), lr=1e-2)
    error = 0.0
    for size in order.batches:
        x = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(size)).double()
        for _ in range(2):
            ours.zero_grad()
            theirs.zero_grad()
            wanted = _loss(original(x), x)
            wanted.backward()
            if order.call == "train_step":
                loss = pm.train_step(x, target=x, loss_fn=_loss)
            else:
                loss = _loss(pm(x), x)
                loss.backward()
            error = max(error, abs(loss.item() - wanted.item()))
            for name, p in pm.named_parameters():
                if (p.grad is None) != (original.get_parameter(name).grad is None):
                    error = max(error, 1.0)
            ours.step()
            theirs.step()
        with torch.no_grad():
            error = max(error, (pm(x)[0] - original(x)[0]).abs().max().item())
    return error


def _loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output[0], target)


def in_exchanges(order: Order) -> tuple[CollectiveLog, float, str]:
    """The same without tags, as over NCCL: only the order pairs messages."""
    channel = ExchangeChannel(dist.new_group())

    def wire(self: World, slot: int, *rest: Any) -> Wire:
        return ExchangeWire(self.rank, slot, *rest[:2], channel, self.host_channel(), *rest[2:], most_packed=-1)

    with mock.patch.object(World, "new_wire", wire):
        return exchanged(order)


def checked_by_torch(order: Order) -> tuple[CollectiveLog, float, str]:
    """The same as with TORCH_DISTRIBUTED_DEBUG=DETAIL: torch compares every collective between the ranks of its group,
    and starts it once all of them have come to it."""
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        return exchanged(order)
    finally:
        dist.set_debug_level(level)
