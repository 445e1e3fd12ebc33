"""How a batch is divided into micro-batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.schedule.micro_batches import from_mean, largest_size, mean_and_ratio, split_sizes


@given(units=st.integers(1, 200), n=st.integers(1, 250), least=st.integers(1, 12), multiple=st.integers(1, 5))
def test_micro_batches_are_as_even_as_least_and_multiple_allow(units: int, n: int, least: int, multiple: int) -> None:
    batch = units * multiple
    sizes = split_sizes(batch, n, least, multiple)
    assert sum(sizes) == batch
    assert len(sizes) <= n
    assert all(size % multiple == 0 for size in sizes)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] in (0, multiple)
    if batch >= least:
        assert sizes[-1] >= least
    # One more micro-batch would exceed n, or leave one with fewer samples than `least`.
    smallest_with_one_more = units // (len(sizes) + 1) * multiple
    assert len(sizes) == n or smallest_with_one_more < least


@given(batch=st.integers(1, 300), n=st.integers(1, 300))
def test_the_largest_micro_batch_is_the_first(batch: int, n: int) -> None:
    if n <= batch:
        assert largest_size(batch, n) == split_sizes(batch, n)[0]


@given(batch=st.integers(1, 300), n=st.integers(1, 300), larger=st.floats(0, 1e3), share=st.floats(0, 2))
def test_the_mean_and_the_ratio_of_two_sizes_say_what_every_micro_batch_takes(
    batch: int, n: int, larger: float, share: float
) -> None:
    sizes = split_sizes(batch, n)
    seconds = tuple(larger if size == sizes[0] else larger * share for size in sizes)
    mean, ratio = mean_and_ratio(seconds)
    assert mean == pytest.approx(sum(seconds) / len(sizes))
    assert from_mean(mean, sizes, ratio) == pytest.approx(seconds)
    if len(set(sizes)) == 1:
        assert from_mean(mean, sizes) == seconds, "exactly, so that prices of even micro-batches do not move"


@given(batch=st.integers(1, 300), n=st.integers(1, 300))
def test_without_a_ratio_micro_batches_take_as_long_as_their_samples_say(batch: int, n: int) -> None:
    sizes = split_sizes(batch, n)
    assert from_mean(batch / len(sizes), sizes) == pytest.approx(sizes)
