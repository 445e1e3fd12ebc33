"""Attention has no mask that it does not need; the plain model is the oracle of what it computes."""

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
from autopar.capture import attention_masks
from autopar.capture.program import Program, capture

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def attention_kinds(program: Program) -> list[str]:
    """For every attention, what its arguments hide."""
    found = []
    for node in program.graph.find_nodes(op="call_function", target=ATTENTION):
        mask, _, causal = (*node.args[3:], *(None, 0.0, False)[len(node.args) - 3 :])
        assert not (causal and mask is not None)
        found.append("mask" if mask is not None else "future" if causal else "nothing")
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


class Everything(Masked):
    def mask(self, batch: int, length: int) -> torch.Tensor:
        return (torch.arange(length) >= 0)[:, None].expand(batch, 1, length, length)


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
    ("kind", "length", "hidden"),
    [
        (Causal, 16, "future"),
        (Window, 8, "future"),
        (Everything, 16, "nothing"),
        (Window, 16, "mask"),
        (Strict, 16, "mask"),
        (BySample, 16, "mask"),
        (Added, 16, "mask"),
        (Learned, 16, "mask"),
        (Drawn, 16, "mask"),
    ],
)
def test_a_mask_is_left_away_where_it_hides_nothing_or_the_future_alone(
    kind: type[Masked], length: int, hidden: str
) -> None:
    model, x = kind(), torch.randn(4, length, 8)
    program = capture(model, (x,), {})
    assert attention_kinds(program) == [hidden]
    names = {str(node.target) for node in program.graph.nodes}
    assert (hidden == "mask") == ("aten.arange.default" in names or kind in (Added, Learned))
    for batch in (4, 2, 7):
        x = torch.randn(batch, length, 8)
        torch.testing.assert_close(program.graph_module(x)[0], model(x))


class Biased(nn.Module):
    """A mask of every sample over a trained bias, as T5 has it."""

    def __init__(self, own: bool = False) -> None:
        super().__init__()
        self.qkv, self.bias, self.own = nn.Linear(8, 24), nn.Parameter(torch.randn(1, 1, 16, 16)), own

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        at = torch.arange(16)
        seen = (at[None] <= at[:, None])[None, None].expand(x.shape[0], 1, 16, 16)
        mask = torch.where(seen, self.bias + (x.mean() if self.own else 0), -1e9).contiguous()
        return scaled_dot_product_attention(q, k, v, mask).squeeze(1), mask.sum() if self.own else q


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_a_mask_that_is_the_same_for_every_sample_is_made_once(own: bool) -> None:
    """Not where something else reads it."""
    model, x = Biased(own), torch.randn(4, 16, 8)
    program = capture(model, (x,), {})
    (choice,) = [node for node in program.graph.nodes if str(node.target).startswith("aten.where")]
    found = program.graph_module(x)
    assert isinstance(choice.meta["val"].shape[0], int) != own
    assert ("aten.expand.default" in {str(node.target) for node in program.graph.nodes}) == own
    for a, b in zip(found, model(x), strict=False):
        torch.testing.assert_close(a, b)
    found[0].sum().backward()
    of_graph = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model(x)[0].sum().backward()
    for a, b in zip(of_graph, [p.grad for p in model.parameters() if p.grad is not None], strict=True):
        torch.testing.assert_close(a, b)


def test_a_mask_that_is_too_large_to_look_at_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_masks, "_MOST_ELEMENTS", 3 * 16 * 16)
    assert attention_kinds(capture(Causal(), (torch.randn(4, 16, 8),), {})) == ["future"]
    assert attention_kinds(capture(Causal(), (torch.randn(4, 17, 8),), {})) == ["mask"]


def test_a_model_on_another_device_is_looked_at_on_the_cpu() -> None:
    with torch.device("meta"):
        assert attention_kinds(capture(Causal(), (torch.randn(4, 16, 8),), {})) == ["future"]


@pytest.mark.slow
def test_every_length_has_its_own_answer() -> None:
    """The third length and later ones come from one capture with symbolic sizes."""
    model = nn.Sequential(nn.Linear(8, 8), Window(), nn.Linear(8, 8))
    original = copy.deepcopy(model)
    plan = Plan.from_split({"0": 0, "2": 1}, n_microbatches=2)
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan, cache=False)
    for length in (8, 12, 6, 20, 9, 16):
        x = torch.randn(4, length, 8)
        torch.testing.assert_close(pm(x), original(x))
    answers = {s.program.inputs[0].shape[1]: attention_kinds(s.program) for s in pm._signatures._captures.known}  # type: ignore[index]
    assert answers == {length: ["future" if length <= 10 else "mask"] for length in (8, 12, 6, 20, 9, 16)}
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
    if name == "bert":
        bert = {key: value for key, value in sizes.items() if key not in ("num_key_value_heads", "use_cache")}
        found = transformers.BertForMaskedLM(transformers.BertConfig(**bert))
        return found, {"bert.embeddings": 0, "bert.encoder.layer.1": 1}
    if name == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    else:
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, sliding_window=5))
    return model, {"model.embed_tokens": 0, "model.layers.1": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("gpt2", "future"),
        ("mistral", "mask"),
        ("bert", "nothing"),
        pytest.param("llama", "future", marks=pytest.mark.exhaustive),
    ],
)
def test_language_models_call_attention_as_they_do_without_a_capture(name: str, hidden: str) -> None:
    model, split = language_model(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    original = copy.deepcopy(model)
    assert attention_kinds(capture(model, (), {"input_ids": tokens(4)})) == [hidden] * 2
    masked = {"input_ids": tokens(4), "attention_mask": torch.ones(4, tokens(4).shape[1], dtype=torch.long)}
    assert attention_kinds(capture(model, (), masked)) == ["mask"] * 2, "it depends on an input"
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


class Layered(Masked):
    """A first attention under the causal mask, a second under a contiguous copy of the same."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(x.shape[1])
        mask = torch.where((at[None] <= at[:, None]).expand(x.shape[0], 1, -1, -1), True, False)
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        first = scaled_dot_product_attention(q, k, v, mask.contiguous())
        return scaled_dot_product_attention(first, k, v, mask).squeeze(1)


def test_a_mask_that_another_is_made_of_leaves_with_it() -> None:
    model, x = Layered(), torch.randn(4, 16, 8)
    program = capture(model, (x,), {})
    assert attention_kinds(program) == ["future", "future"]
    torch.testing.assert_close(program.graph_module(x)[0], model(x))
