"""Outputs of micro-batches become outputs of the batch on one device, in whichever order replicas on several give them.

Fake tensors refuse operators on two devices, except for those that take a scalar of the CPU beside a tensor of a GPU.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from fake_gpus import fake_gpus

from autopar.analysis.batch_proof import OutputCombination
from autopar.capture.thread_state import CallerState
from autopar.runtime.step.call import CallTensors, PipelineCall
from autopar.runtime.step.outputs import OutputCollector

SIZES = (2, 2, 3)
# Rows; a mean over samples; a mean over targets, and their number; a sum; a value that all micro-batches have.
OUTPUTS = (
    OutputCombination("cat", 0),
    OutputCombination("mean"),
    OutputCombination("mean", weight=3),
    OutputCombination("sum"),
    OutputCombination("first"),
)
PROMISED = torch.device("cuda:0")
# The replicas of the last stage; the first has the promised device.
REPLICAS = ("cuda:0", "cuda:1"), ("cuda:0", "cpu"), ("cuda:0", "cuda:1", "cuda:2")


def flat_outputs(rows: int, device: str) -> list[torch.Tensor]:
    count = torch.ones((), dtype=torch.long, device=device)
    return [torch.empty(rows, 4, device=device), *(torch.empty((), device=device) for _ in range(2)), count, count]


@pytest.mark.parametrize("replicas", REPLICAS, ids="+".join)
@pytest.mark.parametrize("order", itertools.permutations(range(3)), ids=str)
def test_outputs_are_on_the_promised_device_in_whichever_order_replicas_give_them(
    order: tuple[int, ...], replicas: tuple[str, ...]
) -> None:
    with fake_gpus():
        collector = OutputCollector(OUTPUTS, SIZES, PROMISED)
        for microbatch in order:
            collector.add(flat_outputs(SIZES[microbatch], replicas[microbatch % len(replicas)]), microbatch)
        found = collector.finish()
    assert [value.device for value in found] == [PROMISED] * len(OUTPUTS)
    assert found[0].shape == (7, 4)


def call_of(weights: tuple[Any, ...]) -> PipelineCall:
    state = CallerState.of_this_thread([torch.device("cpu")])
    return PipelineCall((), (), SIZES, OUTPUTS, state, None, None, (), weights)


@pytest.mark.parametrize("counted", [False, True], ids=["samples", "targets"])
@pytest.mark.parametrize("replicas", REPLICAS, ids="+".join)
def test_a_loss_of_replicas_is_on_the_promised_device(replicas: tuple[str, ...], counted: bool) -> None:
    """`counted`: the weights are tensors, on the GPU of the targets."""
    with fake_gpus():
        weights = tuple(torch.empty((), device="cuda:3") if counted else rows / 7 for rows in SIZES)
        tensors = CallTensors(call_of(weights), PROMISED)
        for microbatch in range(len(SIZES)):
            tensors.losses[microbatch] = torch.empty((), device=replicas[microbatch % len(replicas)])
        assert tensors.loss().device == PROMISED
