"""transformers' Trainer with a pipelined module: the losses, metrics and files of the plain model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset

import autopar
from autopar import PipelinedModule, Plan

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of pinned memory without a GPU, and of autopar
    pytest.mark.usefixtures("shared_exports"),
]

STEPS = 4


class Samples(Dataset[dict[str, Any]]):
    """Fixed samples; each has a column that the model does not take."""

    def __init__(self, sample: Callable[[torch.Generator], dict[str, Any]]) -> None:
        self._sample = sample

    def __len__(self) -> int:
        return 36  # the last batch of 8 has 4 samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self._sample(torch.Generator().manual_seed(index)), "row": index}


def _ids(g: torch.Generator, length: int = 12) -> torch.Tensor:
    return torch.randint(1, models.VOCABULARY - 1, (length,), generator=g)


def _class(g: torch.Generator) -> int:
    return int(torch.randint(0, 2, (), generator=g))


def _padded(g: torch.Generator) -> torch.Tensor:
    """Labels, some of them ignored; each sample ignores another number of them."""
    labels = _ids(g)
    labels[int(torch.randint(2, 12, (), generator=g)) :] = -100
    return labels


def _t5() -> nn.Module:
    model = models.t5()
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = 0
    return model


@dataclass(frozen=True)
class Family:
    build: Callable[[], nn.Module]
    sample: Callable[[torch.Generator], dict[str, Any]]
    stages: dict[str, int]


FAMILIES = {
    "bert": Family(
        models.bert,
        lambda g: {"input_ids": _ids(g), "attention_mask": torch.ones(12, dtype=torch.long), "label": _class(g)},
        {"bert.embeddings": 0, "bert.encoder.layer.1": 1},
    ),
    "gpt2": Family(
        models.gpt2,
        lambda g: {"input_ids": _ids(g), "labels": _padded(g)},
        {"transformer.h.0": 0, "transformer.h.2": 1},
    ),
    "t5": Family(_t5, lambda g: {"input_ids": _ids(g), "labels": _padded(g)}, {"encoder": 0, "decoder": 1}),
    "vit": Family(
        models.vit,
        lambda g: {"pixel_values": torch.randn(3, 16, 16, generator=g), "labels": _class(g)},
        {"vit.embeddings": 0, "vit.layers.1": 1},
    ),
}
families = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))


def model_of(family: Family) -> nn.Module:
    torch.manual_seed(1)
    return family.build()


def pipelined(family: Family, n: int = 3) -> PipelinedModule:
    plan = Plan.from_split(family.stages, n_microbatches=n)
    return autopar.parallelize(model_of(family), ["cpu", "cpu"], plan=plan, cache=False)


def trainer(model: nn.Module, family: Family, place: Path, **more: Any) -> transformers.Trainer:
    callbacks = {key: more.pop(key) for key in ("compute_metrics",) if key in more}
    data = Samples(family.sample)
    arguments = transformers.TrainingArguments(
        output_dir=str(place), report_to=[], **{"max_steps": STEPS, "logging_steps": 1, "disable_tqdm": True, **more}
    )
    return transformers.Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data, **callbacks)


def losses(trained: transformers.Trainer) -> list[float]:
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


def assert_same(mine: transformers.Trainer, plain: transformers.Trainer) -> None:
    """Losses, gradient norms and weights."""
    assert len(losses(plain)) >= STEPS
    for key in ("loss", "grad_norm", "eval_loss"):
        found, expected = ([e[key] for e in t.state.log_history if key in e] for t in (mine, plain))
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert mine.model is not None
    assert plain.model is not None
    torch.testing.assert_close(dict(mine.model.state_dict()), dict(plain.model.state_dict()), rtol=1e-3, atol=1e-4)


@families
@pytest.mark.slow
def test_a_trainer_with_default_arguments_trains_evaluates_saves_and_resumes(family: Family, tmp_path: Path) -> None:
    plain = trainer(model_of(family), family, tmp_path / "plain", save_steps=2)
    plain.train()
    mine = trainer(pipelined(family), family, tmp_path / "mine", save_steps=2)
    mine.train()
    assert_same(mine, plain)
    found, expected = mine.evaluate(), plain.evaluate()
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-4)
    assert mine.predict(mine.eval_dataset).predictions is not None

    place = tmp_path / "mine" / f"checkpoint-{STEPS}"
    loaded = type(plain.model).from_pretrained(place)
    torch.testing.assert_close(loaded.state_dict(), mine.model.state_dict())
    files = [set(load_file(tmp_path / who / place.name / "model.safetensors")) for who in ("mine", "plain")]
    assert files[0] == files[1], "tied weights are saved once"

    resumed = [
        trainer(model, family, tmp_path / who, save_steps=2)
        for who, model in (("mine", pipelined(family)), ("plain", model_of(family)))
    ]
    for one in resumed:
        one.train(resume_from_checkpoint=str(Path(one.args.output_dir) / "checkpoint-2"))
        assert one.state.global_step == STEPS
    assert_same(*resumed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("gpt2", {"gradient_accumulation_steps": 2}),
        ("gpt2", {"bf16": True, "use_cpu": True}),
        ("gpt2", {"label_smoothing_factor": 0.1}),
        ("gpt2", {"gradient_checkpointing": True}),
        ("gpt2", {"optim": "sgd", "weight_decay": 0.1, "learning_rate": 0.1, "lr_scheduler_type": "cosine"}),
        ("bert", {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_steps": 2}),
        ("bert", {"num_train_epochs": 1, "max_steps": -1, "per_device_train_batch_size": 5}),
        ("vit", {"auto_find_batch_size": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_arguments_of_the_trainer_act_as_on_the_plain_model(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    family = FAMILIES[name]
    both = [
        trainer(model, family, tmp_path / who, **more)
        for who, model in (("mine", pipelined(family)), ("plain", model_of(family)))
    ]
    for one in both:
        one.train()
    if "bf16" in more:  # rounding differs with the number of rows
        torch.testing.assert_close(*(torch.tensor(losses(one)) for one in both), rtol=1e-2, atol=1e-2)
    else:
        assert_same(*both)


@pytest.mark.slow
def test_metrics_get_the_predictions_of_the_plain_model(tmp_path: Path) -> None:
    family = FAMILIES["bert"]
    seen: list[Any] = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append(prediction)
        return {"share": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    found, expected = (
        trainer(m, family, tmp_path, compute_metrics=metrics).evaluate() for m in (pipelined(family), model_of(family))
    )
    assert found["eval_share"] == expected["eval_share"]
    torch.testing.assert_close(*(torch.tensor(p.predictions) for p in seen))
    torch.testing.assert_close(*(torch.tensor(p.label_ids) for p in seen))


@pytest.mark.slow
def test_a_seq2seq_trainer_predicts_with_generate(tmp_path: Path) -> None:
    family = FAMILIES["t5"]
    arguments = transformers.Seq2SeqTrainingArguments(
        output_dir=str(tmp_path), report_to=[], predict_with_generate=True, generation_max_length=6, disable_tqdm=True
    )
    data = Samples(family.sample)
    found, expected = (
        transformers.Seq2SeqTrainer(model=m, args=arguments).predict(data).predictions
        for m in (pipelined(family), model_of(family))
    )
    assert (found == expected).all()


class OwnModel(nn.Module):
    """A model that is not of transformers, tied weights included."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(64, 8), nn.Linear(8, 8), nn.Linear(8, 64, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(self.embed(input_ids)).relu())
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


@pytest.mark.slow
def test_a_model_of_ones_own_trains(tmp_path: Path) -> None:
    family = Family(OwnModel, FAMILIES["gpt2"].sample, {"embed": 0, "head": 1})
    both = [
        trainer(m, family, tmp_path / who, include_for_metrics=["loss"])
        for who, m in (("mine", pipelined(family)), ("plain", model_of(family)))
    ]
    for one in both:
        one.train()
        one.evaluate()
    assert_same(*both)
