"""Decoder-only transformers as one rank of tensor parallelism computes them, kernel by kernel.

    x -norm- linear - attention - linear =R=(+)-norm- linear - nonlinearity - linear =R=(+)->
                                       R: sums over the ranks, which are collectives and not counted here

Of t ranks each has heads / t heads and inner / t columns of the feed-forward block (Shoeybi et al., Megatron-LM, 2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.hybrid_tape import Tape, Work


@dataclass(frozen=True)
class Transformer:
    """Sizes of a model. `gated`: as Llama 3 (RMS norm, rotary positions, SwiGLU, no biases, no dropout), else as GPT
    (layer norm, learned positions, GELU, biases, dropout, the head's matrix that of the embedding)."""

    layers: int
    hidden: int
    heads: int
    seq: int  # tokens of a sample
    vocab: int
    kv_heads: int
    inner: int  # of the feed-forward block
    gated: bool

    @property
    def head(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True)
class Arithmetic:
    """How a training system computes a layer."""

    dtype: torch.dtype
    flash: bool  # attention is one kernel that keeps no scores
    fused: bool  # chains of pointwise operators are one kernel each (of a GPT they always are, as in Megatron-LM)
    sequence_parallel: bool  # each rank has its part of the tokens between the blocks (Korthikanti et al., 2022)


def gpt(layers: int, hidden: int, heads: int, seq: int, vocab: int) -> Transformer:
    """GPT-2 and 3."""
    return Transformer(layers, hidden, heads, seq, vocab, heads, 4 * hidden, gated=False)


@cache
def layer_work(model: Transformer, how: Arithmetic, tensor: int, samples: int) -> Work:
    """One layer on one of `tensor` ranks, for a micro-batch of `samples`."""
    tape = Tape(how.dtype)
    (_llama_layer if model.gated else _gpt_layer)(tape, model, how, tensor, samples)
    return tape.work()


@cache
def embedding_work(model: Transformer, how: Arithmetic, tensor: int, samples: int) -> Work:
    """Looking tokens up in a rank's part of the vocabulary; learned positions and dropout where the model has them."""
    tape = Tape(how.dtype)
    tokens = tape.input(model.seq, samples, dtype=torch.int64)
    table = tape.parameter(-(-model.vocab // tensor), model.hidden)
    found = tape.call(F.embedding, tokens, table)
    if not model.gated:
        positions = tape.parameter(model.seq, 1, model.hidden)
        tape.fused([found, positions], found, kept=[], mask=True)
    return tape.work()


@cache
def head_work(model: Transformer, how: Arithmetic, tensor: int, samples: int) -> Work:
    """The last norm, a rank's part of the logits and their cross entropy in float32."""
    tape = Tape(how.dtype)
    normed = _normed(tape, model, how, _between(tape, model, how, tensor, samples))
    weight = tape.parameter(-(-model.vocab // tensor), model.hidden)
    logits = tape.call(F.linear, normed, weight)
    targets = tape.input(samples * model.seq, dtype=torch.int64)
    tape.call(_cross_entropy if model.gated else _split_cross_entropy, logits, targets)
    return tape.work()


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets)


def _split_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = _SplitCrossEntropy.apply(logits.flatten(0, 1).float(), targets[:, None])
    return loss.mean()


class _SplitCrossEntropy(torch.autograd.Function):
    """The operators of Megatron-LM's loss over a vocabulary that is divided (megatron/mpu/cross_entropy.py)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        shifted = logits - logits.max(-1, keepdim=True).values
        chosen = shifted.gather(1, targets)
        softmax = shifted.exp()
        total = softmax.sum(-1, keepdim=True)
        softmax.div_(total)
        ctx.save_for_backward(softmax, targets)
        return total.log() - chosen

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        softmax, targets = ctx.saved_tensors
        softmax.scatter_add_(1, targets, -torch.ones_like(targets, dtype=softmax.dtype))
        return softmax.mul_(gradients[0]), None


def _gpt_layer(tape: Tape, model: Transformer, how: Arithmetic, tensor: int, samples: int) -> None:
    """As Megatron-LM computes it (Narayanan et al., 2021, section 4.2): bias and GELU in one kernel, bias, dropout and
    sum, and scale, mask and softmax; tensors of tokens x samples x width, so that products find heads without copies.
    """
    seq, hidden, heads = model.seq, model.hidden, model.heads // tensor
    wide, inner = hidden // tensor, model.inner // tensor

    def by_head(mixed: Tensor) -> tuple[Tensor, ...]:
        parts = mixed.view(seq, samples * heads, 3 * model.head).chunk(3, dim=-1)
        return tuple(part.transpose(0, 1) for part in parts)

    x = _between(tape, model, how, tensor, samples)
    gathered = _normed(tape, model, how, x)
    mixed = tape.call(F.linear, gathered, tape.parameter(3 * wide, hidden), tape.parameter(3 * wide))
    query, key, value = tape.call(by_head, mixed)
    if how.flash:
        context = tape.attention(*(t.unflatten(0, (samples, heads)) for t in (query, key, value)))
    else:
        scores = tape.call(lambda q, k: torch.bmm(q, k.transpose(1, 2)), query, key, again=True)
        probabilities = tape.masked_softmax(scores)
        dropped = tape.call(lambda p: torch.native_dropout(p, 0.1, True)[0], probabilities, again=True)
        product = tape.call(torch.bmm, dropped, value, again=True)
        context = tape.call(lambda c: c.transpose(0, 1).contiguous().view(seq, samples, wide), product)
    attended = tape.call(F.linear, context.view(seq, samples, wide), tape.parameter(hidden, wide))
    x = _dropout_and_sum(tape, attended, x)

    gathered = _normed(tape, model, how, x)
    grown = tape.call(F.linear, gathered, tape.parameter(inner, hidden))
    bent = tape.fused([grown, tape.parameter(inner)], grown, kind="transcendental")
    _dropout_and_sum(tape, tape.call(F.linear, bent, tape.parameter(hidden, inner)), x)


def _dropout_and_sum(tape: Tape, product: Tensor, residual: Tensor) -> Tensor:
    """residual + dropout(product + bias) in one kernel; of the ranks' tokens where those are divided."""
    part = product.narrow(0, 0, residual.shape[0])
    tape.join(residual)
    return tape.fused([part, tape.parameter(product.shape[-1])], residual, also=[residual], kept=[], mask=True)


def _llama_layer(tape: Tape, model: Transformer, how: Arithmetic, tensor: int, samples: int) -> None:
    """As torchtitan computes it, whose selective recomputation keeps the results of attention and of every second
    product (torchtitan/models/llama/parallelize_llama.py, 2024-12: option "op")."""
    seq, hidden, heads, kv = model.seq, model.hidden, model.heads // tensor, model.kv_heads // tensor
    inner = model.inner // tensor

    def product(x: Tensor, width: int, again: bool) -> Tensor:
        return tape.call(F.linear, x, tape.parameter(width, x.shape[-1]), again=again)

    def repeated(x: Tensor) -> Tensor:
        return x[:, :, :, None, :].expand(-1, -1, -1, heads // kv, -1).reshape(seq, samples, heads, model.head)

    x = _between(tape, model, how, tensor, samples)
    gathered = _normed(tape, model, how, x)
    query = product(gathered, heads * model.head, False).view(seq, samples, heads, model.head)
    key = product(gathered, kv * model.head, True).view(seq, samples, kv, model.head)
    value = product(gathered, kv * model.head, False).view(seq, samples, kv, model.head)
    query, key = (_rotated(tape, how, t) for t in (query, key))
    if kv != heads:
        key, value = (tape.call(repeated, t, again=True) for t in (key, value))
    context = tape.attention(*(t.permute(1, 2, 0, 3) for t in (query, key, value)))
    attended = product(context.view(seq, samples, heads * model.head), hidden, True)
    x = _sum(tape, how, attended, x)

    gathered = _normed(tape, model, how, x)
    gate, up = product(gathered, inner, False), product(gathered, inner, True)
    if how.fused:
        bent = tape.fused([gate, up], gate, again=True, kind="transcendental")
    else:
        bent = tape.call(torch.mul, tape.call(F.silu, gate, again=True), up, again=True)
    _sum(tape, how, product(bent, hidden, False), x)


def _rotated(tape: Tape, how: Arithmetic, x: Tensor) -> Tensor:
    """Rotary positions: pairs of numbers turned, as complex numbers of float32."""
    if how.fused:
        return tape.fused([x], x, kept=[], again=True)
    turns = tape.input(x.shape[0], 1, 1, x.shape[-1] // 2, dtype=torch.complex64).requires_grad_(False)

    def rotate(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)

    return tape.call(rotate, x, again=True)


def _sum(tape: Tape, how: Arithmetic, product: Tensor, residual: Tensor) -> Tensor:
    tape.join(residual)
    part = product.narrow(0, 0, residual.shape[0])
    return tape.fused([part], residual, also=[residual], kept=[], again=True, passes=True)


def _between(tape: Tape, model: Transformer, how: Arithmetic, tensor: int, samples: int) -> Tensor:
    """What one layer hands to the next."""
    return tape.input(model.seq // tensor if how.sequence_parallel else model.seq, samples, model.hidden)


def _normed(tape: Tape, model: Transformer, how: Arithmetic, x: Tensor) -> Tensor:
    """All tokens of the normalized x, gathered from the ranks where those are divided."""
    weight = tape.parameter(model.hidden)
    if model.gated and not how.fused:
        normed = tape.call(_rms_norm, x, weight, again=True)
    else:
        tape.sum_weights(x)
        if model.gated:
            normed = tape.fused([x, weight], x, again=True, kind="normalization")
        else:
            bias = tape.parameter(model.hidden)
            normed = tape.call(lambda x, w, b: F.layer_norm(x, w.shape, w, b), x, weight, bias)
    return normed if x.shape[0] == model.seq else tape.gathered(normed, model.seq)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """As torch.nn.RMSNorm was composed in 2024."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * weight
