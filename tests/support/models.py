"""Small models of the families that autopar must run, with random weights: the original is the oracle of every test.

Dropout is off and batch norm is frozen, so that a pipelined model and its original must agree to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

from autopar.capture.torch_private import tree_leaves

VOCABULARY = 64
ROUNDING = 8.0  # sqrt(n) of the contributions to a gradient that cancel
_ENDS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLMLoss"}
_SMALL: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}


@dataclass(frozen=True)
class Case:
    """A model family. `two` and `three` put its modules on that many stages."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Any]]  # keyword arguments of a call with that number of samples
    two: Mapping[str, int]
    three: Mapping[str, int]

    def model(self) -> nn.Module:
        """A new model in training mode, the same every time."""
        torch.manual_seed(1)
        model = self.build().train()
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        return model


class UNet(nn.Module):
    """Skips from the first to the last layers, in-place activations."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.middle = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True))
        self.up2, self.up1 = nn.ConvTranspose2d(16, 4, 2, stride=2), nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = torch.relu_(self.down1(x))
        b = torch.relu(self.down2(a))
        c = self.up2(torch.cat([self.middle(b), b], 1))
        return self.up1(torch.cat([c, a], 1))


class TwoTowers(nn.Module):
    """Two inputs, two outputs and a product of both; no sample sees another."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))
        self.right = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 8)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        left, right = self.left(a), self.right(b)
        return {"left": left, "right": right, "score": (self.head(left) * right).sum(1)}


class Recurrent(nn.Module):
    """A classifier over the last state of nn.LSTM or nn.GRU."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.rnn = kind(8, 12, 2, batch_first=True)
        self.head = nn.Linear(12, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embed(tokens))[0][:, -1])


class RandomLayer(nn.Module):
    """Linear in `scale`: the sum of its output is the sum of `scale` times its gradient, if both met one mask."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8) + 0.5)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.detach()
        y: torch.Tensor = self.drop(F.scaled_dot_product_attention(q, q, x * self.scale, dropout_p=0.3))
        return y


def mlp(width: int = 16, depth: int = 4) -> nn.Sequential:
    """Linear and in-place ReLU in turn; children are named 0, 1, 2, ..."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def tokens(batch: int, length: int = 12) -> torch.Tensor:
    return torch.randint(0, VOCABULARY - 1, (batch, length))


def ragged_mask(batch: int, length: int = 12) -> torch.Tensor:
    """1 for the first length, length - 1, length - 2 ... tokens of the rows."""
    lengths = length - torch.arange(batch) % (length - 1)
    return (torch.arange(length) < lengths[:, None]).long()


def gpt2() -> nn.Module:
    dropout: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=3, n_embd=32, n_head=4, n_positions=32, vocab_size=VOCABULARY, **dropout, **_ENDS
        )
    )


def bert(dropout: float = 0.0) -> nn.Module:
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            **_SMALL, vocab_size=VOCABULARY, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
        )
    )


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            num_layers=2, d_model=32, d_ff=64, num_heads=4, d_kv=8, vocab_size=VOCABULARY, dropout_rate=0.0
        )
    )


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            **_SMALL, image_size=16, patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
    )


def resnet() -> nn.Module:
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 16], depths=[1, 1, 1], layer_type="basic")
    )


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**_SMALL, num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=32)
    )


class GroupedLlama(nn.Module):
    """A Llama of heads of 128 entries, eight of keys and values, with its loss: for planning, on the meta device."""

    def __init__(self, layers: int, width: int, intermediate: int) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=width // 128,
            num_key_value_heads=8,
            intermediate_size=intermediate,
            vocab_size=32000,
        )
        self.model = transformers.LlamaForCausalLM(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=tokens, use_cache=False).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **_SMALL, num_key_value_heads=2, num_local_experts=4, vocab_size=VOCABULARY, max_position_embeddings=32
        )
    )


def clip() -> nn.Module:
    """Its output relates every text of the batch to every image."""
    small = {**_SMALL, "num_hidden_layers": 1}
    return transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config={**small, "vocab_size": VOCABULARY, "eos_token_id": VOCABULARY - 1},
            vision_config={**small, "image_size": 16, "patch_size": 8},
            projection_dim=16,
        )
    )


def clip_inputs(batch: int) -> dict[str, Any]:
    ids = tokens(batch)
    ids[:, -1] = VOCABULARY - 1
    return {"input_ids": ids, "pixel_values": torch.randn(batch, 3, 16, 16), "attention_mask": torch.ones_like(ids)}


def _labelled(batch: int) -> dict[str, Any]:
    ids = tokens(batch)
    return {"input_ids": ids, "labels": ids}


CASES = [
    Case("sequential", mlp, lambda b: {"input": torch.randn(b, 16)}, {"0": 0, "3": 1}, {"0": 0, "3": 1, "6": 2}),
    Case(
        "u-net",
        UNet,
        lambda b: {"x": torch.randn(b, 3, 8, 8)},
        {"down1": 0, "middle": 0, "up2": 1},
        {"down1": 0, "middle": 1, "up1": 2},
    ),
    Case(
        "two towers",
        TwoTowers,
        lambda b: {"a": torch.randn(b, 6), "b": torch.randn(b, 10)},
        {"left": 0, "right": 1},
        {"left": 0, "right": 1, "head": 2},
    ),
    Case(
        "lstm",
        lambda: Recurrent(nn.LSTM),
        lambda b: {"tokens": tokens(b)},
        {"embed": 0, "head": 1},
        {"embed": 0, "rnn": 1, "head": 2},
    ),
    Case(
        "gru",
        lambda: Recurrent(nn.GRU),
        lambda b: {"tokens": tokens(b)},
        {"embed": 0, "rnn": 1},
        {"embed": 0, "rnn": 1, "head": 2},
    ),
    Case(
        "resnet",
        resnet,
        lambda b: {"pixel_values": torch.randn(b, 3, 32, 32)},
        {"resnet.embedder": 0, "resnet.encoder.stages.1": 1},
        {"resnet.embedder": 0, "resnet.encoder.stages.1": 1, "classifier": 2},
    ),
    Case(
        "gpt2",
        gpt2,
        lambda b: {"input_ids": tokens(b)},
        {"transformer.h.0": 0, "transformer.h.2": 1},
        {"transformer.h.0": 0, "transformer.h.1": 1, "transformer.h.2": 2},
    ),
    Case(
        "gpt2 with labels",
        gpt2,
        _labelled,
        {"transformer.h.0": 0, "transformer.h.1": 1},
        {"transformer.wte": 0, "transformer.h.0": 1, "lm_head": 2},
    ),
    Case(
        "bert",
        bert,
        lambda b: {"input_ids": tokens(b), "attention_mask": ragged_mask(b)},
        {"bert.embeddings": 0, "bert.encoder.layer.1": 1},
        {"bert.encoder.layer.0": 0, "bert.encoder.layer.1": 1, "classifier": 2},
    ),
    Case(
        "t5",
        t5,
        lambda b: {"input_ids": tokens(b), "decoder_input_ids": tokens(b, 7), "use_cache": False},
        {"encoder": 0, "decoder": 1},
        {"encoder": 0, "decoder.block.0": 1, "decoder.block.1": 2},
    ),
    Case(
        "vit",
        vit,
        lambda b: {"pixel_values": torch.randn(b, 3, 16, 16)},
        {"vit.embeddings": 0, "vit.layers.1": 1},
        {"vit.embeddings": 0, "vit.layers.0": 1, "classifier": 2},
    ),
    Case(
        "llama",
        llama,
        lambda b: {"input_ids": tokens(b), "use_cache": False},
        {"model.layers.0": 0, "model.layers.1": 1},
        {"model.embed_tokens": 0, "model.layers.0": 1, "lm_head": 2},
    ),
    Case(
        "mixtral",
        mixtral,
        lambda b: {"input_ids": tokens(b), "attention_mask": ragged_mask(b), "use_cache": False},
        {"model.layers.0": 0, "model.layers.1": 1},
        {"model.layers.0": 0, "model.layers.1": 1, "lm_head": 2},
    ),
]


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    """A mean over samples that every floating-point output moves: a scalar counts as it is, the rest by samples."""
    scores, total = torch.zeros_like(target), torch.zeros(())
    for leaf in tree_leaves(output):
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            continue
        if leaf.dim() == 0:
            total = total + leaf
        else:
            rows = leaf.reshape(len(target), -1).float()
            scores = scores + (rows * torch.arange(rows.shape[1]).cos()).mean(1)
    return total + ((scores - target) ** 2).mean()


def sum_of_squares(output: Any) -> torch.Tensor:
    """A loss that every output which requires grad moves."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return torch.stack([leaf.square().sum() for leaf in leaves]).sum()


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Every parameter's gradient, which is taken off the model."""
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def assert_same_gradients(
    mine: Mapping[str, torch.Tensor | None], original: Mapping[str, torch.Tensor | None], tolerance: float = 1e-5
) -> None:
    """Every parameter's gradient is equal to `tolerance` of its own norm, apart from rounding.

    A gradient sums contributions that may cancel, down to zero for the key biases of an attention and for biases before
    a batch norm. Summing n of them in another order leaves an error of about eps * sqrt(n) * their size, however small
    the sum is. They are about as large as the model's largest gradient: ROUNDING * eps * its norm is allowed on top.
    """
    assert list(mine) == list(original)
    largest = max((g.norm().item() for g in original.values() if g is not None), default=0.0)
    for name, expected in original.items():
        found = mine[name]
        assert (found is None) == (expected is None), f"{name}: {found} instead of {expected}"
        if found is not None and expected is not None:
            error, norm = (found - expected).norm().item(), expected.norm().item()
            allowed = tolerance * norm + ROUNDING * torch.finfo(expected.dtype).eps * largest
            assert error <= allowed, f"{name}: off by {error:.1e}, its norm is {norm:.1e}, the largest {largest:.1e}"


def assert_same_outputs(mine: Any, original: Any, tolerance: float = 1e-5) -> None:
    """The same type, and leaf by leaf equal: tensors to `tolerance` of their largest entry."""
    assert type(mine) is type(original)
    found, expected = tree_leaves(mine), tree_leaves(original)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert type(a) is type(b)
        if isinstance(b, torch.Tensor):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            scale = b.detach().abs().max().item() if b.is_floating_point() and b.numel() else 0.0
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance * scale, equal_nan=True, check_stride=False)
        else:
            assert a == b
