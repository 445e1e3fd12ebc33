"""The models that are trained, with a batch and a loss each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from autopar.runtime.other_systems.training_step import TrainingStep


@dataclass(frozen=True)
class Workload:
    """One training step: `loss(model(**inputs), target).backward()`."""

    title: str
    model: nn.Module  # in training mode
    inputs: dict[str, torch.Tensor]  # the batch is dimension 0
    target: torch.Tensor  # the batch is dimension 0
    loss: Callable[[Any, torch.Tensor], torch.Tensor]  # a mean over samples

    @property
    def batch_size(self) -> int:
        return self.target.shape[0]

    @property
    def training_step(self) -> TrainingStep:
        """The same step, as other systems take it."""
        dims = (0,) * len(self.inputs)
        return TrainingStep(self.model, (), self.inputs, self.target, self.loss, self.batch_size, dims, (0,))

    def step(self) -> None:
        """The plain model, as PyTorch runs it."""
        self.loss(self.model(**self.inputs), self.target).backward()

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)


def resnet(quick: bool) -> Workload:
    """ResNet-50, the model of PyTorch's model-parallel tutorial, on 24 images of 128 x 128; `quick`: a tiny one."""
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    labels, batch, size = (10, 8, 64) if quick else (1000, 24, 128)
    tiny = {"embedding_size": 16, "hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1]}
    changes: dict[str, Any] = {"num_labels": labels, **(tiny if quick else {})}
    model = ResNetForImageClassification(ResNetConfig(**changes)).train()
    images, target = torch.randn(batch, 3, size, size), torch.randint(labels, (batch,))
    title = f"{'a tiny ResNet' if quick else 'ResNet-50'}, {batch} images of {size} x {size}"
    return Workload(title, model, {"pixel_values": images}, target, _class_loss)


def gpt(quick: bool) -> Workload:
    """A GPT-2 of 12 layers, 256 wide, with tied embeddings, on 16 sequences of 128 tokens; `quick`: a tiny one."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    layers, width, vocabulary, length, batch = (2, 64, 200, 32, 8) if quick else (12, 256, 8000, 128, 16)
    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=4,
        vocab_size=vocabulary,
        n_positions=length,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    tokens = torch.randint(vocabulary, (batch, length))
    title = f"GPT-2 of {layers} layers, {width} wide, {batch} sequences of {length} tokens"
    return Workload(title, GPT2LMHeadModel(config).train(), {"input_ids": tokens}, tokens, _next_token_loss)


def _class_loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.logits, labels)


def _next_token_loss(output: Any, tokens: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
