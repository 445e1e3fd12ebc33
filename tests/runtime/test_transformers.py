"""A pipelined module of a transformers model looks like the model, saves like it and generates what it generates."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers.utils.generic import can_return_loss, find_labels

import autopar
from autopar import AutoparWarning, InputError, PipelinedModule, Plan
from autopar.runtime.step_recorder import StepRecorder
from autopar.schedule.clock import Phase

pytestmark = pytest.mark.usefixtures("shared_exports")

STAGES = {
    models.bert: {"bert.embeddings": 0, "bert.encoder.layer.1": 1},
    models.gpt2: {"transformer.h.0": 0, "transformer.h.2": 1},
    models.t5: {"encoder": 0, "decoder": 1},
    models.vit: {"vit.embeddings": 0, "vit.layers.1": 1},
    models.clip: {"text_model": 0, "vision_model": 1},
    models.llama: {"model.layers.0": 0, "model.layers.1": 1},
}
families = pytest.mark.parametrize("build", STAGES, ids=lambda build: build.__name__)


def twins(build: Callable[[], nn.Module], n: int = 3) -> tuple[Any, Any]:
    """The model in evaluation, and a pipelined copy of it."""
    torch.manual_seed(1)
    model = build().eval()
    plan = Plan.from_split(STAGES[build], n_microbatches=n)
    return model, autopar.parallelize(copy.deepcopy(model), ["cpu", "cpu"], plan=plan, cache=False)


@families
def test_it_shows_what_libraries_ask_a_model_for(build: Callable[[], nn.Module]) -> None:
    model, pm = twins(build)
    assert inspect.signature(pm.forward) == inspect.signature(model.forward)
    assert pm.forward.__doc__ == model.forward.__doc__
    assert isinstance(pm, transformers.PreTrainedModel)
    assert isinstance(pm, type(model))
    assert isinstance(pm, PipelinedModule)
    assert type(pm) is PipelinedModule
    assert not isinstance(pm, transformers.MixtralForCausalLM)
    assert find_labels(pm.__class__) == find_labels(type(model))
    assert can_return_loss(pm.__class__) == can_return_loss(type(model))
    assert pm._get_name() == type(model).__name__
    assert pm.config is pm.unwrap().config
    for name in ("main_input_name", "device", "dtype", "base_model_prefix", "loss_type", "is_gradient_checkpointing"):
        assert getattr(pm, name, None) == getattr(model, name, None)
    assert pm.num_parameters() == model.num_parameters()
    assert hasattr(pm, "generate") == hasattr(model, "generate")
    assert not hasattr(pm, "hf_device_map"), "on CPUs nothing is placed"
    assert repr(pm).startswith("PipelinedModule(")


@pytest.mark.slow
def test_it_reports_its_plan() -> None:
    model, pm = twins(models.gpt2)
    assert str(pm.report())
    pm(**next(case for case in models.CASES if case.name == "gpt2").inputs(6))
    assert "transformer.h" in str(pm.report())
    assert type(copy.deepcopy(pm)) is PipelinedModule
    assert isinstance(copy.deepcopy(pm).unwrap(), type(model))


class KeywordOnly(nn.Module):
    def forward(self, *, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return x * scale


class AnySelf(nn.Module):
    def forward(this, self: torch.Tensor) -> torch.Tensor:
        return self * 2


@pytest.mark.parametrize("build", [models.mlp, KeywordOnly, AnySelf, functools.partial(nn.LSTM, 2, 2)])
def test_every_models_signature_is_shown(build: Callable[[], nn.Module]) -> None:
    model = build()
    pm = autopar.parallelize(model, ["cpu"], cache=False)
    assert inspect.signature(pm.forward) == inspect.signature(model.forward)
    assert pm.__class__ is (PipelinedModule if isinstance(model, nn.Sequential) else type(model))


def test_a_container_does_not_pass_for_one() -> None:
    """Code that meets an nn.Sequential iterates over it."""
    assert not isinstance(autopar.parallelize(models.mlp(), ["cpu"], cache=False), nn.Sequential)


@pytest.mark.slow
def test_a_parametrization_of_the_root_reaches_the_model() -> None:
    model = nn.Linear(4, 4)
    pm = autopar.parallelize(model, ["cpu"], cache=False)
    nn.utils.parametrizations.orthogonal(pm, "weight")
    x = torch.randn(3, 4)
    torch.testing.assert_close(pm(x), model(x))
    torch.testing.assert_close(model.weight @ model.weight.T, torch.eye(4), atol=1e-5, rtol=0)


@families
def test_what_it_saves_is_what_the_model_saves(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    model, pm = twins(build)
    model.save_pretrained(tmp_path / "plain")
    pm.save_pretrained(tmp_path / "mine")
    saved = [load_file(tmp_path / who / "model.safetensors") for who in ("mine", "plain")]
    torch.testing.assert_close(*saved, rtol=0, atol=0)
    configs = [json.loads((tmp_path / who / "config.json").read_text()) for who in ("mine", "plain")]
    assert configs[0] == configs[1]
    loaded = type(model).from_pretrained(tmp_path / "mine")
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


# -- generating ------------------------------------------------------------------------------------------------------

HOW = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampling": {"do_sample": True, "top_k": 20},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
    "without cache": {"do_sample": False, "use_cache": False},
}


def generated(model: Any, ids: torch.Tensor, **how: Any) -> torch.Tensor:
    torch.manual_seed(3)
    start = {"decoder_start_token_id": 0} if model.config.is_encoder_decoder else {}
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=7, pad_token_id=0, eos_token_id=63, **start, **how
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("build", [models.gpt2, models.t5, models.llama], ids=lambda build: build.__name__)
def test_it_generates_the_tokens_of_the_plain_model_also_after_training(build: Any, how: str) -> None:
    model, pm = twins(build)
    ids = models.tokens(4)
    assert torch.equal(generated(pm, ids, **HOW[how]), generated(model, ids, **HOW[how]))
    short = ids[:, :7].contiguous()
    labels = {"labels": short, "decoder_input_ids": short} if build is models.t5 else {"labels": ids}
    for called in (model, pm):
        called.train()
        optimizer = torch.optim.SGD(called.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            if called is pm:
                pm.train_step(input_ids=ids, use_cache=False, **labels)
            else:
                model(input_ids=ids, use_cache=False, **labels).loss.backward()
            optimizer.step()
        called.eval()
    after = generated(pm, ids, **HOW[how])
    assert torch.equal(after, generated(model, ids, **HOW[how]))


def test_generating_says_once_that_it_is_not_pipelined() -> None:
    _, pm = twins(models.gpt2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            generated(pm, models.tokens(4))
    messages = [str(w.message) for w in caught if issubclass(w.category, AutoparWarning)]
    assert len(messages) == 1
    assert messages[0].startswith("generate() runs the model itself")


def test_a_model_without_generate_has_none() -> None:
    with pytest.raises(AttributeError):
        _ = autopar.parallelize(models.UNet(), ["cpu"], cache=False).generate


@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
@pytest.mark.parametrize("grad", [False, True])
def test_a_cache_of_a_caller_is_updated_in_place(grad: bool) -> None:
    """The first call with an empty cache, the second with what the first left in it."""
    model, pm = twins(models.llama)
    ids, more = models.tokens(4), models.tokens(4, 1)
    logits = []
    with torch.set_grad_enabled(grad):
        for called in (model, pm):
            cache = transformers.DynamicCache(config=called.config)
            called(input_ids=ids, past_key_values=cache)
            assert cache.get_seq_length() == ids.shape[1]
            logits.append(called(input_ids=more, past_key_values=cache).logits)
            assert cache.get_seq_length() == ids.shape[1] + 1
    torch.testing.assert_close(*logits)
    if grad:
        for each in logits:
            each.square().sum().backward()
        models.assert_same_gradients(models.gradients(pm), models.gradients(model))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
def test_the_cache_that_a_pipelined_call_returns_continues_the_text() -> None:
    model, pm = twins(models.llama)
    ids, more = models.tokens(4), models.tokens(4, 1)
    with torch.inference_mode():
        found, expected = (m(input_ids=more, past_key_values=m(input_ids=ids).past_key_values) for m in (pm, model))
    torch.testing.assert_close(found.logits, expected.logits)
    assert len(pm.stages) == 2, "the first call was pipelined"


def test_a_training_step_with_a_cache_is_refused() -> None:
    _, pm = twins(models.llama)
    ids = models.tokens(4)
    with pytest.raises(InputError, match="leave past_key_values out"):
        pm.train_step(input_ids=ids, labels=ids, past_key_values=transformers.DynamicCache(config=pm.config))


# -- inference over micro-batches ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("build", [models.bert, models.vit, models.gpt2], ids=lambda build: build.__name__)
def test_scoring_is_pipelined_over_micro_batches(build: Any, mode: Any) -> None:
    model, pm = twins(build)
    case = next(case for case in models.CASES if case.build is build)
    for size in (7, 7, 9):  # the last batch of a data set has another size
        recorder = StepRecorder()
        with mode(), pm.recording(recorder):
            batch = case.inputs(size)  # tensors of the mode, as those of a data loader
            expected = model(**batch)
            found = pm(**batch)
        models.assert_same_outputs(found, expected)
        assert not found.logits.requires_grad
        done = {(action.phase, action.stage, action.microbatch) for action in recorder.times}
        assert done == {(Phase.FORWARD, stage, microbatch) for stage in range(2) for microbatch in range(3)}
    assert len(pm._signatures._captures.known) == 1, "one capture serves all sizes"


@pytest.mark.slow
def test_a_first_call_in_inference_mode_may_be_followed_by_training() -> None:
    """The capture and the search get copies of the batch, whose tensors autograd would refuse."""
    model = models.mlp()
    pm = autopar.parallelize(copy.deepcopy(model), ["cpu", "cpu"], cache=False)
    with torch.inference_mode():
        x = torch.randn(8, 16)
        torch.testing.assert_close(pm(x), model(x))
    y = torch.randn(8, 16)
    torch.testing.assert_close(
        pm.train_step(y, target=y, loss_fn=nn.functional.mse_loss), nn.functional.mse_loss(model(y), y).detach()
    )
