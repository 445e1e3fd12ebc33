"""The benchmark of a slow network: ranks compare plans with the ceiling, and the report has all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torchruns

from autopar import Plan
from autopar.runtime.other_systems.independent import CEILING
from benchmarks import network, network_job
from benchmarks.network import RATES
from benchmarks.output import to_json

ROUNDS = 2
REPLICAS = Plan.from_split({"": 0}, devices=[["cpu:0", "cpu:1"]], n_microbatches=2)


def test_every_bandwidth_has_its_ceiling_and_ratios_in_each_round() -> None:
    # On the slow network, the second round met a machine half as fast: pairs do not see it.
    fast = {"seconds": {"0": [1.0, 1.0], "1": [2.0, 2.0], CEILING: [0.5, 0.5]}, "losses": {"0": 1.0, "1": 1.0}}
    slow = {"seconds": {"0": [6.0, 12.0], "1": [3.0, 6.0], CEILING: [0.5, 1.0]}, "losses": {"0": 1.0, "1": 1.0}}
    report = network._report([REPLICAS, REPLICAS], [fast, slow])
    assert [line[-1] for line in report.tables[0].rows] == ["1.00", "2.00", "", "2.00", "1.00", ""]
    found = json.loads(to_json(report, {}))
    assert [rounds["what"] for rounds in found["measured"]] == [f"{rate:g} Mbit/s" for rate in RATES]
    for rounds, given in zip(found["measured"], (fast, slow), strict=True):
        assert rounds["seconds"][rounds["ceiling"]] == given["seconds"][CEILING]
        assert list(rounds["seconds"].values())[:2] == [given["seconds"]["0"], given["seconds"]["1"]]
    assert found["plans_differ"] is False


@pytest.mark.slow
def test_ranks_time_plans_and_the_ceiling_and_both_compute_the_same(tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.json", tmp_path / "out.json"
    plan.write_text(REPLICAS.to_json())
    done = torchruns.run(network_job.__file__, "compare", str(out), str(ROUNDS), str(plan))
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert {name: len(taken) for name, taken in found["seconds"].items()} == {"0": ROUNDS, CEILING: ROUNDS}
    assert min(map(min, found["seconds"].values())) > 0
    # The first rank's half of the batch has nearly the loss of the whole batch, which the plan computes.
    assert found["losses"][CEILING] == pytest.approx(found["losses"]["0"], rel=0.05)
