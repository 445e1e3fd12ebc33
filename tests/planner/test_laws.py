"""Laws of planning for clusters: limits never make a plan faster, and better hardware never makes it slower.

Prices are predicted, so the laws hold whatever the models of kernels and networks say. All to 0.1 %.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from law_cases import Case, cases, step_time
from torch import nn

import autopar
from autopar import Cluster
from autopar.costs.device_group import DeviceGroup
from autopar.planner.inter_op.device_assignment import FreeDevices
from autopar.schedule.builders import SCHEDULES

SAME = 1.001

pytestmark = pytest.mark.usefixtures("shared_exports")


@st.composite
def limits(draw: st.DrawFn, batch: int) -> dict[str, Any]:
    chosen: dict[str, Any] = draw(
        st.one_of(
            st.sampled_from([1, 2, 4]).map(lambda n: {"max_shards": n}),
            st.integers(1, batch).map(lambda n: {"n_microbatches": n}),
            st.sampled_from(SCHEDULES).map(lambda name: {"schedule": name}),
            st.integers(1, 3).map(lambda n: {"max_replicas": n}),
        )
    )
    return chosen


@pytest.mark.slow
@settings(max_examples=examples(2, 40), deadline=None)
@given(cases(), st.data())
def test_a_limit_never_makes_a_plan_faster(case: Case, data: st.DataObject) -> None:
    limit = data.draw(limits(case.batch))
    assert step_time(case.plan()) <= step_time(case.plan(**limit)) * SAME


@pytest.mark.slow
@settings(max_examples=examples(2, 40), deadline=None)
@given(cases(), st.data())
def test_more_devices_never_make_a_plan_slower(case: Case, data: st.DataObject) -> None:
    kind, most = case.node[1:], int(case.node[0])
    per_node = data.draw(st.integers(max(1, most // 2), most))
    fewer = Cluster.preset(f"{per_node}{kind}", data.draw(st.integers(1, case.nodes)))
    assert step_time(case.plan()) <= step_time(case.plan(fewer)) * SAME


@pytest.mark.slow
@settings(max_examples=examples(2, 40), deadline=None)
@given(cases(), st.sampled_from(["bandwidth", "memory", "speed"]))
def test_better_hardware_never_makes_a_plan_slower(case: Case, what: str) -> None:
    cluster, better = case.cluster, case
    if what == "memory":
        better = dataclasses.replace(case, memory=None if case.memory is None else 2 * case.memory)
    if what == "bandwidth":
        cluster = dataclasses.replace(
            cluster,
            intra_node=dataclasses.replace(cluster.intra_node, line_rate=2 * cluster.intra_node.line_rate),
            inter_node=dataclasses.replace(cluster.inter_node, line_rate=2 * cluster.inter_node.line_rate),
        )
    if what == "speed":
        faster = tuple(
            dataclasses.replace(
                spec,
                bandwidth=2 * spec.bandwidth,
                peak_flops={dtype: 2 * flops for dtype, flops in spec.peak_flops.items()},
            )
            for spec in cluster.node
        )
        cluster = dataclasses.replace(cluster, node=faster)
    assert step_time(better.plan(cluster)) <= step_time(case.plan()) * SAME


@pytest.mark.slow
@settings(max_examples=examples(2, 40), deadline=None)
@given(cases())
def test_a_plan_has_one_price_whether_its_micro_batches_are_asked_for_or_found(case: Case) -> None:
    free = case.plan()
    assume(free is not None)
    assert free is not None
    assert step_time(case.plan(n_microbatches=free.n_microbatches)) == pytest.approx(step_time(free), rel=1e-3)


@pytest.mark.slow
@settings(max_examples=examples(2, 40), deadline=None)
@given(cases(), st.data())
def test_no_plan_is_below_a_bound_whatever_the_options(case: Case, data: st.DataObject) -> None:
    free = case.plan()
    assume(free is not None)
    assert free is not None
    assert free.bound is not None
    assert free.bound <= step_time(free) * SAME
    assert free.bound <= step_time(case.plan(**data.draw(limits(case.batch)))) * SAME


@settings(max_examples=examples(50), deadline=None)
@given(st.sampled_from([1, 2, 4, 6, 8, 12]), st.integers(1, 4), st.data())
def test_meshes_of_any_widths_lie_evenly_in_their_nodes_and_leave_no_device_unused(
    per_node: int, nodes: int, data: st.DataObject
) -> None:
    n = per_node * nodes
    widths = {1, *(per_node >> s for s in range(4) if per_node % (1 << s) == 0), *range(per_node, n + 1, per_node)}
    wanted: list[int] = []
    while sum(wanted) < n:
        wanted.append(data.draw(st.sampled_from([w for w in sorted(widths) if w <= n - sum(wanted)])))
    free = FreeDevices([DeviceGroup((str(i),), "device", 1) for i in range(n)], per_node, set(wanted))
    taken: list[int] = []
    for width in wanted:
        mesh = [int(name) for name in free.take(width)]
        assert mesh == list(range(mesh[0], mesh[0] + width))
        assert mesh[0] % min(width, per_node) == 0
        taken += mesh
    assert sorted(taken) == list(range(n))


@pytest.mark.slow
def test_two_of_three_devices_may_share_an_operator() -> None:
    """Three devices cannot cut it evenly, and no single one holds it with its gradient and optimizer state."""
    case = Case((2048, 2048), 4, 16, "3xT4", 1, 0.7 * 16 * 2048 * 2048, step=False)
    fewer = case.plan(Cluster.preset("2xT4"))
    assert fewer is not None
    assert step_time(case.plan()) <= step_time(fewer) * SAME


@pytest.mark.slow
def test_a_part_of_a_cluster_is_searched_like_a_cluster_of_its_own() -> None:
    """Tiny layers, for which twelve devices are too many."""
    case = Case((256, 256, 256, 256), 31, 64, "4xT4", 3, None, step=False)
    plan = case.plan()
    for nodes in (1, 2):
        assert step_time(plan) <= step_time(case.plan(Cluster.preset("4xT4", nodes))) * SAME


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case((4096,) * 3, 4, 16, "2xH100+2xT4", 3, None, step=True),
        Case((1024,) * 4, 8, 16, "1xT4+1xL4", 2, None, step=True),
        Case((2048,) * 3, 6, 512, "1xH100+1xA100-80", 3, None, step=True),
    ],
    ids=lambda case: case.node,
)
def test_nodes_of_mixed_kinds_are_no_slower_than_one_of_them_or_a_limit(case: Case) -> None:
    """Devices of one kind lie in different nodes, and the objective takes their links for those inside a node."""
    step = step_time(case.plan())
    assert step <= step_time(case.plan(Cluster.preset(case.node, 1))) * SAME
    assert step <= step_time(case.plan(n_microbatches=1)) * SAME


@pytest.mark.slow
@pytest.mark.parametrize(("node", "nodes", "part"), [("3xT4", 2, 2), ("5xT4", 2, 4), ("6xT4", 2, 4), ("7xT4", 3, 4)])
def test_nodes_of_any_number_of_devices_are_no_slower_than_meshes_on_some_of_them(
    node: str, nodes: int, part: int
) -> None:
    """Meshes of a power of two do not fill such a node."""
    case = Case((1024, 4096, 1024), 4, 128, node, nodes, None, step=False)
    step = step_time(case.plan())
    for fewer in (Cluster.preset(node), Cluster.preset(f"{part}xT4")):
        assert step <= step_time(case.plan(fewer)) * SAME


@pytest.mark.slow
@pytest.mark.parametrize(("kinds", "nodes"), [(("4xA100-40", "4xT4"), 1), (("2xH100", "2xL4"), 2)])
def test_the_order_of_devices_in_a_node_does_not_change_the_step(kinds: tuple[str, str], nodes: int) -> None:
    """Operators that are small on one kind are not on the other."""
    one, other = (Case((2048,) * 6, 32, 16, "+".join(order), nodes, None, step=True) for order in (kinds, kinds[::-1]))
    assert step_time(one.plan()) == pytest.approx(step_time(other.plan()), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("step", [True, False])
@pytest.mark.parametrize("node", ["1xA100-80", "2xA100-80"])
def test_a_plan_is_found_again_with_the_memory_that_it_needs(node: str, step: bool) -> None:
    """The search's formula says that it needs more. Another plan, which it lets pass, exceeds the memory."""
    case = Case((512,) * 3, 13, 16, node, 1, None, step)
    plan = case.plan()
    assert plan is not None
    peak = max(stage.peak_memory or 0 for stage in plan.stages)
    assert step_time(dataclasses.replace(case, memory=peak).plan()) <= step_time(plan) * SAME


@pytest.mark.slow
def test_a_batch_of_a_prime_number_of_samples_is_split_where_that_is_faster() -> None:
    case = Case((2048, 2048, 2048), 31, 1024, "4xT4", 1, None, step=False)
    plan = case.plan()
    assert plan is not None
    assert plan.n_microbatches > 1
    assert step_time(plan) < step_time(case.plan(n_microbatches=1))


@pytest.mark.exhaustive
def test_a_large_search_finds_a_plan_where_only_the_smallest_micro_batches_fit() -> None:
    """A sample needs the memory of several devices, so that meshes must be far wider than what so many micro-batches
    usually have."""
    case = Case((4096,) * 9, 512, 65536, "8xT4", 8, 2e9, step=True)
    limited = case.plan(n_microbatches=512)
    assert limited is not None
    assert step_time(case.plan()) <= step_time(limited) * SAME


class SmallLanguageModel(nn.Module):
    """A step of it needs other bytes than the formula says: logits, and a head that takes half of the work."""

    def __init__(self, tokens: int = 32_000, width: int = 512) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(tokens, width), nn.Linear(width, tokens, bias=False)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


@pytest.mark.slow
def test_laws_hold_where_steps_need_more_memory_than_the_formula_says() -> None:
    with torch.device("meta"):
        model, tokens = SmallLanguageModel().to(torch.bfloat16), torch.zeros(12, 1024, dtype=torch.long)

    def seconds(memory: float, **limit: Any) -> float:
        return step_time(
            autopar.plan(
                model,
                Cluster.preset("2xH100"),
                example_args=(tokens,),
                target=tokens,
                loss_fn=lambda logits, y: nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()),
                optimizer="sgd",
                memory_limit=memory,
                **limit,
            )
        )

    free = [seconds(memory) for memory in (750e6, 800e6)]
    assert free[1] <= free[0] * SAME
    for memory, fastest in zip((750e6, 800e6), free, strict=True):
        assert fastest <= seconds(memory, max_replicas=1) * SAME
