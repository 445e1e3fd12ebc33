"""Runs the calls of one model on one rank: every rank makes the same calls."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.capture import torch_private
from autopar.errors import AutoparError, InputError
from autopar.runtime.call_runner import CallRunner
from autopar.runtime.captures import BoundCall, CallArguments
from autopar.runtime.ranks.agreement import CallAgreement
from autopar.runtime.ranks.run import RankRun
from autopar.runtime.ranks.signatures import RankSignatures
from autopar.runtime.ranks.world import World
from autopar.runtime.run import Run
from cost_models.hardware.devices import Device


class RankCalls(CallRunner):
    """Every call is compared between the ranks before it runs, so that none of them waits for another for ever."""

    def __init__(self, world: World, model: nn.Module, devices: Sequence[Device], signatures: RankSignatures) -> None:
        super().__init__(model, devices, signatures)
        self._world, self._placed = world, signatures.parameters
        self._agreement = CallAgreement(world)

    def prepare(self, call: CallArguments) -> BoundCall:
        with self._world.watcher.call("prepare"):
            self._check(call)
            with self._world.watcher.raised_calls.together():
                return super().prepare(call)

    def forward(self, call: CallArguments) -> Any:
        with self._world.watcher.call("forward"):
            self._check(call)
            with self._world.watcher.raised_calls.together():
                return super().forward(call)

    def train_step(self, call: CallArguments) -> tuple[torch.Tensor, Any]:
        with self._world.watcher.call("train_step"):
            self._check(call)
            with self._world.watcher.raised_calls.together():
                return super().train_step(call)

    def unpipelined(self, what: str, why: str) -> AbstractContextManager[object]:
        raise InputError(
            f"{what} runs the model itself ({why}), and no rank has all of it; use one process for that (devices=)"
        )

    def _check(self, call: CallArguments) -> None:
        if self._placed.failed:
            raise AutoparError(
                "an earlier call failed on this rank, so that the ranks are out of step; end all and start again"
            )
        if torch.is_autocast_enabled("cpu"):
            raise InputError(
                "autocast with one process a device is not supported so far: convert the model (model.bfloat16()), or "
                "use one process (devices=)"
            )
        if torch_private.inside_ddp():
            raise InputError(
                "the pipelined module is wrapped in DistributedDataParallel, as Accelerate and transformers' Trainer "
                "do under torchrun. Its ranks are one model already: call the module itself in a loop of your own, "
                "without accelerator.prepare(), or run Trainer or Accelerate in one process (devices=)"
            )
        kind = (call.loss is not None, torch.is_grad_enabled(), self._model.training, call.return_outputs)
        raised = self._world.watcher.raised_calls
        raised.wait_for_others()
        self._agreement.check(kind, (call.args, call.kwargs), call.target)
        raised.begin()

    def _run(self, bound: BoundCall, step: CallArguments | None = None) -> Run:
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in bound.leaves):
            raise InputError(
                "an input needs a gradient, which only the first stage's rank would have: detach() the inputs, or run "
                "in one process (devices=)"
            )
        run = super()._run(bound, step)
        if run.call.seed is not None:  # every rank draws what one process would draw, and that of rank 0 counts
            (seed,) = self._world.broadcast_objects([run.call.seed], 0)
            run.call = replace(run.call, seed=seed)
        return RankRun(run, self._placed)
