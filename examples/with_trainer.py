"""transformers' Trainer trains a pipelined module, in one process or in many:

python examples/with_trainer.py
torchrun --nproc-per-node 2 examples/with_trainer.py
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import autopar
from autopar.integrations import PipelinedTrainer

LENGTH, VOCABULARY = 16, 100


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    """Sentences of class 1 contain the token 7."""
    ids = torch.randint(8, VOCABULARY, (count, LENGTH))
    labels = torch.arange(count) % 2
    ids[:, 3] = torch.where(labels == 1, 7, ids[:, 3])
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def main(steps: int = 30) -> float:
    """The evaluation loss of the trained model."""
    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, intermediate_size=64, vocab_size=VOCABULARY
    )
    net, ranked = BertForSequenceClassification(config), "RANK" in os.environ
    # Many processes: one device each, and Trainer gives each its own samples.
    model = autopar.parallelize(net, data="per-rank") if ranked else autopar.parallelize(net, ["cpu", "cpu"])
    folder = tempfile.mkdtemp()
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        learning_rate=3e-3,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    # In one process, transformers.Trainer does as well.
    trainer = PipelinedTrainer(model=model, args=arguments, train_dataset=samples(256), eval_dataset=samples(64))
    trainer.train()
    loss = float(trainer.evaluate()["eval_loss"])
    trainer.save_model(folder)  # an ordinary checkpoint of transformers
    if trainer.is_world_process_zero():
        again = BertForSequenceClassification.from_pretrained(folder).eval()
        batch = samples(8)
        labels = torch.stack([one["labels"] for one in batch])
        found = again(torch.stack([one["input_ids"] for one in batch])).logits.argmax(dim=1)
        print(f"evaluation loss {loss:.4f}; the saved model is right in {int((found == labels).sum())} of 8 samples")
        print(model.report())
    return loss


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
