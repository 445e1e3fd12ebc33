"""The benchmark of inference compares every plan with the plain model; how fast they are, is not looked at."""

import pytest

from benchmarks import inference, zoo


@pytest.mark.slow
def test_every_way_of_planning_has_the_outputs_of_the_plain_model() -> None:
    rows = inference.measure(zoo.bert(quick=True), inference.QUICK)
    assert [row.way for row in rows] == list(inference.WAYS)
    for row in rows:
        assert row.output_error < 1e-5
        assert min(row.throughput, row.plain_throughput, row.speedup) > 0
        assert row.n_microbatches >= 1
    assert all(len(stage) == 1 for stage in rows[0].stages), "a pipeline has one device per stage"
