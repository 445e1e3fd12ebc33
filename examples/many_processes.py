"""An ordinary training script, on one process or on many:

python examples/many_processes.py
torchrun --nproc-per-node 2 examples/many_processes.py
srun --ntasks 2 python examples/many_processes.py

With several processes, each runs its own part of the model, and all have the same losses.
"""

from __future__ import annotations

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import autopar

LENGTH, VOCABULARY, BATCH = 64, 500, 16


def main(steps: int = 10) -> list[float]:
    """The losses."""
    torch.manual_seed(0)  # the same weights and the same data in every process
    config = GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=VOCABULARY, n_positions=LENGTH, use_cache=False)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = GPT2LMHeadModel(config).train()
    pm = autopar.parallelize(model)  # one process: its devices; many: one device each
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        first = torch.randint(VOCABULARY, (BATCH, 1))
        tokens = (first + torch.arange(LENGTH)) % VOCABULARY  # to count on is what the model learns
        optimizer.zero_grad()
        loss = pm.train_step(input_ids=tokens, labels=tokens)
        optimizer.step()
        losses.append(loss.item())
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            sys.stdout.write(f"step {step}, loss {losses[-1]:.5f}\n")
    return losses


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
