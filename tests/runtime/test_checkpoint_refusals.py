"""What does not fit a checkpoint is refused by name, and leaves model and optimizer as they were."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

import autopar
from autopar.runtime.checkpoints import optimizer_class
from autopar.runtime.checkpoints.optimizer_states import SmallStates

MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.2, momentum=0.9),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.1),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.1),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1),
}
PAIRS = [pair for pair in permutations(MAKE, 2) if set(pair) != {"sgd", "momentum"}]


def ready(make: Callable[[Any], torch.optim.Optimizer], seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after two steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = make(model.parameters())
    train(model, optimizer, 2)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, n: int) -> list[float]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.linspace(-1, 1, 8).view(2, 4)).square().mean()
        loss.backward()
        return loss

    return [torch.as_tensor(optimizer.step(closure)).item() for _ in range(n)]


def refused(
    kind: type[Exception], words: str, folder: Path | str, model: nn.Module, optimizer: Any, **options: Any
) -> None:
    """Loading raises, and training goes on as if nobody had tried."""
    twins, draws = copy.deepcopy((model, optimizer)), torch.get_rng_state()
    with pytest.raises(kind, match=words):
        autopar.load(folder, model, optimizer, **options)
    assert torch.equal(torch.get_rng_state(), draws)
    assert optimizer.state_dict()["param_groups"] == twins[1].state_dict()["param_groups"]
    assert train(model, optimizer, 3) == train(*twins, 3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a checkpoint of each optimizer."""
    folder = tmp_path_factory.mktemp("optimizers")
    for name, make in MAKE.items():
        autopar.save(folder / name, *ready(make), step=2)
    return folder


@pytest.mark.parametrize(("source", "other"), PAIRS)
def test_another_class_of_optimizer_is_refused_and_changes_nothing(saved: Path, source: str, other: str) -> None:
    was, is_now = (type(MAKE[name]([nn.Parameter(torch.ones(1))])).__name__ for name in (source, other))
    words = f"step-00000002 is of class torch.optim.{was}, this one is of class torch.optim.{is_now}: make one of class"
    refused(autopar.InputError, words, saved / source, *ready(MAKE[other], seed=1))


def test_options_of_the_same_class_are_those_that_were_saved(saved: Path) -> None:
    model, optimizer = ready(MAKE["sgd"], seed=1)
    autopar.load(saved / "momentum", model, optimizer)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.2, 0.9)
    assert train(model, optimizer, 3) == train(*ready(MAKE["momentum"]), 3)


class OfEarlierVersion:
    """As `SmallStates` was pickled before it had the optimizer's class."""

    @staticmethod
    def state(small: SmallStates) -> dict[str, Any]:
        return {"groups": small.groups, "values": small.values}


@pytest.fixture(scope="module")
def saved_earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("earlier")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SmallStates, "__getstate__", OfEarlierVersion.state, raising=False)
        for name, make in MAKE.items():
            autopar.save(folder / name, *ready(make), step=2)
    return folder


@pytest.mark.parametrize("name", MAKE)
def test_a_checkpoint_without_the_class_loads_with_a_warning(saved_earlier: Path, name: str) -> None:
    model, optimizer = ready(MAKE[name], seed=1)
    with pytest.warns(autopar.AutoparWarning, match=r"earlier version .* it is loaded as torch\.optim\."):
        autopar.load(saved_earlier / name, model, optimizer)
    assert train(model, optimizer, 3) == train(*ready(MAKE[name]), 3)


@pytest.mark.parametrize(
    ("source", "other"), [pair for pair in PAIRS if pair[0] != "sgd" and set(pair) != {"adam", "adamw"}]
)
def test_a_checkpoint_without_the_class_is_refused_for_other_states(
    saved_earlier: Path, source: str, other: str
) -> None:
    words = (
        r"is of another class than torch\.optim\.\w+: its states of '0.weight' are '.*', and torch.optim.\w+ keeps '"
    )
    refused(autopar.InputError, words, saved_earlier / source, *ready(MAKE[other], seed=1))


VARIANTS: dict[str, list[dict[str, Any]]] = {
    "Adadelta": [{}],
    "Adafactor": [{}],
    "Adagrad": [{}],
    "Adam": [{}, {"amsgrad": True}],
    "AdamW": [{}, {"amsgrad": True}],
    "Adamax": [{}],
    "ASGD": [{}],
    "LBFGS": [{}, {"max_iter": 1}, {"line_search_fn": "strong_wolfe"}],
    "Muon": [{}],
    "NAdam": [{}],
    "RAdam": [{}],
    "RMSprop": [{}, {"momentum": 0.5, "centered": True}],
    "Rprop": [{}],
    "SGD": [{"momentum": 0.9}],
}


def test_the_names_of_states_are_those_of_every_class_of_torch() -> None:
    kinds = {k.__name__ for k in vars(torch.optim).values() if isinstance(k, type) and k is not torch.optim.Optimizer}
    assert set(optimizer_class._STATES) == kinds
    assert set(VARIANTS) == kinds - {"SparseAdam"}  # it takes sparse gradients alone
    for name, variants in VARIANTS.items():
        always, every = optimizer_class._kept(f"torch.optim.{name}")
        found = []
        for options in variants:
            model = nn.Linear(4, 4, bias=name != "Muon")  # Muon takes matrices alone
            optimizer = getattr(torch.optim, name)(model.parameters(), **options)
            train(model, optimizer, 3)
            found += [set(state) for state in optimizer.state.values() if state]
        assert set.intersection(*found) >= always, name
        assert set.union(*found) == every, name


def test_an_optimizer_inside_of_accelerates_is_of_its_own_class(tmp_path: Path) -> None:
    model, optimizer = ready(MAKE["adamw"])
    wrapped = Accelerator(cpu=True).prepare(optimizer)
    assert type(wrapped) is not torch.optim.AdamW
    autopar.save(tmp_path, model, wrapped, step=2)
    other, late = ready(MAKE["adamw"], seed=1)
    autopar.load(tmp_path, other, late)
    assert train(other, late, 3) == train(model, optimizer, 3)


class Mine(torch.optim.SGD):
    """An optimizer outside of torch, which fails when it is loaded."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        raise KeyError("mine")


def test_a_failure_of_the_optimizer_itself_leaves_everything_as_it_was(tmp_path: Path) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return Mine(parameters, lr=0.1, momentum=0.9)

    model, optimizer = ready(make)
    optimizer.param_groups[0]["lr"] = 0.3
    autopar.save(tmp_path, model, optimizer, step=2)
    refused(autopar.CheckpointError, "cannot be loaded: KeyError: 'mine'", tmp_path, *ready(make, seed=1))
    words = rf"is of class {re.escape(f'{Mine.__module__}.Mine')}, this one is of class torch.optim.SGD"
    refused(autopar.InputError, words, tmp_path, *ready(MAKE["momentum"], seed=1))


def test_parameters_and_groups_that_were_not_saved_change_nothing(saved: Path) -> None:
    model, _ = ready(MAKE["momentum"], seed=1)
    _, other = ready(MAKE["momentum"], seed=2)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(autopar.InputError, match=r"parameter 0 of the optimizer's group 0, .* is none of the model's"):
        autopar.load(saved / "momentum", model, other)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    parts = [{"params": [p]} for p in model.parameters()]
    refused(
        autopar.CheckpointError,
        "the checkpoint's optimizer does not have '0.weight'",
        part_of(saved),
        model,
        torch.optim.SGD(parts, lr=0.5, momentum=0.9),
    )


def part_of(folder: Path) -> Path:
    """A checkpoint of the same model, whose optimizer trained the last layer alone."""
    model, _ = ready(MAKE["momentum"])
    autopar.save(folder / "part", model, MAKE["momentum"](list(model.children())[1].parameters()), step=2)
    return folder / "part"


def test_a_failure_of_an_extra_value_leaves_model_and_optimizer_as_they_were(tmp_path: Path) -> None:
    model, optimizer = ready(MAKE["adamw"])
    autopar.save(tmp_path, model, optimizer, step=2, extra={"s": 3})
    other, late = ready(MAKE["adamw"], seed=1)
    scheduler = torch.optim.lr_scheduler.StepLR(late, 1)
    refused(autopar.CheckpointError, "cannot be loaded: ", tmp_path, other, late, extra={"s": scheduler})
    words = r"extra has 's', of type int, which has no load_state_dict\(\) .* from what load returns, as .extra\['s'\]"
    refused(autopar.InputError, words, tmp_path, other, late, extra={"s": 4})
    found = autopar.load(tmp_path, other, late)
    assert found is not None
    assert found.extra == {"s": 3}


@pytest.mark.parametrize("step", ["2", 2.0, True, -1])
def test_a_step_that_is_no_whole_number_is_refused_by_value(saved: Path, step: Any) -> None:
    words = f"step must be the number of steps that were done when .*, got {re.escape(repr(step))}$"
    refused(autopar.InputError, words, saved / "sgd", *ready(MAKE["sgd"], seed=1), step=step)


def test_extra_that_is_no_dict_is_refused(saved: Path) -> None:
    refused(autopar.InputError, "extra must be a dict", saved / "sgd", *ready(MAKE["sgd"], seed=1), extra=["a"])


def test_the_directory_of_another_step_is_refused(saved: Path) -> None:
    folder, pair = saved / "sgd" / "step-00000002", ready(MAKE["sgd"], seed=1)
    refused(autopar.InputError, r"is the checkpoint of step 2, not of step=1: give .*/sgd$", folder, *pair, step=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert autopar.load(folder, *pair, step=2) == autopar.load(folder.parent, *pair)


def test_a_model_on_the_meta_device_is_refused_with_what_gives_it_memory(saved: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(autopar.InputError, match=r"'0.weight' of the model is on the meta device, .* model.to_empty\("):
        autopar.load(saved / "sgd", model)
    autopar.load(saved / "sgd", model.to_empty(device="cpu"))
    wanted = ready(MAKE["sgd"])[0].state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())


def test_a_file_in_the_place_of_the_directory_is_refused_also_where_none_is_required(tmp_path: Path) -> None:
    model, optimizer = ready(MAKE["sgd"])
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "below"):
        refused(autopar.CheckpointError, f"{file} is a file, not a directory", folder, model, optimizer, required=False)
    assert autopar.load(tmp_path / "later" / "still", model, optimizer, required=False) is None


def test_an_empty_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, optimizer = ready(MAKE["sgd"])
    with pytest.raises(autopar.InputError, match=r"directory must be a path, got '', .* current directory is '.'"):
        autopar.save("", model, optimizer, step=1)
    refused(autopar.InputError, "directory must be a path, got ''", "", model, optimizer, required=False)
    assert not list(tmp_path.iterdir())


def test_saving_a_model_on_the_meta_device_is_refused_with_its_tensor(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(autopar.InputError, match="'weight' of the model is on the meta device and has no values to"):
        autopar.save(tmp_path / "new", model, step=1)
    assert not list(tmp_path.iterdir())
