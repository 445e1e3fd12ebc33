"""Numbers of pipelines on GPUs are those of the plain model, wherever tensors are: `python -m pytest -m gpu`.

The same tests run on CPU workers, without the mark.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_places import ON_PAIRS, names, on, on_cpu, places
from models import RandomLayer, assert_same_gradients, gpt2, gradients, mlp, tokens
from shardings import Attention, at_random, one_stage
from torch import nn
from torch.nn.functional import mse_loss

import autopar
from autopar import AutoparError, PipelinedModule, Plan
from autopar.capture.program import capture

SCHEDULES = ("gpipe", "1f1b", "zb-h1")


def pipelined(model: nn.Module, devices: list[str], schedule: str = "1f1b", **more: Any) -> PipelinedModule:
    plan = Plan.from_split({"0": 0, "3": 1}, n_microbatches=4, schedule=schedule, **more)
    return autopar.parallelize(model, devices, plan=plan, cache=False, strict=True)


def replicated(model: nn.Module, devices: list[str], first: str = "0") -> PipelinedModule:
    """One stage on both workers."""
    plan = Plan.from_split({first: 0}, n_microbatches=4, devices=[names(devices)])
    return autopar.parallelize(model, devices, plan=plan, cache=False, strict=True)


def assert_trained_alike(model: nn.Module, original: nn.Module, tolerance: float = 1e-4) -> None:
    found = gradients(model)
    for name, gradient in found.items():
        if gradient is not None:
            assert gradient.device == model.get_parameter(name).device, name
    assert_same_gradients(on_cpu(found), on_cpu(gradients(original)), tolerance)


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(a.detach().cpu(), b.detach().cpu(), rtol=tolerance, atol=tolerance)


# -- steps ------------------------------------------------------------------------------------------------------------


@ON_PAIRS
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_devices_train_like_the_model_by_train_step_and_by_the_callers_backward(
    devices: list[str], schedule: str
) -> None:
    model = mlp(64, 6)
    original = copy.deepcopy(model)
    pm = pipelined(model, devices, schedule)
    for _ in range(3):
        x, y = torch.randn(10, 64), torch.randn(10, 64)
        wanted = mse_loss(original(x), y)
        wanted.backward()
        expected = gradients(original)
        close(pm.train_step(x, target=y, loss_fn=mse_loss), wanted)
        assert_same_gradients(on_cpu(gradients(model)), on_cpu(expected), 1e-4)
        output = pm(x)
        mse_loss(output, y.to(output.device)).backward()  # the outer backward waits for the workers' own
        assert_same_gradients(on_cpu(gradients(model)), on_cpu(expected), 1e-4)
    pm.close()


@pytest.mark.slow
@ON_PAIRS
def test_inputs_and_the_model_may_be_on_any_device_at_every_capture(devices: list[str]) -> None:
    """A model on the CPU, inputs on a GPU; a placed model, inputs on the CPU; another mode and other sizes after."""
    for at in places(devices):
        model = mlp(64, 6)
        original = copy.deepcopy(model)
        model.to(places(devices)[-1])
        pm = pipelined(model, devices)
        for mode, rows in ((True, 8), (False, 8), (True, 12)):
            for where in (at, *places(devices)):
                pm.train(mode)
                x = torch.randn(rows, 64, device=where)
                close(pm(x), original(x.cpu()))
        pm.close()


class Positions(nn.Module):
    """Position numbers and a mask of its own code, made where its input is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.b = nn.Embedding(64, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x + self.embed(torch.arange(x.shape[1], device=x.device)))
        mask = torch.ones(x.shape[1], x.shape[1], device=x.device, dtype=torch.bool).tril()
        scores = (y @ y.transpose(1, 2)).masked_fill(~mask, float("-inf"))
        return self.b(torch.softmax(scores, -1) @ y)


@pytest.mark.slow
@ON_PAIRS
def test_what_the_models_code_makes_is_on_its_stages_device_at_the_second_build_too(devices: list[str]) -> None:
    model = Positions()
    original = copy.deepcopy(model)
    plan = Plan.from_split({"embed": 0, "b": 1}, n_microbatches=2)
    pm = autopar.parallelize(model, devices, plan=plan, cache=False, strict=True)
    for mode in (True, False):
        pm.train(mode)
        for length in (8, 11):
            for where in places(devices):
                x = torch.randn(4, length, 16, device=where)
                close(pm(x), original(x.cpu()))
    pm.close()


@ON_PAIRS
@pytest.mark.slow
def test_rotary_embeddings_under_autocast_are_the_models_at_far_positions(devices: list[str]) -> None:
    """In bf16, positions from 256 on would be rounded to their neighbours."""
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.LlamaConfig(**small, num_key_value_heads=2, vocab_size=64, max_position_embeddings=512)
    model = transformers.LlamaForCausalLM(config)
    for name, weight in model.named_parameters():  # what attention reads moves the output
        weight.data.mul_(40 if "q_proj" in name or "k_proj" in name else 10 if "_proj" in name else 1)
    original = copy.deepcopy(model)
    plan = Plan.from_split({"model.embed_tokens": 0, "model.layers.1": 1}, n_microbatches=2)
    pm = autopar.parallelize(model, devices, plan=plan, cache=False, strict=True)
    ids = torch.randint(0, 64, (2, 320))
    wanted = original(ids).logits
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cuda", torch.bfloat16, torch.cuda.is_available()):
        found = pm(ids).logits
    error = (found.float().cpu() - wanted).detach().abs()
    assert error[:, 256:].mean() < 3 * error[:, :200].mean(), "8 times as large where positions are rounded"
    pm.close()


# -- parameters and gradients -----------------------------------------------------------------------------------------


def _fused(parameters: Any) -> Callable[[], object]:
    return torch.optim.Adam(parameters, lr=0.05, fused=True).step


def _clamped(parameters: Any) -> Callable[[], object]:
    return lambda: [p.data.sub_(0.05 * p.grad).clamp_(-0.1, 0.1) for p in parameters]


def _replaced(parameters: Any) -> Callable[[], object]:
    def step() -> None:
        for p in parameters:
            p.data = p.data - 0.05 * p.grad

    return step


@ON_PAIRS
@pytest.mark.parametrize("update", [_fused, _clamped, _replaced], ids=["fused", "clamped", "replaced"])
def test_replicas_compute_with_the_weights_of_the_last_update(
    devices: list[str], update: Callable[[Any], Callable[[], object]]
) -> None:
    model = mlp(16, 3)
    original = copy.deepcopy(model)
    pm = replicated(model, devices)
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    close(pm.train_step(x, target=y, loss_fn=mse_loss), mse_loss(original(x), y))
    model.zero_grad()
    steps = [update(list(one.parameters())) for one in (model, original)]
    for _ in range(3):
        wanted = mse_loss(original(x), y)
        wanted.backward()
        close(pm.train_step(x, target=y, loss_fn=mse_loss), wanted, 1e-3)
        for step in steps:
            step()
        model.zero_grad()
        original.zero_grad()
    pm.close()


@ON_PAIRS
def test_outputs_and_losses_of_replicas_are_always_on_one_device(devices: list[str]) -> None:
    model = mlp(16, 3)
    original = copy.deepcopy(model)
    pm = replicated(model, devices)
    promised = places(devices[:1])[-1]
    for rows in (1, 3, 8):
        x, y = torch.randn(rows, 16), torch.randn(rows, 16)
        output = pm(x)
        assert output.device == promised
        close(output, original(x))
        loss = pm.train_step(x, target=y, loss_fn=mse_loss)
        assert loss.device == promised
        close(loss, mse_loss(original(x), y))
    pm.close()


@ON_PAIRS
def test_gradients_are_where_their_parameters_and_inputs_are(devices: list[str]) -> None:
    for at in places(devices):
        for build in (pipelined, replicated):
            model = mlp(16, 6)
            original = copy.deepcopy(model)
            pm = build(model, devices)
            x = torch.randn(8, 16, device=at, requires_grad=True)
            its = x.detach().cpu().requires_grad_()
            pm(x).square().sum().backward()
            original(its).square().sum().backward()
            assert x.grad is not None
            assert x.grad.device == x.device
            close(x.grad, its.grad)
            assert_trained_alike(model, original)
            pm.close()


@ON_PAIRS
def test_a_module_moved_after_placement_computes_the_same_or_says_why_not(devices: list[str]) -> None:
    for at in places(devices):
        model = mlp(16, 6)
        original = copy.deepcopy(model)
        pm = pipelined(model, devices)
        x = torch.randn(8, 16)
        pm(x)
        try:
            pm.to(at)
        except AutoparError:
            continue
        output = pm(x)
        close(output, original(x))
        output.sum().backward()
        original(x).sum().backward()
        assert_trained_alike(model, original)
        pm.close()


@ON_PAIRS
def test_parameters_stay_trainable_after_a_first_call_in_inference_mode(devices: list[str]) -> None:
    model = mlp(16, 6)
    original = copy.deepcopy(model)
    pm, x = pipelined(model, devices), torch.randn(8, 16)
    with torch.inference_mode():
        close(pm(x), original(x))
    assert not any(p.is_inference() for p in model.parameters())
    pm(x).sum().backward()
    original(x).sum().backward()
    assert_trained_alike(model, original)
    pm.close()


# -- random numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@ON_PAIRS
@pytest.mark.parametrize("mode", ["none", "selective", "full", "stage"])
def test_dropout_comes_again_with_the_seed_and_when_a_forward_runs_again(devices: list[str], mode: str) -> None:
    model = nn.Sequential(*[RandomLayer() for _ in range(4)])
    plan = Plan.from_split({"0": 0, "2": 1}, n_microbatches=2, recompute={0: mode, 1: mode})
    pm, x = autopar.parallelize(model, devices, plan=plan, cache=False), torch.randn(4, 2, 5, 8)
    pm(x)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        output = pm(x)
        output.sum().backward()
        assert all(map(torch.equal, on_gpu, torch.cuda.get_rng_state_all() if on_gpu else []))
        for name, gradient in gradients(model).items():
            assert gradient is not None
            close((model.get_parameter(name) * gradient).sum(), output.sum(), 1e-3)
        outputs.append(output.detach().cpu())
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    pm.close()


@pytest.mark.slow
@ON_PAIRS
def test_a_default_device_of_the_caller_changes_nothing(devices: list[str]) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.Linear(16, 16), nn.Dropout(0.2))
    plan = Plan.from_split({"0": 0, "2": 1}, n_microbatches=4)
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    losses = []
    for default in [*places(devices), torch.device("meta")]:
        one = autopar.parallelize(copy.deepcopy(model), devices, plan=plan, cache=False)
        with default:
            torch.manual_seed(3)
            losses.append(one.train_step(x, target=y, loss_fn=mse_loss).cpu())
        one.close()
    assert all(torch.equal(loss, losses[0]) for loss in losses)


# -- compiled stages --------------------------------------------------------------------------------------------------

ON_GPUS = pytest.mark.parametrize("devices", [on("cuda:0", "cuda:0"), on("cuda:0", "cuda:1")])


@ON_GPUS
@pytest.mark.parametrize("how", [True, "graphs"])
def test_compiled_and_recorded_stages_train_like_the_model(devices: list[str], how: bool | str) -> None:
    model = mlp(64, 6)
    original = copy.deepcopy(model)
    plan = Plan.from_split({"0": 0, "3": 1}, n_microbatches=4)
    pm = autopar.parallelize(model, devices, plan=plan, compile=how, cache=False)
    for _ in range(4):  # the first ones compile and record
        x, y = torch.randn(8, 64), torch.randn(8, 64)
        wanted = mse_loss(original(x), y)
        wanted.backward()
        close(pm.train_step(x, target=y, loss_fn=mse_loss), wanted)
        assert_trained_alike(model, original)
    pm.close()


@ON_GPUS
@pytest.mark.parametrize("how", [True, "graphs"])
def test_compiled_and_recorded_stages_drop_anew_in_every_step(devices: list[str], how: bool | str) -> None:
    model = nn.Sequential(*[RandomLayer() for _ in range(4)])
    plan = Plan.from_split({"0": 0, "2": 1}, n_microbatches=2)
    pm = autopar.parallelize(model, devices, plan=plan, compile=how, cache=False)
    x = torch.randn(4, 2, 5, 8)
    losses = []
    for seed in (1, 2, 3, 3):
        torch.manual_seed(seed)
        output = pm(x)
        output.sum().backward()
        for name, gradient in gradients(model).items():
            assert gradient is not None
            close((model.get_parameter(name) * gradient).sum(), output.sum(), 1e-3)
        losses.append(output.sum().item())
    assert losses[2] == losses[3]
    assert len(set(losses)) == 3
    pm.close()


# -- sharded stages ---------------------------------------------------------------------------------------------------


@ON_PAIRS
@pytest.mark.parametrize("recompute", [False, True])
def test_sharded_stages_train_like_the_model(devices: list[str], recompute: bool) -> None:
    model, x = Attention().double(), torch.randn(8, 12, 24, dtype=torch.float64)
    original = copy.deepcopy(model)
    program = capture(model, (x,), {})
    plan = one_stage(program, at_random(program, (2,), 1), recompute=recompute)
    plan = replace(plan, stages=(replace(plan.stages[0], devices=names(devices)),))
    pm = autopar.parallelize(model, devices, plan=plan, cache=False)
    for _ in range(2):
        output = pm(x)
        close(output, original(x), 1e-9)
        output.square().sum().backward()
        original(x).square().sum().backward()
        assert_trained_alike(model, original, 1e-9)
    pm.close()


# -- transformers -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@ON_PAIRS
@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
def test_stages_on_several_devices_generate_the_tokens_of_the_model(devices: list[str]) -> None:
    model = gpt2().eval()
    original = copy.deepcopy(model)
    plan = Plan.from_split({"transformer.h.0": 0, "transformer.h.2": 1}, n_microbatches=2)
    pm = autopar.parallelize(model, devices, plan=plan, cache=False)
    ids = tokens(4)
    with torch.inference_mode():
        close(pm(ids).logits, original(ids).logits)
    for how in ({"do_sample": False}, {"num_beams": 3}, {"cache_implementation": "static"}):
        wanted = original.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, pad_token_id=0, **how)
        here = ids.to(pm.device)
        found = pm.generate(here, attention_mask=torch.ones_like(here), max_new_tokens=6, pad_token_id=0, **how)
        assert torch.equal(found.cpu(), wanted)
    pm.close()


@ON_PAIRS
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_trainer_leaves_the_stages_where_they_are(devices: list[str], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    rows = [{"input_ids": row, "labels": row} for row in tokens(16)]
    losses = []
    model = gpt2()
    plan = Plan.from_split({"transformer.h.0": 0, "transformer.h.2": 1}, n_microbatches=2)
    for one in (autopar.parallelize(copy.deepcopy(model), devices, plan=plan, cache=False), model):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, logging_steps=1, report_to=[], disable_tqdm=True
        )
        trainer = transformers.Trainer(model=one, args=arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        trainer.evaluate()
        losses.append([e[k] for e in trainer.state.log_history for k in ("loss", "eval_loss") if k in e])
        if isinstance(one, PipelinedModule):
            assert {p.device for p in one.parameters()} == {torch.device(d) for d in devices}
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-3, atol=1e-3)
