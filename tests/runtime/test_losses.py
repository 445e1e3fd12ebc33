"""Training steps with every kind of loss: loss and gradients are those of the plain model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from losses import CLASSES, SPLIT, WHOLE, Case, classes, classifier, inputs_of, penalised
from models import assert_same_gradients, gpt2, gradients, tokens
from torch import nn

import autopar
from autopar import AutoparWarning, InputError, PipelinedModule, Plan
from autopar.analysis import loss as loss_module
from autopar.schedule.builders import INTERLEAVED

SCHEDULES = ("gpipe", "1f1b", "zb-h1")


def pipelined(model: nn.Module, schedule: str = "1f1b", n: int = 3, **split: int) -> PipelinedModule:
    plan = Plan.from_split(split or {"0": 0, "2": 1}, n_microbatches=n, schedule=schedule)
    return autopar.parallelize(model, ["cpu", "cpu"], plan=plan, cache=False)


def plain_step(model: nn.Module, loss_fn: Callable[..., Any], target: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    model.zero_grad()
    loss = loss_fn(model(*args, **kwargs), target)
    loss.backward()
    return loss.detach()


def loss_of(case: Case, model: nn.Module) -> Callable[..., Any]:
    return penalised(model) if case.name == "penalised" else case.loss


@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
@pytest.mark.parametrize("case", [*SPLIT, *WHOLE], ids=lambda case: case.name)
def test_a_step_has_the_loss_and_the_gradients_of_the_plain_model(case: Case) -> None:
    if case.name == "dropout":
        pytest.skip("draws other random numbers than the plain model")
    model = classifier()
    original = copy.deepcopy(model)
    pm = pipelined(model, SCHEDULES[len(case.name) % 3])
    for _ in range(2):  # ignored targets fall otherwise in the second batch
        x, target = inputs_of(case, 8), case.target(8)
        expected = plain_step(original, loss_of(case, original), target, x)
        if not expected.isfinite():
            continue
        model.zero_grad()
        loss = pm.train_step(x, target=target if target is not None else x, loss_fn=loss_of(case, model))
        torch.testing.assert_close(loss, expected)
        assert_same_gradients(gradients(model), gradients(original))


@pytest.mark.parametrize("schedule", [*SCHEDULES, *INTERLEAVED])
def test_a_micro_batch_whose_targets_are_all_ignored_counts_nothing(schedule: str) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    original = copy.deepcopy(model)
    split = {str(i): i for i in range(4)} if schedule in INTERLEAVED else {"0": 0, "2": 1}
    pm = autopar.parallelize(
        model, ["cpu", "cpu"], plan=Plan.from_split(split, n_microbatches=4, schedule=schedule), cache=False
    )
    x, target = torch.randn(8, 8), classes(8, ignored=0.0)
    target[2:4] = -100
    expected = plain_step(original, F.cross_entropy, target, x)
    torch.testing.assert_close(pm.train_step(x, target=target, loss_fn=F.cross_entropy), expected)
    assert_same_gradients(gradients(model), gradients(original))


def test_replicas_weigh_their_micro_batches_by_targets() -> None:
    model = classifier()
    original = copy.deepcopy(model)
    plan = Plan.from_split({"": 0}, n_microbatches=4, devices=[["cpu:0", "cpu:1"]])
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan, cache=False)
    x, target = torch.randn(8, 6), classes(8, ignored=0.5)
    target[0] = 1
    expected = plain_step(original, F.cross_entropy, target, x)
    torch.testing.assert_close(pm.train_step(x, target=target, loss_fn=F.cross_entropy), expected)
    assert_same_gradients(gradients(model), gradients(original))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
def test_the_models_own_loss_is_weighted_by_its_labels() -> None:
    model = gpt2().train()
    original = copy.deepcopy(model)
    ids = tokens(6)
    labels = ids.clone()
    labels[0, 2:] = -100
    labels[2:4] = -100  # a micro-batch without any
    pm = pipelined(model, "1f1b", 3, **{"transformer.h.0": 0, "transformer.h.1": 1})
    own = lambda output, target: output.loss  # noqa: E731
    expected = plain_step(original, own, None, input_ids=ids, labels=labels)
    loss = pm.train_step(input_ids=ids, labels=labels, target=labels, loss_fn=own)
    torch.testing.assert_close(loss, expected)
    assert_same_gradients(gradients(model), gradients(original))


def test_a_loss_on_the_whole_batch_is_warned_of_once_with_its_line() -> None:
    model = classifier()
    pm = pipelined(model)
    case = next(case for case in WHOLE if case.name == "root")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            pm.train_step(inputs_of(case, 8), target=case.target(8), loss_fn=case.loss)
    messages = [str(w.message) for w in caught if issubclass(w.category, AutoparWarning) and "loss" in str(w.message)]
    assert len(messages) == 1
    assert "losses.py" in messages[0]
    assert "sqrt" in messages[0]


def test_a_loss_written_at_the_call_is_studied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    studied: list[Any] = []
    capture = loss_module.capture
    monkeypatch.setattr(loss_module, "capture", lambda *a, **k: (studied.append(a), capture(*a, **k))[1])
    model = classifier()
    pm, x, target = pipelined(model), torch.randn(8, 6), torch.randn(8, CLASSES)
    for scale in (2.0, 2.0, 2.0, 3.0):
        pm.train_step(x, target=target, loss_fn=lambda o, t, s=scale: s * F.mse_loss(o, t))
    assert len(studied) == 2, "once for each number that it computes with"


def test_settings_of_a_loss_module_are_looked_at_again() -> None:
    model = classifier()
    original = copy.deepcopy(model)
    pm, x, target, loss = pipelined(model), torch.randn(8, 6), classes(8, ignored=0.0), nn.CrossEntropyLoss()
    for reduction in ("mean", "sum"):
        loss.reduction = reduction
        model.zero_grad()
        torch.testing.assert_close(pm.train_step(x, target=target, loss_fn=loss), plain_step(original, loss, target, x))
        assert_same_gradients(gradients(model), gradients(original))


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (
            lambda o, t: (F.mse_loss(o, t), 1),
            r"test_losses.py:\d+\) must return one tensor with one element, got 2 values",
        ),
        (lambda o, t: F.mse_loss(o, t, reduction="none"), "got one value per sample; reduce it"),
    ],
)
@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
def test_what_is_no_loss_is_refused(loss: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        pipelined(classifier()).train_step(torch.randn(8, 6), target=torch.randn(8, CLASSES), loss_fn=loss)


def test_a_target_for_another_batch_is_refused() -> None:
    pm = pipelined(classifier())
    pm.train_step(torch.randn(8, 6), target=torch.randn(8, CLASSES), loss_fn=F.mse_loss)
    with pytest.raises(InputError, match=r"target leaf 0 has 8 samples in dimension 0 .*the batch has 6"):
        pm.train_step(torch.randn(6, 6), target=torch.randn(8, CLASSES), loss_fn=F.mse_loss)


@pytest.mark.filterwarnings("error::autopar.AutoparWarning")
@pytest.mark.parametrize("case", SPLIT, ids=lambda case: case.name)
def test_a_loss_is_split_in_a_batch_of_another_size_than_the_captured_one(case: Case) -> None:
    model = classifier()
    original = copy.deepcopy(model)
    pm = pipelined(model, SCHEDULES[len(case.name) % 3])
    pm(inputs_of(case, 7)).sum().backward()
    x, target = inputs_of(case, 8), case.target(8)
    expected = plain_step(original, loss_of(case, original), target, x)
    model.zero_grad()
    loss = pm.train_step(x, target=target if target is not None else x, loss_fn=loss_of(case, model))
    torch.testing.assert_close(loss, expected, equal_nan=True)
    assert_same_gradients(gradients(model), gradients(original))


def test_a_target_dim_is_that_of_the_call_and_not_of_the_captured_batch() -> None:
    pm = pipelined(classifier())
    pm(torch.randn(7, 6))
    target = torch.randn(8, CLASSES)
    pm.train_step(torch.randn(8, 6), target=target, loss_fn=F.mse_loss, target_dim=[0])
    with pytest.raises(InputError, match=r"target_dim\[0\] is 0, but that target is \(7, .*the batch is 6"):
        pm.train_step(torch.randn(6, 6), target=target[:7], loss_fn=F.l1_loss, target_dim=[0])


@pytest.mark.slow
def test_a_plan_made_anew_for_a_loss_is_for_the_batch_of_its_call() -> None:
    pm = autopar.parallelize(classifier(), ["cpu", "cpu"], cache=False, tune=0)
    with torch.no_grad():
        pm(torch.randn(7, 6))
    pm.train_step(torch.randn(8, 6), target=torch.randn(8, CLASSES), loss_fn=F.mse_loss)
    assert pm.plan is not None
    assert pm.plan.batch_size == 8


def test_a_plan_made_for_a_loss_on_the_whole_batch_has_no_loss_in_its_last_stage() -> None:
    model = classifier()
    case = next(case for case in WHOLE if case.name == "dice")
    plan = autopar.plan(
        model,
        autopar.Cluster.preset("2xH100"),
        example_args=(torch.randn(8, 6),),
        target=case.target(8),
        loss_fn=case.loss,
        max_replicas=1,
        max_shards=1,
    )
    assert plan.schedule in ("gpipe", "interleaved-1f1b"), "the others need losses of micro-batches"


@pytest.mark.parametrize("n_microbatches", [1, 4])
@pytest.mark.parametrize("recompute", [(), (0, 1)])
def test_a_loss_that_is_a_constant_for_some_samples_trains_on_the_others(
    n_microbatches: int, recompute: tuple[int, ...]
) -> None:
    def sum_of_positive(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        chosen = output[target > 0]
        return chosen.square().sum() if len(chosen) else torch.zeros(())

    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, CLASSES))
    original = copy.deepcopy(model)
    plan = autopar.Plan.from_split({"0": 0, "1": 1}, n_microbatches=n_microbatches, recompute=recompute)
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan, cache=False)
    x, target = torch.randn(8, 6), torch.tensor([0, 0, 1, 1, 0, 0, 1, 0])
    pm.train_step(x, target=torch.ones(8), loss_fn=sum_of_positive)
    sum_of_positive(original(x), torch.ones(8)).backward()
    loss = pm.train_step(x, target=target, loss_fn=sum_of_positive)
    expected = sum_of_positive(original(x), target)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    assert_same_gradients(gradients(model), gradients(original))


@pytest.mark.parametrize("split", [{"0": 0, "1": 1}, {"": 0}])
@pytest.mark.parametrize("reason", ["detached", "frozen"])
def test_a_loss_without_a_gradient_is_refused(reason: str, split: dict[str, int]) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, CLASSES)).requires_grad_(reason == "detached")
    plan = autopar.Plan.from_split(split, n_microbatches=len(split))
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan, cache=False)

    def detached(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output.detach() if reason == "detached" else output, target)

    with pytest.raises(autopar.InputError, match=r"detached.*without a gradient"):
        pm.train_step(torch.randn(4, 6), target=torch.randn(4, CLASSES), loss_fn=detached)
    assert all(p.grad is None for p in model.parameters())


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_target_made_by_a_trained_teacher_trains_it(schedule: str, n: int) -> None:
    torch.manual_seed(0)
    model, teacher, x = _layers(), nn.Linear(8, 4), torch.randn(6, 8)
    plain, plain_teacher = copy.deepcopy(model), copy.deepcopy(teacher)
    student = pipelined(model, schedule, n, **{"0": 0, "2": 1})
    for _ in range(2):
        student.train_step(x, target=teacher(x), loss_fn=F.mse_loss)
        F.mse_loss(plain(x), plain_teacher(x)).backward()
    assert_same_gradients(gradients(model), gradients(plain))
    assert_same_gradients(gradients(teacher), gradients(plain_teacher))


def test_a_loss_that_divides_by_targets_with_gradients_sees_the_whole_batch() -> None:
    """The weights of micro-batches would count as constants in its derivative."""

    def weighted(output: torch.Tensor, target: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        truth, weight = target
        return ((output - truth).square().mean(1) * weight).sum() / weight.sum()

    torch.manual_seed(0)
    model, x, truth = _layers(), torch.randn(6, 8), torch.randn(6, 4)
    plain, weight = copy.deepcopy(model), torch.rand(6).requires_grad_()
    plain_weight = weight.detach().clone().requires_grad_()
    module = pipelined(model, n=3, **{"0": 0, "2": 1})
    with pytest.warns(AutoparWarning, match="it divides by what target 1 adds up to, and that requires a gradient"):
        module.train_step(x, target=(truth, weight), loss_fn=weighted)
    weighted(plain(x), (truth, plain_weight)).backward()
    torch.testing.assert_close(weight.grad, plain_weight.grad)
    assert_same_gradients(gradients(model), gradients(plain))
