"""The models of `benchmarks.scale`: GPT-3 175B, Llama 3 405B, and a mixture of experts of DeepSeek-V3's sizes.

All are built on the meta device, take (tokens, labels) and return the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.published_runs.models import FusedSwiGLU, GPTSizes, LlamaSizes


@dataclass(frozen=True)
class ExpertSizes:
    """A mixture of experts with low-rank attention (DeepSeek-AI: DeepSeek-V3 Technical Report, 2024, section 4.2)."""

    layers: int
    dense: int  # of the layers: the first ones, without experts
    hidden: int
    inner: int  # of dense layers
    experts: int
    chosen: int  # experts a token, on average
    expert_inner: int
    heads: int
    query_rank: int
    key_rank: int
    head: int  # width of a head, without positions
    rotary: int  # width of a head's part with positions
    seq: int
    vocab: int

    def build(self) -> nn.Module:
        with torch.device("meta"):
            return ExpertModel(self).bfloat16()


@dataclass(frozen=True)
class Training:
    """A model, and how it is trained."""

    title: str
    sizes: GPTSizes | LlamaSizes | ExpertSizes
    batch: int  # samples of a step
    by_hand: Mapping[str, Any] = field(default_factory=dict)  # degrees of a published configuration, for any cluster

    def inputs(self) -> tuple[Tensor, Tensor]:
        tokens = torch.empty(self.batch, self.sizes.seq, dtype=torch.long, device="meta")
        return tokens, torch.empty_like(tokens)

    def degrees(self, devices: int) -> dict[str, Any]:
        """What `Plan.by_hand` takes on `devices`. ZeRO only where there are replicas, whose states it divides."""
        degrees = dict(self.by_hand)
        if degrees.get("tensor", 1) * degrees.get("pipeline", 1) >= devices:
            degrees.pop("zero", None)
        return degrees


MODELS = {
    # Narayanan et al.: Efficient Large-Scale Language Model Training on GPU Clusters, 2021, table 2: 96 layers, width
    # 12,288; batch and degrees of section 5.1.
    "gpt3_175b": Training(
        "GPT-3 175B, 1,536 x 2,048 tokens",
        GPTSizes(96, 12288, 96, 2048, 51200, dtype=torch.bfloat16),
        1536,
        {"tensor": 8, "pipeline": 8, "micro_batch": 1, "zero": 1, "recompute": "full"},
    ),
    # Grattafiori et al.: The Llama 3 Herd of Models, 2024, tables 3 and 4: 16 million tokens a step, tensor 8,
    # pipeline 16.
    "llama_405b": Training(
        "Llama 3 405B, 2,048 x 8,192 tokens",
        LlamaSizes(126, 16384, 128, 8, 53248, 8192),
        2048,
        {"tensor": 8, "pipeline": 16, "micro_batch": 1, "zero": 1},
    ),
    "deepseek_v3_like": Training(
        "mixture of 256 experts (DeepSeek-V3's sizes), 4,096 x 4,096 tokens",
        ExpertSizes(61, 3, 7168, 18432, 256, 8, 2048, 128, 1536, 512, 128, 64, 4096, 129280),
        4096,
    ),
}
QUICK = {
    "gpt_2_layers": Training(
        "GPT of 2 layers", GPTSizes(2, 256, 4, 128, 512, dtype=torch.bfloat16), 4, {"tensor": 2, "micro_batch": 1}
    ),
    "experts_2_layers": Training(
        "mixture of 4 experts", ExpertSizes(2, 1, 128, 256, 4, 2, 64, 2, 64, 32, 32, 16, 64, 256), 4
    ),
}


class ExpertModel(nn.Module):
    """Returns the loss."""

    def __init__(self, sizes: ExpertSizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab, sizes.hidden)
        self.layers = nn.ModuleList(ExpertLayer(sizes, index >= sizes.dense) for index in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """`tokens`, `labels`: [samples, tokens]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(self.norm(x)).float().transpose(1, 2), labels)


class ExpertLayer(nn.Module):
    def __init__(self, sizes: ExpertSizes, experts: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(sizes.hidden), nn.RMSNorm(sizes.hidden)
        self.attention = LowRankAttention(sizes)
        self.feed_forward = Experts(sizes) if experts else FusedSwiGLU(sizes.hidden, sizes.inner)

    def forward(self, x: Tensor) -> Tensor:
        """`x`: [samples, tokens, hidden]."""
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class LowRankAttention(nn.Module):
    """Queries, and keys with values, from a projection of low rank; a head's positions are a part of its width, whose
    keys all heads share. Rotations, which take next to no time, are left out."""

    def __init__(self, sizes: ExpertSizes) -> None:
        super().__init__()
        self.heads, self.width, self.rotary, self.rank = sizes.heads, sizes.head, sizes.rotary, sizes.key_rank
        both = sizes.head + sizes.rotary
        self.query_down = nn.Linear(sizes.hidden, sizes.query_rank, bias=False)
        self.query_up = nn.Linear(sizes.query_rank, sizes.heads * both, bias=False)
        self.key_down = nn.Linear(sizes.hidden, sizes.key_rank, bias=False)
        self.positions = nn.Linear(sizes.hidden, sizes.rotary, bias=False)
        self.key_up = nn.Linear(sizes.key_rank, sizes.heads * sizes.head, bias=False)
        self.value_up = nn.Linear(sizes.key_rank, sizes.heads * sizes.head, bias=False)
        self.out = nn.Linear(sizes.heads * sizes.head, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query_up(self.query_down(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        low = self.key_down(x)
        keys = self.key_up(low).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        positions = self.positions(x).unsqueeze(1).expand(-1, self.heads, -1, -1)
        value = self.value_up(low).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key = torch.cat([keys, positions], dim=-1)
        context = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(context.transpose(1, 2).flatten(-2))


class Experts(nn.Module):
    """A shared expert for all tokens, and experts that each take the tokens of a sample with the highest scores.

    As many tokens for each expert as with a perfectly balanced choice of `chosen` experts a token: the work and the
    bytes moved are those of DeepSeek-V3's balanced routing, in shapes that do not depend on values.
    """

    def __init__(self, sizes: ExpertSizes) -> None:
        super().__init__()
        self.router = nn.Linear(sizes.hidden, sizes.experts, bias=False)
        self.taken = sizes.seq * sizes.chosen // sizes.experts  # tokens of a sample for each expert
        self.gate = nn.Parameter(torch.empty(sizes.experts, sizes.hidden, sizes.expert_inner))
        self.up = nn.Parameter(torch.empty(sizes.experts, sizes.hidden, sizes.expert_inner))
        self.down = nn.Parameter(torch.empty(sizes.experts, sizes.expert_inner, sizes.hidden))
        self.shared = FusedSwiGLU(sizes.hidden, sizes.expert_inner)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).sigmoid().transpose(1, 2)  # [samples, experts, tokens]
        weights, places = scores.topk(self.taken, dim=-1)
        samples, _, hidden = x.shape
        index = places.flatten(1).unsqueeze(-1).expand(-1, -1, hidden)  # [samples, experts x taken, hidden]
        rows = x.gather(1, index).unflatten(1, places.shape[1:])
        rows = rows.transpose(0, 1).flatten(1, 2)  # [experts, samples x taken, hidden]
        inside = functional.silu(torch.bmm(rows, self.gate)) * torch.bmm(rows, self.up)
        made = torch.bmm(inside, self.down).unflatten(1, (samples, self.taken)).transpose(0, 1)
        weighted = (made * weights.unsqueeze(-1)).flatten(1, 2)
        return self.shared(x) + torch.zeros_like(x).scatter_add(1, index, weighted)
