"""The host waits for no GPU within a step, whatever the loss divides by: what counts targets stays on the GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from losses import CLASSES, classes, classifier
from models import assert_same_gradients, gradients
from pretend_gpus import PretendGpus, pipelined
from torch import nn

from autopar import Plan
from autopar.runtime.signatures.bound_signature import RunSettings

pytestmark = pytest.mark.usefixtures("shared_exports")
WEIGHTS = torch.linspace(0.0, 2.0, CLASSES)  # class 0 counts nothing


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendGpus]:
    pretended = PretendGpus(monkeypatch)
    yield pretended
    pretended.close()


def masked(output: torch.Tensor, target: Any) -> torch.Tensor:
    wanted, mask = target
    return ((output - wanted).square().mean(-1) * mask).sum() / mask.sum()


def mask_for(ignored: range) -> Any:
    mask = torch.ones(8)
    mask[list(ignored)] = 0.0
    return torch.randn(8, CLASSES), mask


def classes_for(ignored: range, index: int = -100) -> torch.Tensor:
    target = classes(8, ignored=0.0).clamp(min=1)
    target[list(ignored)] = index
    return target


LOSSES: dict[str, tuple[Callable[..., torch.Tensor], Callable[[range], Any]]] = {
    "cross-entropy": (F.cross_entropy, classes_for),
    "label smoothing": (nn.CrossEntropyLoss(label_smoothing=0.1), classes_for),
    "negative log-likelihood": (lambda o, t: F.nll_loss(o.log_softmax(1), t), classes_for),
    "a mask in the target": (masked, mask_for),
    "classes without a weight": (
        lambda o, t: F.cross_entropy(o, t[0], t[1]),
        lambda ignored: (classes_for(ignored, 0), WEIGHTS),
    ),
}
IGNORED = {"none": range(0), "some": range(3, 5), "those of a micro-batch": range(2, 4), "all": range(8)}


def on_gpu(gpus: PretendGpus, target: Any) -> Any:
    return tuple(gpus.on(x, "cuda:0") for x in target) if isinstance(target, tuple) else gpus.on(target, "cuda:0")


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.cpu(), expected, equal_nan=True)


def assert_gradients(model: nn.Module, original: nn.Module) -> None:
    expected, found = gradients(original), gradients(model)
    if any(g is not None and g.isnan().any() for g in expected.values()):
        for name, gradient in expected.items():
            assert gradient is not None
            assert_equal(found[name], gradient)  # type: ignore[arg-type]
        return
    assert_same_gradients({n: g.cpu() for n, g in found.items() if g is not None}, expected)


@pytest.mark.filterwarnings("error::autopar.AutoparWarning")
@pytest.mark.parametrize("ignored", IGNORED)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_waits_for_no_gpu_whatever_its_loss_counts(gpus: PretendGpus, loss: str, ignored: str) -> None:
    model = classifier()
    original = copy.deepcopy(model)
    schedule = ("gpipe", "1f1b", "zb-h1")[len(loss + ignored) % 3]
    plan = Plan.from_split({"0": 0, "2": 1}, n_microbatches=4, devices=["cuda:0", "cuda:1"], schedule=schedule)
    pm, (loss_fn, targets) = pipelined(model, plan), LOSSES[loss]
    with gpus.recording():
        for _ in range(2):
            x, target = torch.randn(8, 6), targets(IGNORED[ignored])
            original.zero_grad()
            expected = loss_fn(original(x), target)
            expected.backward()
            there = gpus.on(x, "cuda:0"), on_gpu(gpus, target)
            pm.prepare((x,), {})
            pm.prepare(there[:1], {}, loss_fn=loss_fn, target=there[1])
            model.zero_grad()
            gpus.waits.clear()
            found = pm.train_step(there[0], target=there[1], loss_fn=loss_fn)
            assert not gpus.waits
            assert_equal(found, expected.detach())
            assert_gradients(model, original)
    gpus.check()


def test_running_statistics_of_all_batches_are_updated_without_waiting(gpus: PretendGpus) -> None:
    """With momentum None, a batch counts 1 / batches so far, and their number is on the GPU."""
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None), nn.Linear(6, CLASSES)).train()
    original = copy.deepcopy(model)
    plan = Plan.from_split({"0": 0, "2": 1}, n_microbatches=2, devices=["cuda:0", "cuda:1"])
    pm = pipelined(model, plan, settings=RunSettings(batch_norm="deferred"))
    with gpus.recording(), torch.no_grad():
        for _ in range(3):
            x = torch.randn(8, 6)
            original(x)
            pm.prepare((x,), {})
            there = gpus.on(x, "cuda:0")
            gpus.waits.clear()
            pm(there)
            assert not gpus.waits
            for name in ("running_mean", "running_var"):
                assert_equal(getattr(model[1], name), getattr(original[1], name))
    gpus.check()


class OwnLoss(nn.Module):
    """Returns its loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.last(torch.tanh(self.first(x)))
        return F.cross_entropy(logits, labels), logits


@pytest.mark.parametrize("way", ["call and backward", "train_step"])
@pytest.mark.parametrize("ignored", IGNORED)
def test_a_model_with_its_own_loss_waits_for_no_gpu(gpus: PretendGpus, way: str, ignored: str) -> None:
    model = OwnLoss()
    original = copy.deepcopy(model)
    plan = Plan.from_split({"first": 0, "last": 1}, n_microbatches=4, devices=["cuda:0", "cuda:1"])
    pm = pipelined(model, plan)
    with gpus.recording():
        for _ in range(2):
            x, labels = torch.randn(8, 6), classes_for(IGNORED[ignored])
            original.zero_grad()
            expected, _ = original(x, labels)
            expected.backward()
            pm.prepare((x, labels), {})
            there = gpus.on(x, "cuda:0"), gpus.on(labels, "cuda:0")
            pm.prepare(there, {})
            model.zero_grad()
            gpus.waits.clear()
            if way == "train_step":
                found = pm.train_step(*there)
            else:
                found, _ = pm(*there)
                found.backward()
            assert not gpus.waits
            assert_equal(found.detach(), expected.detach())
            assert_gradients(model, original)
    gpus.check()
