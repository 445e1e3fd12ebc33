"""A script of tests: transformers' Trainer in one process, or PipelinedTrainer on the ranks of torchrun.

trained_by_trainer.py MODEL FOLDER [OPTION ...]    writes what it logged and the weights to FOLDER/found.pt

resume: from FOLDER/runs/checkpoint-2. again: evaluate and train before, with the same trainer. ours: PipelinedTrainer
also in one process. only: checkpoints of the model alone. best: the best model is loaded at the end, that of step 2.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import SequentialSampler
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

import autopar
from autopar import Plan
from autopar.integrations import PipelinedTrainer

LENGTH, VOCABULARY, PER_STEP = 16, 50, 8
_SMALL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    if name == "bert":
        sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
        return BertForSequenceClassification(BertConfig(**sizes, **_SMALL, vocab_size=VOCABULARY))
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=VOCABULARY, n_positions=LENGTH, use_cache=False)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


def samples(name: str, count: int) -> list[dict[str, torch.Tensor]]:
    """Of the language model, every sample ignores another number of tokens."""
    torch.manual_seed(1)
    ids = torch.randint(VOCABULARY, (count, LENGTH))
    if name == "bert":
        return [{"input_ids": row, "labels": row[0] % 2} for row in ids]
    places = torch.arange(LENGTH)
    labels = [torch.where(places < (3 * i) % 11, -100, row) for i, row in enumerate(ids)]
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def in_order(trainer: Any, dataset: Any = None) -> SequentialSampler:
    return SequentialSampler(dataset if dataset is not None else trainer.train_dataset)


def main(name: str, folder: Path, *options: str) -> None:
    n = int(os.environ.get("WORLD_SIZE", "1"))
    accumulated = 2 if "accumulate" in options else 1
    arguments = TrainingArguments(
        output_dir=str(folder / "runs"),
        max_steps=4,
        per_device_train_batch_size=PER_STEP // n,
        per_device_eval_batch_size=6 // n,
        gradient_accumulation_steps=accumulated,
        learning_rate=1e-2,
        max_grad_norm=0.05,  # every step is clipped
        logging_steps=1,
        save_strategy="steps",
        save_steps=2,
        save_only_model="only" in options,
        eval_strategy="steps" if "best" in options else "no",
        eval_steps=2,
        load_best_model_at_end="best" in options,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    model: Any = model_of(name)
    kind: Any = PipelinedTrainer if "ours" in options else Trainer
    if n > 1:
        stages = (
            {"bert": 0, "classifier": 1}
            if name == "bert"
            else {"transformer.wte": 0, "transformer.h.1": 1, "lm_head": 1}
        )
        plan = Plan.from_split(stages, n_microbatches=2)
        model, kind = autopar.parallelize(model, plan=plan, data="per-rank"), PipelinedTrainer
    kind._get_train_sampler = in_order
    data = samples(name, 64)
    trainer = kind(model=model, args=arguments, train_dataset=data, eval_dataset=samples(name, 18))
    if "again" in options:
        trainer.evaluate()
        trainer.train()
    trainer.train(resume_from_checkpoint=str(folder / "runs" / "checkpoint-2") if "resume" in options else None)
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(folder / "saved"))
    if trainer.is_world_process_zero():
        saved = type(model_of(name)).from_pretrained(folder / "saved")
        values = ("loss", "grad_norm", "learning_rate")
        logged = [tuple(one[value] for value in values) for one in trainer.state.log_history if "grad_norm" in one]
        torch.save((logged, evaluated, saved.state_dict()), folder / "found.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
