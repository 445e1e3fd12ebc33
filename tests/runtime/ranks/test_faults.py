"""Whatever happens to one rank, all ranks end within seconds, and say which one failed, where and why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rank_faults import caught_on_all_ranks, caught_on_one_rank, interrupted_while_waiting, saved_on_one_rank, train
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


@pytest.mark.parametrize(("what", "where", "n", "rank", "schedule"), CASES, ids=lambda value: str(value))
def test_all_ranks_end_and_name_the_failure(
    ranks: RankPool, tmp_path: Path, what: str, where: str, n: int, rank: int, schedule: str
) -> None:
    within = 35.0 if what == "stop" else WITHIN
    found = ranks.outcomes(train, n, what, where, rank, 3, schedule, tmp_path, within=within)
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
            place = ", last heard of .*"
        elif what == "kill":  # the action that another rank waited for, or the last beat where it waited for no message
            action = rf" in the (forward|backward) of stage {rank}, micro-batch \d \(call 4, train_step\)"
            place = f"({action}|, last heard of .*)"
        wanted = rf"rank {rank} failed{place}: {CAUSES[what]}"
        assert re.search(wanted, texts[other] + found[other]), (wanted, texts[other], found[other])


def test_an_interrupted_wait_ends_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.outcomes(interrupted_while_waiting, 2, tmp_path, within=WITHIN) == ["ended", "ended"]
    for text in said(tmp_path, 2):
        assert "rank 0 failed in call 2, train_step: KeyboardInterrupt" in text


def test_ranks_that_wait_in_different_calls_end(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.outcomes(saved_on_one_rank, 2, tmp_path, within=WITHIN)
    assert not {"returned", "still runs"} & set(found)
    waits = [
        "rank 0 failed in call 3, save: rank 1 is in another call 3, train_step, and both wait",
        "rank 1 failed in call 3, train_step: rank 0 is in another call 3, save, and both wait",
    ]
    for text, outcome in zip(said(tmp_path, 2), found, strict=True):
        assert any(one in text + outcome for one in waits), (text, outcome)


def test_an_error_that_all_ranks_catch_ends_nothing(ranks: RankPool) -> None:
    first, second = ranks.run(caught_on_all_ranks, 2)
    assert first == second
    assert len(set(first)) == 1


def test_an_error_that_one_rank_catches_ends_the_job(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.outcomes(caught_on_one_rank, 2, tmp_path, within=WITHIN)
    assert "the last call raised an error on 1 of 2 ranks, this one among them" in found[1]
