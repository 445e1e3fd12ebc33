"""Loss functions over outputs [B, CLASSES] or [B, length, CLASSES], with many targets that are ignored."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autopar.runtime.step.execution import Execution

CLASSES = 8
WEIGHTS = torch.linspace(0.1, 2.0, CLASSES)
Loss = Callable[[Any, Any], torch.Tensor]


def classifier() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def in_worker() -> bool:
    """Whether an action of a pipeline runs this, in a worker or in its place: not the study of a loss."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is Execution._act.__code__:
            return True
        frame = frame.f_back
    return False


def classes(batch: int, *more: int, ignored: float = 0.4, index: int = -100) -> torch.Tensor:
    chosen = torch.randint(0, CLASSES, (batch, *more))
    return chosen.masked_fill(torch.rand(chosen.shape) < ignored, index)


@dataclass(frozen=True)
class Case:
    """A loss over outputs [B, CLASSES] or, with a length, [B, length, CLASSES]."""

    name: str
    loss: Loss
    target: Callable[[int], Any]
    combine: str = "mean"
    length: int | None = None


def penalised(model: nn.Module) -> Loss:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return 0.5 * F.cross_entropy(output, target) + 0.01 * sum(p.square().sum() for p in model.parameters())

    return loss


MODEL = classifier()
SPLIT = [
    Case("cross-entropy", F.cross_entropy, classes),
    Case("cross-entropy module", nn.CrossEntropyLoss(), classes),
    Case("ignore_index 255", nn.CrossEntropyLoss(ignore_index=255), lambda b: classes(b, index=255)),
    Case("class weights", nn.CrossEntropyLoss(weight=WEIGHTS), classes),
    Case("class weights in the target", lambda o, t: F.cross_entropy(o, t[0], t[1]), lambda b: (classes(b), WEIGHTS)),
    Case("label smoothing", nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2), classes),
    Case("probabilities", F.cross_entropy, lambda b: torch.rand(b, CLASSES).softmax(1)),
    Case("negative log-likelihood", lambda o, t: F.nll_loss(o.log_softmax(1), t), classes),
    Case("tokens", lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()), lambda b: classes(b, 5), length=5),
    Case("tokens last", lambda o, t: F.cross_entropy(o.mT, t), lambda b: classes(b, 5), length=5),
    Case(
        "next tokens",
        lambda o, t: F.cross_entropy(o[:, :-1].reshape(-1, CLASSES), t[:, 1:].reshape(-1)),
        lambda b: classes(b, 5),
        length=5,
    ),
    Case("penalised", penalised(MODEL), classes),
    Case("sum", nn.CrossEntropyLoss(reduction="sum"), classes, "sum"),
    Case("squares", F.mse_loss, lambda b: torch.randn(b, CLASSES)),
    Case("sum of squares", nn.MSELoss(reduction="sum"), lambda b: torch.randn(b, CLASSES), "sum"),
    Case("sum by samples", lambda o, t: (o - t).abs().sum() / o.shape[0], lambda b: torch.randn(b, CLASSES)),
    Case("huber", F.huber_loss, lambda b: torch.randn(b, CLASSES)),
    Case("binary", F.binary_cross_entropy_with_logits, lambda b: torch.rand(b, CLASSES).round()),
    Case(
        "masked by hand",
        lambda o, t: ((o - t[0]).square().mean(-1) * t[1]).sum() / t[1].sum(),
        lambda b: (torch.randn(b, 5, CLASSES), (torch.rand(b, 5) < 0.5).float()),
        length=5,
    ),
    Case(
        "weights as long as the batch",
        lambda o, t: ((o - t[0]) ** 2 * t[1]).mean(),
        lambda b: (torch.randn(b, 8), WEIGHTS),
    ),
    Case("a size as a number", lambda o, t: (o - t).abs().sum() / len(o), lambda b: torch.randn(b, CLASSES)),
]


def dice(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    share = output.sigmoid()
    return 1 - (2 * (share * target).sum() + 1) / (share.sum() + target.sum() + 1)


def of_numpy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.square().mean() * float(target.numpy().mean())


LABELS = classes(8)
WHOLE = [
    Case("dice", dice, lambda b: torch.rand(b, CLASSES).round()),
    Case("numpy", of_numpy, lambda b: torch.rand(b, CLASSES)),
    Case("two means", lambda o, t: F.cross_entropy(o, t) + o.square().mean(), classes),
    Case("root", lambda o, t: F.mse_loss(o, t).sqrt(), lambda b: torch.randn(b, CLASSES)),
    Case("contrast", lambda o, t: F.cross_entropy(o @ o.T, torch.arange(len(o))), lambda b: None),
    Case("labels from outside", lambda o, t: F.cross_entropy(o, LABELS), lambda b: None),
    Case("dropout", lambda o, t: F.mse_loss(F.dropout(o), t), lambda b: torch.randn(b, CLASSES)),
    Case("clamped count", lambda o, t: (o.mean(1) * t).sum() / t.sum().clamp(min=1), lambda b: torch.rand(b).round()),
    # The tracer's own number of samples, five, would show none of these.
    Case("first six", lambda o, t: F.mse_loss(o[:6], t[:6]), lambda b: torch.randn(b, CLASSES)),
    Case("first of two parts", lambda o, t: (o - t).split(6)[0].square().sum(), lambda b: torch.randn(b, CLASSES)),
    Case("many", lambda o, t: F.mse_loss(o, t) * (2 if len(o) > 100 else 1), lambda b: torch.randn(b, CLASSES)),
    Case("few", lambda o, t: F.mse_loss(o, t) * (2 if len(o) < 4 else 1), lambda b: torch.randn(b, CLASSES)),
    Case("one of outputs that are no zeros", lambda o, t: o.abs().mean() * (2 if len(o) == 1 else 1), lambda b: None),
    Case("one", lambda o, t: F.mse_loss(o, t) * (2 if len(o) == 1 else 1), lambda b: torch.randn(b, CLASSES)),
]


def inputs_of(case: Case, batch: int) -> torch.Tensor:
    return torch.randn(batch, 6) if case.length is None else torch.randn(batch, case.length, 6)
