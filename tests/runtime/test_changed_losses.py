"""Losses that compute something else in a later step: the plain model is the oracle.

Each case changes what a loss reads between steps, in one of the ways in which programs do.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import autopar
from autopar import Plan
from autopar.runtime.signatures import loss_splits
from autopar.runtime.signatures.loss_identity import ALIKE, EXACT, identity

Loss = Callable[[Tensor, Tensor], Tensor]
Steps = Iterator[Loss]  # the loss of each step, whose settings may be others when the next one is asked for


def dice(output: Tensor, target: Tensor) -> Tensor:
    """No mean or sum over samples."""
    a, b = output.sigmoid(), target.sigmoid()
    return 1 - 2 * (a * b).sum() / (a.sum() + b.sum())


class Trainer:
    reduction = "mean"
    weight: Tensor | None = None

    def __init__(self) -> None:
        self.criterion: Any = nn.MSELoss()
        self.parts: dict[str, Tensor] = {}

    def by_criterion(self, output: Tensor, target: Tensor) -> Tensor:
        return self.criterion(output, target)

    def by_helper(self, output: Tensor, target: Tensor) -> Tensor:
        return self._reduced(output, target)

    def _reduced(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target, reduction=self.how)

    @property
    def how(self) -> str:
        return self.reduction

    def weighted(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target.argmax(dim=1), weight=self.weight)

    def logged(self, output: Tensor, target: Tensor) -> Tensor:
        self.parts["mse"] = functional.mse_loss(output, target)
        return self.parts["mse"]


def criterion_replaced() -> Steps:
    trainer = Trainer()
    yield trainer.by_criterion
    trainer.criterion = dice
    yield trainer.by_criterion
    trainer.criterion = nn.MSELoss(reduction="sum")
    yield trainer.by_criterion


def settings_of_a_criterion() -> Steps:
    trainer = Trainer()
    yield lambda output, target: trainer.criterion(output, target)
    trainer.criterion.reduction = "sum"
    yield lambda output, target: trainer.criterion(output, target)


GLOBAL = nn.MSELoss()


def settings_of_a_global_module() -> Steps:
    for reduction in ("mean", "sum", "mean"):
        GLOBAL.reduction = reduction
        yield lambda output, target: GLOBAL(output, target)


def number_read_by_a_helper() -> Steps:
    trainer = Trainer()
    yield trainer.by_helper
    trainer.reduction = "sum"
    yield trainer.by_helper


def number_of_the_class() -> Steps:
    class Mine(Trainer):
        pass

    trainer = Mine()
    yield trainer.by_helper
    Mine.reduction = "sum"
    yield trainer.by_helper


def class_weights() -> Steps:
    trainer = Trainer()
    for weight in (None, [1.0, 2, 3, 4], [5.0, 2, 1, 1]):
        trainer.weight = None if weight is None else torch.tensor(weight)
        yield trainer.weighted


def class_weights_of_a_module() -> Steps:
    loss: Any = nn.CrossEntropyLoss()
    for weight in (None, [1.0, 2, 3, 4], [9.0, 1, 1, 5], None):
        loss.weight = None if weight is None else torch.tensor(weight)
        yield lambda output, target: loss(output, target.argmax(dim=1))


def written_class_weights() -> Steps:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 3, 4]))
    yield lambda output, target: loss(output, target.argmax(dim=1))
    loss.weight.copy_(torch.tensor([1.0, 1, 7, 5]))  # type: ignore[union-attr, operator]
    yield lambda output, target: loss(output, target.argmax(dim=1))


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shares = {"mse": 1.0, "dice": 0.0}
        self.function: Loss = functional.mse_loss

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = self.shares["mse"] * self.function(output, target)
        return loss + self.shares["dice"] * dice(output, target) if self.shares["dice"] else loss


def dict_of_a_module() -> Steps:
    loss = Parts()
    yield loss
    loss.shares["dice"] = 0.5
    yield loss
    loss.shares = {"mse": 1.0, "dice": 0.25}
    yield loss


def function_of_a_module() -> Steps:
    loss = Parts()
    yield loss
    loss.function = dice
    yield loss


def hook_of_a_module() -> Steps:
    loss = nn.MSELoss()
    yield loss
    loss.register_forward_hook(lambda module, args, out: out.sqrt())
    yield loss


def nested_settings() -> Steps:
    settings, entries = SimpleNamespace(loss=SimpleNamespace(how="mean")), {"loss": {"how": "mean"}}
    for how in ("mean", "sum", "mean"):
        settings.loss.how = how
        yield lambda output, target: functional.mse_loss(output, target, reduction=settings.loss.how)
    for how in ("mean", "sum"):
        entries["loss"]["how"] = how
        yield lambda output, target: functional.mse_loss(output, target, reduction=entries["loss"]["how"])


def dict_of_losses() -> Steps:
    losses: dict[str, Loss] = {"mse": functional.mse_loss}
    yield lambda output, target: sum((loss(output, target) for loss in losses.values()), torch.zeros(()))
    losses["dice"] = dice
    yield lambda output, target: sum((loss(output, target) for loss in losses.values()), torch.zeros(()))


HOW = {"reduction": "mean"}


class ReadsAGlobal(nn.Module):
    how = "mean"

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target, reduction=HOW["reduction"])


class ReadsItsClass(nn.Module):
    how = "mean"

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target, reduction=self.how)


class Slotted:
    __slots__ = ("how",)

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target, reduction=self.how)


class Answering:
    """A configuration over a dict."""

    def __init__(self) -> None:
        self.entries = {"how": "mean"}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise RuntimeError(name)
        return self.entries[name]


class Partly:
    how = "mean"

    def _loss(self, output: Tensor, target: Tensor, scale: float) -> Tensor:
        return scale * functional.mse_loss(output, target, reduction=self.how)

    halved = functools.partialmethod(_loss, scale=0.5)

    @staticmethod
    def of_class(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target, reduction=Partly.how)


def globals_of_a_module() -> Steps:
    for HOW["reduction"] in ("mean", "sum", "mean"):
        yield ReadsAGlobal()


def class_of_a_module() -> Steps:
    loss = ReadsItsClass()
    for ReadsItsClass.how in ("mean", "sum", "mean"):
        yield loss


def a_patched_class() -> Steps:
    class Mine(ReadsItsClass):
        pass

    loss = Mine()
    yield loss
    Mine.forward = lambda self, output, target: dice(output, target)  # type: ignore[method-assign]
    yield loss


def callable_with_slots() -> Steps:
    criterion = Slotted()
    for criterion.how in ("mean", "sum"):
        yield lambda output, target: criterion(output, target)


def partial_of_a_trainer() -> Steps:
    trainer, settings = Trainer(), Answering()

    def loss(owner: Any, cfg: Any, output: Tensor, target: Tensor) -> Tensor:
        return owner.criterion(output, target) + functional.mse_loss(output, target, reduction=cfg.how)

    bound = functools.partial(loss, trainer, settings)
    yield bound
    trainer.criterion = nn.MSELoss(reduction="sum")
    yield bound
    settings.entries["how"] = "sum"
    yield bound


def methods_of_other_kinds() -> Steps:
    made = Partly()
    for Partly.how in ("mean", "sum", "mean"):
        yield made.halved
        yield Partly.of_class
        yield lambda output, target: made.of_class(output, target)


def sets_and_arrays() -> Steps:
    kinds, scale = {"mse"}, np.array([1.0, 2.0])
    yield lambda output, target: functional.mse_loss(output, target) + (dice(output, target) if "dice" in kinds else 0)
    kinds.add("dice")
    yield lambda output, target: functional.mse_loss(output, target) + (dice(output, target) if "dice" in kinds else 0)
    for scale[0] in (1.0, 3.0):
        yield lambda out, y: functional.mse_loss(out, y, reduction="sum" if scale[0] > scale[1] else "mean")


CHANGES = [
    *(globals_of_a_module, class_of_a_module, a_patched_class, callable_with_slots, partial_of_a_trainer),
    *(methods_of_other_kinds, sets_and_arrays),
    *(criterion_replaced, settings_of_a_criterion, settings_of_a_global_module, number_read_by_a_helper),
    *(number_of_the_class, class_weights, class_weights_of_a_module, written_class_weights, dict_of_a_module),
    *(function_of_a_module, hook_of_a_module, nested_settings, dict_of_losses),
]


def follow(losses: Callable[[], Steps]) -> None:
    """Train a pipeline and the plain model with the same losses, step by step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    original = copy.deepcopy(model)
    plan = Plan.from_split({"0": 0, "2": 1}, n_microbatches=4)
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan, cache=False)
    for mine, plain in zip(losses(), losses(), strict=True):
        x, target = torch.randn(8, 6), torch.randn(8, 4)
        wanted = plain(original(x), target)
        wanted.backward()
        torch.testing.assert_close(pm.train_step(x, target=target, loss_fn=mine), wanted.detach())
        for parameter, other in zip(model.parameters(), original.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad)


@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
@pytest.mark.parametrize("losses", CHANGES, ids=lambda losses: losses.__name__)
def test_a_loss_that_changes_between_steps_is_followed(losses: Callable[[], Steps]) -> None:
    follow(losses)


@pytest.fixture
def studied(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """An entry for each loss that is studied."""
    found: list[None] = []
    study = loss_splits.study_loss
    monkeypatch.setattr(loss_splits, "study_loss", lambda *a, **k: found.append(None) or study(*a, **k))
    return found


def masked(mask: Tensor) -> Loss:
    return lambda output, target: (output * mask - target).square().mean()


@pytest.mark.parametrize(
    "made",
    [
        lambda step: nn.SmoothL1Loss(),
        lambda step: lambda out, y: functional.mse_loss(out, y),
        lambda step: masked(step),
    ],
    ids=["module", "lambda", "mask"],
)
def test_equal_losses_of_every_step_are_studied_once(studied: list[None], made: Callable[[Tensor], Loss]) -> None:
    follow(lambda: (made(torch.arange(4.0) + step) for step in range(5)))
    assert len(studied) == 1


@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
def test_a_loss_that_keeps_its_parts_or_never_splits_is_not_studied_in_every_step(studied: list[None]) -> None:
    trainer, temperature = Trainer(), SimpleNamespace(value=0.0)

    def logs() -> Steps:
        yield from [trainer.logged] * 6

    def never_splits() -> Steps:
        for _ in range(8):
            temperature.value += 0.25
            yield lambda output, target: dice(output * temperature.value, target)

    follow(logs)
    assert len(studied) <= 2  # before it keeps anything, and after
    studied.clear()
    follow(never_splits)
    assert len(studied) <= 4


def test_what_a_loss_does_not_read_makes_no_difference() -> None:
    trainer = Trainer()
    before = identity(trainer.by_helper, EXACT)
    trainer.criterion, trainer.parts["more"], trainer.weight = dice, torch.zeros(1), torch.zeros(1)
    assert identity(trainer.by_helper, EXACT) == before
    assert hash(identity(trainer.by_helper, EXACT)) == hash(before)


def test_tensors_are_alike_or_the_same() -> None:
    trainer = Trainer()
    trainer.weight = torch.zeros(4)
    alike, exact = (identity(trainer.weighted, form) for form in (ALIKE, EXACT))
    trainer.weight = torch.ones(4)
    assert identity(trainer.weighted, ALIKE) == alike
    assert identity(trainer.weighted, EXACT) != exact
    trainer.weight = torch.ones(5)
    assert identity(trainer.weighted, ALIKE) != alike


def test_what_holds_itself_and_what_is_large_has_an_identity() -> None:
    ring: dict[str, Any] = {}
    ring["ring"] = [ring]
    many = list(range(100_000))
    ring_loss = lambda output, target: functional.mse_loss(output, target) * len(ring)  # noqa: E731
    assert identity(ring_loss, EXACT) == identity(ring_loss, EXACT)
    big_loss = lambda output, target: functional.mse_loss(output, target) * len(many)  # noqa: E731
    assert identity(big_loss, EXACT) == identity(big_loss, EXACT)


@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
def test_a_loss_that_appends_to_a_list_does_so_once_a_step(studied: list[None]) -> None:
    class Keeping:
        def __init__(self) -> None:
            self.history: list[Tensor] = []

        def loss(self, output: Tensor, target: Tensor) -> Tensor:
            loss = functional.mse_loss(output, target)
            self.history.append(loss.detach())
            return loss

    kept: list[Keeping] = []

    def losses() -> Steps:
        kept.append(Keeping())
        yield from [kept[-1].loss] * 5

    follow(losses)
    assert len(studied) == 1
    torch.testing.assert_close(kept[0].history, kept[1].history)


@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
def test_objects_that_answer_any_name_or_refuse_to_do_not_end_a_step() -> None:
    class Silent:
        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, *args: Any) -> None:
            return None

    class Key:
        def __repr__(self) -> str:
            raise RuntimeError

    logger, table = Silent(), {Key(): 1}

    def loss(output: Tensor, target: Tensor) -> Tensor:
        logger.log(len(table))
        return functional.mse_loss(output, target)

    follow(lambda: iter([loss] * 2))


def test_a_loss_may_call_another_pipelined_module_that_was_never_called_before() -> None:
    teacher = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    plan = Plan.from_split({"0": 0, "2": 1}, n_microbatches=2)
    taught: Any = autopar.parallelize(copy.deepcopy(teacher), ["cpu", "cpu"], plan=plan, cache=False)

    def of(module: Any) -> Loss:
        def loss(output: Tensor, target: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = module(target * 1.1)
            return functional.mse_loss(output, wanted)

        return loss

    both = [of(taught), of(teacher)]
    follow(lambda: iter([both.pop(0)]))
    x = torch.randn(6, 4)
    torch.testing.assert_close(taught(x), teacher(x))


@dataclasses.dataclass
class Settings:
    how: str = "mean"


class Table(dict):  # type: ignore[type-arg]
    """A dict with attributes."""

    how = "mean"


class Base:
    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target, reduction=self.how)  # type: ignore[attr-defined]


class Derived(Base):
    def __init__(self) -> None:
        self.how = "mean"

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return super().__call__(output, target)


class Indexed:
    def __init__(self) -> None:
        self.hidden = {"how": "mean"}

    def __getitem__(self, name: str) -> str:
        return self.hidden[name]


def helper(output: Tensor, target: Tensor, settings: Any) -> Tensor:
    return functional.mse_loss(output, target, reduction=settings.how)


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def run(*args: Any) -> Any:
        return function(*args)

    return run


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main, self.aux = nn.MSELoss(), nn.L1Loss()

    @decorated
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        result: Tensor = self.main(output, target)
        return result


def by_attribute(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target, reduction=by_attribute.how)  # type: ignore[attr-defined]


def edits() -> dict[str, tuple[Loss, Callable[[], object]]]:
    """A loss, and what changes it."""
    settings, table, derived, indexed, module = Settings(), Table(), Derived(), Indexed(), Decorated()
    array, swapped = np.zeros(4000), nn.ModuleDict({"main": nn.MSELoss(reduction="sum"), "aux": nn.L1Loss()})
    by_attribute.how = "mean"  # type: ignore[attr-defined]

    def swap() -> None:
        swapped["main"], swapped["aux"] = swapped["aux"], swapped["main"]

    return {
        "an object passed on": (lambda o, t: helper(o, t, settings), lambda: setattr(settings, "how", "sum")),
        "an attribute of a dict": (lambda o, t: helper(o, t, table), lambda: setattr(table, "how", "sum")),
        "the base class": (lambda o, t: derived(o, t), lambda: setattr(derived, "how", "sum")),
        "an index": (
            lambda o, t: functional.mse_loss(o, t, reduction=indexed["how"]),
            lambda: indexed.hidden.update(how="sum"),
        ),
        "a decorated method": (module, lambda: setattr(module.main, "reduction", "sum")),
        "a function": (by_attribute, lambda: setattr(by_attribute, "how", "sum")),
        "names of modules": (lambda o, t: swapped["main"](o, t), swap),
        "an array": (lambda o, t: functional.mse_loss(o, t) * array[3999], lambda: array.fill(2.0)),
    }


@pytest.mark.parametrize("name", list(edits()))
def test_what_a_loss_reads_by_any_way_is_part_of_its_identity(name: str) -> None:
    loss, change = edits()[name]
    before = identity(loss, ALIKE)
    assert identity(loss, ALIKE) == before
    change()
    assert identity(loss, ALIKE) != before


def test_functions_of_torch_are_not_read() -> None:
    mapped = vmap(lambda x: x * 2)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return checkpoint(vmap(torch.sum), output - target, use_reentrant=False).mean() + mapped(output).mean()

    assert identity(loss, ALIKE) == identity(loss, ALIKE)


@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
def test_losses_that_never_split_keep_few_objects_alive(studied: list[None]) -> None:
    kept: list[weakref.ref[Settings]] = []

    def losses() -> Steps:
        for step in range(24):
            settings = Settings(how=str(step))
            kept.append(weakref.ref(settings))
            yield lambda output, target, settings=settings: dice(output, target) + 0 * len(settings.how)

    follow(losses)
    gc.collect()
    assert len(studied) <= 5
    assert sum(one() is not None for one in kept) < 16


class Unfriendly(dict):  # type: ignore[type-arg]
    def items(self) -> Any:
        raise RuntimeError

    def __len__(self) -> int:
        raise RuntimeError


@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_reading_a_loss_runs_no_code_of_its_objects() -> None:
    table, lazy = Unfriendly(scale=2.0), nn.LazyLinear(2)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target) * table["scale"]

    def holds_lazy(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target) + 0 * len(type(lazy).__name__)

    follow(lambda: iter([loss, holds_lazy, loss]))
