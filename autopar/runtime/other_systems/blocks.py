"""Where a row of blocks is cut into stages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch

from autopar.runtime.other_systems.training_step import Refusal, TrainingStep


def need_blocks(step: TrainingStep, n_stages: int) -> torch.nn.Sequential:
    """The blocks. Raises Refusal where there are none, or too few."""
    if step.blocks is None:
        raise Refusal("it cuts an nn.Sequential with one tensor as input, and this model is none")
    if len(step.blocks) < n_stages:
        raise Refusal(f"it cuts the model between its {len(step.blocks)} modules, and needs {n_stages} stages")
    return step.blocks


def refuse_shared_parameters(step: TrainingStep, cuts: Sequence[int]) -> None:
    """A system that knows nothing of parameters with readers in two stages would have a part of their gradients."""
    assert step.blocks is not None
    handled = {id(p) for p in step.tied}
    seen: dict[int, int] = {}
    for index, block in enumerate(step.blocks):
        stage = sum(cut <= index for cut in cuts)
        for name, parameter in block.named_parameters():
            if id(parameter) not in handled and seen.setdefault(id(parameter), stage) != stage:
                raise Refusal(f"parameter {index}.{name} is read in two stages, and each would have its own gradient")


def block_seconds(step: TrainingStep, n_microbatches: int, rounds: int) -> list[float]:
    """Forward and backward of every block with the first micro-batch, the last block's with the loss; medians, in s.

    The blocks run within passes over all of them, as they will in a step: alone, they would find their caches warm.
    """
    assert step.blocks is not None
    assert step.block_loss is not None
    x, target = (tensor.tensor_split(n_microbatches)[0] for tensor in (step.input, step.target))
    found: list[list[float]] = [[] for _ in step.blocks]
    for _ in range(rounds + 1):
        step.clear()
        inputs, outputs, seconds = [], [], []
        value = x
        for index, block in enumerate(step.blocks):
            value = value.detach().requires_grad_(value.is_floating_point())
            start = time.perf_counter()
            output = block(value)
            if index == len(step.blocks) - 1:
                output = step.block_loss(output, target)
            seconds.append(time.perf_counter() - start)
            inputs.append(value)
            outputs.append(output)
            value = output
        gradient = None
        for index in reversed(range(len(outputs))):
            start = time.perf_counter()
            if outputs[index].requires_grad:
                torch.autograd.backward(outputs[index], gradient)
            seconds[index] += time.perf_counter() - start
            gradient = inputs[index].grad
        for times, taken in zip(found, seconds, strict=True):
            times.append(taken)
    step.clear()
    return [median(times[1:]) for times in found]


def balanced(seconds: Sequence[float], n: int) -> list[int]:
    """The first block of each of `n` stages but the first; the longest stage is as short as can be. O(n b^2)."""
    total = [0.0]
    for one in seconds:
        total.append(total[-1] + one)
    best: list[dict[int, tuple[float, list[int]]]] = [{0: (0.0, [])}]
    for _ in range(n):
        following: dict[int, tuple[float, list[int]]] = {}
        for start, (longest, cuts) in best[-1].items():
            for end in range(start + 1, len(seconds) + 1):
                candidate = max(longest, total[end] - total[start])
                if end not in following or candidate < following[end][0]:
                    following[end] = candidate, [*cuts, end]
        best.append(following)
    return best[-1][len(seconds)][1][:-1]


def sizes_in_words(cuts: Sequence[int], n_blocks: int) -> str:
    """Such as "blocks 3 | 4"."""
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, n_blocks], strict=True)]
    return f"blocks {' | '.join(map(str, sizes))}"
