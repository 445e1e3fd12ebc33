"""Selective recomputation as it runs: gradients of the plain model, and tensors that are not kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Plan


def transformer(kind: str, attention: str, dropout: float = 0.0) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
        sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 64, "n_positions": 128}
        config = transformers.GPT2Config(**sizes, **drops, attn_implementation=attention)
        model: nn.Module = transformers.GPT2LMHeadModel(config)
    else:
        drops = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        config = transformers.BertConfig(vocab_size=64, **sizes, **drops, attn_implementation=attention)
        model = transformers.BertForMaskedLM(config)
    return model.train()


IDS = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(0))


def planned(
    model: nn.Module, recompute: str = "selective", ids: torch.Tensor = IDS, **degrees: Any
) -> tuple[Any, Plan]:
    n = degrees.get("pipeline", 1) * degrees.get("tensor", 1) * degrees.get("data", 1)
    call = {"input_ids": ids, "labels": ids}
    plan = Plan.by_hand(model, ["cpu"] * n, example_kwargs=call, recompute=recompute, **degrees)
    return autopar.parallelize(model, ["cpu"] * n, plan=plan), plan


def train(module: Any, ids: torch.Tensor = IDS) -> float:
    loss = module(input_ids=ids, labels=ids).loss
    loss.backward()
    return float(loss.detach())


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
@pytest.mark.parametrize(
    "degrees",
    [
        {"micro_batch": 2},
        {"pipeline": 2, "micro_batch": 2},
        {"pipeline": 2, "micro_batch": 2, "schedule": "zb-h1"},
        {"pipeline": 2, "micro_batch": 2, "schedule": "gpipe"},
        {"tensor": 2},
        {"data": 2, "tensor": 2, "zero": 3},
    ],
)
def test_a_model_that_recomputes_attention_trains_like_the_plain_one(
    kind: str, attention: str, degrees: dict[str, Any]
) -> None:
    model = transformer(kind, attention)
    plain = copy.deepcopy(model)
    pm, plan = planned(model, **degrees)
    assert all(stage.selective for stage in plan.stages)
    for _ in range(2):  # a second step: no first run is remembered
        assert train(pm) == pytest.approx(train(plain), rel=1e-5)
    for (name, mine), (_, its) in zip(pm.named_parameters(), plain.named_parameters(), strict=True):
        assert mine.grad is not None, name
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-4, atol=1e-6, msg=name)
    pm.close()


def kept_bytes(recompute: str, kind: str, attention: str) -> int:
    """Of the tensors that autograd holds when a forward has ended."""
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model = transformer(kind, attention)
    ids = torch.zeros(8, 128, dtype=torch.long)
    pm, _ = planned(model, recompute, ids, micro_batch=4)
    train(pm, ids)
    (replica,) = pm._signatures.newest().executable.replicas
    inputs = [ids[:4]] * len(replica.stage.model_inputs)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = replica.compute(*inputs)
    assert outputs
    pm.close()
    return sum(held.values())


@pytest.mark.slow
def test_scores_are_not_kept() -> None:
    none, selective = (kept_bytes(name, "gpt2", "eager") for name in ("none", "selective"))
    scores = 4 * 4 * 128 * 128 * 4  # bytes: samples x heads x length x length in float32
    assert none - selective >= scores  # of two layers the softmax, less what is kept of their operands


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("degrees", [{"micro_batch": 2}, {"pipeline": 2, "micro_batch": 2}, {"tensor": 2}])
@pytest.mark.slow
def test_dropout_in_attention_is_the_same_in_both_runs(attention: str, degrees: dict[str, Any]) -> None:
    """Gradients are those of the loss that was returned: a small step changes it as they say."""
    model = transformer("gpt2", attention, dropout=0.3).double()
    pm, _ = planned(model, **degrees)

    def loss_at(shift: float, direction: list[torch.Tensor]) -> float:
        with torch.no_grad():
            for p, d in zip(model.parameters(), direction, strict=True):
                p.add_(d, alpha=shift)
        torch.manual_seed(7)
        value = float(pm(input_ids=IDS, labels=IDS).loss.detach())
        with torch.no_grad():
            for p, d in zip(model.parameters(), direction, strict=True):
                p.sub_(d, alpha=shift)
        return value

    torch.manual_seed(7)
    pm(input_ids=IDS, labels=IDS).loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    norm = float(torch.sqrt(sum((g * g).sum() for g in gradients)))  # type: ignore[arg-type]
    direction = [g / norm for g in gradients]
    step = 1e-3  # the loss is in float32
    slope = (loss_at(step, direction) - loss_at(-step, direction)) / (2 * step)
    assert slope == pytest.approx(norm, rel=5e-3)
    pm.close()


@pytest.mark.slow
def test_inference_runs_attention_once() -> None:
    model = transformer("gpt2", "eager")
    plain = copy.deepcopy(model).eval()
    pm, _ = planned(model, pipeline=2, micro_batch=2)
    pm.eval()
    with torch.no_grad():
        torch.testing.assert_close(pm(input_ids=IDS).logits, plain(input_ids=IDS).logits, rtol=1e-4, atol=1e-5)
    pm.close()
