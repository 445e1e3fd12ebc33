"""Measured memory, and comparisons that leave the model unchanged."""

from __future__ import annotations

import copy
import json
import re
import threading
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import autopar
from autopar import Cluster, Comparison, InputError, Plan, PlanError
from autopar.report.tables import WIDTH
from autopar.runtime.memory_watch import MemoryWatch
from autopar.runtime.other_systems.catalogue import check_systems
from cost_models import parse_devices
from cost_models.hardware.devices import operator_threads

BATCH = 8
CPUS = parse_devices(["cpu", "cpu"])


# -- memory ----------------------------------------------------------------------------------------------------------


def test_memory_is_counted_from_the_first_operator_on_a_storage_until_it_is_freed() -> None:
    watch = MemoryWatch(CPUS[:1])
    x = torch.zeros(1000)  # 4000 bytes
    with watch.step([]), watch("cpu:0"):
        y = x + 1  # 8000
        view = y.view(10, 100)  # the same storage
        z = view * 2  # 12000: the peak
        del y, view
        del x, z
        torch.zeros(500)
    assert watch.peaks == {"cpu:0": 12000}


def test_the_peak_of_a_linear_layers_step_is_known() -> None:
    """y = x w: at the gradient of w, x, w, y's gradient and w's gradient are held."""
    layer, x = nn.Linear(50, 50, bias=False), torch.randn(20, 50)
    watch = MemoryWatch(CPUS[:1])
    with watch.step([*layer.parameters()]), watch("cpu:0"):
        layer(x).backward(torch.ones(20, 50))
    (peak,) = watch.peaks.values()
    assert 4 * (20 * 50 + 50 * 50 + 20 * 50 + 50 * 50) <= peak <= 4 * (2 * 50 * 50 + 4 * 20 * 50)


def test_gradients_of_one_tensor_are_added_up_in_place_as_autograd_does_when_nobody_watches() -> None:
    embedding, rows = nn.Embedding(1000, 10), torch.randint(1000, (5,))  # a gradient of 40,000 bytes
    watch = MemoryWatch(CPUS[:1])
    with watch.step([]), watch("cpu:0"):
        (embedding(rows).sum() + embedding(rows).tanh().sum()).backward()
    assert 3 * 40_000 <= watch.peaks["cpu:0"] < 3.5 * 40_000, "the weight and two gradients"


def test_what_a_convolution_copies_counts_while_it_runs() -> None:
    x, weight = torch.zeros(2, 4, 8, 8, dtype=torch.float64), torch.zeros(4, 4, 3, 3, dtype=torch.float64)
    watch = MemoryWatch(CPUS[:1])
    with watch.step([]), watch("cpu:0"):
        y = nn.functional.conv2d(x, weight, padding=1)
    assert watch.peaks["cpu:0"] == x.nbytes + weight.nbytes + y.nbytes + 9 * x.nbytes, "an element is in nine windows"


def test_every_worker_counts_its_own_storages_whoever_frees_them() -> None:
    watch = MemoryWatch(CPUS)
    made: dict[str, torch.Tensor] = {}

    def work(name: str, size: int) -> None:
        with watch(name):
            made[name] = torch.zeros(size)

    for name, size in (("cpu:0", 100), ("cpu:1", 300)):
        thread = threading.Thread(target=work, args=(name, size))
        thread.start()
        thread.join()
    made.clear()
    work("cpu:0", 50)
    assert watch.peaks == {"cpu:0": 400, "cpu:1": 1200}


# -- comparisons -----------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """Batch norm and dropout: what a comparison must not disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1))
        self.second = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


HAND = Plan.from_split({"first": 0, "second": 1}, n_microbatches=2)
MIDDLE = Plan.from_split({"first.0": 0, "second.2": 1}, n_microbatches=4, schedule="gpipe")


def state_of(model: nn.Module) -> Mapping[str, torch.Tensor | None]:
    gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters()}
    return copy.deepcopy({**model.state_dict(), **gradients})


@pytest.fixture(scope="module")
def compared() -> tuple[Comparison, Mapping[str, object], Mapping[str, object]]:
    """A comparison, and all that it might disturb before and after."""
    torch.manual_seed(0)
    model, x, y = Small(), torch.randn(BATCH, 32), torch.randint(4, (BATCH,))
    model.second[0].weight.grad = torch.ones(64, 64)

    def surroundings() -> dict[str, object]:
        return {**state_of(model), "random": torch.get_rng_state(), "threads": torch.get_num_threads()}

    before = surroundings()
    with pytest.warns(autopar.AutoparWarning, match="batch norm"):
        comparison = autopar.compare(
            model,
            ["cpu", "cpu"],
            {"auto": None, "hand": HAND, "middle": MIDDLE},
            example_args=(x,),
            target=y,
            loss_fn=nn.functional.cross_entropy,
            repeats=3,
        )
    return comparison, before, surroundings()


Compared = tuple[Comparison, Mapping[str, object], Mapping[str, object]]


@pytest.mark.slow
def test_a_comparison_leaves_the_model_and_its_surroundings_as_they_were(compared: Compared) -> None:
    _, before, after = compared
    assert before.keys() == after.keys()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=0, msg=name)


def test_every_plan_has_a_row_with_predictions_and_steps_measured_in_turn(compared: Compared) -> None:
    comparison = compared[0]
    assert [row.name for row in comparison.rows] == ["one device", "auto", "hand", "middle"]
    for row in comparison.rows:
        assert len(row.steps) == 3
        assert row.measured in row.steps
        assert row.predicted > 0
        assert row.error == pytest.approx((row.predicted - row.measured) / row.measured)
    assert comparison.speed_up(comparison.single) == 1
    assert comparison["hand"].plan.n_microbatches == 2
    assert [len(stage.operators) > 0 for stage in comparison["middle"].plan.stages] == [True, True]
    with pytest.raises(KeyError):
        comparison["nobody"]


def test_memory_is_predicted_and_measured_at_the_same_places(compared: Compared) -> None:
    comparison = compared[0]
    assert set(comparison.single.measured_memory) == {"cpu:0"}
    assert set(comparison["hand"].measured_memory) == {"cpu:0", "cpu:1"}
    for row in comparison.rows:
        assert row.predicted_memory.keys() == row.measured_memory.keys()
        for place, predicted in row.predicted_memory.items():
            assert 0.6 * row.measured_memory[place] < predicted < 1.6 * row.measured_memory[place]


def test_text_and_json_hold_every_row(compared: Compared) -> None:
    comparison = compared[0]
    text = str(comparison)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= WIDTH
    data = json.loads(comparison.to_json())
    assert [row["name"] for row in data["rows"]] == ["one device", "auto", "hand", "middle"]
    assert all(row["name"] in text for row in data["rows"])
    assert Plan.from_json(json.dumps(data["rows"][2]["plan"])) == comparison["hand"].plan


class Choosing(nn.Module):
    """Returns scores, and something without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.head(self.body(x).tanh())
        return {"out": found, "choice": found.argmax(1)}


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_without_a_loss_a_step_is_a_call_and_in_training_a_backward(training: bool) -> None:
    plan = Plan.from_split({"body": 0, "head": 1}, n_microbatches=2)
    found = autopar.compare(
        Choosing().train(training), ["cpu", "cpu"], {"hand": plan}, example_args=(torch.randn(4, 6),), repeats=1
    )
    assert found.training is training
    assert ("backward" in str(found)) is False
    backward = [stage.backward_time or 0.0 for stage in found["hand"].plan.stages]
    assert any(backward) is training


def test_a_batch_that_may_not_be_split_is_compared_whole() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x) - self.a(x).mean(0))

    plan = Plan.from_split({"a": 0, "b": 1}, n_microbatches=2)
    with pytest.warns(autopar.AutoparWarning, match="not split"):
        found = autopar.compare(Mixing(), ["cpu", "cpu"], {"hand": plan}, example_args=(torch.randn(4, 4),), repeats=1)
    assert found["hand"].plan.n_microbatches == 1


def test_what_does_not_fit_is_refused() -> None:
    model, x = Choosing(), torch.randn(4, 6)
    with pytest.raises(InputError, match="repeats"):
        autopar.compare(model, ["cpu"], example_args=(x,), repeats=0)
    with pytest.raises(InputError, match="example_args"):
        autopar.compare(model, ["cpu"])
    with pytest.raises(InputError, match="target"):
        autopar.compare(model, ["cpu"], example_args=(x,), loss_fn=nn.functional.mse_loss)
    with pytest.raises(PlanError, match="devices"):
        autopar.compare(
            model, ["cpu"], {"two": Plan.from_split({"body": 0, "head": 1}, n_microbatches=1)}, example_args=(x,)
        )


@pytest.mark.parametrize(
    ("plans", "systems", "message"),
    [
        ({"one device": None}, (), "'one device' is the name of another row"),
        ({"DDP": None}, ("DDP",), "'DDP' is the name of another row"),
        ({"mine": "plan.json"}, (), "'mine' must be a Plan, or None for a search, got str (Plan.load reads a file)"),
        ({"": None}, (), "names must be texts, got ''"),
        ({1: None}, (), "names must be texts, got 1"),
        (
            {"a": 3, "b": "x", "DDP": None},
            ("DDP",),
            "'a' must be a Plan, or None for a search, got int; 'b' must be a Plan",
        ),
        ({"a": 3, "DDP": None}, ("DDP",), "got int; 'DDP' is the name of another row"),
        ([None], (), "plans must be a dict of names and plans, got list"),
    ],
)
def test_plans_that_are_none_or_have_a_name_of_another_row_are_refused(
    plans: Any, systems: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        autopar.compare(Choosing(), ["cpu"], plans, example_args=(torch.randn(4, 6),), systems=systems)


@pytest.mark.parametrize("devices", [Cluster.preset("2xH100"), "cpu,cpu"], ids=["a cluster", "devices at hand"])
def test_a_comparison_of_nothing_is_refused(devices: Any) -> None:
    with pytest.raises(InputError, match="there is nothing to compare"):
        autopar.compare(Choosing(), devices, {}, example_args=(torch.randn(4, 6),))


def test_a_comparison_without_plans_has_the_rows_of_other_systems() -> None:
    compared = autopar.compare(
        nn.Linear(6, 6), "cpu", {}, example_args=(torch.randn(4, 6),), systems=["plain"], repeats=1, cache=False
    )
    assert [row.name for row in compared.systems] == ["plain"]
    assert "plain" in str(compared)
    assert compared.to_json()
    assert str(compared.report())
    with pytest.raises(KeyError, match="there is no plan 'auto'; no plan was compared"):
        compared["auto"]


@pytest.mark.slow
def test_a_plan_under_two_names_runs_once_and_plans_by_hand_say_what_they_are(capsys: Any) -> None:
    both = Plan.from_split({"": 0}, n_microbatches=2, schedule="gpipe", devices=[["cpu:0", "cpu:1"]])
    listed = Plan.from_split({"body": 0, "head": 0}, n_microbatches=2, devices=[["cpu:0", "cpu:1"]])
    call = {"example_args": (torch.randn(4, 6),), "repeats": 1, "cache": False}
    found = autopar.compare(Choosing(), "cpu,cpu", {"both": both, "listed": listed}, **call)
    assert [row.name for row in found.plans] == ["both"]
    assert found.same == {"listed": "both"}
    assert (found["listed"].name, found["listed"].steps) == ("listed", found["both"].steps)
    assert json.loads(found.to_json())["same"] == {"listed": "both"}
    for text in (str(found), str(found.report())):
        words = " ".join(text.split())
        assert "listed: the same plan as both, which ran for both" in words
        assert "both: Data parallel 2" in words
        assert "made by hand. Its data parallelism: each replica is a thread of this process" in words


def test_names_of_systems_may_be_in_small_letters_and_bad_ones_are_refused_with_the_near_one() -> None:
    assert check_systems(["ddp", "pipelining:1f1b", "PIPELINING:gpipe"]) == (
        *("DDP", "pipelining:1F1B", "pipelining:GPipe"),
    )
    with pytest.raises(InputError, match="there is no system 'pipelining:1f1'; did you mean 'pipelining:"):
        check_systems(["plain", "pipelining:1f1"])
    with pytest.raises(InputError, match=r"systems must be a list of names, such as \['DDP'\], got 3"):
        check_systems(3)  # type: ignore[arg-type]


class _SaysThreads(nn.Linear):
    """A layer that writes down how many threads its operators have."""

    seen: ClassVar[list[int]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(torch.get_num_threads())
        return super().forward(x)


@pytest.mark.slow
def test_a_plan_that_runs_the_model_itself_has_the_callers_threads_as_it_has_when_it_is_followed() -> None:
    model, x = nn.Sequential(_SaysThreads(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)
    alone = Plan.from_split({"": 0}, n_microbatches=1)
    with operator_threads(3):
        autopar.parallelize(model, ["cpu", "cpu"], plan=alone)(x)
        assert _SaysThreads.seen[-1] == 3
        _SaysThreads.seen.clear()
        autopar.compare(model, ["cpu", "cpu"], {"alone": alone}, example_args=(x,), repeats=1, cache=False)
        assert torch.get_num_threads() == 3
    of_a_device = CPUS[0].threads
    assert _SaysThreads.seen[-6:] == [of_a_device, 3, of_a_device, 3, of_a_device, 3]
