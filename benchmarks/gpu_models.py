"""The models of the GPU benchmark, with a batch, a loss and a cut into two stages each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.models import Workload

_TEXT: dict[str, Any] = {"use_cache": False, "bos_token_id": 0, "eos_token_id": 0}


@dataclass(frozen=True)
class Subject:
    """A workload on a device, and where its second stage starts."""

    name: str
    workload: Workload
    split: Mapping[str, int]  # module path -> stage, of two

    @property
    def call(self) -> dict[str, Any]:
        """The keywords of `autopar.plan` and `parallelize` for its training step."""
        work = self.workload
        return {"example_kwargs": work.inputs, "target": work.target, "loss_fn": work.loss}

    def rows(self, count: int) -> Workload:
        """The same model on the first `count` samples."""
        work = self.workload
        inputs = {name: x[:count] for name, x in work.inputs.items()}
        return Workload(f"{self.name}, {count} samples", work.model, inputs, work.target[:count], work.loss)


Builder = Callable[[torch.device, bool], Subject]  # of the same numbers at every call; True: a tiny one


def resnet(device: torch.device, quick: bool) -> Subject:
    """ResNet-50 on 64 images of 224 x 224."""
    from transformers import ResNetConfig, ResNetForImageClassification

    tiny: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 1, 1]}
    labels, batch, size = (10, 8, 64) if quick else (1000, 64, 224)
    changes: dict[str, Any] = {"num_labels": labels, **(tiny if quick else {})}

    def build() -> Workload:
        model = ResNetForImageClassification(ResNetConfig(**changes))
        images, target = torch.randn(batch, 3, size, size), torch.randint(labels, (batch,))
        return Workload(f"{batch} images of {size} x {size}", model, {"pixel_values": images}, target, class_loss)

    return _subject("ResNet-50", build, device, {"resnet.embedder": 0, "resnet.encoder.stages.2": 1})


def gpt2_medium(device: torch.device, quick: bool) -> Subject:
    """GPT-2 medium (24 layers, 1,024 wide) with its dropout, on 8 sequences of 1,024 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, vocabulary, length, batch = (2, 32, 100, 16, 8) if quick else (24, 1024, 50257, 1024, 8)
    sizes: dict[str, Any] = {"n_layer": layers, "n_embd": width, "n_head": 4 if quick else 16, "n_positions": length}

    def build() -> Workload:
        model = GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, **sizes, **_TEXT))
        tokens = torch.randint(vocabulary, (batch, length))
        return Workload(_text(batch, length), model, {"input_ids": tokens}, tokens, next_token_loss)

    return _subject("GPT-2 medium", build, device, {"transformer.wte": 0, f"transformer.h.{layers // 2}": 1})


def llama_1b(device: torch.device, quick: bool) -> Subject:
    """A Llama of 1.1 billion parameters (22 layers, 2,048 wide, 4 of 32 heads with keys of their own) in bf16, on 4
    sequences of 1,024 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width, vocabulary, length, batch = (2, 32, 100, 16, 4) if quick else (22, 2048, 32000, 1024, 4)
    heads: dict[str, Any] = {"num_attention_heads": 4 if quick else 32, "num_key_value_heads": 2 if quick else 4}
    sizes: dict[str, Any] = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": 2 * width if quick else 5632,
        "vocab_size": vocabulary,
    }

    def build() -> Workload:
        model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=2048, **sizes, **heads, **_TEXT))
        tokens = torch.randint(vocabulary, (batch, length))
        return Workload(_text(batch, length), model, {"input_ids": tokens}, tokens, next_token_loss)

    return _subject("Llama 1B", build, device, {"model.embed_tokens": 0, f"model.layers.{layers // 2}": 1}, bf16=True)


def t5_base(device: torch.device, quick: bool) -> Subject:
    """T5-base (12 + 12 layers, 768 wide) with its dropout, on 16 sequences of 512 tokens that become 128."""
    from transformers import T5Config, T5ForConditionalGeneration

    layers, width, vocabulary, length, batch = (2, 32, 100, 16, 8) if quick else (12, 768, 32128, 512, 16)
    heads: dict[str, Any] = {"num_heads": 4, "d_kv": 8} if quick else {"num_heads": 12, "d_kv": 64}
    sizes: dict[str, Any] = {"num_layers": layers, "d_model": width, "d_ff": 4 * width, "vocab_size": vocabulary}

    def build() -> Workload:
        model = T5ForConditionalGeneration(T5Config(use_cache=False, **sizes, **heads))
        source, target = (torch.randint(vocabulary, (batch, n)) for n in (length, length // 4))
        inputs = {"input_ids": source, "decoder_input_ids": target}
        return Workload(_text(batch, length), model, inputs, target, token_loss)

    return _subject("T5-base", build, device, {"encoder.block.0": 0, "decoder.block.0": 1})


MODELS: dict[str, Builder] = {"resnet": resnet, "gpt2": gpt2_medium, "llama": llama_1b, "t5": t5_base}


def class_loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.logits, labels)


def token_loss(output: Any, tokens: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.logits.flatten(0, 1), tokens.flatten())


def next_token_loss(output: Any, tokens: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _subject(
    name: str, build: Callable[[], Workload], device: torch.device, split: Mapping[str, int], *, bf16: bool = False
) -> Subject:
    torch.manual_seed(0)
    with torch.device(device):  # a model of a billion parameters is made on its device at once
        work = build()
    model: nn.Module = work.model.train()
    if bf16:
        model.to(torch.bfloat16)
    return Subject(name, Workload(f"{name}, {work.title}", model, work.inputs, work.target, work.loss), split)


def _text(batch: int, length: int) -> str:
    return f"{batch} sequences of {length} tokens"
