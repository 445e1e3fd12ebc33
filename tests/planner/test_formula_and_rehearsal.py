"""The search's formula and the rehearsal count the same tensors: those that kernels of the device keep."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from autopar import Plan
from autopar.analysis.example import capture_example
from autopar.analysis.own_loss import own_loss
from benchmarks.plan_memory import Call, Subject, costs_of_bytes, stated
from cost_models import Device, parse_devices

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")


def decoder(attention: str, dropped: float) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=60,
        n_positions=48,
        n_embd=32,
        n_layer=2,
        n_head=4,
        attn_pdrop=dropped,
        resid_pdrop=dropped,
        embd_pdrop=dropped,
        attn_implementation=attention,
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config).train()
    model.config.use_cache = False  # as in training
    return model


def bytes_of(attention: str, dropped: float, kind: str, *, autocast: bool = False) -> tuple[int, int]:
    """Of a plain step on a device of a kind: by the formula, and rehearsed."""
    ids = torch.randint(60, (16, 48))
    model, call = decoder(attention, dropped), Call(kwargs={"input_ids": ids, "labels": ids})
    place = torch.device("cuda:0" if kind == "cuda" else "cpu")
    device = Device(f"{place.type}:0", place, kind, 80 << 30, threads=1)
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        warnings.simplefilter("ignore")
        example = capture_example(model, parse_devices(["cpu"]), (), call.keywords, loss_fn=own_loss, target=None)
        subject = Subject(model, call, (device,), example, costs_of_bytes(example, [device]))
    plan = Plan.from_split({"transformer.h.0": 0}, n_microbatches=1).on([device.name])
    ((rehearsed,), (formula,)) = stated(subject, plan, "none")
    return formula, rehearsed.peak


# Scores of attention that are written operator by operator count at work as well as kept.
MOST = {"sdpa": 1.1, "eager": 1.25}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("dropped", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
@pytest.mark.parametrize(
    "attention", [pytest.param(name, marks=[pytest.mark.slow] * (name == "eager")) for name in MOST]
)
def test_the_formula_is_near_the_rehearsed_peak(attention: str, dropped: float, kind: str) -> None:
    """With dropout a CPU keeps masks in the tensors' dtype, and the scores of attention; a GPU keeps neither."""
    formula, rehearsed = bytes_of(attention, dropped, kind)
    assert 0.99 <= formula / rehearsed <= MOST[attention], f"formula {formula}, rehearsed {rehearsed}"


@pytest.mark.slow
def test_the_formula_counts_the_dtypes_of_autocast() -> None:
    (usual, _), (narrow, rehearsed) = (bytes_of("sdpa", 0.0, "cpu", autocast=autocast) for autocast in (False, True))
    assert narrow < 0.9 * usual
    assert 0.95 <= narrow / rehearsed <= 1.2
