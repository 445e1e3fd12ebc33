"""Warnings about what changes the numbers or the speed of calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from autopar.analysis.batching import Batching
from autopar.capture.program import Program
from autopar.errors import each_warning_once, warn
from autopar.lower.stages import Lowered
from autopar.plan.plan import Plan


class OneTimeWarnings:
    """Warnings of one module; it gives each of them once. `given`: those so far."""

    def __init__(self, given: Iterable[Any] = ()) -> None:
        self.given: set[Any] = set(given)

    def uncaptured(self, program: Program) -> None:
        """(An autograd.Function loses nothing as one operator: the plan names it.)"""
        modules = [text for text in program.uncaptured if text.startswith("module ")]
        if modules:
            more = f" (and {len(modules) - 1} more modules; the plan lists them)" if modules[1:] else ""
            self._once(f"{modules[0]}{more}; strict=True refuses such a model")

    def batch_stays_whole(self, batching: Batching) -> None:
        if batching.obstacle and batching.obstacle != "the batch has one sample":
            self._once(f"the batch is not split into micro-batches: {batching.obstacle}")

    def changed_attribute(self, path: str) -> None:
        self._once(
            f"'{path}' has changed since the model was captured, so it is captured again, which takes seconds; what "
            "changes with every step is better an input, as a tensor"
        )

    def types_without_autocast(self, device_types: Iterable[str]) -> None:
        if not any(map(torch.is_autocast_enabled, device_types)):
            return
        self._once(
            "forward asks for the dtype of a tensor that it has computed, and is told the one without torch.autocast, "
            "which is on: what it does about it (x.to(other.dtype), torch.finfo(x.dtype)) may differ from the original "
            "model; ask the dtype of parameters or inputs instead, or name the dtype"
        )

    def not_verified(self) -> None:
        self._once(
            "verify=True does not check this call: no rank has all values of the model, so what the graph proves "
            "counts; check the model once in one process (devices=)"
        )

    def statistics_are_of_microbatches(self, plan: Plan, batching: Batching) -> None:
        if batching.batch_norms and plan.n_microbatches > 1:
            self._once(
                f"batch norm uses the statistics of each micro-batch (1/{plan.n_microbatches} of the batch), first in "
                f"{batching.batch_norms[0]}; batch_norm='deferred' keeps the running statistics those of the batch, "
                "batch_norm='exact' keeps the batch whole"
            )

    def undivided(self, lowered: Lowered) -> None:
        """The plan was made for a call with inputs of other sizes, which its shards divide, or with other operators."""
        whole = [key for stage in lowered.stages for key in stage.undivided]
        if whole:
            more = f" and {len(whole) - 1} more" if len(whole) > 1 else ""
            self._once(
                f"every device computes all of {whole[0]}{more}: the plan splits them over devices, but in this call "
                "the number of devices does not divide their sizes, or they are other operators"
            )

    def left_alone(self, stages: Mapping[int, str], compile: bool | str) -> None:
        """`stages`: why they are neither compiled nor recorded."""
        for stage, why in sorted(stages.items()):
            self._once(f"compile={compile!r} leaves stage {stage} as it is: {why}")

    def loss_sees_whole_batch(self, why: str) -> None:
        self._once(
            f"the loss is computed on the whole batch, between all forwards and all backwards, because it is not split "
            f"into micro-batches exactly: {why}"
        )

    def fixed_size(self, size: str, values: Sequence[int | float]) -> None:
        """`size`: as `dimension 2 of 'pixel_values'`. `values`: at which it was captured."""
        hint = "; give it as a tensor" if any(isinstance(value, float) for value in values) else ""
        self._once(
            f"the model fixes {size} (captured at {', '.join(map(str, values))}), so every new value there is captured "
            f"anew, which takes seconds{hint}"
        )

    def runs_unpipelined(self, what: str, why: str) -> None:
        self._once(f"{what} runs the model itself on the devices of its stages, without pipelining: {why}")

    def checkpointed(self) -> None:
        self._once(
            "torch.utils.checkpoint around a pipelined module runs it twice and saves no memory: its stages keep their "
            "activations; mark modules with autopar.recompute(module) instead, before autopar.parallelize"
        )

    def without_shards(self, batch: int, multiple: int) -> None:
        self._once(
            f"a batch of {batch} samples runs without shards, because the plan's shards need a multiple of {multiple} "
            "samples"
        )

    def _once(self, message: str) -> None:
        with each_warning_once(self.given):
            warn(message)
