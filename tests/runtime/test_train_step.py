"""Training steps with the model's own loss, with outputs for metrics, with a gradient scaler and with accumulation."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import assert_same_gradients, assert_same_outputs, bert, gpt2, gradients, mlp, ragged_mask, t5, tokens, vit
from torch import nn

import autopar
from autopar import InputError, PipelinedModule, Plan

BATCH = 7  # micro-batches of 3, 2 and 2


class ReturnsLoss(nn.Module):
    """Its loss is the first entry of a tuple, the entry of a dict, or all that it returns."""

    def __init__(self, shape: str, reduction: str = "mean") -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
        self.shape, self.reduction = shape, reduction

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.b(self.a(x).tanh())
        loss = None if labels is None else F.cross_entropy(logits, labels, reduction=self.reduction)
        if self.shape == "dict":
            return {"logits": logits, "loss": loss}
        return loss if self.shape == "alone" else (loss, logits)


def _classes(batch: int) -> dict[str, Any]:
    labels = torch.randint(0, 4, (batch,))
    labels[1:4] = -100  # other numbers of labels in each micro-batch
    return {"x": torch.randn(batch, 8), "labels": labels}


def _text(batch: int) -> dict[str, Any]:
    ids = tokens(batch)
    labels = ids.clone()
    labels[0, 3:] = -100
    labels[3:5] = -100  # a micro-batch without any
    return {"input_ids": ids, "labels": labels}


def _t5() -> nn.Module:
    model = t5()
    model.config.decoder_start_token_id = 0  # the labels, shifted, are what the decoder reads
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Any]], dict[str, int]]] = {
    "tuple": (lambda: ReturnsLoss("tuple"), _classes, {"a": 0, "b": 1}),
    "dict": (lambda: ReturnsLoss("dict"), _classes, {"a": 0, "b": 1}),
    "alone": (lambda: ReturnsLoss("alone"), _classes, {"a": 0, "b": 1}),
    "sum": (lambda: ReturnsLoss("tuple", "sum"), _classes, {"a": 0, "b": 1}),
    "bert": (
        bert,
        lambda b: {"input_ids": tokens(b), "attention_mask": ragged_mask(b), "labels": torch.arange(b) % 2},
        {"bert.embeddings": 0, "bert.encoder.layer.1": 1},
    ),
    "gpt2": (gpt2, _text, {"transformer.h.0": 0, "transformer.h.1": 1}),
    "t5": (_t5, lambda b: {**_text(b), "use_cache": False}, {"encoder": 0, "decoder": 1}),
    "vit": (
        vit,
        lambda b: {"pixel_values": torch.randn(b, 3, 16, 16), "labels": torch.arange(b) % 2},
        {"vit.embeddings": 0, "vit.layers.1": 1},
    ),
}
models = pytest.mark.parametrize("name", MODELS)


def pipelined(model: nn.Module, split: dict[str, int], schedule: str = "1f1b", n: int = 3, **more: Any) -> Any:
    plan = Plan.from_split(split, n_microbatches=n, schedule=schedule)
    return autopar.parallelize(model, ["cpu", "cpu"], plan=plan, cache=False, **more)


def own(output: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output
    return output["loss"] if isinstance(output, dict) else output[0]


def twins(name: str, **options: Any) -> tuple[nn.Module, PipelinedModule, dict[str, Any]]:
    """The model, a pipelined copy of it, and a batch."""
    torch.manual_seed(1)
    build, inputs, split = MODELS[name]
    model = build().train()
    return model, pipelined(copy.deepcopy(model), split, **options), inputs(BATCH)


@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
@pytest.mark.filterwarnings("error:the loss is computed on the whole batch")
@models
def test_the_models_own_loss_needs_no_target(name: str) -> None:
    model, pm, batch = twins(name, schedule=("gpipe", "1f1b", "zb-h1")[len(name) % 3])
    for _ in range(2):
        output = model(**batch)
        own(output).backward()
        loss, outputs = pm.train_step(**batch, return_outputs=True)
        torch.testing.assert_close(loss, own(output).detach())
        assert not loss.requires_grad
        assert_same_outputs(outputs, output)
        assert not any(
            x.requires_grad for x in autopar.capture.torch_private.tree_leaves(outputs) if hasattr(x, "grad")
        )
        assert_same_gradients(gradients(pm), gradients(model))
    torch.testing.assert_close(pm.train_step(**batch), loss)


@models
def test_the_models_own_loss_is_split_into_micro_batches(name: str) -> None:
    _, pm, batch = twins(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pm.train_step(**batch)
    assert not [str(w.message) for w in caught if "on the whole batch" in str(w.message)]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu"]])
def test_a_plan_of_its_own_is_found_for_the_models_own_loss(devices: list[str]) -> None:
    model = ReturnsLoss("tuple")
    pm = autopar.parallelize(copy.deepcopy(model), devices, cache=False)
    batch = _classes(BATCH)
    output = model(**batch)
    output[0].backward()
    loss, outputs = pm.train_step(**batch, return_outputs=True)
    torch.testing.assert_close(loss, output[0].detach())
    assert_same_outputs(outputs, tuple(x.detach() for x in output))
    assert_same_gradients(gradients(pm), gradients(model))


@pytest.mark.slow
def test_plans_are_tried_with_the_models_own_loss() -> None:
    model, batch = ReturnsLoss("tuple"), _classes(BATCH)
    output = model(**batch)
    output[0].backward()
    two = Plan.from_split({"a": 0, "b": 1}, n_microbatches=2)
    pm = autopar.parallelize(copy.deepcopy(model), ["cpu", "cpu"], cache=False, tune=1, candidates={"two": two})
    torch.testing.assert_close(pm.train_step(**batch), output[0].detach())
    assert pm.plan is not None
    assert pm.plan.measured_step_time is not None
    assert_same_gradients(gradients(pm), gradients(model))


@pytest.mark.slow
def test_a_plan_made_for_a_call_serves_the_models_own_loss() -> None:
    batch = _classes(BATCH)
    pm = autopar.parallelize(ReturnsLoss("tuple"), ["cpu", "cpu"], example_kwargs=batch, cache=False)
    plan = pm.plan
    pm.train_step(**batch)
    assert pm.plan is plan


def test_a_plan_for_all_forwards_before_all_backwards_is_made_anew_for_steps_of_the_models_own_loss() -> None:
    batch = _classes(BATCH)
    options: dict[str, Any] = {"n_microbatches": 3, "max_replicas": 1, "tune": 0, "cache": False}
    pm = autopar.parallelize(ReturnsLoss("tuple"), ["cpu", "cpu"], example_kwargs=batch, **options)
    assert pm.plan is not None
    assert pm.plan.barrier
    pm.train_step(**batch)
    plan = pm.plan
    assert not plan.barrier
    pm(**batch)
    pm.train_step(**batch)
    assert pm.plan is plan


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
@pytest.mark.parametrize("whole", [False, True])
def test_outputs_for_metrics_are_those_of_the_whole_batch(whole: bool, n: int) -> None:
    model = mlp()
    pm = pipelined(copy.deepcopy(model), {"0": 0, "3": 1}, n=n)
    x, y = torch.randn(BATCH, 16), torch.randn(BATCH, 16)
    loss_fn = (lambda o, t: F.mse_loss(o, t).sqrt()) if whole else F.mse_loss
    expected = loss_fn(model(x), y)
    expected.backward()
    loss, outputs = pm.train_step(x, target=y, loss_fn=loss_fn, return_outputs=True)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(outputs, model(x).detach())
    assert not outputs.requires_grad
    assert_same_gradients(gradients(pm), gradients(model))


def test_outputs_come_with_a_recomputed_last_stage_and_with_a_profile() -> None:
    model = mlp()
    plan = Plan.from_split({"0": 0, "3": 1}, n_microbatches=3, recompute=[1])
    pm = autopar.parallelize(copy.deepcopy(model), ["cpu", "cpu"], plan=plan, cache=False)
    x, y = torch.randn(BATCH, 16), torch.randn(BATCH, 16)
    _, outputs = pm.train_step(x, target=y, loss_fn=F.mse_loss, return_outputs=True, profile=True)
    torch.testing.assert_close(outputs, model(x).detach())
    assert pm.last_profile is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "batch", "said"),
    [
        (gpt2, {"input_ids": tokens(4)}, r"returned no loss \(CausalLMOutputWithCrossAttentions without .*labels="),
        (mlp, {"input": torch.randn(4, 16)}, "the output is torch.float32 with 2 dimensions"),
        (lambda: ReturnsLoss("tuple"), {"x": torch.randn(4, 8)}, r"without output\[0\]"),
        (lambda: ReturnsLoss("dict"), {"x": torch.randn(4, 8)}, r"without output\['loss'\]"),
    ],
)
def test_a_model_that_returns_no_loss_is_refused_before_it_is_planned_for(model: Any, batch: Any, said: str) -> None:
    pm = autopar.parallelize(model(), ["cpu", "cpu"], cache=False)
    with pytest.raises(InputError, match=said):
        pm.train_step(**batch)
    assert pm.plan is None
    assert all(p.grad is None for p in pm.parameters())


def test_errors_of_a_loss_name_it_and_what_it_was_called_with() -> None:
    pm = pipelined(mlp(), {"0": 0, "4": 1})
    x = torch.randn(6, 16)
    for target in (torch.zeros(6, dtype=torch.int32), torch.zeros(6, 3)):
        with pytest.raises((RuntimeError, ValueError)) as raised:
            pm.train_step(x, target=target, loss_fn=F.cross_entropy)
        assert any("'cross_entropy'" in note and "raised this, for output (" in note for note in raised.value.__notes__)


def test_a_misspelt_loss_or_target_is_named() -> None:
    pm = pipelined(mlp(), {"0": 0, "4": 1})
    x = torch.randn(6, 16)
    with pytest.raises(InputError, match=r"loss_fn needs target=.*forward has no argument 'targets'"):
        pm.train_step(x, targets=x, loss_fn=F.mse_loss)
    with pytest.raises(InputError, match=r"target needs loss_fn=.*forward has no argument 'criterion'"):
        pm.train_step(x, target=x, criterion=F.mse_loss)


def test_half_of_target_and_loss_fn_is_refused() -> None:
    pm, x = pipelined(mlp(), {"0": 0, "3": 1}), torch.randn(4, 16)
    with pytest.raises(InputError, match=r"loss_fn needs target=.*or give neither"):
        pm.train_step(x, loss_fn=F.mse_loss)
    with pytest.raises(InputError, match=r"target needs loss_fn=.*or give neither"):
        pm.train_step(x, target=x)


# -- recipes of docs/how-to/losses.md ---------------------------------------------------------------------------------


def test_recipe_gradient_scaler() -> None:
    """Scale inside the loss, and unscale what comes back: the backward runs within train_step."""
    model = mlp()
    pm = pipelined(copy.deepcopy(model), {"0": 0, "3": 1})
    batches = [(torch.randn(BATCH, 16), torch.randn(BATCH, 16)) for _ in range(4)]
    batches[1][1][0, 0] = torch.inf  # the scaler leaves this step out and halves its scale

    def train(called: Any) -> list[torch.Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(called.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for x, y in batches:
            optimizer.zero_grad()
            if isinstance(called, PipelinedModule):
                scaled = called.train_step(x, target=y, loss_fn=lambda o, t: scaler.scale(F.mse_loss(o, t)))
                losses.append(scaled / scaler.get_scale())
            else:
                loss = F.mse_loss(called(x), y)
                scaler.scale(loss).backward()
                losses.append(loss.detach())
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(called.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 512.0
        return losses

    torch.testing.assert_close(train(pm), train(model))
    torch.testing.assert_close(dict(pm.state_dict()), dict(model.state_dict()))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
def test_recipe_accumulation() -> None:
    """Steps add to `.grad` until it is cleared; nothing is synchronised in between, so no `no_sync` is needed."""
    torch.manual_seed(1)
    model = gpt2().train()
    pm = pipelined(copy.deepcopy(model), {"transformer.h.0": 0, "transformer.h.1": 1})
    batches = [_text(BATCH) for _ in range(2)]
    own_share = lambda output, _: output.loss / len(batches)  # noqa: E731
    for batch in batches:
        (model(**batch).loss / len(batches)).backward()
        pm.train_step(**batch, target=batch["labels"], loss_fn=own_share)
    assert_same_gradients(gradients(pm), gradients(model))


@pytest.mark.slow
@pytest.mark.filterwarnings("error:the loss is computed on the whole batch")
def test_recipe_gradient_scaler_with_the_models_own_loss() -> None:
    """The scaler scales the loss that the model returns; the labels say what it averages over."""
    torch.manual_seed(1)
    model = gpt2().train()
    pm = pipelined(copy.deepcopy(model), {"transformer.h.0": 0, "transformer.h.1": 1})
    scaler, batch = torch.amp.GradScaler("cpu", init_scale=1024.0), _text(BATCH)
    for _ in range(2):
        loss = model(**batch).loss
        scaler.scale(loss).backward()
        found = pm.train_step(**batch, target=batch["labels"], loss_fn=lambda out, _: scaler.scale(out.loss))
        torch.testing.assert_close(found / scaler.get_scale(), loss.detach())
        assert_same_gradients(gradients(pm), gradients(model))
