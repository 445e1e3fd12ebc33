"""Tables keep to their width, say what they leave out, and never cut a number."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autopar.report.tables import WIDTH, table

names = st.text("abcdefghij.|+ ", max_size=30)
numbers = st.integers(0, 10**9).map(str)


@given(
    st.integers(1, 12).flatmap(
        lambda n: st.lists(st.tuples(names, names, st.lists(numbers, min_size=n, max_size=n)), min_size=1, max_size=4)
    )
)
def test_numbers_are_whole_or_their_column_is_named_as_left_out(rows: list[tuple[str, str, list[str]]]) -> None:
    heads = [f"column\n{index}" for index in range(len(rows[0][2]))]
    text = table(["plan", "stages", *heads], [[a, b, *cells] for a, b, cells in rows], words=2)
    assert max(map(len, text.splitlines())) <= WIDTH
    body, _, left_out = text.partition("(columns left out to fit the width:")
    missing = [name.strip() for name in " ".join(left_out.split()).rstrip(")").split(",")]
    for _, _, cells in rows:
        for head, cell in zip(heads, cells, strict=True):
            assert head.replace("\n", " ") in missing or cell in body.split()
