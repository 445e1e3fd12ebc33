"""The models of published training runs, built on the meta device: no parameter has values.

They call the operators that the training systems call, so that these have the prices of theirs:

    MegatronGPT   Megatron-LM (Narayanan et al., 2021): tensors of tokens x samples x width, in which products find
                  heads without copies; queries, keys and values in one matrix; attention as two products and a softmax
    Llama3        Grattafiori et al., The Llama 3 Herd of Models, 2024: RMS norm, rotary positions, SwiGLU, attention in
                  one kernel

Where a system has one kernel of its own for several operators, the model has one operator that reads, writes and keeps
as much. Scaling, masking and softmax of scores are one kernel in Megatron-LM, for most numbers of heads: here they are
`softmax` alone. SwiGLU is one kernel in Transformer Engine: here it is `glu`. Megatron-LM's fused loss works on its
float32 logits in place (megatron/core/fusions/fused_cross_entropy.py): those and their gradient in bfloat16 are 6 bytes
a logit at the most, as are three tensors in bfloat16, which `cross_entropy` of such logits has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTSizes:
    """GPT-2 and 3; the head's matrix is that of the embedding."""

    layers: int
    hidden: int
    heads: int
    seq: int  # tokens of a sample
    vocab: int  # rows of the embedding
    dtype: torch.dtype = torch.float16
    fused_softmax: bool = True  # scaling, masking and softmax of scores are one kernel (see `has_fused_softmax`)

    @property
    def divided(self) -> int:
        """What tensor parallelism divides."""
        return self.heads

    def parameters(self) -> int:
        h = self.hidden
        return self.layers * (12 * h * h + 13 * h) + (self.vocab + self.seq + 2) * h

    def build(self) -> nn.Module:
        with torch.device("meta"):
            return MegatronGPT(self).to(self.dtype)


@dataclass(frozen=True)
class LlamaSizes:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int  # of the feed-forward block
    seq: int
    vocab: int = 128256
    fused: bool = True  # whether norms and SwiGLU are kernels of their own, not composed of others
    one_product: bool = True  # whether both halves of SwiGLU are columns of one matrix, where that is one kernel
    wide_loss: bool = True  # whether the loss makes a float32 copy of the logits, beside what it keeps
    dtype: torch.dtype = torch.bfloat16

    @property
    def divided(self) -> int:
        """What tensor parallelism divides."""
        return self.kv_heads

    def parameters(self) -> int:
        h, kv = self.hidden, self.hidden // self.heads * self.kv_heads
        return self.layers * (2 * h * h + 2 * h * kv + 3 * h * self.inner + 2 * h) + (2 * self.vocab + 1) * h

    def build(self) -> nn.Module:
        with torch.device("meta"):
            return Llama3(self).to(self.dtype)


Sizes = GPTSizes | LlamaSizes


class MegatronGPT(nn.Module):
    """Returns the loss."""

    def __init__(self, sizes: GPTSizes, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab, sizes.hidden)
        self.positions = nn.Embedding(sizes.seq, sizes.hidden)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(GPTLayer(sizes, dropout) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.hidden)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """`tokens`, `labels`: [samples, tokens]."""
        x = self.embedding(tokens) + self.positions.weight
        x = self.dropout(x.transpose(0, 1).contiguous())
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.embedding.weight).float()
        return F.cross_entropy(logits.permute(1, 2, 0), labels)


class GPTLayer(nn.Module):
    mask: Tensor

    def __init__(self, sizes: GPTSizes, dropout: float) -> None:
        super().__init__()
        hidden = sizes.hidden
        self.heads = sizes.heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.dropout, self.attention_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.fused_softmax = sizes.fused_softmax
        if not sizes.fused_softmax:
            self.register_buffer("mask", torch.empty(1, 1, sizes.seq, sizes.seq, dtype=torch.bool), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x`: [tokens, samples, hidden]."""
        x = x + self.dropout(self.out(self.attention(self.norm1(x))))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))

    def attention(self, x: Tensor) -> Tensor:
        mixed = self.qkv(x).unflatten(-1, (self.heads, -1))
        query, key, value = mixed.chunk(3, dim=-1)
        scores = query.permute(1, 2, 0, 3) @ key.permute(1, 2, 3, 0)
        probabilities = scores.softmax(-1) if self.fused_softmax else self.composed_softmax(scores)
        context = self.attention_dropout(probabilities) @ value.permute(1, 2, 0, 3)
        return context.permute(2, 0, 1, 3).contiguous().flatten(-2)

    def composed_softmax(self, scores: Tensor) -> Tensor:
        """Operator by operator, in single precision."""
        return (scores.float() * 1.0).masked_fill(self.mask, -1e4).softmax(-1).to(scores.dtype)


def has_fused_softmax(heads: int, samples: int, tokens: int) -> bool:
    """Whether Megatron-LM has one kernel for scores of `heads` heads on a device (megatron/fused_kernels, and
    FusedScaleMaskSoftmax.is_kernel_available in megatron/model/fused_softmax.py, 2021 to 2022)."""
    return heads * samples % 4 == 0 and tokens % 4 == 0 and 16 < tokens <= 2048


class Llama3(nn.Module):
    """Returns the loss."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab, sizes.hidden)
        self.layers = nn.ModuleList(LlamaLayer(sizes) for _ in range(sizes.layers))
        self.norm = _norm(sizes)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        width = sizes.hidden // sizes.heads
        self.wide_loss = sizes.wide_loss
        self.register_buffer("cos", torch.empty(sizes.seq, 1, width), persistent=False)
        self.register_buffer("sin", torch.empty(sizes.seq, 1, width), persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """`tokens`, `labels`: [samples, tokens]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy((logits.float() if self.wide_loss else logits).transpose(1, 2), labels)


class LlamaLayer(nn.Module):
    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        hidden, self.width = sizes.hidden, sizes.hidden // sizes.heads
        self.norm1, self.norm2 = _norm(sizes), _norm(sizes)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, sizes.kv_heads * self.width, bias=False)
        self.value = nn.Linear(hidden, sizes.kv_heads * self.width, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.feed_forward = (FusedSwiGLU if sizes.fused and sizes.one_product else SwiGLU)(hidden, sizes.inner)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x`: [samples, tokens, hidden]."""
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.feed_forward(self.norm2(x))

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (f(x).unflatten(-1, (-1, self.width)) for f in (self.query, self.key, self.value))
        query, key = (_rotated(t, cos, sin).transpose(1, 2) for t in (query, key))
        heads = (query, key, value.transpose(1, 2))
        context = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return self.out(context.transpose(1, 2).flatten(-2))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class SwiGLU(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class FusedSwiGLU(nn.Module):
    """One product for both halves, whose columns alternate so that tensor parallelism cuts pairs of them."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_and_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.glu(self.gate_and_up(x).unflatten(-1, (-1, 2)), dim=-1).flatten(-2))


def _norm(sizes: LlamaSizes) -> nn.Module:
    return nn.RMSNorm(sizes.hidden) if sizes.fused else ComposedRMSNorm(sizes.hidden)


class ComposedRMSNorm(nn.Module):
    """As torch.nn.RMSNorm was composed in 2024."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight
