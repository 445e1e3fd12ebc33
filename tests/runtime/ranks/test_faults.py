"""Whatever happens to one rank, all ranks end within seconds, and say which one failed, where and why."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rank_faults import (
    caught_on_all_ranks,
    caught_on_one_rank,
    ended_before,
    interrupted_while_waiting,
    through_a_day,
    train,
    waits_apart,
)
from rank_pool import RankPool

pytestmark = pytest.mark.slow

WITHIN = 90.0  # s, on a busy machine, on which ranks take long to start; gloo would wait longer in these tests
CAUSES = {
    "kill": "its process ended: killed, or crashed",
    "stop": "no sign of life for 8 s: it is stopped, or its machine cannot be reached",
    "interrupt": "KeyboardInterrupt",
    "error": "ValueError: a mistake in the model",
    "memory": "MemoryError: no memory left",
    "allocate": "RuntimeError: .*allocate memory",
}


def said(folder: Path, n: int) -> list[str]:
    return [(folder / f"rank{rank}").read_text() for rank in range(n)]


CASES = [
    *[(what, "forward", 2, rank, "1f1b") for what in CAUSES for rank in (0, 1)],
    *[(what, "backward", 3, 1, "zb-h1") for what in ("kill", "error")],
    *[("kill", "forward", 3, rank, "gpipe") for rank in (0, 1, 2)],
    ("error", "loss", 3, 2, "1f1b"),
    ("stop", "between", 3, 0, "1f1b"),
    ("kill", "between", 2, 1, "1f1b"),
    ("kill", "between", 3, 1, "1f1b"),
]


# What the slow set runs of them: every cause and every place.
SLOW_SET = [
    ("kill", "forward", 2, 0, "1f1b"),
    ("kill", "backward", 3, 1, "zb-h1"),
    ("kill", "between", 3, 1, "1f1b"),
    ("stop", "forward", 2, 1, "1f1b"),
    ("interrupt", "forward", 2, 1, "1f1b"),
    ("error", "loss", 3, 2, "1f1b"),
    ("allocate", "forward", 2, 0, "1f1b"),
]


def cases(every: Sequence[tuple[Any, ...]], slow_set: Sequence[tuple[Any, ...]]) -> list[Any]:
    assert set(slow_set) <= set(every)
    return [pytest.param(*one, marks=[] if one in slow_set else [pytest.mark.exhaustive]) for one in every]


@pytest.mark.parametrize(("what", "where", "n", "rank", "schedule"), cases(CASES, SLOW_SET), ids=str)
def test_all_ranks_end_and_name_the_failure(
    ranks: RankPool, tmp_path: Path, what: str, where: str, n: int, rank: int, schedule: str
) -> None:
    stopped = rank if what == "stop" else None
    found = ranks.outcomes(train, n, what, where, rank, 3, schedule, tmp_path, within=WITHIN, stopped=stopped)
    texts = said(tmp_path, n)
    for other in range(n):
        if other == rank and what == "stop":
            assert found[other] == "still runs"
            continue
        assert found[other] not in ("still runs", "returned"), texts
        if other == rank and what == "kill":
            continue
        phase = "backward" if where == "backward" else "forward"
        place = rf" in the {phase}( \(inputs\))? of stage {rank}, micro-batch 0 \(call 4, train_step\)"
        if what == "stop" or where == "between":
            place = "(, last heard of .*|)"
        elif what == "kill":  # the action that another rank waited for, or the last beat where it waited for no message
            action = rf" in the (forward|backward) of stage {rank}, micro-batch \d \(call 4, train_step\)"
            place = f"({action}|, last heard of .*)"
        wanted = rf"rank {rank} failed{place}: {CAUSES[what]}"
        assert re.search(wanted, texts[other] + found[other]), (wanted, texts[other], found[other])


PLACES = {
    "capture": "in call 1, train_step",
    "place": "in call 1, train_step",
    "first step": r"in the forward of stage 0, micro-batch \d \(call 1, train_step\)",
    "clip": "after call 1",
    "step": "after call 2",
    "evaluate": r"in the forward of stage 0, micro-batch \d \(call 7, forward\)",
    "save": "in call 8, save",
    "load": "in call 9, load",
    "end": r"in the forward of stage 0, micro-batch \d \(call 10, train_step\)",
}


ANYWHERE = [(where, what) for what in ("kill", "error") for where in PLACES]
ANYWHERE_SLOW = [("capture", "kill"), ("evaluate", "kill"), ("save", "kill"), ("place", "error"), ("step", "error")]


@pytest.mark.parametrize(("where", "what"), cases(ANYWHERE, ANYWHERE_SLOW))
def test_all_ranks_end_wherever_the_failure_is(ranks: RankPool, tmp_path: Path, where: str, what: str) -> None:
    rank = list(PLACES).index(where) % 2
    found = ranks.outcomes(through_a_day, 2, what, where, rank, tmp_path, within=WITHIN, store_on_rank_0=True)
    texts = said(tmp_path, 2)
    assert not {"still runs", "returned"} & set(found), texts
    for other in (0, 1):
        text = texts[other] + found[other]
        if what == "kill" and other != rank:
            place = f"( {PLACES[where]}|, last heard of .*|)"
            silent = "|no sign of life for 8 s" if where in ("capture", "place") else ""  # while groups are connected
            assert re.search(f"rank {rank} failed{place}: ({CAUSES[what]}{silent})", text), text
        elif what == "error" and where in ("capture", "save", "load"):  # all ranks raise it
            expected = rf"{CAUSES[what]} \(rank {rank}\)|failed on rank {rank} alone: {CAUSES[what]}|rank {rank} failed"
            assert re.search(f"{expected}|rank 1 ends for the reason that rank 0 gives", text), text
        elif what == "error":
            assert re.search(f"rank {rank} failed {PLACES[where]}: {CAUSES[what]}", text), text


@pytest.mark.parametrize("what", ["kill", "stop", pytest.param("error", marks=pytest.mark.exhaustive)])
def test_the_rank_that_has_the_store_is_named(ranks: RankPool, tmp_path: Path, what: str) -> None:
    """Without torchrun, rank 0's process has the store through which ranks learn of failures."""
    stopped = 0 if what == "stop" else None
    found = ranks.outcomes(
        train, 3, what, "forward", 0, 3, "1f1b", tmp_path, within=WITHIN, stopped=stopped, store_on_rank_0=True
    )
    texts = said(tmp_path, 3)
    assert found[0] == ("still runs" if what == "stop" else found[0])
    for text, outcome in list(zip(texts, found, strict=True))[1:]:
        assert outcome not in ("still runs", "returned"), texts
        assert "rank 0 failed" in text + outcome, (texts, found)
        assert what != "stop" or "has not answered for 8 s: it is stopped" in text + outcome, (texts, found)


def test_an_interrupted_wait_ends_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.outcomes(interrupted_while_waiting, 2, tmp_path, within=WITHIN) == ["ended", "ended"]
    for text in said(tmp_path, 2):
        assert "rank 0 failed in call 2, train_step: KeyboardInterrupt" in text


@pytest.mark.parametrize("call", ["by_hand", "parallelize"])
def test_a_rank_that_has_ended_is_named_by_every_call(ranks: RankPool, call: str) -> None:
    found = ranks.outcomes(ended_before, 2, call, within=WITHIN)
    assert "autopar.errors.AutoparError: rank 1 failed: its script had ended after call 1 (" in found[0], found[0]
    assert found[0].count("Traceback") == 1  # without gloo's


def test_ranks_that_wait_in_different_calls_end(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.outcomes(waits_apart, 2, tmp_path, within=WITHIN)
    assert not {"returned", "still runs"} & set(found)
    waits = [
        "rank 0 failed in call 2, one: rank 1 is in another call 2, other, and both wait",
        "rank 1 failed in call 2, other: rank 0 is in another call 2, one, and both wait",
    ]
    for text, outcome in zip(said(tmp_path, 2), found, strict=True):
        assert any(one in text + outcome for one in waits), (text, outcome)


def test_an_error_that_all_ranks_catch_ends_nothing(ranks: RankPool) -> None:
    first, second = ranks.run(caught_on_all_ranks, 2)
    assert first == second
    assert len(set(first)) == 1


def test_an_error_that_one_rank_catches_ends_the_job(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.outcomes(caught_on_one_rank, 2, tmp_path, within=WITHIN, stopped=0)  # it waits for the other one
    assert "the last call raised an error on 1 of 2 ranks, this one among them" in found[1]
