"""A loss that the prices of a plan leave out is said; what is no loss is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import AutoparWarning, Cluster, InputError, Plan

CLUSTER = Cluster.preset("4xH100")
X = torch.randn(8, 16)


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))


def misspelt(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.no_such_method(target)


def through_numpy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.mean() * float(target.numpy().mean())


def planned(loss: Any, target: Any = X) -> list[Plan]:
    call = {"example_args": (X,), "loss_fn": loss, "target": target}
    return [autopar.plan(layers(), CLUSTER, **call), Plan.by_hand(layers(), CLUSTER, pipeline=2, **call)]


def notes_of(plan: Plan) -> list[str]:
    return [note for note in plan.notes if note.startswith("predictions leave out the loss")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "target", "why"),
    [
        (misspelt, X, "loss_fn 'misspelt' .*has no attribute 'no_such_method'"),
        (through_numpy, X, "loss_fn 'through_numpy'"),
        (nn.functional.mse_loss, torch.randn(5, 16), "loss_fn 'mse_loss'"),
    ],
)
def test_a_loss_that_cannot_be_split_is_left_out_and_plans_say_so(loss: Any, target: torch.Tensor, why: str) -> None:
    with pytest.warns(AutoparWarning, match=f"predictions leave out the loss, .*{why}"):
        plans = planned(loss, target)
    assert all(len(notes_of(plan)) == 1 for plan in plans)


@pytest.mark.slow
def test_the_note_goes_when_a_loss_counts() -> None:
    with pytest.warns(AutoparWarning, match="misspelt"):
        plan, _ = planned(misspelt)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AutoparWarning)
        again = autopar.plan(layers(), CLUSTER, plan=plan, example_args=(X,), target=X, loss_fn=nn.functional.mse_loss)
    assert notes_of(plan)
    assert not notes_of(again)
    assert again.predicted_step_time is not None
    assert plan.predicted_step_time is not None
    assert again.predicted_step_time > plan.predicted_step_time


@pytest.mark.parametrize("wrong", [3, "mse"])
def test_what_is_no_function_is_refused_by_its_value(wrong: Any) -> None:
    call: dict[str, Any] = {"example_args": (X,), "loss_fn": wrong, "target": X}
    said = f"loss_fn must be a function of .*, got {wrong!r}"
    for make in (autopar.plan, autopar.compare, Plan.by_hand, autopar.profile):
        with pytest.raises(InputError, match=said):
            make(layers(), CLUSTER, **call)
    with pytest.raises(InputError, match=said):
        autopar.parallelize(layers(), ["cpu", "cpu"], **call)
    with pytest.raises(InputError, match=said):
        autopar.parallelize(layers(), ["cpu"]).train_step(X, target=X, loss_fn=wrong)


@pytest.mark.slow
def test_inputs_need_no_values_for_a_cluster_and_need_them_where_they_run() -> None:
    model, meta = layers(), X.to("meta")
    call: dict[str, Any] = {"loss_fn": nn.functional.mse_loss}
    plans = [
        autopar.plan(model, CLUSTER, example_args=(x,), target=y, **call) for x, y in ((X, X), (meta, X), (X, meta))
    ]
    assert len({plan.predicted_step_time for plan in plans}) == 1
    assert not any(p.is_meta for p in model.parameters())
    with pytest.raises(InputError, match="nothing to divide over devices"):  # it lacks values as little as its input
        autopar.plan(nn.Tanh(), CLUSTER, example_args=(meta,))
    with pytest.raises(InputError, match="argument 0 is on the meta device and the model is not"):
        autopar.plan(model, ["cpu", "cpu"], example_args=(meta,), target=X, **call)


@pytest.mark.slow
def test_devices_that_gain_nothing_are_not_used() -> None:
    """Four that all do the same hold less of the optimizer's state, and are as fast to a hundredth of a percent."""
    torch.manual_seed(0)
    call: dict[str, Any] = {"example_args": (X,), "target": X, "loss_fn": nn.functional.mse_loss}
    plan = autopar.plan(layers(), CLUSTER, **call)
    assert plan.predicted_step_time is not None
    fewer = autopar.plan(layers(), Cluster.preset("1xH100"), **call).predicted_step_time
    assert len(plan.used_devices) == 1
    assert plan.predicted_step_time == fewer


UNTRAINED: dict[str, tuple[Any, str]] = {
    "detached": (lambda output, target: nn.functional.mse_loss(output, target).detach(), "without a gradient"),
    "constant": (lambda output, target: torch.tensor(1.0), "without a gradient"),
    "complex": (lambda output, target: torch.complex(output, target).sum(), "must return a real number, got torch.co"),
    "one argument": (lambda output: output.mean(), r"is called as loss_fn\(output, target\), which it does not take"),
    "a class": (nn.MSELoss, r"loss_fn is the class MSELoss; give one of its objects, MSELoss\(\)"),
}


@pytest.mark.parametrize(("loss", "said"), UNTRAINED.values(), ids=UNTRAINED)
def test_a_loss_that_cannot_train_is_refused_when_a_plan_is_made(loss: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        autopar.plan(layers(), CLUSTER, example_args=(X,), target=X, loss_fn=loss)
    with pytest.raises(InputError, match=said):
        autopar.parallelize(layers(), ["cpu", "cpu"], tune=0, cache=False).train_step(X, target=X, loss_fn=loss)


def test_a_loss_needs_its_target_and_a_target_its_loss() -> None:
    with pytest.raises(InputError, match=r"loss_fn needs target=.*give neither"):
        autopar.plan(layers(), CLUSTER, example_args=(X,), loss_fn=nn.functional.mse_loss)
    with pytest.raises(InputError, match=r"target needs loss_fn=.*give neither"):
        autopar.plan(layers(), CLUSTER, example_args=(X,), target=X)


def test_a_function_that_fails_is_not_blamed_on_the_model() -> None:
    with pytest.warns(AutoparWarning, match=r"it fails.*ZeroDivisionError: division by zero") as caught:
        autopar.plan(layers(), CLUSTER, example_args=(X,), target=X, loss_fn=lambda output, target: 1 / 0)
    assert not any("cannot capture module" in str(one.message) for one in caught)
