"""Buffers that training is the first to write, after an evaluation that does not read them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_later_buffers import STEPS, counted_by_norms, norms, read_elsewhere, trained
from rank_pool import RankPool

import autopar

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("batch_norm", ["deferred", "exact"])
def test_only_the_ranks_that_write_them_have_them(ranks: RankPool, tmp_path: Path, batch_norm: str) -> None:
    first, second = ranks.run(counted_by_norms, 2, tmp_path, batch_norm)
    loaded, alone = norms(), norms()
    trained(alone)
    autopar.load(tmp_path, loaded)
    wanted = dict(alone.named_buffers())
    assert (first | second).keys() == wanted.keys()
    assert not first.keys() & second.keys()
    for found in (first | second, dict(loaded.named_buffers())):
        assert found["1.num_batches_tracked"] == found["3.num_batches_tracked"] == STEPS
        if batch_norm == "exact":  # deferred: the second norm sees what micro-batches made
            for name, value in wanted.items():
                torch.testing.assert_close(found[name], value)


def test_other_ranks_read_what_training_wrote(ranks: RankPool) -> None:
    (error, first), (other, second) = ranks.run(read_elsewhere, 2, False)
    assert max(error, other) < 1e-9
    assert (first, second) == ([], ["seen"])


def test_training_is_refused_where_a_call_before_reads_on_another_rank(ranks: RankPool) -> None:
    first, second = ranks.run(read_elsewhere, 2, True)
    assert first == second
    assert "writes the buffer 'seen', which a call of another mode reads on rank 0" in first
