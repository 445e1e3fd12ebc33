"""Pipelines on a GPU: run with `python -m pytest -m gpu`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from models import assert_same_gradients, gpt2, gradients, mlp, tokens
from torch import nn
from torch.nn.functional import mse_loss

import autopar
from autopar import PipelinedModule, Plan
from autopar.runtime.transfers import arrived, push

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GPU = torch.device("cuda:0")
SCHEDULES = ("gpipe", "1f1b", "zb-h1")


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Whatever makes the host wait for the GPU is an error in here."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def pipelined(model: nn.Module, devices: list[str], schedule: str = "1f1b", n_microbatches: int = 4) -> PipelinedModule:
    plan = Plan.from_split({"0": 0, "3": 1}, n_microbatches=n_microbatches, schedule=schedule)
    return autopar.parallelize(model, devices, plan=plan)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "devices", [["cuda:0", "cuda:0"], ["cpu", "cuda:0"], ["cuda:0", "cpu"], ["cuda:0", "cuda:1"]], ids="+".join
)
def test_two_devices_train_like_the_model_be_they_gpus_or_one_given_twice_or_a_cpu(
    devices: list[str], schedule: str
) -> None:
    if "cuda:1" in devices and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model = mlp(64, 6)
    original = copy.deepcopy(model).to(GPU)
    pm = pipelined(model, devices, schedule)
    for _ in range(3):
        x, y = torch.randn(10, 64), torch.randn(10, 64)
        model.zero_grad()
        original.zero_grad()
        loss = pm.train_step(x, target=y, loss_fn=mse_loss)
        wanted = mse_loss(original(x.to(GPU)), y.to(GPU))
        wanted.backward()
        torch.testing.assert_close(loss.cpu(), wanted.detach().cpu(), rtol=1e-4, atol=1e-5)
        found = {name: g.cpu() for name, g in gradients(model).items() if g is not None}
        assert_same_gradients(found, {name: g.cpu() for name, g in gradients(original).items() if g is not None})
        mse_loss(pm(x).to(GPU), y.to(GPU)).backward()


def test_a_step_makes_the_host_wait_for_nothing() -> None:
    model = mlp(64, 6)
    pm = pipelined(model, ["cuda:0", "cuda:0"])
    x, y = torch.randn(16, 64, device=GPU), torch.randn(16, 64, device=GPU)
    for _ in range(2):  # the first ones capture, place and compile kernels
        pm.train_step(x, target=y, loss_fn=mse_loss)
    with no_synchronization():
        pm.train_step(x, target=y, loss_fn=mse_loss)
        pm(x)
    torch.cuda.synchronize()


def test_a_pipeline_computes_on_the_stream_of_its_caller() -> None:
    model = mlp(512, 6)
    original = copy.deepcopy(model).to(GPU)
    pm = pipelined(model, ["cuda:0", "cuda:0"])
    x = torch.randn(64, 512, device=GPU)
    pm(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(20):  # the input is made, used and overwritten on one stream, nowhere waited for
            x = torch.randn(64, 512, device=GPU)
            kept = x.clone()
            found = pm(x)
            x.zero_()
            torch.testing.assert_close(found, original(kept), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("way", [("cpu", "cuda:0"), ("cuda:0", "cpu")])
def test_a_tensor_arrives_whole_though_its_sender_overwrites_it_at_once(way: tuple[str, str]) -> None:
    source, target = (torch.device(d) for d in way)
    for _ in range(20):
        tensor = torch.randn(1 << 20, device=source)
        expected = tensor.clone()
        sent = push(tensor, target)
        del tensor  # its memory may be given to the next one
        torch.empty(1 << 20, device=source).fill_(float("nan"))
        assert torch.equal(arrived(sent, target).to(source), expected)


def test_memory_of_a_step_is_given_back() -> None:
    pm = pipelined(mlp(256, 6), ["cuda:0", "cuda:0"])
    x = torch.randn(64, 256, device=GPU)
    for _ in range(3):
        pm.train_step(x, target=x, loss_fn=mse_loss)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        pm.train_step(x, target=x, loss_fn=mse_loss)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


SPREAD = pytest.mark.parametrize("devices", [["cpu", "cuda:0"], ["cuda:0", "cpu"], ["cuda:0", "cuda:0"]], ids="+".join)


@SPREAD
@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
def test_stages_on_several_devices_generate_the_tokens_of_the_model(devices: list[str]) -> None:
    model = gpt2().eval()
    original = copy.deepcopy(model)
    plan = Plan.from_split({"transformer.h.0": 0, "transformer.h.2": 1}, n_microbatches=2)
    pm = autopar.parallelize(model, devices, plan=plan, cache=False)
    ids = tokens(4)
    with torch.inference_mode():
        torch.testing.assert_close(pm(ids).logits.cpu(), original(ids).logits, rtol=1e-4, atol=1e-4)
    for how in ({"do_sample": False}, {"num_beams": 3}, {"cache_implementation": "static"}):
        wanted = original.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, pad_token_id=0, **how)
        found = pm.generate(
            ids.to(pm.device),
            attention_mask=torch.ones_like(ids).to(pm.device),
            max_new_tokens=6,
            pad_token_id=0,
            **how,
        )
        assert torch.equal(found.cpu(), wanted)


@SPREAD
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
            assert {str(p.device) for p in one.parameters()} == set(devices)
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-3, atol=1e-3)
