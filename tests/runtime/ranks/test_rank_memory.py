"""What ranks hold is what plans for meshes predict."""

from __future__ import annotations

from typing import Any

import pytest
from rank_memory import peaks
from rank_pool import RankPool

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("degrees", [{"tensor": 2}, *({"data": 2, "zero": zero} for zero in range(4))], ids=str)
def test_the_peak_on_a_mesh_is_not_under_what_its_ranks_hold(ranks: RankPool, degrees: dict[str, Any]) -> None:
    """The peak includes the gradient of a micro-batch besides the sum over micro-batches."""
    for held, (predicted,) in ranks.run(peaks, 2, degrees):
        assert 0.85 * predicted <= held <= 1.01 * predicted, (held, predicted)
