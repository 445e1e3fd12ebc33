"""The automatic plan is never slower than one that an expert writes down, whatever its degrees.

To 1 %: cuts are chosen by the objective of the search, which the simulated steps follow that closely."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from law_cases import Case, cases, step_time
from simulations import chunk_counts
from torch import nn

from autopar import Plan, PlanError
from autopar.analysis.example import example_ahead
from autopar.options import PlanOptions
from autopar.planner.hand_plan.by_hand import plan_by_hand
from autopar.planner.hand_plan.degrees import ZERO
from autopar.planner.hand_plan.shared_work import SharedWork
from autopar.schedule.builders import SCHEDULES

SAME = 1.01
pytestmark = pytest.mark.usefixtures("shared_exports")


def all_degrees(n_devices: int, batch: int) -> Iterator[dict[str, Any]]:
    """All that multiply to the devices, with every schedule, number of chunks and ZeRO stage."""
    divisors = [d for d in range(1, n_devices + 1) if n_devices % d == 0]
    for tensor, pipeline in itertools.product(divisors, divisors):
        data, rest = divmod(n_devices, tensor * pipeline)
        sizes = [n for n in range(1, batch + 1) if data and batch % (n * data) == 0]
        for samples, schedule, zero in itertools.product(() if rest else sizes, SCHEDULES, ZERO):
            for chunks in chunk_counts(schedule, pipeline):
                yield {
                    "tensor": tensor,
                    "pipeline": pipeline,
                    "data": data,
                    "micro_batch": samples,
                    "schedule": schedule,
                    "chunks": chunks,
                    "zero": zero,
                    "recompute": "none",
                    "sequence_parallel": tensor > 1,
                }


def hand_plans(case: Case) -> Iterator[tuple[dict[str, Any], Plan]]:
    """Those that the model and the memory allow."""
    with torch.device("meta"):
        x, y = torch.empty(case.batch, case.rows, case.sizes[0]), torch.empty(case.batch, case.rows, case.sizes[-1])
    loss = {"loss_fn": nn.functional.mse_loss, "target": y} if case.step else {}
    example, options = example_ahead(case.model(), (x,), {}, batch_dim=None, **loss), PlanOptions(optimizer="adamw")
    shared = SharedWork(example, options)
    for degrees in all_degrees(len(case.cluster.devices), case.batch):
        try:
            plan = plan_by_hand(example, case.cluster, options, degrees, shared=shared)
        except PlanError:
            continue
        peak = max(stage.peak_memory or 0 for stage in plan.stages)
        if peak <= (case.memory or math.inf) and not any(note.startswith("does not fit") for note in plan.notes):
            yield degrees, plan


@pytest.mark.slow
@settings(max_examples=examples(3), deadline=None)
@given(cases())
def test_no_plan_by_hand_is_faster_than_the_automatic_one(case: Case) -> None:
    automatic = step_time(case.plan())
    for degrees, plan in hand_plans(case):
        assert automatic <= step_time(plan) * SAME, degrees


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case((4096, 4096), 4, 1024, "4xH100", 2, None, step=False),  # one mesh axis over two nodes
        Case((2048, 4096, 4096, 2048), 8, 128, "2xT4", 1, None, step=False),  # zero-bubble after the caller's loss
        Case((1024, 1024, 1024), 4, 128, "4xT4", 1, None, step=True),  # ZeRO 1: the optimizer's step is divided
        Case((256, 2048, 2048, 2048), 8, 128, "2xT4", 2, None, step=False),  # sends between nodes behind passes
    ],
)
def test_no_plan_by_hand_is_faster_for_these_models(case: Case) -> None:
    automatic = step_time(case.plan())
    assert all(automatic <= step_time(plan) * SAME for _, plan in hand_plans(case))
