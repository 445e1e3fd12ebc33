"""A model whose end needs the whole batch runs the rest in micro-batches, and computes what the plain model does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

import autopar
from autopar import Plan
from autopar.analysis.own_loss import own_loss

WIDTH, VOCABULARY, TOKENS = 16, 50, 6
TOLERANCE = 5e-6
Batch = dict[str, torch.Tensor]


class Contrast(nn.Module):
    """Samples of two kinds compared with each other, by a learned scale and bias."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.right = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.scale, self.bias = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor(-0.2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        left, right = (functional.normalize(z, dim=-1) for z in (self.left(x), self.right(y)))
        scores = left @ right.T * self.scale.exp() + self.bias
        own = torch.arange(len(scores), device=scores.device)
        loss = (functional.cross_entropy(scores, own) + functional.cross_entropy(scores.T, own)) / 2
        return {"loss": loss, "scores": scores, "left": left}


def contrast_batch(rows: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(rows, WIDTH, generator=generator) for name in ("x", "y")}


def bert_config() -> transformers.BertConfig:
    return transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def tokens(rows: int, seed: int) -> tuple[torch.Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (rows, TOKENS), generator=generator), generator


def pretraining_batch(rows: int, seed: int) -> Batch:
    """The first batch ignores no target, later ones do."""
    ids, generator = tokens(rows, seed)
    ignored = torch.rand(ids.shape, generator=generator) < (0.6 if seed else 0.0)
    sentences = torch.randint(2, (rows,), generator=generator)
    return {"input_ids": ids, "labels": ids.masked_fill(ignored, -100), "next_sentence_label": sentences}


def question_batch(rows: int, seed: int) -> Batch:
    """Answers outside of the text count nothing."""
    ids, generator = tokens(rows, seed)
    most = TOKENS + 3 if seed else TOKENS
    starts, ends = (torch.randint(most, (rows,), generator=generator) for _ in range(2))
    starts[0] = ends[0] = TOKENS - 1  # a mean over no answer is NaN
    return {"input_ids": ids, "start_positions": starts, "end_positions": ends}


def clip() -> nn.Module:
    text = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 2, "max_position_embeddings": 8, "eos_token_id": 2}
    vision = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 8, "patch_size": 4}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


def clip_batch(rows: int, seed: int) -> Batch:
    ids, generator = tokens(rows, seed)
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(rows, 3, 8, 8, generator=generator),
        "attention_mask": torch.ones_like(ids),
    }


class Case(NamedTuple):
    model: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    split: dict[str, int]
    settings: dict[str, Any]


def mixtral() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
    balanced = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads, **balanced))


def causal_batch(rows: int, seed: int) -> Batch:
    """The first batch has no padding, later ones do."""
    batch = pretraining_batch(rows, seed)
    del batch["next_sentence_label"]
    mask = torch.ones_like(batch["input_ids"])
    mask[0, : 2 * (seed > 0)] = 0
    return batch | {"attention_mask": mask}


CASES = {
    "contrast": Case(Contrast, contrast_batch, {"left": 0, "right": 1}, {}),
    "pretraining": Case(
        lambda: transformers.BertForPreTraining(bert_config()),
        pretraining_batch,
        {"bert.embeddings": 0, "bert.encoder.layer.1": 1},
        {},
    ),
    "questions": Case(
        lambda: transformers.BertForQuestionAnswering(bert_config()),
        question_batch,
        {"bert.embeddings": 0, "bert.encoder.layer.1": 1},
        {},
    ),
    "balanced experts": Case(mixtral, causal_batch, {"model.layers.0": 0, "model.layers.1": 1}, {}),
    "clip": Case(clip, clip_batch, {"text_model": 0, "vision_model": 1}, {"return_loss": True}),
}

QUICK = ("contrast", "pretraining")
GIVEN = [pytest.param(case, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, case in CASES.items()]


def pair(case: Case, **options: Any) -> tuple[nn.Module, Any]:
    """The plain model, and a pipelined copy in two stages and three micro-batches."""
    torch.manual_seed(0)
    plain = case.model().train()
    plan = Plan.from_split(case.split, n_microbatches=3)
    return plain, autopar.parallelize(copy.deepcopy(plain), ["cpu", "cpu"], plan=plan, **options)


def apart(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    assert (a is None) == (b is None)
    return 0.0 if a is None or b is None else float((a - b).abs().max())


def gradients_apart(plain: nn.Module, pipelined: nn.Module) -> float:
    """Relative to the largest gradient."""
    pairs = [(p.grad, q.grad) for p, q in zip(plain.parameters(), pipelined.parameters(), strict=True)]
    return max(apart(a, b) for a, b in pairs) / max(float(a.abs().max()) for a, _ in pairs if a is not None)


@pytest.mark.parametrize("case", GIVEN)
def test_losses_outputs_and_gradients_of_several_batches_are_the_plain_models(case: Case) -> None:
    plain, pipelined = pair(case)
    for seed, rows in enumerate((6, 6, 7, 1)):
        batch = case.batch(rows, seed)
        expected, found = (own_loss(one(**batch, **case.settings)) for one in (plain, pipelined))
        for loss in (expected, found):
            loss.backward()
        assert apart(expected.detach(), found.detach()) < TOLERANCE
        assert gradients_apart(plain, pipelined) < TOLERANCE
    assert pipelined.plan.n_microbatches == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the loss is computed on the whole batch")
@pytest.mark.parametrize("case", GIVEN)
def test_train_step_computes_the_loss_that_the_model_returns(case: Case) -> None:
    plain, pipelined = pair(case)
    for seed in range(2):
        batch = case.batch(6, seed)
        expected = own_loss(plain(**batch, **case.settings))
        expected.backward()
        found, outputs = pipelined.train_step(**batch, **case.settings, return_outputs=True)
        assert apart(expected.detach(), found) < TOLERANCE
        assert apart(own_loss(outputs), found) < 1e-7
        assert gradients_apart(plain, pipelined) < TOLERANCE


@pytest.mark.slow
def test_all_outputs_come_back_in_evaluation_and_without_gradients() -> None:
    plain, pipelined = pair(CASES["contrast"])
    plain.eval()
    pipelined.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        batch = contrast_batch(6, 0)
        with mode():
            expected, found = plain(**batch), pipelined(**batch)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.allclose(value, found[name], atol=1e-6)
            assert not found[name].requires_grad


def test_inputs_of_the_model_and_of_its_end_get_their_gradients() -> None:
    class Distances(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (self.layers(x) @ y.T).logsumexp(0).sum() + x.square().sum()

    case = Case(Distances, contrast_batch, {"layers.0": 0, "layers.2": 1}, {})
    plain, pipelined = pair(case)
    given = [{k: v.requires_grad_() for k, v in contrast_batch(6, 1).items()} for _ in range(2)]
    for one, batch in zip((plain, pipelined), given, strict=True):
        one(**batch).backward()
    for name in given[0]:
        assert apart(given[0][name].grad, given[1][name].grad) < 1e-5
    assert pipelined.plan.n_microbatches == 3


@pytest.mark.slow
def test_other_sizes_keep_the_end_of_the_model() -> None:
    case = CASES["pretraining"]
    plain, pipelined = pair(case)
    for length in (6, 5, 4, 6):
        batch = {k: v[:, :length].contiguous() if v.dim() > 1 else v for k, v in case.batch(6, length).items()}
        expected, found = (own_loss(one(**batch)) for one in (plain, pipelined))
        for loss in (expected, found):
            loss.backward()
        assert apart(expected.detach(), found.detach()) < TOLERANCE
        assert gradients_apart(plain, pipelined) < TOLERANCE


@pytest.mark.slow
def test_verify_compares_what_micro_batches_compute() -> None:
    plain, pipelined = pair(CASES["contrast"], verify=True)
    batch = contrast_batch(6, 0)
    assert apart(plain(**batch)["loss"].detach(), pipelined(**batch)["loss"].detach()) < 1e-6
    assert pipelined.plan.n_microbatches == 3


@pytest.mark.slow
def test_a_plan_says_that_the_end_of_the_model_runs_on_the_whole_batch() -> None:
    plan = autopar.plan(Contrast(), ["cpu", "cpu"], example_kwargs=contrast_batch(8, 0), cache=False)
    assert any(note.startswith("the end of the model runs once") and "matmul" in note for note in plan.notes)


def test_a_plan_by_hand_says_so_too() -> None:
    plan = Plan.from_split({"left": 0, "right": 1}, n_microbatches=2)
    pm = autopar.parallelize(Contrast(), ["cpu", "cpu"], plan=plan, tune=0)
    pm(**contrast_batch(8, 0))
    assert pm.plan is not None
    (note,) = pm.plan.notes
    assert note.startswith("the end of the model runs once on the whole batch: aten.matmul.default in module '(root)'")


class Scaled(nn.Module):
    """Its end takes a learned number, as one of no dimension or of one."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        self.scale = nn.Parameter(torch.ones(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        return functional.cross_entropy(x @ x.T * self.scale.exp(), torch.arange(len(x)))


@pytest.mark.slow
def test_a_number_that_enters_the_end_is_no_loss_where_a_backward_would_start() -> None:
    hand = Plan.from_split({"layers.0": 0, "layers.2": 1}, n_microbatches=4)
    call: dict[str, Any] = {"example_args": (torch.randn(64, 64),), "cache": False}
    plans = [autopar.plan(Scaled(shape), ["cpu", "cpu"], plan=hand, **call) for shape in ((), (1,))]
    for stages in zip(*(plan.stages for plan in plans), strict=True):
        assert all((stage.backward_time or 0.0) > 0 for stage in stages)
        assert stages[0].peak_memory == pytest.approx(stages[1].peak_memory, abs=256)
    number, vector = (autopar.profile(Scaled(shape), ["cpu"], optimizer="adamw", **call).memory for shape in ((), (1,)))
    assert number is not None
    assert vector is not None
    assert number.peak.total == pytest.approx(vector.peak.total, abs=256)
