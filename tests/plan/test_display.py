"""What is registered for a type answers; what is not is a mistake in the program, which says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from autopar import Plan
from autopar.plan.display import compared, explained, inside_explained, printable, shown


@pytest.mark.parametrize(
    "ask", [shown, explained, lambda value: inside_explained(value, "a"), lambda value: compared(value, value)]
)
def test_types_that_nothing_is_registered_for_are_named(ask: Callable[[Any], Any]) -> None:
    with pytest.raises(NotImplementedError, match="Terminal"):
        ask(Terminal())


def test_a_plan_is_shown_and_compared() -> None:
    plan = Plan.from_split({"a": 0, "b": 1}, n_microbatches=2)
    assert shown(plan) == str(plan)
    assert compared(plan, plan).same_decisions


def test_control_characters_are_shown_and_not_obeyed() -> None:
    assert printable("a\x1b[31mb\n") == "a\\x1b[31mb\\n"
    assert printable("stage ü") == "stage ü"


class Terminal:
    pass
