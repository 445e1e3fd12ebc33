"""An error inside a worker reaches the caller unchanged, with a note of its place, and leaves nothing behind."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from losses import in_worker
from models import assert_same_gradients, assert_same_outputs, gradients
from torch import nn

import autopar
from autopar import InputError, PipelinedModule, Plan


class Lookup(nn.Module):
    """An embedding in the second stage, which fails for tokens that it does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table, self.last = nn.Linear(4, 8), nn.Embedding(10, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.last(hidden + self.table(tokens))


class Refused(Exception):
    """Raised by the hook below."""


def mean_square(output: torch.Tensor, _: object) -> torch.Tensor:
    return output.square().mean()


def pipelined(replicated: bool = False) -> PipelinedModule:
    devices = ["cpu:0", ("cpu:1", "cpu:2") if replicated else "cpu:1"]
    plan = Plan.from_split({"first": 0, "table": 1, "last": 1}, n_microbatches=3, devices=devices)
    return autopar.parallelize(Lookup(), ["cpu"] * 3, plan=plan)


def call(wrong_row: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 10, (6,))
    if wrong_row is not None:
        tokens[wrong_row] = 99
    return torch.randn(6, 4), tokens


def assert_works(pm: PipelinedModule) -> None:
    model, inputs = pm.unwrap(), call()
    expected = model(*inputs)
    expected.square().mean().backward()
    wanted = gradients(model)
    found = pm(*inputs)
    assert_same_outputs(found, expected)
    found.square().mean().backward()
    assert_same_gradients(gradients(pm), wanted)
    pm.train_step(*inputs, target=torch.zeros(6), loss_fn=mean_square)
    assert_same_gradients(gradients(pm), wanted)


@pytest.mark.parametrize("replicated", [False, True], ids=["stages", "replicas"])
@pytest.mark.parametrize("how", ["forward", "no_grad", "train_step"])
@pytest.mark.parametrize("row", [0, 5])
def test_an_operator_that_fails_names_stage_micro_batch_module_and_line(how: str, row: int, replicated: bool) -> None:
    pm = pipelined(replicated)
    pm(*call())
    start: dict[str, Callable[..., Any]] = {
        "forward": pm,
        "no_grad": torch.no_grad()(pm),
        "train_step": functools.partial(pm.train_step, target=torch.zeros(6), loss_fn=mean_square),
    }
    threads = threading.active_count()
    for _ in range(3):
        with pytest.raises(IndexError, match="index out of range") as caught:
            start[how](*call(row))
        (note,) = caught.value.__notes__
        assert "forward of stage 1" in note
        assert f"micro-batch {row // 2}" in note
        assert "aten.embedding" in note
        assert "'table'" in note
        assert "return self.last(hidden + self.table(tokens))" in note
        assert all(p.grad is None for p in pm.parameters())
        assert_works(pm)
    assert threading.active_count() <= threads  # others' may end meanwhile


def test_a_first_call_that_fails_names_module_and_line_too() -> None:
    pm = autopar.parallelize(Lookup(), ["cpu"] * 2, n_microbatches=2, tune=0)
    with pytest.raises(IndexError, match="out of range") as caught:
        pm(*call(wrong_row=1))
    (note,) = caught.value.__notes__
    assert "aten.embedding.default in module 'table'" in note
    assert "return self.last(hidden + self.table(tokens))" in note
    assert_works(pm)


def test_the_code_shown_is_the_models_alone() -> None:
    pm = pipelined()
    pm(*call())
    with pytest.raises(IndexError) as caught:
        pm(*call(0))
    shown = caught.value.__notes__[0].partition("The model's code:")[2]
    assert shown.split('"')[1] == __file__, "the outermost frame"


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasSgemm"),
    ],
    ids=str,
)
def test_an_error_of_a_gpu_says_that_another_operator_may_be_its_cause(
    error: RuntimeError, blocking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(output: torch.Tensor, _: object) -> torch.Tensor:
        if in_worker():
            raise type(error)(*error.args)
        return mean_square(output, _)

    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1" if blocking else "0")
    with pytest.raises(type(error)) as caught:
        pipelined().train_step(*call(), target=torch.zeros(6), loss_fn=failing)
    text = " ".join(caught.value.__notes__)
    assert "forward of stage 1" in text
    assert ("may not be the culprits" in text) is not blocking
    assert ("CUDA_LAUNCH_BLOCKING=1" in text) is not blocking


def test_other_errors_do_not_blame_the_gpu() -> None:
    pm = pipelined()
    pm(*call())
    with pytest.raises(IndexError) as caught:
        pm(*call(0))
    assert "CUDA" not in " ".join(caught.value.__notes__)


@pytest.mark.parametrize("how", ["backward", "train_step"])
def test_a_backward_that_fails_names_its_stage_and_the_next_call_works(how: str) -> None:
    pm = pipelined()
    assert_works(pm)
    threads = threading.active_count()

    def failing(gradient: torch.Tensor) -> None:
        raise Refused("not this gradient")

    def loss_of(output: torch.Tensor, _: Any) -> torch.Tensor:
        if in_worker():
            output.register_hook(failing)
        return output.square().mean()

    for _ in range(3):
        if how == "train_step":
            with pytest.raises(Refused, match="not this gradient") as caught:
                pm.train_step(*call(), target=torch.zeros(6), loss_fn=loss_of)
        else:
            output = pm(*call())
            with torch.no_grad():
                pm.last.weight.mul_(1)  # the backward needs it as it was
            with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:  # type: ignore[assignment]
                output.sum().backward()
        assert "backward of stage 1" in caught.value.__notes__[0]
        assert all(p.grad is None for p in pm.parameters())
        assert_works(pm)
    assert threading.active_count() <= threads  # others' may end meanwhile


def test_a_loss_function_that_fails_reaches_the_caller() -> None:
    pm = pipelined()

    def failing(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise Refused("no loss")

    for _ in range(2):
        with pytest.raises(Refused, match="no loss"):
            pm.train_step(*call(), target=torch.zeros(6), loss_fn=failing)
        assert_works(pm)


def test_a_loss_that_reads_what_was_computed_before_the_call_is_refused_in_words() -> None:
    """torch says only that a graph is gone backward through twice: by two micro-batches."""
    pm, scale = pipelined(), nn.Parameter(torch.ones(()))
    computed = scale.exp()
    with pytest.raises(InputError, match=r"computed before the call .* compute it inside the loss function"):
        pm.train_step(*call(), target=torch.zeros(6), loss_fn=lambda y, t: (y * computed).square().mean())
    pm.train_step(*call(), target=torch.zeros(6), loss_fn=lambda y, t: (y * scale.exp()).square().mean())
    assert scale.grad is not None


def test_a_failure_in_the_callers_own_graph_leaves_the_call_usable() -> None:
    pm = pipelined()
    output = pm(*call())

    def failing(gradient: torch.Tensor) -> None:
        raise Refused("in the caller's own graph")

    handle = output.register_hook(failing)
    with pytest.raises(Refused):
        output.sum().backward()
    handle.remove()
    output.sum().backward()
    assert all(p.grad is not None for p in pm.parameters())


def test_a_loss_of_no_parameter_is_refused_and_the_next_call_works() -> None:
    pm = pipelined()
    with pytest.raises(InputError, match="without a gradient"):
        pm.train_step(*call(), target=torch.zeros(6), loss_fn=lambda output, target: target.mean())
    assert_works(pm)
