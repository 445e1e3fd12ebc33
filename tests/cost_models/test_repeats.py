"""Measurements that disagree are taken again: fixed times instead of clocks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

import autopar
from autopar.costs import measured
from cost_models.measuring import core_waiting, operator_times, timed_passes
from cost_models.measuring.repeats import AGREEMENT, agree, spread, until_two_agree
from cost_models.measuring.timed_passes import GraphRunner, TimedPass

seconds = st.lists(st.floats(0.1, 100), min_size=1, max_size=8)


@given(seconds, st.integers(1, 8))
def test_the_lower_of_two_that_agree_is_kept_and_no_more_are_taken_than_needed(taken: list[float], most: int) -> None:
    first, *later = taken
    remaining = iter(later + [1000.0 * 2**i for i in range(10)])  # far apart from each other
    seen = [first]

    def again() -> float:
        seen.append(next(remaining))
        return seen[-1]

    kept, agreed = until_two_agree(first, again, lambda t: t, most)
    pairs = [(a, b) for i, a in enumerate(seen) for b in seen[:i] if max(a, b) <= AGREEMENT * min(a, b)]
    assert agreed == bool(pairs)
    assert kept == (min(map(min, pairs)) if pairs else min(seen))
    assert len(seen) <= max(most, 1)
    earlier = seen[:-1]
    assert all(max(a, b) > AGREEMENT * min(a, b) for i, a in enumerate(earlier) for b in earlier[:i])


@pytest.mark.parametrize(
    ("passes", "expected"),
    [([1.0], True), ([1.0, 1.1, 1.0, 9.0], True), ([1.0, 2.0, 2.1, 2.0], False), ([1.0, 1.0, 5.0, 5.0, 5.0], False)],
)
def test_one_disturbed_pass_is_no_disagreement_but_half_of_them_are(passes: list[float], expected: bool) -> None:
    assert agree(passes) is expected


class ScriptedRunner:
    """Passes that take the times of a script, and the last of them from then on."""

    device = torch.device("cpu")

    def __init__(self, script: list[float]) -> None:
        self.script, self.passes = script, 0

    def plain_pass(self, loss: Any) -> tuple[float, float]:
        self.passes += 1
        return self.script[min(self.passes - 1, len(self.script) - 1)], 0.0

    def timed_pass(self, loss: Any) -> TimedPass:
        return TimedPass({"a": 1.0}, {"a": 0.0}, (0.0, 0.0), (1.0, 0.0))


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    ("script", "rounds"),
    [([1e-3], 1), ([1e-3] * 4 + [9e-3] * 7 + [1e-3], 2), ([1e-3 * 1.4**i for i in range(40)], operator_times._ROUNDS)],
)
def test_passes_that_disagree_are_repeated_by_all_workers_a_bounded_number_of_times(
    workers: int, script: list[float], rounds: int
) -> None:
    runners = [ScriptedRunner(script) for _ in range(workers)]
    load = operator_times._Load(runners, [None] * workers, threads=1, budget=1.0)  # type: ignore[arg-type]
    load.run()
    assert [runner.passes - 1 for runner in runners] == [10 * rounds] * workers  # without the warm-up
    assert len(load.plain) == 10 * rounds * workers


def test_waiting_between_the_two_clocks_is_never_subtracted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that loses its core for 1 s after the first clock that it reads at the end of a measurement."""
    now, waited, waits = [0.0], [0.0], itertools.cycle([0.0, 0.0, 1.0, 0.0])

    def read(value: list[float]) -> float:
        seen, wait = value[0], next(waits)
        now[0] += wait
        waited[0] += wait
        return seen

    def clock() -> float:
        return read(now)

    def total_wait() -> float:
        return read(waited)

    monkeypatch.setattr(timed_passes.time, "perf_counter", clock)
    monkeypatch.setattr(timed_passes, "waited_for_core", total_wait)
    module = fx.symbolic_trace(nn.Linear(2, 2))
    runner = GraphRunner(module, torch.device("cpu"), True, None)
    runner.inputs = [torch.randn(2, 2)]
    forward, backward = runner.plain_pass(None)
    assert forward >= 0
    assert backward >= 0


def test_waiting_is_known_only_where_the_system_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    core_waiting.waiting_is_known.cache_clear()
    monkeypatch.setattr(core_waiting, "_fields", lambda: (0, 0))  # a kernel without CONFIG_SCHED_INFO shows zeros
    assert not core_waiting.waiting_is_known()
    core_waiting.waiting_is_known.cache_clear()
    ran = itertools.count(0, 1_000_000)
    monkeypatch.setattr(core_waiting, "_fields", lambda: (next(ran), 0))
    assert core_waiting.waiting_is_known()
    core_waiting.waiting_is_known.cache_clear()


def test_no_file_means_no_waiting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(core_waiting, "_SCHEDSTAT", str(tmp_path / "schedstat"))
    assert core_waiting.waited_for_core() == 0.0
    (tmp_path / "schedstat").write_text("garbage\n")
    assert core_waiting.waited_for_core() == 0.0
    (tmp_path / "schedstat").write_text("5 2000000000 7\n")
    assert core_waiting.waited_for_core() == 2.0


def passes_made(monkeypatch: pytest.MonkeyPatch, seconds: float, *, known: bool = True) -> int:
    """Of a pass that takes as long every time, longer than the budget."""
    monkeypatch.setattr(operator_times, "waiting_is_known", lambda: known)
    load = operator_times._Load([ScriptedRunner([seconds])], [None], threads=1, budget=0.5)  # type: ignore[list-item]
    load.run()
    return len(load.plain)


def test_more_passes_are_made_where_waiting_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert passes_made(monkeypatch, 1.0, known=False) > 2 * passes_made(monkeypatch, 1.0)


def test_a_single_pass_does_not_count_unless_it_takes_very_long(monkeypatch: pytest.MonkeyPatch) -> None:
    assert passes_made(monkeypatch, 1.0) == operator_times._PASSES
    assert passes_made(monkeypatch, 2 * operator_times._VERY_LONG_PASS) == 1


@pytest.mark.slow
def test_a_plan_says_how_uncertain_it_is_where_waiting_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (operator_times, measured):
        monkeypatch.setattr(module, "waiting_is_known", lambda: False)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    plan = autopar.plan(model, ["cpu"], example_args=(torch.randn(4, 8),), tune=0, cache=False)
    assert any("does not report how long threads wait" in note for note in plan.notes)


def test_the_spread_is_that_of_the_middle_half() -> None:
    assert spread([1.0]) == 0.0
    assert spread([2.0, 2.0, 2.0]) == 0.0
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx((4 - 2) / 3)
