"""Steps whose layers and collectives run one after another, with launches ahead within a layer alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
import torch
from test_hand_plans import Language

import autopar
from autopar import Cluster, Plan
from autopar.analysis.example import example_ahead
from autopar.costs.estimated import estimate_costs
from autopar.costs.recipe import Recipe
from autopar.options import PlanOptions
from autopar.planner.inter_op.atom_times import atom_times
from autopar.planner.inter_op.candidates import Searching
from autopar.planner.search_options import search_options
from cost_models.collectives.overlap import overlap_named
from cost_models.kernels.launches import lay


def step(overlap: str, **degrees: int) -> float:
    devices = degrees.get("tensor", 1) * degrees.get("pipeline", 1)
    plan = Plan.by_hand(
        Language(4),
        Cluster.preset(f"{devices}xV100"),
        example_args=(torch.zeros(16, 64, dtype=torch.long),),
        overlap=overlap,
        **degrees,  # type: ignore[arg-type]
    )
    assert plan.predicted_step_time is not None
    return plan.predicted_step_time


@pytest.mark.slow
def test_a_serial_stage_takes_what_its_layers_take_alone() -> None:
    """The oracle lays the kernels of each layer by themselves; the loss counts to the sum."""
    example = example_ahead(Language(3), (torch.zeros(16, 64, dtype=torch.long),), {}, batch_dim=None)
    example, search = search_options(example, PlanOptions(), 1)
    recipe = Recipe(overlap=overlap_named("serial"))
    costs = estimate_costs(example, Cluster.preset("1xV100"), recipe, n_microbatches=4)
    atoms = Searching(costs, search).atoms
    kind = costs.devices[0].kind
    taken = atom_times(costs, atoms, kind, 1, 4).stage(range(len(atoms.nodes)))
    table = costs.table(kind, 1)
    host = table.host
    assert host is not None
    forward, backward, loss = table.at(4)
    run = {name for names in atoms.nodes for name in names}
    passes = []
    for kernels, launches, order, of_loss in (
        (forward, host.forward, 1, (loss[0], host.loss[0])),
        (backward, host.backward, -1, (loss[1], host.loss[1])),
    ):
        columns = zip(table.nodes, kernels, launches, strict=True)
        pairs = [(costs.operators[name].block, k, x) for name, k, x in columns if name in run]
        layers = [list(layer) for _, layer in groupby(pairs[::order], key=lambda pair: pair[0])]
        assert len(layers) >= 3
        alone = [lay([float(k) for _, k, _ in layer], [float(x) for _, _, x in layer]).device for layer in layers]
        passes.append(max(sum(alone) + of_loss[0], sum(x for _, _, x in pairs) + of_loss[1]))
    assert (taken.forward, taken.backward) == pytest.approx(tuple(passes))


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", [1, 2])
def test_without_collectives_a_serial_step_is_never_faster(pipeline: int) -> None:
    """With collectives it may be: their launches count within their own seconds."""
    assert step("serial", pipeline=pipeline) >= step("none", pipeline=pipeline) * (1 - 1e-9)


@pytest.mark.slow
def test_collectives_are_added_to_launches_that_would_hide_them() -> None:
    """Layers this small are launches alone, behind which the collectives of a usual stream vanish."""
    usual = Cluster.preset("2xV100")
    slow = replace(usual, intra_node=replace(usual.intra_node, latency=10 * usual.intra_node.latency))

    def priced(cluster: Cluster, overlap: str) -> tuple[float, float]:
        """(Seconds of a step, of a micro-batch's collectives.)"""
        tokens = torch.zeros(16, 64, dtype=torch.long)
        plan = Plan.by_hand(Language(4), cluster, example_args=(tokens,), tensor=2, micro_batch=1, overlap=overlap)
        assert plan.predicted_step_time is not None
        shardings = [stage.sharding for stage in plan.stages if stage.sharding is not None]
        collectives = [one.seconds for sharding in shardings for one in sharding.exchanges if not one.once]
        return plan.predicted_step_time, sum(collectives)

    longer = {name: np.subtract(priced(slow, name), priced(usual, name)) for name in ("serial", "none")}
    step_longer, each = longer["serial"]
    assert each > 0
    assert step_longer >= 16 * each * 0.999  # and what happens once a step
    assert longer["none"][0] < step_longer / 2


@pytest.mark.slow
def test_a_search_prices_serial_plans_as_hand_plans_are() -> None:
    example = {"example_args": (torch.zeros(16, 64, dtype=torch.long),)}
    cluster = Cluster.preset("2xT4")
    found = autopar.plan(Language(2), cluster, overlap="serial", **example)  # type: ignore[arg-type]
    assert found.predicted_step_time is not None
    assert found.assumed is not None
    assert found.assumed.overlap == "serial"
    for degrees in ({"tensor": 2}, {"data": 2, "micro_batch": 8}, {"pipeline": 2}):
        hand = Plan.by_hand(Language(2), cluster, overlap="serial", **example, **degrees)  # type: ignore[arg-type]
        assert hand.predicted_step_time is not None
        assert found.predicted_step_time <= hand.predicted_step_time * 1.01
