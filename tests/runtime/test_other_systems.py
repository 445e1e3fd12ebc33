"""Other systems beside plans: they compute what the model does, or say in words why they do not run."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autopar
from autopar import AutoparError, Comparison, InputError, Plan
from autopar.analysis.example import capture_example
from autopar.report.comparison import ceiling_text, verdict_text
from autopar.runtime import host_memory
from autopar.runtime.comparing.comparison import Row, SystemRow
from autopar.runtime.other_systems import catalogue
from autopar.runtime.other_systems import processes as processes_room
from autopar.runtime.other_systems.catalogue import CEILING, DATA_PARALLEL, DDP, GPIPE, PIPELINING, PLAIN, SYSTEMS
from autopar.runtime.other_systems.pipelining import PER_RANK, stages_of
from autopar.runtime.other_systems.processes import Processes
from autopar.runtime.other_systems.rank import SystemRank
from autopar.runtime.other_systems.training_step import Refusal, TrainingStep, load_step
from cost_models import parse_devices

CPUS = parse_devices(["cpu", "cpu"])
PLAN = Plan.from_split({"": 0}, n_microbatches=1)


def row_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)])


BATCH = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def step_of(model: nn.Module, args: tuple[Any, ...] = (BATCH,), **kwargs: Any) -> TrainingStep:
    example = capture_example(model, CPUS, args, kwargs, loss_fn=nn.functional.mse_loss, target=BATCH, batch_dim=None)
    return TrainingStep.of(example)


def compared(model: nn.Module, systems: Any, **options: Any) -> Comparison:
    found = autopar.compare(
        model, ["cpu", "cpu"], {"alone": PLAN}, example_args=(BATCH,), repeats=1, systems=systems, **options
    )
    assert isinstance(found, Comparison)
    return found


LOSS = {"target": BATCH, "loss_fn": nn.functional.mse_loss}


# -- what they compute ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks() -> Iterator[Processes]:
    with Processes(SystemRank, 2) as processes:
        yield processes


@pytest.mark.slow
@pytest.mark.parametrize("schedule", PER_RANK)
def test_every_schedule_of_pipelining_computes_the_models_loss_and_gradients(
    schedule: str, ranks: Processes, tmp_path: Path
) -> None:
    step = step_of(row_model())
    step.save(tmp_path / "step.pt")
    ranks.call(SystemRank.load, partial(load_step, tmp_path / "step.pt"))
    cuts = [3] if PER_RANK[schedule] == 1 else [1, 3, 5]
    ranks.call(SystemRank.pipelining, schedule, schedule, 4, cuts)
    losses = [loss for loss in ranks.call(SystemRank.step, schedule) if loss is not None]
    names = [name for name, _ in step.model.named_parameters()]
    found: dict[str, Any] = {}
    for one in ranks.call(SystemRank.gradients, schedule, names):
        found |= one
    assert losses == pytest.approx([step.run()], rel=1e-5)
    assert set(found) == set(names)
    for name, parameter in step.model.named_parameters():
        torch.testing.assert_close(torch.from_numpy(found[name]), parameter.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_parts_of_a_batch_in_processes_have_the_models_loss_and_ddp_its_gradients(
    ranks: Processes, tmp_path: Path
) -> None:
    step = step_of(row_model())
    step.save(tmp_path / "step.pt")
    ranks.call(SystemRank.load, partial(load_step, tmp_path / "step.pt"))
    ranks.call(SystemRank.ddp, DDP)
    ranks.call(SystemRank.independent, CEILING)
    losses = ranks.call(SystemRank.step, DDP)
    name = "0.0.weight"
    first, second = (one[name] for one in ranks.call(SystemRank.gradients, DDP, [name]))
    halves = ranks.call(SystemRank.step, CEILING)
    whole = step.run()
    assert losses == pytest.approx([whole, whole], rel=1e-5)
    assert sum(halves) / 2 == pytest.approx(whole, rel=1e-5)
    assert halves[0] != halves[1]
    expected = step.model.get_parameter(name).grad
    for gradient in (first, second):
        torch.testing.assert_close(torch.from_numpy(gradient), expected, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_systems_take_turns_with_the_plans_and_have_rows() -> None:
    pytest.importorskip("torchgpipe")
    names = [PLAIN, CEILING, DDP, GPIPE, PIPELINING, f"{PIPELINING}:ZBVZeroBubble", DATA_PARALLEL]
    model = row_model()
    before = {name: p.clone() for name, p in model.named_parameters()}
    found = compared(model, names, n_microbatches=4, **LOSS)
    assert [row.name for row in found.systems] == [name for name in names if name != CEILING]
    assert {row.name for row in found.systems if row.refused} == {DATA_PARALLEL}
    assert all(len(row.steps) == 1 for row in (*found.systems, found.ceiling) if row and not row.refused)
    assert all(torch.equal(before[name], p) and p.grad is None for name, p in model.named_parameters())
    text = " ".join(str(found).split())
    assert "DataParallel was not run: nn.DataParallel needs two GPUs" in text
    assert "4 micro-batches" in text
    data = json.loads(found.to_json())
    assert [row["name"] for row in data["systems"]] == [row.name for row in found.systems]
    assert data["ceiling_speed_up"] == pytest.approx(found.ceiling_speed_up)


class Failing:
    """Fails on one rank, on all of them, or so that the other one waits for ever."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def number(self, n: int) -> int:
        return n + self.rank

    def keeps_freed_memory(self) -> bool:
        return host_memory.freed_memory_is_kept()

    def on_all(self) -> None:
        raise ValueError(f"rank {self.rank} cannot")

    def on_first(self) -> int:
        if self.rank == 0:
            raise ValueError("rank 0 cannot")
        return 1

    def waits(self) -> None:
        if self.rank == 0:
            raise ValueError("rank 0 cannot")
        threading.Event().wait()


@pytest.mark.slow
@pytest.mark.usefixtures("started_anew")
def test_answers_of_a_failed_request_are_not_taken_for_those_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes_room, "_PATIENCE", 1.0)
    with Processes(Failing, 2) as processes:
        for method in (Failing.on_all, Failing.on_first, Failing.on_all):
            with pytest.raises(RuntimeError, match="cannot"):
                processes.call(method)
            assert processes.call(Failing.number, 10) == [10, 11]
        with pytest.raises(RuntimeError, match="rank 0 cannot"):
            processes.call(Failing.waits)
        with pytest.raises(RuntimeError, match="a process ended: it waits for another one"):
            processes.call(Failing.number, 10)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the setting is glibc's")
@pytest.mark.parametrize("kept", [False, True])
def test_processes_keep_freed_memory_where_this_process_does(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, their steps have page faults that the steps beside them have not."""
    monkeypatch.setattr(host_memory, "_kept", kept)
    with Processes(Failing, 2) as processes:
        assert processes.call(Failing.keeps_freed_memory) == [kept, kept]


@pytest.mark.parametrize("n_ranks", [2, 4])
@pytest.mark.parametrize("schedule", PER_RANK)
def test_every_stage_is_on_one_rank(schedule: str, n_ranks: int) -> None:
    stages = [s for rank in range(n_ranks) for s in stages_of(schedule, rank, n_ranks)]
    assert sorted(stages) == list(range(n_ranks * PER_RANK[schedule]))


def test_parts_of_a_batch_cut_what_has_samples_and_nothing_else() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + table

    table = torch.randn(16)
    step = step_of(Masked(), (BATCH,), table=table)
    parts = [step.part(number, 4) for number in range(4)]
    assert torch.equal(torch.cat([part.args[0] for part in parts]), BATCH)
    assert torch.equal(torch.cat([part.target for part in parts]), BATCH)
    assert all(torch.equal(part.kwargs["table"], table) for part in parts)
    assert sum(part.run() or 0 for part in parts) / 4 == pytest.approx(step.run(), rel=1e-5)
    with pytest.raises(Refusal, match="8 samples has no 3 equal parts"):
        step.part(0, 3)


# -- what they refuse -------------------------------------------------------------------------------------------------


class Branched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(x)


@pytest.mark.slow
def test_a_model_that_is_no_row_is_refused_in_words_and_the_rest_is_compared() -> None:
    pytest.importorskip("torchgpipe")
    found = compared(Branched(), [PIPELINING, GPIPE, PLAIN], **LOSS)
    assert [bool(row.refused) for row in found.systems] == [True, True, False]
    assert all("nn.Sequential" in row.refused for row in found.systems[:2])


@pytest.mark.slow
def test_shared_parameters_in_two_stages_are_refused() -> None:
    layer = nn.Linear(16, 16)
    found = compared(nn.Sequential(layer, nn.Tanh(), layer), [PIPELINING], **LOSS)
    assert "2.weight is read in two stages" in found.systems[0].refused


@pytest.mark.slow
def test_what_cannot_be_sent_to_a_process_is_refused() -> None:
    loss = {"target": BATCH, "loss_fn": lambda out, y: (out - y).square().mean()}
    found = compared(row_model(), [CEILING], **loss)
    assert found.ceiling is not None
    assert "top level" in found.ceiling.refused
    assert "ceiling was not measured" in ceiling_text(found)
    assert found.ceiling_speed_up is None


@pytest.mark.slow
def test_without_a_loss_there_is_no_pipeline_to_run_but_a_ceiling() -> None:
    found = compared(row_model(), [PIPELINING, CEILING])
    assert "loss_fn=" in found.systems[0].refused
    assert found.ceiling is not None
    assert len(found.ceiling.steps) == 1


def test_unknown_systems_and_missing_packages_are_named_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="did you mean 'torchgpipe'"):
        compared(row_model(), ["torchpipe"])
    with pytest.raises(InputError, match="list of names"):
        compared(row_model(), "DDP")
    find = importlib.util.find_spec
    monkeypatch.setattr(catalogue.importlib.util, "find_spec", lambda name: None if name == GPIPE else find(name))
    with pytest.raises(InputError, match=r"torchgpipe: pip install \"autopar\[peers\]\""):
        compared(row_model(), [GPIPE])
    cluster = autopar.Cluster.preset("2xH100")
    with pytest.raises(InputError, match="not at hand"):
        autopar.compare(row_model(), cluster, example_args=(BATCH,), systems=[PLAIN])
    assert all(name in SYSTEMS for name in (PLAIN, CEILING, f"{PIPELINING}:DualPipeV"))


# -- what may be claimed ----------------------------------------------------------------------------------------------


def comparison(steps: dict[str, tuple[float, ...]], ceiling: tuple[float, ...] = ()) -> Comparison:
    """Of made-up steps; the first is the plain model."""
    rows = [Row(name, PLAN, taken, {}, {}) for name, taken in steps.items()]
    apart = SystemRow(CEILING, "2 processes", ceiling) if ceiling else None
    return Comparison(rows[0], tuple(rows[1:]), ("cpu:0", "cpu:1"), 8, training=True, ceiling=apart)


ROUNDS = (1.0, 1.1, 2.0, 1.05, 1.2, 1.0, 1.3)  # the machine was slow in one of them


def times(factor: float, noise: float = 0.0, seed: int = 0) -> tuple[float, ...]:
    random = np.random.default_rng(seed)
    return tuple(s * factor * (1 + noise * random.uniform(-1, 1)) for s in ROUNDS)


def test_a_plan_that_is_faster_in_every_round_wins() -> None:
    found = comparison({"one device": times(1.0), "auto": times(0.6, 0.02), "hand": times(0.7, 0.02)})
    assert found.verdict.winner == "auto"
    assert found.verdict.rival == "hand"
    assert verdict_text(found).startswith("winner: auto; hand takes 1.1")


def test_there_is_no_winner_where_intervals_overlap_or_rounds_are_few() -> None:
    close = comparison({"one device": times(1.0), "auto": times(0.6, 0.1, 1), "hand": times(0.61, 0.1, 2)})
    assert close.verdict.winner is None
    assert verdict_text(close).startswith("no winner: the intervals overlap")
    few = comparison({"one device": (1.0, 1.0, 1.0), "auto": (0.5, 0.5, 0.5)})
    assert few.verdict.winner is None
    assert verdict_text(few).startswith("no winner: 3 steps allow an interval of 75% only")


def test_many_rivals_need_a_clearer_difference() -> None:
    """With 40 rivals that differ by noise alone, one of them looks slower by chance."""
    names = {f"plan {i}": times(0.6, 0.05, i) for i in range(40)}
    levels = [comparison(dict(list(names.items())[:n])).verdict.interval.level for n in (2, 41)]  # type: ignore[union-attr]
    assert levels[0] == 0.95
    assert levels[1] == 1 - 2.0 ** (1 - len(ROUNDS))  # as much as seven rounds allow


def test_a_busy_machine_shows_in_its_ceiling() -> None:
    quiet = comparison({"one device": times(1.0)}, ceiling=times(0.52))
    busy = comparison({"one device": times(1.0)}, ceiling=times(0.8))
    assert quiet.ceiling_speed_up == pytest.approx(1 / 0.52)
    assert not quiet.disturbed
    assert "1.92x one device" in ceiling_text(quiet)
    assert busy.disturbed
    assert "something else uses the cores" in ceiling_text(busy)


# -- how it is shown --------------------------------------------------------------------------------------------------


def shown() -> Comparison:
    found = comparison({"one device": times(1.0), "auto": times(0.6, 0.02)}, ceiling=times(0.52))
    ready = SystemRow(DDP, "2 processes", times(0.7))
    refused = SystemRow(PIPELINING, "", (), "it cuts an nn.Sequential")
    return dataclasses.replace(found, systems=(ready, refused), measured_on="2 x a CPU; 2026-12-01")


def test_the_page_of_a_comparison_has_its_systems_ceiling_and_verdict() -> None:
    text = " ".join(str(shown().report()).split())
    for part in ("Winner: auto", "nn.Sequential", "2 processes", "1.92x", "2 x a CPU; 2026-12-01"):
        assert part in text


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_figure_has_every_row_that_was_measured(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"compared{suffix}"
    shown().figure(path)
    if suffix == ".svg":
        drawn = path.read_text()
        assert all(f"<!-- {name} -->" in drawn for name in ("one device", "auto", DDP, "ms a step"))
        assert f"<!-- {PIPELINING} -->" not in drawn
    else:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"] + ["matplotlib.figure"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(AutoparError, match=r"autopar\[figure\]"):
        shown().figure(tmp_path / "compared.png")
