"""Quantities as texts: the right unit, and numbers that can be read back."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.report.quantities import (
    duration_text,
    percent,
    rate_text,
    seconds_text,
    share_of_text,
    size_text,
    ticks,
    utilisation_text,
)

SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "minutes": 60.0, "hours": 3600.0, "days": 86400.0, "years": 31557600.0}
BYTES = {"bytes": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}


def back(text: str, units: dict[str, float]) -> float:
    number, unit = text.split(" ")
    return float(number.replace(",", "")) * units[unit]


@given(st.floats(1e-8, 1e12))
def test_seconds_can_be_read_back(seconds: float) -> None:
    assert back(seconds_text(seconds), SECONDS) == pytest.approx(seconds, rel=0.006)
    if seconds >= 1:
        assert back(duration_text(seconds), SECONDS) == pytest.approx(seconds, rel=0.006)


@given(st.integers(1, 10**17))
def test_sizes_can_be_read_back(nbytes: int) -> None:
    assert back(size_text(nbytes), BYTES) == pytest.approx(nbytes, rel=0.006)


def test_a_part_names_its_unit_where_the_whole_has_another() -> None:
    assert share_of_text(61.23e9, 79.1e9) == "61.2 of 79.1 GB"
    assert share_of_text(612e6, 79.1e9) == "612 MB of 79.1 GB"
    assert share_of_text(612e6, None) == "612 MB"
    assert (size_text(None), size_text(0), seconds_text(None), seconds_text(0)) == ("unknown", "0", "unknown", "0 s")
    assert rate_text(4_090_000, "tokens") == "4.09 million tokens/s"


def test_no_share_has_a_sign_for_nothing() -> None:
    assert [percent(x, "+") for x in (0.0, -0.0, -0.0004, 0.0004, -0.0006)] == ["0.0%", "0.0%", "0.0%", "0.0%", "-0.1%"]
    assert percent(0.123) == "12.3%"


@given(st.floats(1e-6, 1e4))
def test_an_axis_has_few_round_times_that_do_not_touch(seconds: float) -> None:
    found = ticks(seconds)
    assert found[0][0] == 0
    assert 2 <= len(found) <= 7
    assert all(place <= 0.95 or place == pytest.approx(1) for place, _ in found)
    assert all(later - place > 0.1 for (place, _), (later, _) in itertools.pairwise(found))
    leading = {re.sub(r"[0.,]", "", text.split(" ")[0]) for _, text in found[1:2]}
    if seconds < 60:
        assert leading <= {"1", "2", "5"}


def test_a_small_utilisation_is_not_shown_as_nothing() -> None:
    shown = {share: utilisation_text(share) for share in (0.0, 3.4e-5, 4.1e-4, 0.0123, 0.5)}
    assert shown == {0.0: "0.0%", 3.4e-5: "0.0034%", 4.1e-4: "0.041%", 0.0123: "1.2%", 0.5: "50.0%"}
