"""Garbage collections are rare inside, and as before afterwards, whatever happens."""

from __future__ import annotations

import gc

import pytest

from autopar.analysis.few_collections import few_collections


@few_collections()
def failing(inside: list[tuple[int, int, int]]) -> None:
    inside.append(gc.get_threshold())
    raise KeyError


@pytest.mark.parametrize("before", [(700, 10, 10), (10**6, 5, 5), (0, 10, 10)])
def test_the_callers_thresholds_are_back_after_an_error(before: tuple[int, int, int]) -> None:
    usual = gc.get_threshold()
    inside: list[tuple[int, int, int]] = []
    gc.set_threshold(*before)
    try:
        with pytest.raises(KeyError):
            failing(inside)
        assert gc.get_threshold() == before
    finally:
        gc.set_threshold(*usual)
    assert inside[0][0] == (0 if before[0] == 0 else max(before[0], 100_000))  # a collector that is off stays off
