"""Attention that hides only the future is told so; the plain model is the oracle of what it computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import assert_same_gradients, gradients, tokens
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import autopar
from autopar import Plan
from autopar.capture import causal_masks
from autopar.capture.program import Program, capture

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def told(program: Program) -> list[bool]:
    """For every attention, whether it is causal by its own argument, without a mask."""
    found = []
    for node in program.graph.find_nodes(op="call_function", target=ATTENTION):
        mask, _, causal = (*node.args[3:], *(None, 0.0, False)[len(node.args) - 3 :])
        assert not (causal and mask is not None)
        found.append(bool(causal))
    return found


class Masked(nn.Module):
    """Attention of some tokens under a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def mask(self, batch: int, length: int) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return scaled_dot_product_attention(q, k, v, self.mask(x.shape[0], x.shape[1])).squeeze(1)


class Causal(Masked):
    def mask(self, batch: int, length: int) -> torch.Tensor:
        at = torch.arange(length)
        return (at[None] <= at[:, None]).expand(batch, 1, length, length)


class Window(Masked):
    """The last ten alone."""

    def mask(self, batch: int, length: int) -> torch.Tensor:
        at = torch.arange(length)
        return (at[None] <= at[:, None]) & (at[None] > at[:, None] - 10)


class Strict(Masked):
    """Without the token itself, except for the first."""

    def mask(self, batch: int, length: int) -> torch.Tensor:
        at = torch.arange(length)
        return (at[None] < at[:, None]) | (at[None] + at[:, None] == 0)


class BySample(Masked):
    """Causal for the first sample, everything for others."""

    def mask(self, batch: int, length: int) -> torch.Tensor:
        at = torch.arange(length)
        return (at[None] <= at[:, None]) | (torch.arange(batch) > 0)[:, None, None, None]


class Added(Masked):
    """Numbers that are added to the scores."""

    def mask(self, batch: int, length: int) -> torch.Tensor:
        return torch.full((length, length), -1.0).triu(1)


class Learned(Masked):
    """Of a buffer, which a call may change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(64, 64, dtype=torch.bool).tril())

    def mask(self, batch: int, length: int) -> torch.Tensor:
        found: torch.Tensor = self.kept[:length, :length]
        return found


class Drawn(Masked):
    def mask(self, batch: int, length: int) -> torch.Tensor:
        at = torch.arange(length)
        return (at[None] <= at[:, None]) & (torch.rand(length, length) >= 0)


@pytest.mark.parametrize(
    ("kind", "length", "causal"),
    [
        (Causal, 16, True),
        (Window, 8, True),
        (Window, 16, False),
        (Strict, 16, False),
        (BySample, 16, False),
        (Added, 16, False),
        (Learned, 16, False),
        (Drawn, 16, False),
    ],
)
def test_a_mask_is_left_away_where_it_hides_the_future_alone(kind: type[Masked], length: int, causal: bool) -> None:
    model, x = kind(), torch.randn(4, length, 8)
    program = capture(model, (x,), {})
    assert told(program) == [causal]
    names = {str(node.target) for node in program.graph.nodes}
    assert causal == ("aten.arange.default" not in names and kind not in (Added, Learned))
    for batch in (4, 2, 7):
        x = torch.randn(batch, length, 8)
        torch.testing.assert_close(program.graph_module(x)[0], model(x))


def test_a_mask_that_is_too_large_to_look_at_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_masks, "_MOST_ELEMENTS", 3 * 16 * 16)
    assert told(capture(Causal(), (torch.randn(4, 16, 8),), {})) == [True]
    assert told(capture(Causal(), (torch.randn(4, 17, 8),), {})) == [False]


def test_a_model_on_another_device_is_looked_at_on_the_cpu() -> None:
    with torch.device("meta"):
        assert told(capture(Causal(), (torch.randn(4, 16, 8),), {})) == [True]


def test_every_length_has_its_own_answer() -> None:
    """The third length and later ones come from one capture with symbolic sizes."""
    model = nn.Sequential(nn.Linear(8, 8), Window(), nn.Linear(8, 8))
    original = copy.deepcopy(model)
    plan = Plan.from_split({"0": 0, "2": 1}, n_microbatches=2)
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan, cache=False)
    for length in (8, 12, 6, 20, 9, 16):
        x = torch.randn(4, length, 8)
        torch.testing.assert_close(pm(x), original(x))
    answers = {s.program.inputs[0].shape[1]: told(s.program) for s in pm._signatures._captures.known}  # type: ignore[index]
    assert answers == {length: [length <= 10] for length in (8, 12, 6, 20, 9, 16)}
    pm.close()


def language_model(name: str) -> tuple[nn.Module, dict[str, int]]:
    """A model of transformers, and where its second stage starts."""
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    sizes |= {"intermediate_size": 64, "num_key_value_heads": 2, "use_cache": False}
    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=64, use_cache=False)
        return transformers.GPT2LMHeadModel(config), {"transformer.wte": 0, "transformer.h.1": 1}
    if name == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    else:
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, sliding_window=5))
    return model, {"model.embed_tokens": 0, "model.layers.1": 1}


@pytest.mark.parametrize(("name", "causal"), [("gpt2", True), ("llama", True), ("mistral", False)])
def test_language_models_call_attention_as_they_do_without_a_capture(name: str, causal: bool) -> None:
    model, split = language_model(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    original = copy.deepcopy(model)
    assert told(capture(model, (), {"input_ids": tokens(4)})) == [causal] * 2
    masked = {"input_ids": tokens(4), "attention_mask": torch.ones(4, tokens(4).shape[1], dtype=torch.long)}
    assert told(capture(model, (), masked)) == [False] * 2, "it depends on an input"
    plan = Plan.from_split(split, n_microbatches=2)
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan, cache=False)
    for batch in (4, 6):
        ids = tokens(batch)
        loss = pm.train_step(input_ids=ids, labels=ids)
        wanted = original(input_ids=ids, labels=ids).loss
        wanted.backward()
        torch.testing.assert_close(loss, wanted.detach())
        assert_same_gradients(gradients(model), gradients(original), 1e-4)
    pm.close()
