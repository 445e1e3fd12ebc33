"""The benchmarks of processes, networks and scale run, and their arithmetic is right."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.runtime.other_systems.blocks import balanced
from autopar.runtime.other_systems.pipelining import PER_RANK
from autopar.runtime.other_systems.processes import Processes
from benchmarks import peer_models, scale
from benchmarks.distributed import AUTOPAR, DATA, SHARDED, THREADS, compare
from benchmarks.distributed_systems import STAGES, BenchmarkRank
from benchmarks.kept import Kept
from benchmarks.scale_models import MODELS, QUICK, ExpertModel, Experts
from cost_models.hardware.devices import operator_threads


@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=7), st.integers(2, 4))
def test_blocks_are_cut_so_that_the_longest_stage_is_as_short_as_any(seconds: list[float], n: int) -> None:
    n = min(n, len(seconds))

    def longest(cuts: tuple[int, ...]) -> float:
        return max(sum(seconds[a:b]) for a, b in itertools.pairwise((0, *cuts, len(seconds))))

    cuts = balanced(seconds, n)
    assert len(cuts) == n - 1
    best = min(map(longest, itertools.combinations(range(1, len(seconds)), n - 1)))
    assert longest(tuple(cuts)) == pytest.approx(best)


@pytest.mark.slow
@pytest.mark.parametrize("build", [peer_models.tiny])
def test_every_system_computes_what_the_plain_model_does(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of autopar; what another system computes wrongly has no times."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(STAGES))
    with operator_threads(1), Processes(BenchmarkRank, STAGES) as ranks:
        _, rows = compare(build, 2, ranks, Kept())
    timed = {row.system: row for row in rows if row.steps}
    wanted = [f"{system}, {kind}" for system in (AUTOPAR, THREADS) for kind in ("automatic", "pipeline", "replicas")]
    assert {*wanted, DATA, SHARDED, *(f"pipelining, {name}" for name in PER_RANK)} <= set(timed)
    pipeline = timed[f"{AUTOPAR}, pipeline"]
    assert pipeline.predicted is not None
    assert pipeline.sent == pipeline.planned  # bytes between stages


def test_an_interrupted_run_goes_on_with_the_cases_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[tuple[str, int, str]] = []

    def row(*case: Any) -> dict[str, Any]:
        planned.append(case)
        if len(planned) == 2:
            raise KeyboardInterrupt
        return {**dict(zip(("model", "devices", "plan"), case, strict=True)), "refused": "too large", "planning": 1.0}

    monkeypatch.setattr(scale, "_in_its_own_process", row)
    path = tmp_path / "scale-quick.partial.jsonl"
    with pytest.raises(KeyboardInterrupt):
        scale.run_scale(True, Kept(path), at_once=1)
    path.write_text(path.read_text() + '{"key": ["cut o')
    report = scale.run_scale(True, Kept(path), at_once=1)
    assert planned == [scale._cases(True)[0], *scale._cases(True)[1:2], *scale._cases(True)[1:]]
    assert len(report.data["cases"]) == len(scale._cases(True)) == len(path.read_text().splitlines()) - 1
    assert all(json.loads(line) for line in path.read_text().splitlines())


@pytest.mark.slow
def test_a_mixture_of_experts_is_planned_and_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    scale.print_case("experts_2_layers", 2, scale.SEARCHED)
    row = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert row["fits"]
    assert 0 < row["utilisation"] < 1
    assert row["device_hours"] == pytest.approx(row["step"] * 2 / 3600 * 1e12 / (4 * 64))


@pytest.mark.slow
def test_a_refused_hand_plan_says_what_contradicts(capsys: pytest.CaptureFixture[str]) -> None:
    scale.print_case("gpt_2_layers", 1, scale.BY_HAND)
    row = json.loads(capsys.readouterr().out)
    assert "tensor=2" in row["refused"]
    assert "not 1" in row["refused"]
    assert "tensor=2" in scale._line(row)[1]


def test_hand_plans_divide_states_only_over_replicas() -> None:
    training = MODELS["gpt3_175b"]
    degrees = training.by_hand["tensor"] * training.by_hand["pipeline"]
    assert "zero" not in training.degrees(degrees)
    assert training.degrees(2 * degrees) == training.by_hand


def test_experts_take_their_best_tokens_and_add_up_where_they_came_from() -> None:
    """Against a loop over samples, experts and tokens."""
    torch.manual_seed(0)
    sizes = QUICK["experts_2_layers"].sizes
    layer = Experts(sizes)  # type: ignore[arg-type]
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(2, sizes.seq, sizes.hidden)
    expected, scores = layer.shared(x), layer.router(x).sigmoid()
    for sample in range(2):
        for expert in range(sizes.experts):  # type: ignore[union-attr]
            for place in scores[sample, :, expert].topk(layer.taken).indices.tolist():
                row = x[sample, place]
                inside = torch.nn.functional.silu(row @ layer.gate[expert]) * (row @ layer.up[expert])
                made = scores[sample, place, expert] * (inside @ layer.down[expert])
                expected = expected.index_put((torch.tensor(sample), torch.tensor(place)), made, accumulate=True)
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)
    assert isinstance(QUICK["experts_2_layers"].sizes.build(), ExpertModel)
