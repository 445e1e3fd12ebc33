"""The models of the comparison with peers: each as a module for autopar, and as a row of blocks for those who want one.

transformers model    embeddings -> layer 0 -> layer 1 -> ... -> head      the same modules, the same parameters
blocks                    0           1           2                n
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear, mse_loss

from autopar.runtime.other_systems.training_step import TrainingStep
from benchmarks import models, overhead
from benchmarks.models import Workload


class Logits(NamedTuple):
    """What losses read of the output of a model of transformers."""

    logits: torch.Tensor


@dataclass(frozen=True)
class Subject:
    """A model without dropout, twice over the same parameters: `blocks(input)` are the model's logits."""

    workload: Workload
    blocks: nn.Sequential
    tied: tuple[nn.Parameter, ...] = ()  # read by the first block and by the last, which holds them in no table
    split: Mapping[str, int] = field(default_factory=dict)  # autopar's stages, where it is not to choose them

    @property
    def input(self) -> torch.Tensor:
        (tensor,) = self.workload.inputs.values()
        return tensor

    def loss(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.workload.loss(Logits(logits), target)

    @property
    def training_step(self) -> TrainingStep:
        """The same step, as other systems take it."""
        step = self.workload.training_step
        return replace(step, blocks=self.blocks, block_loss=self.loss, tied=self.tied)


Gradients = dict[str, np.ndarray[Any, Any]]  # by the model's names of its parameters


def gradients_of(model: nn.Module, names: Sequence[str]) -> Gradients:
    """Those of the parameters `names` that have one."""
    parameters = dict(model.named_parameters())
    return {name: g.numpy().copy() for name in names if (g := parameters[name].grad) is not None}


Builder = Callable[[], Subject]  # of the same numbers at every call, in every process


def tiny() -> Subject:
    """The stages of the overhead benchmark: arithmetic counts for next to nothing."""
    depth = overhead.LAYERS[-1]
    layers, x, y = overhead.example(depth)
    model = _ReturnsLogits(layers)
    title = f"two stages of {depth} linear layers, {overhead.WIDTH} wide, {overhead.BATCH} samples"
    split = {"layers.0": 0, f"layers.{depth}": 1}
    return Subject(Workload(title, model, {"x": x}, y, _squares_loss), nn.Sequential(*layers), split=split)


def resnet(quick: bool) -> Subject:
    workload = models.resnet(quick)
    net: Any = workload.model
    layers = [layer for stage in net.resnet.encoder.stages for layer in stage.layers]
    return Subject(workload, nn.Sequential(net.resnet.embedder, *layers, net.resnet.pooler, net.classifier))


def gpt(quick: bool) -> Subject:
    workload = models.gpt(quick)
    net: Any = workload.model
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    body = net.transformer
    tied = body.wte.weight
    blocks = nn.Sequential(_GptEmbeddings(body.wte, body.wpe), *body.h, _GptHead(body.ln_f, tied))
    return Subject(workload, blocks, tied=(tied,))


def bert(quick: bool) -> Subject:
    """A BERT of 24 layers, 256 wide, that classifies 16 sequences of 128 tokens; `quick`: a tiny one."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    layers, width, vocabulary, length, batch = (4, 64, 200, 32, 8) if quick else (24, 256, 30522, 128, 16)
    config = BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=4,
        intermediate_size=4 * width,
        vocab_size=vocabulary,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    net = BertForSequenceClassification(config).train()
    tokens, labels = torch.randint(vocabulary, (batch, length)), torch.randint(net.num_labels, (batch,))
    title = f"BERT of {layers} layers, {width} wide, {batch} sequences of {length} tokens"
    blocks = nn.Sequential(net.bert.embeddings, *net.bert.encoder.layer, net.bert.pooler, net.classifier)
    return Subject(Workload(title, net, {"input_ids": tokens}, labels, _class_loss), blocks)


class _ReturnsLogits(nn.Module):
    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> Logits:
        return Logits(self.layers(x))


class _GptEmbeddings(nn.Module):
    def __init__(self, tokens: nn.Embedding, positions: nn.Embedding) -> None:
        super().__init__()
        self.tokens, self.positions = tokens, positions

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))


class _GptHead(nn.Module):
    """The last norm, and the product with the tied embedding.

    That is no parameter of the head: torchgpipe refuses a parameter of two blocks, though on one device, where both
    read the one tensor, nothing is wrong with it.
    """

    def __init__(self, norm: nn.LayerNorm, tied: nn.Parameter) -> None:
        super().__init__()
        self.norm = norm
        self.tied = (tied,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(self.norm(x), self.tied[0])


def _class_loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.logits, labels)


def _squares_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return mse_loss(output.logits, target)
