"""The order of copies and kernels on GPUs, shown on pretended ones: nothing is read or reused too early.

Whole steps of the real runtime run under a recording stand-in of torch.cuda's streams and events (pretend_gpus.py), and
a race detector checks what it recorded (happens_before.py). The seeded faults show that it would find them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from models import assert_same_gradients, gradients
from pretend_gpus import PretendGpus, pipelined
from pretend_streams import Event, Stream
from shardings import staged
from torch import nn
from torch.nn.functional import mse_loss

from autopar import Plan
from autopar.capture.program import capture
from autopar.runtime.stages.executable import Executable
from autopar.runtime.step import transfers
from autopar.runtime.step.transfers import Transfers

pytestmark = [
    pytest.mark.usefixtures("shared_exports"),
    pytest.mark.filterwarnings("error::autopar.AutoparWarning"),  # a loss on the whole batch is another order
]


class Skips(nn.Module):
    """Four layers. The last stage reads what the first one computes, and the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x)
        second = torch.relu(self.layers[1](first))
        third = torch.relu(self.layers[2](second)) + first
        return self.layers[3](third) * x


def split(n_stages: int) -> dict[str, int]:
    return {f"layers.{i}": i * n_stages // 4 for i in range(4)}


def plan_of(schedule: str, devices: list[Any], n_stages: int = 2, n_microbatches: int = 4, **more: Any) -> Plan:
    return Plan.from_split(split(n_stages), n_microbatches=n_microbatches, schedule=schedule, devices=devices, **more)


TWO = ["cuda:0", "cuda:1"]
PLANS = {
    "gpipe": plan_of("gpipe", TWO),
    "1f1b": plan_of("1f1b", TWO),
    "zb-h1": plan_of("zb-h1", TWO),
    "interleaved": plan_of("interleaved-1f1b", TWO * 2, 4),
    "recompute": plan_of("1f1b", TWO, recompute=(0, 1)),
    "replicas": plan_of("1f1b", [["cuda:0", "cuda:2"], "cuda:1"]),
    "replicas of the last stage": plan_of("1f1b", ["cuda:0", ["cuda:1", "cuda:2"]]),
    "three stages": plan_of("1f1b", ["cuda:2", "cuda:0", "cuda:1"], 3, 5),
    "there and back": plan_of("gpipe", ["cuda:1", "cuda:0"], n_microbatches=7),
    "one GPU": plan_of("1f1b", ["cuda:0", "cuda:0#1"]),
}
WITH_CPU = {
    "GPU to CPU": plan_of("1f1b", ["cuda:0", "cpu:0"]),
    "CPU to GPU": plan_of("zb-h1", ["cpu:0", "cuda:0"]),
}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendGpus]:
    pretended = PretendGpus(monkeypatch)
    yield pretended
    pretended.close()


def on_cpu(found: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    return {name: g.cpu() for name, g in found.items() if g is not None}


class Session:
    """A model on pretended GPUs beside the plain one."""

    def __init__(self, gpus: PretendGpus, plan: Plan) -> None:
        torch.manual_seed(1)
        self.gpus, self.model = gpus, Skips()
        self.original = copy.deepcopy(self.model)
        self.pm = pipelined(self.model, plan)
        x = torch.randn(8, 8)
        self.pm.prepare((x,), {}, loss_fn=mse_loss, target=x)
        with gpus.recording():
            self.pm.prepare((x,), {}, loss_fn=mse_loss, target=gpus.on(x, "cuda:0"))  # the loss is studied there, too

    @property
    def executable(self) -> Executable:
        newest = self.pm._signatures.newest()
        assert newest is not None
        assert newest.executable is not None
        return newest.executable

    def expected(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.model.zero_grad()
        self.original.zero_grad()
        loss = mse_loss(self.original(x), y)
        loss.backward()
        return loss.detach()

    def train_step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.pm.train_step(x, target=y, loss_fn=mse_loss)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Without a backward, whose messages would put many things in order."""
        with torch.no_grad():
            return self.pm(x)

    def call_and_backward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output = self.pm(x)
        loss = mse_loss(output, y.to(output.device))
        loss.backward()
        return loss.detach()

    def check_steps(self, way: str, targets_at: str = "cuda:0", steps: int = 2) -> None:
        """Steps with inputs on the first GPU, in order, without a wait of the host, and equal to the plain model's."""
        with self.gpus.recording():
            for _ in range(steps):
                x, y = torch.randn(8, 8), torch.randn(8, 8)
                expected = self.expected(x, y)
                there = self.gpus.on(x, "cuda:0"), self.gpus.on(y, targets_at)
                self.gpus.waits.clear()
                loss = WAYS[way](self, *there)
                assert not self.gpus.waits
                del there
                self.check(loss, expected)
        self.gpus.check()

    def check(self, loss: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(loss.cpu(), expected)
        assert_same_gradients(on_cpu(gradients(self.model)), on_cpu(gradients(self.original)))


WAYS: dict[str, Callable[[Session, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "train_step": Session.train_step,
    "call and backward": Session.call_and_backward,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_steps_on_gpus_read_and_reuse_nothing_too_early_and_wait_for_no_gpu(
    gpus: PretendGpus, plan: Plan, way: str
) -> None:
    Session(gpus, plan).check_steps(way, steps=3)


@pytest.mark.parametrize("way", WAYS)
def test_gpus_that_do_not_reach_each_other_send_through_the_host_in_order(
    gpus: PretendGpus, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: False)
    Session(gpus, PLANS["interleaved"]).check_steps(way, targets_at="cuda:1")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("meshes", [((2,), None), (None, (2,)), ((2,), (2,))], ids=str)
def test_devices_of_a_mesh_exchange_in_order(gpus: PretendGpus, meshes: Any, way: str) -> None:
    program = capture(Skips(), (torch.randn(8, 8),), {})
    plan = staged(program, split(2), meshes, [1, 1])
    on_gpus = tuple(
        replace(stage, devices=tuple(name.replace("cpu", "cuda") for name in stage.devices)) for stage in plan.stages
    )
    Session(gpus, replace(plan, stages=on_gpus)).check_steps(way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("plan", WITH_CPU.values(), ids=WITH_CPU)
def test_a_host_thread_waits_only_where_a_cpu_stage_reads_what_a_gpu_sent(
    gpus: PretendGpus, plan: Plan, way: str
) -> None:
    session = Session(gpus, plan)
    with gpus.recording():
        for _ in range(2):
            x, y = torch.randn(8, 8), torch.randn(8, 8)
            expected = session.expected(x, y)
            gpus.waits.clear()
            loss = WAYS[way](session, x, y)
            inside = [wait for wait in gpus.waits if "autopar-" in wait]
            assert inside
            assert all("autopar-cpu" in wait and "transfers.py" in wait for wait in inside)
            session.check(loss, expected)
    gpus.check()


@pytest.mark.parametrize("where", ["cpu", "pinned", "cuda:0", "cuda:1", "cuda:3"])
@pytest.mark.parametrize("way", [*WAYS, "forward"])
def test_inputs_may_be_overwritten_and_freed_as_soon_as_the_call_returns(
    gpus: PretendGpus, way: str, where: str
) -> None:
    session = Session(gpus, PLANS["1f1b"])
    with gpus.recording():
        for _ in range(2):
            x, y = torch.randn(8, 8), torch.randn(8, 8)
            expected = session.expected(x, y)
            if where == "pinned":
                there = x.pin_memory(), y.pin_memory()
            else:
                there = tuple(x.clone() if where == "cpu" else gpus.on(x, where) for x in (x, y))
            gpus.waits.clear()
            result = {**WAYS, "forward": Session.forward}[way](session, *there)
            with torch.no_grad():
                for tensor in there:
                    tensor.fill_(float("nan"))
            del there, tensor
            assert all(wait.endswith("the caller") for wait in gpus.waits)
            if way == "forward":
                torch.testing.assert_close(result.cpu(), session.original(x))
            else:
                session.check(result, expected)
    gpus.check()


def test_a_graph_that_is_kept_is_differentiated_again_in_order(gpus: PretendGpus) -> None:
    session = Session(gpus, PLANS["1f1b"])
    with gpus.recording():
        x, y = torch.randn(8, 8), torch.randn(8, 8)
        expected = mse_loss(session.original(x), y)
        expected.backward(retain_graph=True)
        expected.backward()
        output = session.pm(gpus.on(x, "cuda:0"))
        loss = mse_loss(output, gpus.on(y, "cuda:1"))
        loss.backward(retain_graph=True)
        loss.backward()
        session.check(loss.detach(), expected.detach())
        del output, loss
    gpus.check()


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_outputs_without_gradients_are_the_callers_and_in_order(gpus: PretendGpus, mode: Any) -> None:
    session = Session(gpus, PLANS["three stages"])
    stream = torch.cuda.Stream(torch.device("cuda", 1))
    with gpus.recording(), mode():
        x = torch.randn(8, 8)
        stream.wait_stream(torch.cuda.default_stream(stream.device))
        with gpus.use(stream):  # type: ignore[arg-type]
            for _ in range(3):
                there = gpus.on(x, "cuda:1")
                found = session.pm(there)
                there.zero_()
                torch.testing.assert_close(found.cpu(), session.original(x))
                del there, found
    gpus.check()


def test_gradients_of_inputs_come_back_in_order(gpus: PretendGpus) -> None:
    session = Session(gpus, PLANS["1f1b"])
    with gpus.recording():
        x, y = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)
        expected = session.expected(x, y)
        there = gpus.on(x, "cuda:1").detach().requires_grad_()
        session.check(session.call_and_backward(there, gpus.on(y, "cuda:1")), expected)
        assert there.grad is not None
        assert x.grad is not None
        torch.testing.assert_close(there.grad.cpu(), x.grad)
    gpus.check()


def test_copies_of_inputs_wait_for_nothing_that_is_queued_after_the_call_began(gpus: PretendGpus) -> None:
    """Stage 0 computes on the GPU of the inputs; stage 1 reads them, too, and gets its copies at once."""
    session = Session(gpus, PLANS["gpipe"])
    with gpus.recording():
        x = gpus.on(torch.randn(8, 8), "cuda:0")
        with torch.no_grad():
            session.pm(x)
            gpus.copies.clear()
            begun = gpus.order.clock("cuda:0 default").get("cuda:0 default", 0)
            session.pm(x)
        inputs = [seen for source, seen in gpus.copies if source is gpus.memory(x)]
    assert len(inputs) == 4, "a micro-batch each"
    assert all(seen.get("cuda:0 default", 0) <= begun + 1 for seen in inputs)  # one more: the event at the start


def test_kernels_do_not_wait_for_the_copies_of_the_actions_before(gpus: PretendGpus) -> None:
    """Whatever number of tensors an action sends."""
    here, there = torch.device("cuda", 0), torch.device("cuda", 1)
    computing = torch.cuda.current_stream(here).name  # type: ignore[attr-defined]
    with gpus.recording():
        copies = Transfers([torch.cuda.current_stream(d) for d in (here, there)])
        values = [gpus.on(torch.randn(2), "cuda:0") for _ in range(9)]
        waited = []
        for _ in range(transfers._AHEAD + 1):
            copies.begin_action()
            waited.append([name for name in gpus.order.clock(computing) if "stream" in str(name)])
            for value in values:
                copies.arrived(copies.push(value, there), there)
        assert not any(waited[:-1])
        assert waited[-1], "for those of the first action"
        copies.finish()
    gpus.check()


@pytest.mark.parametrize("way", [*WAYS, "forward"])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "replicas"])
def test_memory_in_transit_is_bounded_however_far_the_host_runs_ahead(
    gpus: PretendGpus, name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pretended GPUs never get anywhere: what a host waits for until it frees memory, it would hold for ever."""
    session = Session(gpus, replace(PLANS[name], n_microbatches=8))
    hold, most = Transfers._hold, [0]

    def watched(self: Transfers, *args: Any) -> None:
        hold(self, *args)
        most[0] = max(most[0], *map(len, self._held.values()))

    monkeypatch.setattr(Transfers, "_hold", watched)
    with gpus.recording():
        there = gpus.on(torch.randn(8, 8), "cuda:0"), gpus.on(torch.randn(8, 8), "cuda:0")
        {**WAYS, "forward": Session.forward}[way](session, *there)
        assert most == [transfers._AHEAD]
        assert not gpus.n_recorded, "record_stream frees nothing before the GPU has got there"
    gpus.check()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("plan", [PLANS["1f1b"], PLANS["replicas"]], ids=["1f1b", "replicas"])
def test_a_call_computes_and_collects_gradients_on_the_streams_of_its_caller(
    gpus: PretendGpus, plan: Plan, way: str
) -> None:
    session = Session(gpus, plan)
    streams = [torch.cuda.Stream(torch.device("cuda", i)) for i in range(3)]
    defaults = [torch.cuda.default_stream(torch.device("cuda", i)) for i in range(3)]
    collected: list[str] = []

    def as_autograd_does(loss: torch.Tensor) -> None:
        """Autograd runs a backward on a thread of its own, on the stream of the loss, else on default streams."""
        collect = session.executable.collect_gradients

        def watched() -> Any:
            gpus.threads.clear()
            found = collect()
            collected.extend(gpus.threads)
            return found

        session.executable.collect_gradients = watched  # type: ignore[method-assign]
        with gpus.recording(), gpus.use(streams[loss.device.index]):  # type: ignore[arg-type, index]
            loss.backward()

    with gpus.recording():
        for _ in range(2):  # the second one adds to gradients that are there
            x, y = torch.randn(8, 8), torch.randn(8, 8)
            mse_loss(session.original(x), y).backward()
            for stream, default in zip(streams, defaults, strict=True):
                stream.wait_stream(default)
            with gpus.use(streams[0]), gpus.use(streams[1]), gpus.use(streams[2]):
                there = gpus.on(x, "cuda:0"), gpus.on(y, "cuda:0")
                if way == "train_step":
                    session.train_step(*there)
                else:
                    output = session.pm(there[0])
                    gpus.in_thread(as_autograd_does, mse_loss(output, there[1].to(output.device)))
                del there
                found = on_cpu(gradients(session.model))
            assert_same_gradients(found, on_cpu(gradients(session.original)))
            for stream, default in zip(streams, defaults, strict=True):
                default.wait_stream(stream)
    assert not [name for name in collected if "default" in name]
    gpus.check()


@pytest.mark.slow
@given(
    schedule=st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    n_stages=st.integers(2, 4),
    places=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    n_microbatches=st.integers(1, 8),
    recompute=st.booleans(),
    where=st.sampled_from(["cpu", "cuda:0", "cuda:1", "cuda:3"]),
    way=st.sampled_from(sorted(WAYS)),
)
@settings(max_examples=4, deadline=None, phases=[Phase.generate])
def test_no_schedule_reads_or_reuses_anything_too_early(
    schedule: str,
    n_stages: int,
    places: list[int],
    n_microbatches: int,
    recompute: bool,
    where: str,
    way: str,
) -> None:
    seen = [places[:i].count(place) for i, place in enumerate(places)]
    names = [f"cuda:{place}" + (f"#{n}" if n else "") for place, n in zip(places, seen, strict=True)][:n_stages]
    again = tuple(range(n_stages)) if recompute else ()
    plan = plan_of(schedule, names, n_stages, n_microbatches, recompute=again)
    with pytest.MonkeyPatch.context() as patch:
        gpus = PretendGpus(patch)
        session = Session(gpus, plan)
        with gpus.recording():
            x, y = torch.randn(8, 8), torch.randn(8, 8)
            expected = session.expected(x, y)
            there = gpus.on(x, where), gpus.on(y, where)
            loss = WAYS[way](session, *there)
            del there
            session.check(loss, expected)
        gpus.check()
        session.pm.close()
        gpus.close()


# -- the oracle finds what is seeded -----------------------------------------------------------------------------------


def _no_wait(self: Stream, event: Event) -> None:
    self.gpus.queue(self)


def _empty_event(self: Event, stream: Stream) -> None:
    self.gpus.queue(stream)


def _no_reference(self: Transfers, tensor: torch.Tensor, owner: Stream, event: Event) -> None:
    return None


def _no_finish(self: Transfers) -> None:
    self._held.clear()


def _no_host_wait(self: Event) -> None:
    return None


def _copies_before_the_inputs_are_there(self: Transfers, streams: Any) -> None:
    self._start, self._held = {stream.device: torch.cuda.Event() for stream in streams}, {}


FAULTS: dict[str, tuple[object, str, Any, str, str]] = {
    "no stream waits for an event": (Stream, "wait_event", _no_wait, "1f1b", "before"),
    "events say nothing": (Event, "record", _empty_event, "1f1b", "before"),
    "what is copied is freed at once": (Transfers, "_hold", _no_reference, "1f1b", "is freed before"),
    "nothing is waited for at the end": (Transfers, "finish", _no_finish, "1f1b", "is freed before"),
    "inputs are copied before they are computed": (
        Transfers,
        "__init__",
        _copies_before_the_inputs_are_there,
        "1f1b",
        "has written it",
    ),
    "a CPU stage does not wait": (Event, "synchronize", _no_host_wait, "GPU to CPU", "has written it"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_oracle_finds_a_seeded_fault(fault: str, gpus: PretendGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    target, name, broken, plan, said = FAULTS[fault]
    monkeypatch.setattr(target, name, broken)
    session = Session(gpus, {**PLANS, **WITH_CPU}[plan])
    with gpus.recording():
        for _ in range(2):
            session.train_step(gpus.on(torch.randn(8, 8), "cuda:0"), gpus.on(torch.randn(8, 8), "cuda:0"))
    with pytest.raises(AssertionError, match=said):
        gpus.check()
