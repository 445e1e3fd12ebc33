"""After a fault at any place and time, the caller gets the error, no thread hangs, and the next step is right."""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from faults import (
    MICROBATCHES,
    ROWS,
    Act,
    at_call,
    batch,
    comes_true,
    happening,
    mean_square,
    on_every_worker,
    pipelined,
    workers,
)
from models import assert_same_gradients, gradients
from torch._subclasses.fake_tensor import FakeTensor

from autopar import PipelinedModule

pytestmark = pytest.mark.timeout(90)  # s, for a step that hangs

FAULTS = 63  # of each plan; every one is followed by a step that must be right


class Refused(Exception):
    """Raised by the loss functions and operators below."""


class CtrlC:
    """A SIGINT handler that raises KeyboardInterrupt once inside `reaches`. Elsewhere it does nothing, because a signal
    that comes late must not end the tests."""

    def __init__(self) -> None:
        self._armed = False

    def __call__(self, *_: object) -> None:
        if self._armed:
            self._armed = False
            raise KeyboardInterrupt

    def reaches(self, step: Act) -> bool:
        """Whether the caller of `step` was interrupted."""
        try:
            self._armed = True
            step()
            self._armed = False
        except KeyboardInterrupt:
            return True
        return False


def press() -> None:
    """Send SIGINT to the main thread, as the kernel does for Ctrl-C. May be called from any thread."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@pytest.fixture
def ctrl_c() -> Iterator[CtrlC]:
    handler = CtrlC()
    before = signal.signal(signal.SIGINT, handler)
    yield handler
    signal.signal(signal.SIGINT, before)


class Trial:
    """Steps of one pipelined module: as a call or a `train_step`, on one worker or on all, at random."""

    def __init__(self, pm: PipelinedModule, n_stages: int, ctrl_c: CtrlC, chance: random.Random) -> None:
        self.pm, self.n_stages, self.ctrl_c, self.chance = pm, n_stages, ctrl_c, chance
        original = copy.deepcopy(pm.unwrap())
        self.batches = [batch(n_stages) for _ in range(3)]
        self.wanted = []
        for one in self.batches:
            mean_square(original(*one), one[0]).backward()
            self.wanted.append(gradients(original))
        for _ in range(3):
            self.assert_right()
        start = time.perf_counter()
        self.assert_right()
        self.usual = time.perf_counter() - start  # s of a step

    def step(self, x: torch.Tensor, tokens: torch.Tensor, loss_fn: Callable[..., torch.Tensor] = mean_square) -> None:
        rows = torch.arange(len(x))
        with on_every_worker(self.pm) if self.chance.random() < 0.7 else contextlib.nullcontext():
            if self.chance.random() < 0.5:
                self.pm.train_step(x, tokens, target=rows, loss_fn=loss_fn)
            else:
                loss_fn(self.pm(x, tokens), rows).backward()

    def assert_right(self) -> None:
        number = self.chance.randrange(len(self.batches))
        self.step(*self.batches[number])
        assert_same_gradients(gradients(self.pm), self.wanted[number])

    # -- faults: each does one step -------------------------------------------------------------------------------

    def wrong_token(self) -> None:
        x, tokens = batch(self.n_stages)
        row, stage = self.chance.randrange(len(x)), self.chance.randrange(self.n_stages)
        tokens[row, stage] = 99
        with pytest.raises(IndexError, match="index out of range") as caught:
            self.step(x, tokens)
        self._assert_located(caught.value, f"in the forward of stage {stage} ", row // ROWS)

    def no_loss(self) -> None:
        wrong = self.chance.randrange(ROWS * MICROBATCHES)
        inside: list[bool] = []

        def loss_fn(output: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            if type(output) is torch.Tensor and wrong in rows:  # not while the loss is captured
                inside.append(len(rows) == ROWS)  # or the call's own: the pipeline does not know that it failed
                raise Refused("no loss")
            return mean_square(output, rows)

        with pytest.raises(Refused, match="no loss") as caught:
            self.step(*batch(self.n_stages), loss_fn)
        if inside == [True]:
            self._assert_located(caught.value, f"in the forward of stage {self.n_stages - 1} ", wrong // ROWS)

    def no_backward(self) -> None:
        stage, number = self.chance.randrange(self.n_stages), self.chance.randrange(MICROBATCHES)

        def refuse() -> None:
            raise Refused("no backward")

        refusing = happening({("backward", stage): at_call(number, refuse)})
        with pytest.raises(Refused, match="no backward") as caught, refusing:
            self.step(*batch(self.n_stages))
        self._assert_located(caught.value, f"in the backward.* of stage {stage} ", r"\d")

    def ctrl_c_in_an_operator(self) -> None:
        place = self.chance.choice(["forward", "backward"]), self.chance.randrange(self.n_stages)
        one = batch(self.n_stages)
        with happening({place: at_call(self.chance.randrange(MICROBATCHES), press)}):
            assert self.ctrl_c.reaches(lambda: self.step(*one))
        self.pm.zero_grad()

    def ctrl_c_at_some_time(self) -> None:
        timer = threading.Timer(self.chance.uniform(0, 1.2 * self.usual), press)
        one = batch(self.n_stages)
        timer.start()
        self.ctrl_c.reaches(lambda: self.step(*one))
        timer.join()
        self.pm.zero_grad()

    def _assert_located(self, error: BaseException, where: str, microbatch: int | str) -> None:
        assert re.search(rf"{where}\(cpu:\d\), micro-batch {microbatch}\b", "\n".join(error.__notes__))
        assert all(p.grad is None for p in self.pm.parameters())


FAULTY: list[Callable[[Trial], None]] = [
    *(Trial.wrong_token, Trial.no_loss, Trial.no_backward, Trial.ctrl_c_in_an_operator, Trial.ctrl_c_at_some_time)
]


def tensors() -> int:
    """Tensors that are alive. Without fake ones: torch.export keeps two, which have no memory, for each capture."""
    gc.collect()
    kinds = (type(thing) for thing in gc.get_objects())
    return sum(issubclass(kind, torch.Tensor) and not issubclass(kind, FakeTensor) for kind in kinds)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [[], [0]], ids=["plain", "recompute"])
@pytest.mark.parametrize(
    ("schedule", "devices"),
    [
        ("gpipe", ["cpu:0", ("cpu:1", "cpu:2"), "cpu:3"]),
        ("1f1b", ["cpu:0", "cpu:1"]),
        ("interleaved-1f1b", ["cpu:0", "cpu:1", "cpu:0", "cpu:1"]),
        ("zb-h1", [("cpu:0", "cpu:1"), "cpu:2", "cpu:3"]),
    ],
    ids=["gpipe", "1f1b", "interleaved", "zb-h1"],
)
def test_after_any_fault_the_next_step_is_right(
    schedule: str, devices: list[Any], recompute: list[int], ctrl_c: CtrlC
) -> None:
    chance = random.Random(f"{schedule} {recompute}")
    trial = Trial(pipelined(schedule, devices, recompute), len(devices), ctrl_c, chance)
    n_threads, n_tensors = len(workers()), tensors()
    for _ in range(FAULTS):
        chance.choice(FAULTY)(trial)
        trial.assert_right()
    assert comes_true(lambda: len(workers()) <= n_threads)  # others' may end meanwhile
    assert comes_true(lambda: tensors() <= n_tensors)


def watching_lines(step: Act, look: Callable[[tuple[str, int]], None]) -> None:
    """Do `step`. Before its thread runs a line of the runtime, call `look` with the file and the line number."""

    def entered(frame: Any, *_: object) -> Any:
        return at_line if "/autopar/runtime/" in frame.f_code.co_filename else None

    def at_line(frame: Any, event: str, _: object) -> Any:
        if event == "line":
            look((frame.f_code.co_filename, frame.f_lineno))
        return at_line

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        step()
    finally:
        sys.settrace(before)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["a call", "train_step"])
def test_ctrl_c_at_any_line_of_the_caller_leaves_nothing_behind(way: str, ctrl_c: CtrlC) -> None:
    trial = Trial(pipelined("1f1b", ["cpu:0", "cpu:1"]), 2, ctrl_c, random.Random(0))
    one, wanted = trial.batches[0], trial.wanted[0]

    def step() -> None:
        with on_every_worker(trial.pm):
            if way == "train_step":
                trial.pm.train_step(*one, target=one[0], loss_fn=mean_square)
            else:
                mean_square(trial.pm(*one), one[0]).backward()

    def interrupt_at(line: tuple[str, int]) -> None:
        def look(here: tuple[str, int]) -> None:
            if here == line:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            watching_lines(step, look)

    step()
    trial.pm.zero_grad()  # as before every interrupted step
    lines: dict[tuple[str, int], None] = {}
    watching_lines(step, lambda line: lines.setdefault(line))
    trial.pm.zero_grad()
    wrong = []
    for line in lines:
        interrupt_at(line)
        trial.pm.zero_grad()
        step()
        after = gradients(trial.pm)
        if not all(torch.allclose(after[name], g, atol=1e-6) for name, g in wanted.items()):  # type: ignore[arg-type]
            wrong.append(line)
    assert len(lines) > 50
    assert not wrong, "gradients of the next step"


@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("receiver", ["the main thread", "another thread"])
def test_ctrl_c_does_not_wait_for_an_operator_whose_thread_ends_later(receiver: str, way: str, ctrl_c: CtrlC) -> None:
    pm = pipelined("1f1b", ["cpu:0", "cpu:1"])
    trial = Trial(pm, 2, ctrl_c, random.Random(0))
    release, ended = threading.Event(), threading.Event()

    def long() -> None:
        if receiver == "the main thread":
            press()
        else:
            signal.raise_signal(signal.SIGINT)  # handled by this thread: it does not interrupt the caller's wait
        release.wait(30)
        ended.set()

    n_threads = len(workers())
    every_worker = pm.device_context(lambda _: contextlib.nullcontext())  # stages this small run in the caller's thread
    with happening({(way, 0): at_call(0, long)}):
        with every_worker:
            assert ctrl_c.reaches(lambda: trial.step(*trial.batches[0]))
        assert not ended.is_set(), "the caller waited for the operator"
        pm.zero_grad()
        for _ in range(3):
            trial.assert_right()
        assert not ended.is_set(), "the next step waited for the operator"
        release.set()
    assert ended.wait(20)
    assert comes_true(lambda: len(workers()) <= n_threads)
    trial.assert_right()
