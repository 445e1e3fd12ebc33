"""How a batch is divided into micro-batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autopar.schedule.micro_batches import largest_size, split_sizes


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
