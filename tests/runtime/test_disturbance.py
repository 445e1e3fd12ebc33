"""Steps measured while other programs use the machine: what is left out, and what is not believed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_tuning import CALL, Clock, costly, layers

import autopar
from autopar import Plan
from autopar.costs.history import recall
from autopar.plan.stage import Stage
from autopar.runtime.comparing.contestants import Round, Rounds
from autopar.runtime.comparing.disturbance import agree, steady_steps, undisturbed, why_unbelievable
from cost_models.hardware.devices import operator_threads
from cost_models.measuring.core_waiting import ThreadsWaiting

__all__ = ["costly"]  # a fixture

TWO = ["cpu", "cpu"]
PREDICTED = {"automatic": 0.1, "plain model": 0.2, "one device": 0.25}


def plans(**predicted: float) -> dict[str, Plan]:
    names = ("d0", "d1")
    return {
        name: Plan(
            (Stage(names if name == "automatic" else names[:1]),),
            2,
            devices=names,
            device_kinds=("k", "k"),
            predicted_step_time=seconds,
        )
        for name, seconds in (PREDICTED | predicted).items()
    }


# -- rounds ------------------------------------------------------------------------------------------------------------


def test_rounds_in_which_threads_waited_for_cores_are_left_out() -> None:
    rounds = [Round((0.1, 0.2), 0.0), Round((0.3, 2.0), 0.9), Round((0.1, 0.2), 0.01)]
    assert undisturbed(rounds) == ([rounds[0], rounds[2]], True)
    waited = [replace_waited(one, 5.0) for one in rounds]
    assert undisturbed(waited) == (waited, False), "all of them, and nobody says that they are right"


def test_without_the_kernels_word_a_round_with_a_long_step_is_left_out() -> None:
    rounds = [Round(s) for s in ((0.1, 0.2), (0.3, 0.2), (0.11, 0.21), (0.1, 2.0))]
    assert undisturbed(rounds) == ([rounds[0], rounds[2]], False)
    assert undisturbed(rounds[:2]) == (rounds[:2], False), "two rounds cannot tell which of them is right"


def replace_waited(one: Round, seconds: float) -> Round:
    return one._replace(waited=seconds)


def test_rounds_agree_whose_ratios_do() -> None:
    assert agree([Round((1.0, 2.0)), Round((3.0, 6.0))]), "all slower together"
    assert not agree([Round((1.0, 2.0)), Round((1.0, 3.0))])
    assert agree([Round((1.0, 2.0))])


class Racer:
    def __init__(self, name: str, step: Callable[[str], float]) -> None:
        self.name, self._step = name, step

    def timed(self, devices: object) -> float:
        return self._step(self.name)


@pytest.mark.parametrize(("later", "passes"), [((1.0, 2.0), 2), ((1.0, 9.0), 3)])
def test_rounds_that_disagree_are_followed_by_more(
    later: tuple[float, float], passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pass has the rounds 1.0 : 2.0 and 1.0 : 4.0; every later one agrees with itself."""
    took: dict[str, list[float]] = {"a": [], "b": []}

    def step(name: str) -> float:
        mine = took[name]
        first = {"a": (1.0, 1.0, 1.0), "b": (2.0, 2.0, 4.0)}[name]
        mine.append(first[len(mine)] if len(mine) < 3 else later[name == "b"])
        return mine[-1]

    monkeypatch.setattr(ThreadsWaiting, "now", classmethod(lambda cls: cls(None)))
    racers = [Racer("a", step), Racer("b", step)]
    found = steady_steps(racers, (), Rounds(2), lambda *_: None, lambda *_: "")
    assert len(took["a"]) == 3 * passes, "a warm-up and two rounds that count in each pass"
    assert set(found.steps) == {"a", "b"}
    assert not found.doubt


def test_contestants_close_to_the_fastest_run_more_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first round that counts, `b` looks faster than `a`; `c` is far behind, and `d` alone would be."""
    took = {"a": [1.0, 1.2, 1.0, 1.0, 1.0], "b": [1.1, 1.1, 1.1, 1.1, 1.1], "c": [3.0, 3.0], "d": [1.0, 1.0]}
    monkeypatch.setattr(ThreadsWaiting, "now", classmethod(lambda cls: cls(None)))
    racers = {name: Racer(name, lambda name: took[name].pop(0)) for name in took}
    several = [racers[name] for name in "abc"]
    found = steady_steps(several, (), Rounds(1, finals=3), lambda *_: None, lambda *_: "")
    assert found.steps == {"a": (1.2, 1.0, 1.0, 1.0), "b": (1.1,) * 4, "c": (3.0,)}
    assert steady_steps([racers["d"]], (), Rounds(1, finals=3), lambda *_: None, lambda *_: "").steps == {"d": (1.0,)}


# -- what is believed --------------------------------------------------------------------------------------------------


def test_a_speed_up_beyond_the_number_of_devices_is_not_believed() -> None:
    one = plans()
    steps = {"automatic": (0.11,), "plain model": (2.7,), "one device": (2.7,)}
    for quiet in (True, False):
        assert "2 devices cannot be 24.5x as fast as one" in why_unbelievable(one, one.keys(), steps, quiet)
    assert why_unbelievable(one, one.keys(), {name: (3 * p,) for name, p in PREDICTED.items()}, False) == ""


def test_one_plan_far_off_its_prediction_beside_others_is_believed_only_of_a_quiet_machine() -> None:
    one, steps = plans(), {"automatic": (0.55,), "plain model": (0.21,), "one device": (0.25,)}
    doubt = why_unbelievable(one, one.keys(), steps, False)
    assert doubt.startswith("automatic took 550 ms where 100 ms are predicted (5.5x)")
    assert why_unbelievable(one, one.keys(), steps, True) == ""
    assert why_unbelievable(one, one.keys(), {name: (6 * p,) for name, p in PREDICTED.items()}, False) == ""


def test_with_more_threads_than_it_was_priced_for_a_step_may_be_shorter() -> None:
    one, steps = plans(), {"automatic": (0.1,), "plain model": (0.02,), "one device": (0.25,)}
    like = {"automatic", "one device"}
    assert why_unbelievable(one, like, steps, False) == ""
    assert "plain model took 20 ms" in why_unbelievable(one, one.keys(), steps | {"automatic": (0.08,)}, False)
    assert "plain model took 2.5 s" in why_unbelievable(one, like, steps | {"plain model": (2.5,)}, False)


# -- planning ----------------------------------------------------------------------------------------------------------


def predicted() -> dict[str, float]:
    """By name of a contestant; from the notes of a plan whose steps all take as long."""
    plan = autopar.plan(layers(), TWO, cache=False, **CALL)
    (note,) = [note for note in plan.notes if note.startswith("tuned over")]
    listed = note.partition("measured: ")[2].partition(" (*")[0].split(", ")
    found = [one.lstrip("*").rsplit(" ", 4) for one in listed]
    return {name: float(milliseconds) / 1e3 for name, milliseconds, *_ in found}


@pytest.mark.slow
@pytest.mark.usefixtures("costly")
@pytest.mark.parametrize("quiet", [True, False])
def test_one_device_means_the_threads_of_a_worker_whatever_the_caller_has_set(
    quiet: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """While another program holds a core, two threads of one operator take 100 times as long as one."""
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    waiting: dict[str, float] | None = {} if quiet else None
    monkeypatch.setattr(ThreadsWaiting, "now", classmethod(lambda cls: cls(waiting)))
    monkeypatch.setattr(ThreadsWaiting, "since", lambda self: None if self.seconds is None else 0.0)
    clock = Clock({}, monkeypatch)
    raw = autopar.plan(layers(), TWO, cache=False, tune=0, **CALL)
    assert raw.single_device_time is not None
    with operator_threads(torch.get_num_threads() + 1):
        expected = predicted()
        assert {"plain model", "plain model on 1 thread"} <= expected.keys()
        clock.took = {name: 2 * seconds for name, seconds in expected.items()}
        clock.took["plain model"] = 100 * expected["plain model"]
        before = len(recall())
        plan = autopar.plan(layers(), TWO, **CALL)
        ran = dict(clock.ran)
        again = autopar.plan(layers(), TWO, **CALL)
    assert len(plan.used_devices) == len(again.used_devices) == 2
    if quiet:
        assert plan.single_device_time == pytest.approx(2 * raw.single_device_time, rel=0.01)
        assert clock.ran == ran, "remembered"
        mine = recall()[before:]
        assert mine
        assert all(record.measured == pytest.approx(2 * record.predicted, rel=0.01) for record in mine)
    else:
        assert plan.notes[-1].startswith("the machine was busy: plain model took")
        assert (plan.single_device_time, plan.time_scale) == (pytest.approx(raw.single_device_time, rel=0.01), None)
        assert plan.measured_step_time is None
        assert clock.ran["plain model"] > ran["plain model"], "measured again"
        assert len(recall()) == before


@pytest.mark.slow
@pytest.mark.usefixtures("costly")
def test_predictions_are_not_scaled_by_the_steps_of_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock({"plain model on cpu:0": 90.0, "plain model on 2 devices": 2.0}, monkeypatch)
    fixed: dict[str, Any] = {"cache": False, "tune": 0, "n_microbatches": 2, "max_replicas": 1, **CALL}
    plan = autopar.plan(layers(), TWO, calibrate=True, **fixed)
    assert clock.ran["plain model on cpu:0"]
    assert plan.time_scale is None
    assert "the machine was busy: one device took 90 s" in plan.notes[-1]
