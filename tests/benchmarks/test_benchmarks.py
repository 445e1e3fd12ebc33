"""The benchmarks run, and their arithmetic is right; how fast anything is, is not looked at."""

import importlib.util
import itertools
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autopar.plan.plan import Plan
from autopar.plan.stage import Stage
from autopar.runtime.other_systems.blocks import block_seconds
from autopar.runtime.other_systems.independent import CEILING
from autopar.runtime.other_systems.processes import Processes
from autopar.schedule.builders import make_schedule
from autopar.schedule.clock import Action, Phase
from benchmarks import estimates, overhead, peer_models, peers, stamps, training, zoo
from benchmarks.__main__ import main
from benchmarks.bound import lower_bound
from benchmarks.distributed_systems import STAGES, BenchmarkRank
from benchmarks.kept import Kept
from benchmarks.machine import machine_header
from benchmarks.models import Workload
from benchmarks.output import Report, Rounds, Table, to_markdown
from benchmarks.peers import AUTOPAR, GLOO, GPIPE, GPIPE_WORKERS, Outcome
from benchmarks.registry import BENCHMARKS
from benchmarks.sweep import PIPELINE, REPLICAS, SHARES, Final, Grid, GridPlan, choose_cuts, summary
from benchmarks.timing import interleave, ratio, slope
from benchmarks.training import FREE, PLAIN, PLAIN_THREADS, PURE, PURE_CALL, Scale, report_of
from cost_models.hardware.devices import operator_threads

COUNTS = (1, 2, 3)
CUTS = 2
ROUNDS = 2


@pytest.fixture(scope="module")
def workload() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)])
    batch = torch.randn(6, 32), torch.randn(6, 32)
    return Workload("a tiny net", model, {"input": batch[0]}, batch[1], nn.functional.mse_loss)


@pytest.fixture(scope="module")
def report(workload: Workload) -> Report:
    return report_of(workload, Scale(ROUNDS, 1, Grid(CUTS, COUNTS)), Kept())


# -- timing -----------------------------------------------------------------------------------------------------------


def test_steps_are_run_in_turn_after_a_round_that_does_not_count() -> None:
    calls: list[str] = []
    steps = {name: partial(calls.append, name) for name in "abc"}
    seconds = interleave(steps, 9, before=lambda: calls.append("-"))
    assert calls[::2] == ["-"] * 30
    rounds = ["".join(calls[start : start + 6 : 2]) for start in range(1, 60, 6)]
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert len(set(rounds)) > 3  # none always follows the same one
    assert {name: len(taken) for name, taken in seconds.items()} == {"a": 9, "b": 9, "c": 9}


def test_ratio_pairs_the_times_of_a_round() -> None:
    # The second round met a machine half as fast: pairs do not see it, medians of each would.
    assert ratio([3.0, 6.0, 3.0], [1.0, 2.0, 1.5]) == 3.0


@pytest.mark.slow
@given(st.floats(-10, 10), st.floats(-10, 10))
def test_slope_is_that_of_the_line_the_points_lie_on(steepness: float, offset: float) -> None:
    xs = [2, 4, 8, 16, 32]
    assert slope(xs, [steepness * x + offset for x in xs]) == pytest.approx(steepness, abs=1e-9)


# -- the sweep's cuts -------------------------------------------------------------------------------------------------


def test_a_cut_lies_at_the_outermost_module_boundary_near_its_share() -> None:
    # Piece by piece, the middle is within `a`; the end of `a` is near enough, that of `b` too far.
    paths = ["net.a.x"] * 6 + ["net.a.y"] + ["net.b"] * 4 + ["net.c"]
    assert choose_cuts(np.ones(12), list(itertools.pairwise(paths)), 1) == [7]


@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=30), st.integers(1, 7))
def test_cuts_leave_both_stages_work_and_are_the_nearest_where_modules_do_not_matter(
    seconds: list[float], n: int
) -> None:
    times = np.array(seconds)
    cuts = choose_cuts(times, [("", "")] * (len(times) - 1), n)
    shares = np.cumsum(times)[:-1] / times.sum()
    targets = np.linspace(*SHARES, n) if n > 1 else np.array([0.5])
    nearest = {float(np.min(np.abs(shares - t))).__round__(9) for t in targets}
    assert cuts == sorted(set(cuts))
    assert 1 <= cuts[0] <= cuts[-1] < len(times)
    assert {float(np.min([abs(shares[c - 1] - t) for c in cuts])).__round__(9) for t in targets} == nearest


# -- what a run reports -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_training_compares_every_way_to_run_the_step(report: Report) -> None:
    rows = {row["name"]: row for row in report.data["rows"]}
    assert list(rows) == [PLAIN, FREE, PURE, PURE_CALL, CEILING, PLAIN_THREADS]
    for name in (FREE, PURE, PURE_CALL):
        assert rows[name]["predicted"] > 0
    assert rows[PLAIN]["speedup"] == 1
    assert all(len(row["steps"]) == (1 if name == PLAIN_THREADS else ROUNDS) for name, row in rows.items())


@pytest.mark.slow
def test_sweep_measures_every_cut_and_replicas_at_every_number_of_microbatches(report: Report) -> None:
    points = report.data["sweep"]["points"]
    found = sorted((p["shape"], p["n_microbatches"], p["share"]) for p in points if p["shape"] == PIPELINE)
    shares = sorted({share for _, _, share in found})
    assert len(shares) == CUTS
    several = [(PIPELINE, m, share) for m in COUNTS[1:] for share in shares]
    assert [entry for entry in found if entry[1] > 1] == several
    assert [m for _, m, _ in found].count(1) == 1  # stages do not overlap: one cut tells all
    assert sorted(p["n_microbatches"] for p in points if p["shape"] == REPLICAS) == [2, 3]
    assert all(p["predicted"] > 0 for p in points)
    assert all(len(p["steps"]) == ROUNDS for p in points)


def test_the_sweep_is_compared_with_the_automatic_plan_round_by_round() -> None:
    stage = Stage(("cpu:0",), ("a",))
    plans = [GridPlan(PIPELINE, 0.5, "b", Plan((stage,), m), 1.0) for m in (2, 4)]
    plans.append(GridPlan(REPLICAS, None, "", Plan((stage,), 2), 1.0))
    # The second round met a machine half as fast.
    times = [(3.0, 6.0, 3.0), (2.0, 5.0, 2.0), (1.0, 2.0, 1.5)]
    sweep = summary(plans, dict(zip(map(str, plans), times, strict=True)), auto=(1.0, 2.0, 1.0))
    assert [point.measured for point in sweep.points] == [3.0, 2.0, 1.5]
    assert [point.over_auto for point in sweep.points] == [3.0, 2.0, 1.0]
    assert (sweep.fastest.name, sweep.fastest_pipeline.name) == (str(plans[2]), str(plans[1]))
    assert {m: point.measured for m, point in sweep.best(PIPELINE, lambda p: p.measured).items()} == {2: 3.0, 4: 2.0}


def test_the_best_of_the_sweep_races_the_automatic_plan_in_rounds_that_did_not_choose_it() -> None:
    """Both ratios come from the given rounds alone; one plan under two names ran once."""
    final = Final.of("a cut", (1.0, 2.0, 1.0, 1.1, 1.0), (2.0, 4.0, 2.0, 2.2, 1.0), same=False)
    assert (final.over_best, final.interval.low, final.interval.high) == (0.5, 0.5, 1.0)
    same = Final.of("the same", (1.0, 2.0), (), same=True)
    assert (same.over_best, same.interval.low, same.interval.high) == (1, 1, 1)
    assert same.best == same.automatic


@pytest.mark.slow
def test_an_interrupted_sweep_keeps_its_plans_and_rounds(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, scale = tmp_path / "x.jsonl", Scale(ROUNDS, 1, Grid(CUTS, COUNTS))
    wrap = training._wrap_cost

    def interrupted(*_: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "_wrap_cost", interrupted)
    with pytest.raises(KeyboardInterrupt):
        report_of(workload, scale, Kept(path))
    monkeypatch.setattr(training, "_wrap_cost", wrap)
    monkeypatch.setattr(training, "_planned", interrupted)  # not again
    before = Kept(path)
    found = report_of(workload, scale, Kept(path))
    (together, finals, _) = found.measured
    for number in range(ROUNDS):
        assert before.get("all", "round", number) == {name: taken[number] for name, taken in together.seconds.items()}
    assert set(finals.seconds) >= {FREE, PURE, CEILING}
    assert together.ceiling == CEILING


@pytest.mark.slow
def test_training_leaves_parameters_as_they_were(workload: Workload, report: Report) -> None:
    torch.manual_seed(0)
    again = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)])
    assert report.tables
    for ours, fresh in zip(workload.model.parameters(), again.parameters(), strict=True):
        assert ours.grad is None
        assert torch.equal(ours, fresh)


@pytest.mark.exhaustive
def test_overhead_has_a_time_and_a_ceiling_for_every_number_of_microbatches() -> None:
    counts = (2, 4)
    result = overhead.measure(overhead.Scale(counts, 2), Kept())
    for times in (result.pipeline, result.accumulation, result.ceiling):
        assert set(times) == set(overhead.LAYERS)
        assert all(set(t) == set(counts) and min(t.values()) > 0 for t in times.values())
    assert len({rounds.what for rounds in result.rounds}) == len(result.rounds) == len(overhead.LAYERS) * 2 + 2
    for rounds in result.rounds:
        assert rounds.ceiling in rounds.seconds
        assert {len(taken) for taken in rounds.seconds.values()} == {2}
    for layers, rounds in zip(overhead.LAYERS, result.rounds[:: len(counts)], strict=False):
        assert result.ceiling[layers][2] == pytest.approx(np.median(rounds.seconds[CEILING]))


def test_what_stamps_cost_is_the_median_ratio_of_steps_of_one_round() -> None:
    """A round that is slow as a whole says nothing."""
    plain, stamped = (1.0, 5.0, 1.0, 1.0, 1.0), (1.01, 5.05, 1.01, 1.03, 0.9)
    found = stamps.Stamps(Rounds("net", {stamps.PLAIN: plain, stamps.STAMPED: stamped, stamps.PROFILED: plain}))
    assert found.ratio(stamps.STAMPED) == pytest.approx(1.01)
    assert found.interval(stamps.STAMPED).low < 1.01 < found.interval(stamps.STAMPED).high
    rows = {row[0]: row[2:] for row in found.table().rows}
    assert rows[stamps.PLAIN] == ("", "")
    assert rows[stamps.STAMPED][0] == "+1.00%"
    assert rows[stamps.PROFILED] == ("+0.00%", "+0.00% to +0.00%")


@pytest.mark.slow
def test_stamps_are_measured_on_steps_of_one_model_in_turn() -> None:
    found = stamps.measure_stamps(True, 2, Kept())
    assert {name: len(taken) for name, taken in found.rounds.seconds.items()} == dict.fromkeys(
        (stamps.PLAIN, stamps.STAMPED, stamps.PROFILED), 2
    )
    assert found.data()[stamps.STAMPED]["ratio"] > 0


@pytest.mark.slow
def test_the_ceiling_of_overhead_computes_what_the_plain_model_does_in_turn() -> None:
    """Each process its half of the micro-batches: the mean of their gradients is that of the whole batch."""
    model, x, y = overhead.example(1)
    overhead._accumulation_step(model, x, y, 4)()
    with Processes(overhead.OverheadRank, overhead.STAGES) as ranks:
        ranks.call(overhead.OverheadRank.in_turn, "a", 1, 4, 3)
        ranks.call(overhead.OverheadRank.step, "a")
        names = [name for name, _ in model.named_parameters()]
        parts = ranks.call(overhead.OverheadRank.gradients, "a", names)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        mean = sum(part[name] for part in parts) / len(parts) / 3  # three steps in a call
        np.testing.assert_allclose(mean, parameter.grad.numpy(), rtol=1e-4, atol=1e-7)


@pytest.mark.exhaustive
def test_zoo_compares_a_model_with_its_copy() -> None:
    subject = zoo.bert(quick=True)
    row = zoo.measure(subject, rounds=1)
    assert row.parameters == sum(p.numel() for p in subject.model.parameters())
    assert 1 <= len(row.operators) <= 8  # stages, as the noise of so short a profile has it
    assert min(row.operators) > 0
    assert len(row.steps) == len(row.plain_steps) == len(row.ceiling_steps) == 1
    (rounds,) = zoo._rounds([row])
    assert rounds.seconds[CEILING] == row.ceiling_steps
    assert rounds.ceiling == CEILING
    assert max(row.output_error, row.gradient_error) < 1e-5


def test_halves_of_a_subject_make_the_step_of_the_whole() -> None:
    """The ceiling's processes do the work of the plain step, each its part: the mean of their losses is the loss."""
    subject = zoo.bert(quick=True)
    whole = subject.training_step.run()
    halves = [subject.training_step.part(number, 2).run() for number in range(2)]
    assert whole is not None
    assert np.mean(halves) == pytest.approx(whole, rel=1e-5)


@pytest.mark.exhaustive
def test_estimates_measure_the_step_beside_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(estimates, "MODELS", (zoo.vit,))
    (rounds,) = estimates.run_estimates(True, Kept()).measured
    assert rounds.ceiling == CEILING
    assert {name: len(taken) for name, taken in rounds.seconds.items()} == {"step": 5, CEILING: 5}


def test_gradient_error_is_relative_to_the_largest_gradient_and_finds_a_missing_one() -> None:
    model, oracle = nn.Linear(2, 1), nn.Linear(2, 1)
    oracle.weight.grad, oracle.bias.grad = torch.tensor([[3.0, 4.0]]), torch.tensor([2.0])
    model.weight.grad = torch.tensor([[3.0, 4.5]])
    assert zoo.largest_gradient_error(model, oracle) == pytest.approx(2 / 5)
    model.bias.grad = torch.tensor([2.0])
    assert zoo.largest_gradient_error(model, oracle) == pytest.approx(0.5 / 5)
    model.bias.grad = torch.tensor([torch.nan])
    assert np.isnan(zoo.largest_gradient_error(model, oracle))


def test_header_names_machine_date_versions_and_threads() -> None:
    header = machine_header()
    assert header["torch"] == torch.__version__ or torch.__version__.startswith(header["torch"])
    assert {"date", "processor", "python", "transformers", "OMP_NUM_THREADS"} <= set(header)
    assert all(header.values())


def test_markdown_has_a_line_a_row_and_bars_do_not_break_it() -> None:
    table = Table("T", ("", "s"), (("cpu:0 | cpu:1", "1"), ("b", "2")), "read it so")
    lines = to_markdown(Report("R", (table,), {}), {"date": "today"}).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 4
    assert rows[2] == "| cpu:0 \\| cpu:1 | 1 |"
    assert "- date: today" in lines
    assert lines[-1] == "read it so"


# -- other pipelines --------------------------------------------------------------------------------------------------


@pytest.fixture
def without_gpipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchgpipe is not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == GPIPE else find(name, *rest))


@pytest.mark.parametrize(
    "build",
    [peer_models.tiny, *(partial(build, True) for build in (peer_models.resnet, peer_models.gpt, peer_models.bert))],
)
def test_blocks_in_a_row_are_the_model(build: peer_models.Builder) -> None:
    subject = build()
    workload = subject.workload
    model_loss = workload.loss(workload.model(**workload.inputs), workload.target)
    blocks_loss = subject.loss(subject.blocks(subject.input), workload.target)
    assert torch.equal(model_loss, blocks_loss)
    parameters = [p for p in workload.model.parameters() if p.requires_grad]
    expected, found = (torch.autograd.grad(loss, parameters) for loss in (model_loss, blocks_loss))
    assert all(map(torch.equal, found, expected))


def test_every_block_is_timed_and_leaves_no_gradient() -> None:
    subject = peer_models.gpt(quick=True)
    seconds = block_seconds(subject.training_step, n_microbatches=4, rounds=1)
    assert len(seconds) == len(subject.blocks)
    assert min(seconds) > 0
    assert all(p.grad is None for p in subject.workload.model.parameters())


@given(st.integers(1, 6), st.floats(0.1, 2), st.floats(0.1, 2))
def test_bound_of_two_stages_is_the_sum_and_the_slower_ones_other_turns(m: int, first: float, second: float) -> None:
    schedule = make_schedule("gpipe", m, [1, 1])
    times = (first, second)
    # A backward takes as long as its forward. Of three steps one was disturbed: the median does not see it.
    steps = [{a: times[a.stage] * k for table in schedule.actions for a in table} for k in (1, 1, 9)]
    assert lower_bound(schedule, steps) == pytest.approx(2 * (sum(times) + (m - 1) * max(times)))


def test_bound_counts_both_parts_of_a_split_backward() -> None:
    schedule = make_schedule("zb-h1", 1, [1, 1])
    seconds = {Phase.FORWARD: 1.0, Phase.INPUT: 2.0, Phase.WEIGHT: 4.0}
    step = {action: seconds[action.phase] for table in schedule.actions for action in table}
    assert Action(Phase.WEIGHT, 0, 0) in step
    assert lower_bound(schedule, [step]) == pytest.approx(1 + 1 + 2 + 2 + 4)


def test_errors_are_relative_to_the_reference_and_a_missing_gradient_counts() -> None:
    reference = Outcome(2.0, {"a": np.array([3.0, 4.0]), "b": np.array([2.0])})
    assert Outcome(2.5, {"a": np.array([3.0, 4.0])}).errors(reference) == pytest.approx((0.25, 2 / 5))
    assert np.isnan(Outcome(2.0, {"a": np.array([np.nan, 4.0]), "b": np.array([2.0])}).errors(reference)[1])


@pytest.mark.slow
def test_what_is_not_installed_has_no_row_and_is_listed(without_gpipe: None) -> None:
    title, rows = peers.compare(peer_models.tiny, (2, 4), 1, peers.QUICK, None, Kept())
    assert [(row.system, row.n_microbatches, row.over_autopar) for row in rows] == [
        (AUTOPAR, 2, 1.0),
        (AUTOPAR, 4, 1.0),
    ]
    assert all(row.alone is not None and row.alone > 0 for row in rows)
    assert all(row.over_bound is not None and row.over_bound >= 1 - 1e-9 for row in rows)
    for table in (peers._tiny_table(title, rows), peers._model_table(title, rows)):
        missing = [line[0] for line in table.rows if {"not installed", "not run"} & set(line)]
        assert set(missing) == set(peers.SYSTEMS) - {AUTOPAR}


@pytest.mark.exhaustive
def test_torchgpipe_steps_with_one_worker_and_with_one_a_stage_compute_what_the_plain_model_does() -> None:
    with operator_threads(1):
        _, rows = peers.compare(partial(peer_models.gpt, True), (2,), 1, peers.QUICK, None, Kept())
    assert [row.system for row in rows] == [AUTOPAR, GPIPE, GPIPE_WORKERS]
    assert max(error for row in rows for error in (row.loss_error, row.gradient_error)) < 1e-5


@pytest.mark.slow
def test_a_system_that_computes_something_else_is_found(without_gpipe: None, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = peers._train_step
    monkeypatch.setattr(peers, "_train_step", lambda *args: lambda: honest(*args)() * 1.1)
    with pytest.raises(RuntimeError, match=r"autopar, .*: the loss is off by 1\.0e-01"):
        peers.compare(peer_models.tiny, (2,), 1, peers.QUICK, None, Kept())


@pytest.mark.slow
def test_processes_compute_what_the_plain_model_does_and_tell_what_went_wrong(without_gpipe: None) -> None:
    with operator_threads(1), Processes(BenchmarkRank, STAGES) as ranks:
        build = partial(peer_models.gpt, True)  # tied: a gradient from both processes
        subject = build()
        ranks.call(BenchmarkRank.load, build)
        names = [name for name, _ in subject.workload.model.named_parameters()]
        systems = peers._gloo(subject, 4, 1, ranks, names)
        assert set(systems) == set(GLOO)
        reference = Outcome(peers._accumulated(subject, 4), peers.gradients_of(subject.workload.model, names))
        for system in systems.values():
            ranks.call(BenchmarkRank.clear)
            loss = system.step()
            assert max(Outcome(loss, system.gradients()).errors(reference)) < 1e-5
        with pytest.raises(RuntimeError, match="KeyError: 'nonsense'"):
            ranks.call(BenchmarkRank.gradients, "nonsense", names)


# -- the command ------------------------------------------------------------------------------------------------------


def test_list_names_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in BENCHMARKS)


def test_the_list_is_json_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {name: what for name, (what, _) in BENCHMARKS.items()}


@pytest.mark.parametrize("name", ["published", "partition_instances"])
def test_a_benchmark_of_a_folder_names_the_option_that_it_needs(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", name, "--results", str(tmp_path)]) == 0
    assert "skipped: --" in capsys.readouterr().out
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "is no JSON file"),
        ("[]", "is no instance: it lacks nodes, edges"),
        ('{"nodes": [], "edges": [{}], "maxSizePerFPGA": 1, "maxFPGAs": 1, "maxCPUs": 1}', "edges[0] lacks sourceId"),
        ('{"nodes": 3, "edges": [], "maxSizePerFPGA": 1, "maxFPGAs": 1, "maxCPUs": 1}', "nodes[0] lacks id"),
    ],
)
def test_a_file_that_is_no_instance_is_refused_by_its_name(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "LayerGraphs").mkdir()
    (tmp_path / "LayerGraphs" / "broken.json").write_text(text)
    assert main(["run", "partition_instances", "--instances", str(tmp_path), "--results", str(tmp_path / "r")]) == 2
    error = capsys.readouterr().err
    assert "broken.json" in error
    assert message in error


def test_an_instance_that_makes_no_sense_or_does_not_fit_leaves_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = {"supportedOnFpga": 1, "cpuLatency": 2.0, "fpgaLatency": 1.0, "isBackwardNode": 0, "size": 5.0}
    good: dict[str, Any] = {
        "nodes": [{**node, "id": 0}, {**node, "id": 1}],
        "edges": [{"sourceId": 0, "destId": 1, "cost": 0.5}],
        "maxSizePerFPGA": 5.0,
        "maxFPGAs": 2,
        "maxCPUs": 0,
    }
    bad = {
        "edge": good | {"edges": [{"sourceId": 7, "destId": 1, "cost": 0.5}]},
        "none": good | {"maxFPGAs": 0},
        "nan": good | {"nodes": [{**node, "id": 0, "size": float("nan")}]},
        "text": good | {"nodes": [{**node, "id": 0, "fpgaLatency": "1"}]},
        "twice": good | {"nodes": [{**node, "id": 0}, {**node, "id": 0}]},
        "empty": good | {"nodes": [], "edges": []},
    }
    (tmp_path / "some").mkdir()
    for name, instance in {"good": good, "small": good | {"maxSizePerFPGA": 4.0}, **bad}.items():
        (tmp_path / "some" / f"{name}.json").write_text(json.dumps(instance))
    out = tmp_path / "out.json"
    arguments = ["--instances", str(tmp_path), "--results", str(tmp_path / "r"), "--json", str(out)]
    assert main(["run", "partition_instances", *arguments]) == 0
    printed, found = capsys.readouterr().err, json.loads(out.read_text())
    assert {name: one["objective"] for name, one in found.items()} == {"some/good": 1.5, "some/small": None}
    assert all(f"some/{name}: skipped: " in printed for name in bad)


@pytest.mark.parametrize("arguments", [["nonsense"], []])
def test_without_a_known_name_it_exits_2_with_the_list(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert all(name in printed.err for name in BENCHMARKS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "overhead", "--tables", "x"], "--tables is an option of published; overhead does not read it"),
        (["run", "gpu", "--models", "wrong"], "no model wrong; gpu has resnet"),
        (["run", "overhead", "--json", "FOLDER"], "is a folder; give the name of a file"),
        (["run", "overhead", "--results", "FILE"], "--results: cannot write in"),
        (["all", "--json", "FILE/out.json"], "--json: cannot write in"),
        (["run", "gpt", "--figure", "FILE/out.png"], "--figure: cannot write in"),
        (["run", "gpt", "--figure", "out.txt"], "--figure out.txt: give a name that ends in .png, .svg, .pdf"),
        (["run", "overhead", "--figure", "out.png"], "--figure is an option of tutorial and gpt; overhead draws none"),
        (["run", "gpu", "--device", "gpu0"], "--device gpu0: give cuda, cuda:N or cpu"),
        (["run", "published", "--tables", "FILE"], "there is no such folder"),
        (["run", "partition_instances", "--instances", "FOLDER/none"], "there is no such folder"),
        (["run", "--json", "gpt"], "--json took gpt as the file to write; put the name first: run gpt --json"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_options_that_cannot_be_followed_are_refused_before_anything_runs(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    words = [one.replace("FOLDER", str(tmp_path)).replace("FILE", str(file)) for one in arguments]
    assert main([*words, *([] if "--results" in words else ["--results", str(tmp_path)])]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def small() -> Report:
    """With a table and a figure."""

    def draw(path: Path) -> None:
        from matplotlib.figure import Figure

        Figure().savefig(path)

    table = Table("T", ("", "s"), (("n_microbatches 2", "1"),))
    return Report("R", (table,), {"rows": [1, 2]}, draw)


def test_results_are_written_as_json_markdown_and_figure(
    small: Report, tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(BENCHMARKS, "gpt", ("", lambda run: small))
    chosen = tmp_path / "elsewhere" / "data.json"
    assert main(["gpt", "--results", str(tmp_path / "results"), "--json", str(chosen)]) == 0
    data = json.loads(chosen.read_text())
    assert data["machine"]["torch"]
    assert len(data["rows"]) == len(small.data["rows"])
    page = (tmp_path / "results" / "gpt.md").read_text()
    assert "(gpt.png)" in page
    assert all(f"## {table.title}" in page for table in small.tables)
    assert (tmp_path / "results" / "gpt.png").read_bytes().startswith(b"\x89PNG")
    assert "n_microbatches" in capsys.readouterr().out


def test_quick_results_do_not_replace_full_ones(small: Report, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BENCHMARKS, "gpt", ("", lambda run: Report("R", small.tables, small.data)))
    assert main(["gpt", "--quick", "--results", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpt-quick.json", "gpt-quick.md"]


def test_without_matplotlib_the_figure_is_skipped_with_a_message(
    small: Report, tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"] + ["matplotlib.figure"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(BENCHMARKS, "gpt", ("", lambda run: small))
    assert main(["gpt", "--results", str(tmp_path)]) == 0
    assert "no figure" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpt.json", "gpt.md"]


def test_without_transformers_it_exits_1_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["tutorial", "--quick"]) == 1
    assert "transformers" in capsys.readouterr().err
