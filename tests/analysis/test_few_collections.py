"""Garbage collections are rare inside, and as before afterwards, whatever happens."""

from __future__ import annotations

import gc

import pytest

from autopar.analysis.few_collections import few_collections


@pytest.mark.parametrize("before", [(700, 10, 10), (10**6, 5, 5), (0, 10, 10)])
def test_the_callers_thresholds_are_back_after_an_error(before: tuple[int, int, int]) -> None:
    usual = gc.get_threshold()
    gc.set_threshold(*before)
    try:
        with pytest.raises(KeyError), few_collections():
            inside = gc.get_threshold()
            raise KeyError
        assert gc.get_threshold() == before
    finally:
        gc.set_threshold(*usual)
    assert inside[0] >= before[0]
    assert (inside[0] == 0) == (before[0] == 0)  # a collector that is off stays off
    assert inside[0] == 0 or inside[0] >= 100_000
