"""What scripts do wrong, or on some ranks only, ends with an error on all ranks, or changes nothing."""

from __future__ import annotations

import re

import pytest
from rank_misuse import caught_inside_accumulation, loss_with_a_late_scale
from rank_pool import RankPool

pytestmark = pytest.mark.slow

TOLERANCE = 1e-10  # float64


@pytest.mark.parametrize(
    ("n", "plan", "inside"), [(2, "replicas 2", False), (3, "replicas 2,1", False), (3, "replicas 2,1", True)]
)
def test_gradients_of_accumulation_outlive_a_refused_call(ranks: RankPool, n: int, plan: str, inside: bool) -> None:
    """The optimizer's step between is refused on all ranks, also on those that share no parameter."""
    for found in ranks.run(caught_inside_accumulation, n, plan, inside):
        assert "returned a loss without a gradient" in found["message"]
        assert re.match("InputError: an optimizer's step needs the gradients of all ranks", found["step"])
        assert found["error"] < TOLERANCE


@pytest.mark.parametrize("where", ["a global", "a dictionary", "a closure"])
def test_a_loss_may_set_itself_up_at_its_first_call(ranks: RankPool, where: str) -> None:
    for found in ranks.run(loss_with_a_late_scale, 2, where):
        assert max(found.values()) < TOLERANCE
