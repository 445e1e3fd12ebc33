"""Bytes that ranks hold in a training step, and what a plan by hand for a cluster predicts."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.nn import functional

import autopar
from autopar import Cluster, Plan
from autopar.runtime.memory_watch import MemoryWatch
from autopar.runtime.ranks.world import current


class LanguageModel(nn.Module):
    """With its loss. Its tables are larger than its layers, and these than its activations."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            num_hidden_layers=4,
            hidden_size=256,
            num_attention_heads=4,
            intermediate_size=688,
            vocab_size=40000,
            max_position_embeddings=64,
        )
        self.model = transformers.LlamaForCausalLM(config)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=ids, use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def peaks(degrees: dict[str, Any]) -> tuple[int, list[int]]:
    """Bytes that this rank holds at its peak in a step, and what is predicted for each stage."""
    torch.manual_seed(0)
    model, ids = LanguageModel(), torch.randint(40000, (16, 64))
    how: dict[str, Any] = {"example_args": (ids,), "optimizer": "sgd", "recompute": "full", "micro_batch": 1, **degrees}
    predicted = Plan.by_hand(model, Cluster.preset(f"{dist.get_world_size()}xH100"), **how)
    pm = autopar.parallelize(model, plan=Plan.by_hand(model, None, **how), tune=0)
    for _ in range(2):
        pm.train_step(ids)
        pm.zero_grad()
    world = current()
    assert world is not None
    gc.collect()
    watch = MemoryWatch(world.devices([]))
    gc.disable()
    try:
        with watch.step([]), pm.device_context(watch):
            pm.train_step(ids)
    finally:
        gc.enable()
    return max(watch.peaks.values()), [stage.peak_memory or 0 for stage in predicted.stages]
