"""The plan file of a Llama of 16 layers takes less than 10 KB, or 16 KB where stages have different meshes."""

from __future__ import annotations

import itertools
import json
from functools import cache
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar import Cluster, Plan
from autopar.plan.file_format.fields import plain

MOST = 10_000  # bytes
MOST_OF_UNLIKE_STAGES = 16_000  # bytes; every stage has strategies of its own
Data = dict[str, Any]


@cache
def llama_of_16_layers(heads: int = 32, key_value_heads: int = 8) -> tuple[LlamaForCausalLM, Data]:
    """A model on the meta device, and an example call that returns its loss."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 4096}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": key_value_heads}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=16, **sizes)).train()
        ids = torch.zeros(16, 128, dtype=torch.long)
    return model, {"example_kwargs": {"input_ids": ids, "labels": ids}}


def assert_is_short(plan: Plan, most: int = MOST) -> None:
    text = plan.to_json()
    assert json.loads(text)["autopar_plan"] == "6.1"
    assert '"rows": ' not in text, "no table needs to be written in full"
    found = Plan.from_json(text)
    assert found == plan
    assert found.to_json() == text
    assert len(text.encode()) < most


@pytest.mark.exhaustive
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_an_automatic_plan_takes_less_than_16_kb(nodes: int) -> None:
    model, call = llama_of_16_layers()
    plan = autopar.plan(model, Cluster.preset("8xH100", nodes), **call)
    assert any(stage.sharding is not None for stage in plan.stages), "a plan without strategies is small anyway"
    assert_is_short(plan, MOST_OF_UNLIKE_STAGES)


def by_hand(**degrees: Any) -> Plan:
    model, call = llama_of_16_layers()
    return Plan.by_hand(model, Cluster.preset("8xH100"), micro_batch=1, **degrees, **call)


@pytest.mark.parametrize(
    "degrees",
    [
        pytest.param(degrees, marks=pytest.mark.exhaustive if number else pytest.mark.slow)
        for number, degrees in enumerate(
            (
                {"tensor": 2, "pipeline": 2, "data": 2, "zero": 3, "chunks": 4, "recompute": "selective"},
                {"tensor": 2, "pipeline": 4, "chunks": 4, "sequence_parallel": True, "recompute": "full"},
                {"pipeline": 8, "chunks": 2, "recompute": "full"},
            )
        )
    ],
    ids=str,
)
def test_plans_by_hand_with_most_to_say_take_less_than_10_kb(degrees: dict[str, Any]) -> None:
    plan = by_hand(**degrees)
    assert_is_short(plan)
    if "tensor" in degrees:
        assert len(json.dumps(plain(plan), indent=1)) > 10 * len(plan.to_json()), "what format 2 took"


DEGREES = [
    {"tensor": tensor, "pipeline": pipeline, "data": data, "zero": zero, "sequence_parallel": sequence}
    for tensor, pipeline in itertools.product((1, 2, 4, 8), (1, 2, 4, 8))
    if 8 % (tensor * pipeline) == 0
    for data in [8 // (tensor * pipeline)]
    for zero in (range(4) if data > 1 else (0,))
    for sequence in ((False, True) if tensor > 1 else (False,))
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_a_plan_by_hand_takes_less_than_10_kb(degrees: dict[str, Any]) -> None:
    for chunks in (1, 2, 4) if 1 < degrees["pipeline"] < 8 else (1, 2) if degrees["pipeline"] == 8 else (1,):
        assert_is_short(by_hand(**degrees, chunks=chunks))


# Every recomputation, every stage of ZeRO, chunks and sequence parallelism occur.
USUAL = {("selective", 0, False, 4), ("full", 1, True, 1), ("selective-op", 2, False, 1), ("stage", 3, True, 4)}


@pytest.mark.parametrize(
    ("recompute", "zero", "sequence", "chunks"),
    [
        pytest.param(*case, marks=pytest.mark.slow if case in USUAL else pytest.mark.exhaustive)
        for case in itertools.product(("selective", "full", "selective-op", "stage"), range(4), (False, True), (1, 4))
    ],
)
def test_a_plan_by_hand_that_recomputes_takes_little_more(
    recompute: str, zero: int, sequence: bool, chunks: int
) -> None:
    degrees = {"tensor": 2, "pipeline": 2, "data": 2, "zero": zero, "sequence_parallel": sequence}
    assert_is_short(by_hand(**degrees, recompute=recompute, chunks=chunks), MOST + 500)
