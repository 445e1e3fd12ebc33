"""transformers' Trainer takes the pipelined module as it is: python examples/with_trainer.py"""

from __future__ import annotations

import sys
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import autopar

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
    model = autopar.parallelize(BertForSequenceClassification(config), ["cpu", "cpu"])
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=steps, learning_rate=3e-3, report_to=[], disable_tqdm=True
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=samples(256), eval_dataset=samples(64))
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
        trainer.save_model(folder)
        again = BertForSequenceClassification.from_pretrained(folder)  # an ordinary checkpoint of transformers
    assert torch.equal(again.classifier.weight, model.classifier.weight.cpu())
    print(model.report())
    return float(loss)


if __name__ == "__main__":
    print(f"evaluation loss {main(*map(int, sys.argv[1:])):.4f}")
