"""The wire between ranks: every message arrives as it was sent, and no schedule deadlocks under NCCL's rules."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rendezvous import Deadlock, PairQueues
from simulations import chunk_counts

from autopar import AutoparError
from autopar.runtime.ranks.messages.exchange_wire import ExchangeWire
from autopar.runtime.ranks.messages.exchanges import START
from autopar.runtime.ranks.messages.execution_messages import ExecutionMessages
from autopar.runtime.ranks.messages.packing import MOST_PACKED, Packing, SentTensor, Values
from autopar.runtime.ranks.messages.tables import Message, messages
from autopar.runtime.ranks.messages.wire import AHEAD, Routes, Wire
from autopar.runtime.step.mailbox import Aborted, Address
from autopar.schedule.builders import INTERLEAVED, SCHEDULES, make_schedule
from autopar.schedule.clock import Action, Phase

SHAPE = SentTensor((4,), torch.float32)
VALUES = Values({0: SHAPE, 1: SHAPE, 3: int, 4: float})
PARTS = 1 + len(VALUES.specs)


def content(address: Address, position: int) -> torch.Tensor:
    """Another one for every value of every message."""
    return torch.tensor([address.sender, address.receiver, address.microbatch, position], dtype=torch.float32)


class Pipeline:
    """A chain of stages with skips; each sends a trained tensor, another one, and numbers."""

    def __init__(
        self,
        name: str,
        n_microbatches: int,
        replicas: tuple[int, ...],
        chunks: int,
        shards: int | tuple[int, ...] = 1,
        *,
        edges: Collection[tuple[int, int]] | None = None,
        part: str = "step",
        most_packed: int = -1,
    ) -> None:
        """`shards`: ranks of every slot, or of each. `edges`: (stage, later stage) that the first one sends to, beside
        the next one. Default: the next but one. `part`: "step", or "forward" or "backward" for an execution of these
        actions alone. `most_packed`: of a wire."""
        self.most_packed = most_packed
        self.table = make_schedule(name, n_microbatches, replicas, chunks=chunks)
        n, forward = self.table.n_stages, Phase.FORWARD
        sends = set([(s, s + 2) for s in range(n - 2)] if edges is None else edges) | {(s, s + 1) for s in range(n - 1)}
        self.consumers = [[c for c in range(n) if (s, c) in sends] for s in range(n)]
        self.sources = [[p for p in range(n) if (p, s) in sends] for s in range(n)]
        self.actions = [
            [a for a in table if part == "step" or (a.phase is forward) == (part == "forward")]
            for table in self.table.actions
        ]
        # What a rank knows of the values that it has sent in an execution before.
        self.trained = {(*edge, i): (0,) for edge in sends for i in range(n_microbatches) if part == "backward"}
        widths = (shards,) * self.table.n_slots if isinstance(shards, int) else shards
        ends = list(itertools.accumulate(widths))
        self.routes = Routes(tuple(tuple(range(end - n, end)) for n, end in zip(widths, ends, strict=True)))
        self.n_ranks = ends[-1]
        self.messages = messages(self.actions, self.table.slot_of, self.consumers, self.sources)
        self.execution = ExecutionMessages(self.messages, PARTS)

    def values(self, address: Address) -> Values:
        return VALUES

    def run(self, queues: PairQueues, kind: type[Wire] = Wire) -> None:
        """All ranks on threads. Raises what the first failing one raised."""
        errors: list[BaseException] = []
        # Devices of a mesh meet in the collectives of every action.
        meshes = [threading.Barrier(len(ranks), timeout=queues.patience) for ranks in self.routes.ranks]

        def work(rank: int) -> None:
            try:
                slot = next(k for k, ranks in enumerate(self.routes.ranks) if rank in ranks)
                trained = dict(self.trained)
                wire = self.wire(rank, slot, queues, trained, kind)
                for action in self.actions[slot]:
                    self.act(wire, action, meshes[slot].wait)
                wire.finish()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(self.n_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def wire(self, rank: int, slot: int, queues: PairQueues, trained: dict[Any, Any], kind: type[Wire] = Wire) -> Wire:
        """Headers have queues of their own, as numbers of hosts do beside tensors of GPUs."""
        channel, rows = queues.of(rank), queues.headers.of(rank)
        known = ExecutionMessages(self.messages, PARTS)  # of this rank
        known.__dict__["receives"] = self.execution.receives
        return kind(rank, slot, self.routes, known, channel, rows, self.values, trained, most_packed=self.most_packed)

    def act(self, wire: Wire, action: Action, compute: Callable[[], Any]) -> None:
        phase, stage, i = action
        if phase is Phase.WEIGHT:
            compute()
            return
        slot = self.table.slot_of(stage, i)
        if phase is Phase.FORWARD:
            for source in self.sources[stage]:
                address = Address(Phase.FORWARD, source, stage, i)
                found = wire.receive(slot, address)
                assert torch.equal(found[0], content(address, 0))
                assert torch.equal(found[1], content(address, 1))
                assert (found[0].requires_grad, found[1].requires_grad) == (True, False)
                assert (found[3], found[4]) == (7 + i, 0.1 * i)
            compute()
            for target in self.consumers[stage]:
                address = Address(Phase.FORWARD, stage, target, i)
                values = {0: content(address, 0).requires_grad_(), 1: content(address, 1), 3: 7 + i, 4: 0.1 * i}
                wire.send(self.table.slot_of(target, i), address, values)
            return
        for target in self.consumers[stage]:
            address = Address(Phase.BACKWARD, target, stage, i)
            found = wire.receive(slot, address)
            assert set(found) == ({0} if i % 2 else set())  # a gradient that is None stays None
            assert all(torch.equal(gradient, content(address, p)) for p, gradient in found.items())
        compute()
        for source in self.sources[stage]:
            address = Address(Phase.BACKWARD, stage, source, i)
            wire.send(self.table.slot_of(source, i), address, {0: content(address, 0)} if i % 2 else {})


CASES = [
    *[(name, m, (1,) * p, 1) for name in ("gpipe", "1f1b", "zb-h1") for p in (2, 3, 4, 6) for m in (1, 2, 5, 12)],
    *[
        (name, m, (1,) * p, v)
        for name in INTERLEAVED
        for p in (2, 3, 4)
        for v in chunk_counts(name, p)[-2:]
        for m in (p, 2 * p, 4 * p)
    ],
    *[
        (name, 7, replicas, 1)
        for name in ("gpipe", "1f1b", "zb-h1")
        for replicas in ((2, 1), (1, 3), (2, 2), (1, 2, 1))
    ],
]


@pytest.mark.parametrize("kind", [Wire, ExchangeWire])
@pytest.mark.parametrize(("name", "n_microbatches", "replicas", "chunks"), CASES)
def test_no_schedule_deadlocks(
    name: str, n_microbatches: int, replicas: tuple[int, ...], chunks: int, kind: type[Wire]
) -> None:
    queues, pipeline = PairQueues(), Pipeline(name, n_microbatches, replicas, chunks)
    pipeline.run(queues, kind)
    if kind is Wire:
        assert queues.most_ahead <= PARTS * (AHEAD + 1)


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    name = draw(st.sampled_from(SCHEDULES))
    if name in INTERLEAVED:
        replicas = (1,) * draw(st.integers(2, 3))
        chunks = draw(st.sampled_from([v for v in chunk_counts(name, len(replicas)) if v > 1]))
        n_microbatches = len(replicas) * draw(st.integers(1, 3))
    else:
        replicas, chunks = tuple(draw(st.lists(st.integers(1, 3), min_size=2, max_size=4))), 1
        n_microbatches = draw(st.integers(1, 9))
    n = len(replicas) * chunks
    every = [(a, b) for a in range(n) for b in range(a + 2, n)]
    edges = draw(st.sets(st.sampled_from(every), max_size=5)) if every else set()
    shards = draw(st.integers(1, 2)) if sum(replicas) < 5 else 1
    part = draw(st.sampled_from(["step", "step", "forward", "backward"]))
    most_packed = draw(st.sampled_from([-1, SHAPE.nbytes - 1, SHAPE.nbytes]))
    return Pipeline(name, n_microbatches, replicas, chunks, shards, edges=edges, part=part, most_packed=most_packed)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(pipeline=pipelines(), kind=st.sampled_from([Wire, ExchangeWire]))
def test_no_pipeline_deadlocks(pipeline: Pipeline, kind: type[Wire]) -> None:
    """Any schedule, skips, replicas, meshes, number of micro-batches; whole steps, forwards alone, backwards alone;
    small tensors by themselves or in the rows of their numbers."""
    pipeline.run(PairQueues(), kind)


def needed(message: Message) -> int:
    """The action before the one that reads a message."""
    return message.read_by - 1


def test_messages_are_exchanged_right_before_they_are_read_unless_that_deadlocks() -> None:
    """In the usual schedules of a chain that never happens, in an interleaved one it does."""
    chains = [Pipeline(name, 12, (1,) * 4, 1, edges=()) for name in ("gpipe", "1f1b", "zb-h1")]
    for pipeline, early in [
        *((chain, False) for chain in chains),
        (Pipeline("interleaved-1f1b", 6, (1,) * 3, 2), True),
    ]:
        found = pipeline.execution.receives
        places = {m.number: place for of_slot in found.values() for place, some in of_slot.items() for m in some}
        assert places.keys() == {m.number for m in pipeline.messages}
        assert all(START <= places[m.number] <= needed(m) for m in pipeline.messages)
        assert any(places[m.number] < needed(m) for m in pipeline.messages) == early


@pytest.mark.parametrize("case", [("interleaved-1f1b", 6, (1, 1, 1), 2), ("zb-h1", 5, (1, 1, 1), 1)], ids=str)
def test_the_stand_in_finds_receives_that_come_too_late(case: tuple[Any, ...]) -> None:
    """Each right before it is read, in the order of sending."""
    pipeline = Pipeline(*case)
    late: dict[int, dict[int, list[Message]]] = {}
    for message in pipeline.messages:
        same = [m for m in pipeline.messages if (m.source, m.target) == (message.source, message.target)]
        place = min(needed(m) for m in same if m.number >= message.number)
        late.setdefault(message.target, {}).setdefault(place, []).append(message)
    pipeline.execution.__dict__["receives"] = late
    with pytest.raises(Deadlock):
        pipeline.run(PairQueues(patience=0.5), ExchangeWire)


def test_a_backward_of_its_own_knows_what_an_earlier_forward_sent() -> None:
    """Its receives are posted ahead: stage 2 sends stage 0 its gradients before stage 1, for which stage 0 waits."""
    for kind in (Wire, ExchangeWire):
        Pipeline("1f1b", 4, (1, 1, 1), 1, part="backward").run(PairQueues(), kind)


@pytest.mark.parametrize("shards", [2, 3, (2, 1, 4), (1, 3, 2)])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_every_rank_of_a_mesh_gets_every_message(name: str, shards: int | tuple[int, ...]) -> None:
    for kind in (Wire, ExchangeWire):
        Pipeline(name, 5, (1, 1, 1), 1, shards).run(PairQueues(), kind)


def two_ranks(queues: PairQueues) -> tuple[Wire, Wire]:
    pipeline = Pipeline("1f1b", 1, (1, 1), 1)
    return pipeline.wire(0, 0, queues, {}), pipeline.wire(1, 1, queues, {})


def test_a_tensor_of_another_shape_than_derived_is_refused_where_it_is_sent() -> None:
    sender, _ = two_ranks(PairQueues())
    address = Address(Phase.FORWARD, 0, 1, 0)
    with pytest.raises(AutoparError, match=r"stage 0 made a tensor of shape \(3,\)"):
        sender.send(1, address, {0: torch.zeros(3), 1: torch.zeros(4), 3: 0, 4: 0.0})


def test_a_rank_that_failed_reads_nothing_more() -> None:
    _, receiver = two_ranks(PairQueues())
    receiver.abort()
    with pytest.raises(Aborted):
        receiver.receive(1, Address(Phase.FORWARD, 0, 1, 0))


def test_a_lost_connection_names_the_rank_and_the_message() -> None:
    class Broken:
        def send(self, *_: Any) -> Any: ...

        def receive(self, *_: Any) -> Any:
            return self

        def wait(self) -> None:
            raise RuntimeError("Connection closed by peer")

    pipeline = Pipeline("1f1b", 1, (1, 1), 1)
    wire = Wire(1, 1, pipeline.routes, pipeline.execution, Broken(), Broken(), pipeline.values, {})
    with pytest.raises(AutoparError, match="rank 0 ended or failed while rank 1 waited for the outputs of stage 0"):
        wire.receive(1, Address(Phase.FORWARD, 0, 1, 0))


dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex128])
sent_tensors = st.builds(SentTensor, st.lists(st.integers(0, 5), max_size=3).map(tuple), dtypes)


@settings(max_examples=60, deadline=None)
@given(
    numbers=st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=4),
    specs=st.lists(sent_tensors, max_size=4),
    most=st.sampled_from([-1, 0, 16, MOST_PACKED]),
)
def test_packed_numbers_and_tensors_arrive_as_they_were(numbers: list[int], specs: list[SentTensor], most: int) -> None:
    packing = Packing.of(len(numbers), dict(enumerate(specs)), most)
    sent = {p: (torch.randn(spec.shape) * 50).to(spec.dtype) for p, spec in enumerate(specs)}
    row = packing.packed(numbers, sent).clone()
    assert packing.numbers(row) == numbers
    arrived = packing.unpacked(row)
    assert sorted([*arrived, *packing.apart]) == list(sent)
    assert all(torch.equal(tensor, sent[p]) and tensor.dtype == sent[p].dtype for p, tensor in arrived.items())
    assert all(specs[p].nbytes > most for p in packing.apart)


def test_a_write_into_one_packed_tensor_is_none_into_another() -> None:
    """Else autograd would refuse the backward of the other one."""
    packing = Packing.of(0, {0: SHAPE, 1: SHAPE}, MOST_PACKED)
    one, other = packing.unpacked(packing.packed([], {0: torch.ones(4), 1: torch.ones(4)})).values()
    other.requires_grad_()
    loss = (other * other).sum()
    one.add_(1)
    loss.backward()
    assert other.grad is not None
    assert other.grad.tolist() == [2.0] * 4
