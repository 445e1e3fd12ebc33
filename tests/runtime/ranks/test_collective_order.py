"""All ranks of a process group begin the same collectives in the same order, whatever the model, plan and batch."""

from __future__ import annotations

from typing import Any

import pytest
from collective_log import CollectiveLog, disagreements
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rank_orders import Order, checked_by_torch, exchanged, in_exchanges
from rank_pool import RankPool

from autopar.schedule.builders import INTERLEAVED

CASES = [
    (2, Order()),
    (2, Order(frozen=(0, 1), unused=(2,))),  # the first rank has no gradient to send
    (2, Order(plan="replicas", n_microbatches=1)),  # the second replica has no micro-batch, so no gradient
    (3, Order(plan="replicas", n_microbatches=1, frozen=(3,), tied=True)),
    (3, Order(n_blocks=6, skips=(3, 5), schedule="zb-h1", n_microbatches=4, call="backward")),
    (2, Order(n_blocks=8, plan="chunks", n_microbatches=4)),
    (2, Order(n_blocks=8, plan="chunks", schedule="interleaved-zb", n_microbatches=4)),
    (2, Order(n_blocks=8, tied=True, plan="chunks", schedule="zb-v", n_microbatches=3)),
    (2, Order(tied=True, plan="chunks", batches=(6,), call="backward")),  # a gradient is complete early on one rank
    (2, Order(plan="data", frozen=(1,), unused=(2,), batches=(8, 4))),
    (2, Order(plan="tensor")),
    (4, Order(plan="zero", batches=(8, 4))),
    (4, Order(plan="mixed", schedule="zb-h1", frozen=(1,), unused=(2,), batches=(8, 4))),
]


def check(found: list[tuple[CollectiveLog, float, str]]) -> None:
    logs, errors, refused = zip(*found, strict=True)
    assert len(set(refused)) == 1, refused
    assert disagreements(logs) == []
    assert max(errors) < 1e-6
    assert refused[0] or all(log.calls for log in logs)


def test_a_log_that_differs_is_noticed() -> None:
    logs = [CollectiveLog({"all": (0, 1)}), CollectiveLog({"all": (0, 1)})]
    for log in logs:
        log.calls["all"] += [("all_reduce", ((4,), "float32")), ("broadcast", ((2,), "int64"))]
    logs[0].sent[1].append((0, (3,), "float32"))
    logs[1].received[0].append((0, (3,), "float32"))
    assert disagreements(logs) == []
    logs[1].calls["all"].reverse()
    logs[1].received[0].clear()
    assert len(disagreements(logs)) == 2


def test_groups_in_another_order_are_noticed() -> None:
    logs = [CollectiveLog({"all": (0, 1), "wire": (0, 1)}) for _ in range(2)]
    for log, order in zip(logs, (["all", "wire"], ["wire", "all"]), strict=True):
        log.order += order
        for name in order:
            log.calls[name].append(("all_reduce", ((4,), "float32")))
    (found,) = disagreements(logs)
    assert found == "collective 0 of both is in all on rank 0, in wire on rank 1"


@pytest.mark.slow
@pytest.mark.parametrize("job", [exchanged, in_exchanges, checked_by_torch], ids=lambda job: job.__name__)
@pytest.mark.parametrize(("n", "order"), CASES, ids=str)
def test_ranks_exchange_the_same_in_the_same_order(ranks: RankPool, n: int, order: Order, job: Any) -> None:
    found = ranks.run(job, n, order)
    assert not found[0][2], found[0][2]
    check(found)


@st.composite
def orders(draw: st.DrawFn) -> tuple[int, Order]:
    n = draw(st.integers(2, 3))
    plan = draw(st.sampled_from(["chain", "chain", "chunks", "replicas", "data", "tensor", "zero"]))
    n_blocks = draw(st.integers(2 * n, 7))
    blocks = st.integers(0, n_blocks - 1)
    trained = {draw(blocks)}  # and used: the loss has a gradient
    schedule = draw(st.sampled_from(INTERLEAVED if plan == "chunks" else ["gpipe", "1f1b", "zb-h1"]))
    return n, Order(
        n_blocks,
        tuple(sorted(draw(st.sets(blocks, max_size=n_blocks - 1)) - trained)),
        tuple(sorted(draw(st.sets(st.integers(1, n_blocks - 2), max_size=2)) - trained)),
        tuple(sorted(draw(st.sets(blocks, max_size=3)))),
        draw(st.booleans()),
        plan,
        schedule,
        n * draw(st.integers(1, 2)) if plan == "chunks" else draw(st.integers(1, 5)),
        tuple(draw(st.lists(st.sampled_from([12, 6, 5, 3, 1]), min_size=1, max_size=2, unique=True))),
        draw(st.sampled_from(["train_step", "backward"])),
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("job", [exchanged, checked_by_torch], ids=lambda job: job.__name__)
@settings(max_examples=examples(10), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(case=orders())
def test_ranks_agree_for_random_models_and_plans(ranks: RankPool, job: Any, case: tuple[int, Order]) -> None:
    n, order = case
    check(ranks.run(job, n, order))
