"""Operator times measured in place: within whole forward and backward passes of a torch.fx graph.

Repeating an operator alone keeps caches warm and skips allocation, and so underestimates a model by 14-20 %. This
module times every operator where it runs (`timed_passes.py`). The clock is that of the device (`device_clock.py`): on
a GPU it is read once a pass, after everything was queued. Marks take time themselves, so the sums are calibrated
against passes without marks. Passes that disagree are repeated. Linux reports how long a thread waited for a core; that
time is subtracted, because a plan should fit the machine and not the other programs that run on it during planning.
Where the system does not report it, more passes are made, and how far they lie apart is kept. Workers of one machine
share memory bandwidth, caches and Python's interpreter lock: with `workers=n`, n threads run the same passes at once,
and the times are those under that load. Threads of several GPUs share the lock alone: launches take longer, kernels do
not, and the marks in each GPU's queue show the longer of the two. Where workers are processes, these run them at once.
"""

from __future__ import annotations

import logging
import math
import statistics
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, Self

import torch
from torch import fx

from cost_models.graphs import Loss
from cost_models.hardware.devices import Device
from cost_models.measuring.autocast import Autocast
from cost_models.measuring.core_waiting import waiting_is_known
from cost_models.measuring.device_clock import device_clock
from cost_models.measuring.repeats import agree, spread
from cost_models.measuring.timed_passes import GraphRunner, TimedPass

log = logging.getLogger(__name__)

# Rounds of passes at most: another one follows while the passes so far disagree.
_ROUNDS = 3
# Passes of a round at least, unless one takes very long (s): a cloud's processor changes its speed all the time. There
# passes of 2 s over one T5 differed by 10 % (standard deviation), so that a single one says little.
_PASSES, _VERY_LONG_PASS = 3, 10.0
# Where the system does not report how long threads wait for a core, medians of more passes take the place of that:
# rounds at least, and passes of a round.
_ROUNDS_UNKNOWN, _PASSES_UNKNOWN = 2, 5

# Seconds of a pass above which the clock reads around its operators (about a microsecond each) do not matter.
_LONG_PASS = 0.3

_PAIRS = 8  # of gradients that are added up in turn: 256 MiB in all

_LONGEST = 1e9  # s: longer times come from a damaged cache


@dataclass(frozen=True)
class GraphTimes:
    """Seconds of one pass over a graph at one micro-batch size, on one of `workers` busy devices."""

    rows: int  # samples in the micro-batch
    workers: int  # devices of the machine that were busy at the same time
    forward: dict[str, float]  # node -> s
    backward: dict[str, float]  # node -> s; gradient accumulation counts to the node that reads the parameter
    loss_forward: float = 0.0  # s
    loss_backward: float = 0.0  # s
    spread: float = 0.0  # of the seconds of whole passes: how far the middle half of them lies apart, of the median
    # Node -> s of `backward`: adding gradients of parameters to those of earlier micro-batches.
    accumulation: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Seconds of the whole pass."""
        return sum(self.forward.values()) + sum(self.backward.values()) + self.loss_forward + self.loss_backward

    def to_json(self) -> dict[str, Any]:
        """A JSON value that `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any, nodes: Collection[str]) -> Self:
        """The times of `nodes` that `to_json` wrote.

        Raises:
            TypeError, AttributeError: `value` has other fields or types.
            ValueError: it has times of other nodes, times that are not finite seconds >= 0, or no samples or workers.
        """
        times = cls(**value)
        if {*times.forward} != {*nodes} or {*times.backward} != {*nodes}:
            raise ValueError("the cached times are of other operators")
        if "accumulation" not in value or not {*times.accumulation} <= {*nodes}:
            raise ValueError("the cached times do not tell the accumulation of gradients apart")
        seconds = (*times.forward.values(), *times.backward.values(), times.loss_forward, times.loss_backward)
        seconds = (*seconds, *times.accumulation.values(), times.spread)
        if not all(type(s) in (int, float) and 0 <= s < _LONGEST for s in seconds):
            raise ValueError(f"cached times must be seconds from 0 to {_LONGEST:g}")
        if not all(type(count) is int and count >= 1 for count in (times.rows, times.workers)):
            raise ValueError("cached times must be of one or more samples and workers")
        return times


class Companions(Protocol):
    """Other processes of the machine that run the same passes at the same time."""

    def wait(self) -> None:
        """Until all are here."""

    def largest(self, value: float) -> float:
        """Of all values."""


def measure(
    module: fx.GraphModule,
    inputs_of: Callable[[int], list[Any]],
    loss_of: Callable[[int], Loss | None],
    rows: int,
    device: Device,
    *,
    workers: int = 1,
    training: bool = True,
    n_outputs: int | None = None,
    all_outputs: bool = False,
    budget: float = 1.0,
    autocast: Autocast | None = None,
    companions: Companions | None = None,
    beside: Sequence[tuple[fx.GraphModule, torch.device]] = (),
) -> GraphTimes:
    """Median times of every node of `module` at `rows` samples, on `workers` threads at once.

    `inputs_of(rows)` gives the flat inputs, `loss_of(rows)` a loss of the flat outputs or None (backward then starts
    from ones at every scalar output, which is a loss, or at all outputs without one or with `all_outputs`).
    `n_outputs`: the outputs from this index on are loose ends; the backward starts from them, too. After a warm-up,
    timed passes and passes without clock reads take turns for about `budget` seconds; if they disagree, up to `_ROUNDS`
    times. `autocast`: that all passes run under; None: off. `companions`: `workers`
    processes, this one included, make one of the `workers` each in place of threads; the times are this process's own.
    `beside`: for each of the `workers` but the first, `module` for another GPU like `device`, and that GPU; by default
    all threads run on `device`.

    Raises:
        ValueError: `beside` has not one GPU for each worker but the first, or there are companions as well.
    """
    if beside and (len(beside) != workers - 1 or companions is not None):
        raise ValueError(f"{workers} workers have {workers - 1} other GPUs in the same process, got {len(beside)}")
    own = workers if companions is None else 1
    places = [(module, device.torch_device), *beside] if beside else [(module, device.torch_device)] * own
    runners = [
        GraphRunner(graph, place, training, n_outputs, autocast=autocast, all_outputs=all_outputs)
        for graph, place in places
    ]
    for runner, (_, place) in zip(runners, places, strict=True):
        runner.inputs = [_to(x, place) for x in inputs_of(rows)]
    load = _Load(runners, [loss_of(rows) for _ in runners], device.threads, budget, companions)
    load.run()
    return _typical_times(rows, workers, load.plain, load.timed)


class _Load:
    """The same passes on every runner at once, one thread per runner.

    The threads meet at a barrier before every pass, so that each pass runs while all others run the same:

        thread 0   | warm-up |      | timed | plain |       | timed | plain |
        thread 1   | warm-up    |   | timed   | plain |     | timed | plain   |
                   ^            ^   ^       ^               barriers
                        1. n_passes from the slowest warm-up    2. the timed and plain passes take turns
                                                                3. once more, if the passes of all threads disagree
    """

    def __init__(
        self,
        runners: Sequence[GraphRunner],
        losses: Sequence[Loss | None],
        threads: int,
        budget: float,
        companions: Companions | None = None,
    ) -> None:
        """`threads`: CPU threads of each runner's operators; `budget`: s for the passes after the warm-up.
        `companions`: processes with the same load as this one, which has one runner."""
        self.plain: list[tuple[float, float]] = []  # s of forward and backward
        self.timed: list[TimedPass] = []
        self._runners, self._losses, self._threads, self._budget = runners, losses, threads, budget
        self._barrier: threading.Barrier | _Meeting = threading.Barrier(len(runners))
        if companions is not None:
            self._barrier = _Meeting(companions)
        self._companions = companions
        self._lock = threading.Lock()
        self._warm_ups: list[float] = []  # s of every runner's first pass
        self._failures: list[BaseException] = []

    def run(self) -> None:
        """Run all passes; raises the first error of a thread."""
        before = torch.get_num_threads()
        threads = [
            threading.Thread(target=self._work, args=pair, name=f"autopar-profile-{index}")
            for index, pair in enumerate(zip(self._runners, self._losses, strict=True))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.set_num_threads(before)  # set_num_threads of a thread also becomes the default of later threads
        if self._failures:
            # The threads that waited for the failed one have a BrokenBarrierError.
            causes = [f for f in self._failures if not isinstance(f, threading.BrokenBarrierError)]
            raise (causes or self._failures)[0]

    def _work(self, runner: GraphRunner, loss: Loss | None) -> None:
        try:
            torch.set_num_threads(self._threads)
            self._barrier.wait()
            # Backwards run in the thread that calls them, as in the workers of a pipeline.
            with _current(runner.device), torch.autograd.set_multithreading_enabled(False):
                warm_up = self._warmed_up(runner, loss)
                with self._lock:
                    self._warm_ups.append(warm_up)
                self._barrier.wait()
                self._repeat(runner, loss)
        except BaseException as error:  # `run` raises it; the other threads must not wait for this one
            self._failures.append(error)
            self._barrier.abort()

    def _warmed_up(self, runner: GraphRunner, loss: Loss | None) -> float:
        """Seconds of a first pass: allocation, kernels, lazy initialisation. Of the slowest process, which all raise
        for where one of them cannot run it."""
        if self._companions is None:
            return sum(runner.plain_pass(loss))
        own = math.inf
        try:
            own = sum(runner.plain_pass(loss))
        finally:
            slowest = self._companions.largest(own)
        if math.isinf(slowest):
            raise RuntimeError("another process could not run the passes that are measured on all at once")
        return slowest

    def _repeat(self, runner: GraphRunner, loss: Loss | None) -> None:
        """Timed and plain passes in turn. All threads make the same number, or the last passes would be without load.

        Where passes are long, the plain ones are left out: the clock reads do not matter there.
        """
        slowest = max(self._warm_ups)
        with_plain = slowest < _LONG_PASS
        known = waiting_is_known()
        fewest = _PASSES_UNKNOWN if not known else 1 if slowest > _VERY_LONG_PASS else _PASSES
        n_passes = max(fewest, min(10, round(self._budget / (slowest * (1 + with_plain)))))
        rounds_at_least = 1 if known else _ROUNDS_UNKNOWN
        for made in range(1, max(_ROUNDS, rounds_at_least) + 1):
            for _ in range(n_passes):
                self._barrier.wait()
                timed = runner.timed_pass(loss)
                self._barrier.wait()
                plain = runner.plain_pass(loss) if with_plain else timed.totals
                with self._lock:
                    self.plain.append(plain)
                    self.timed.append(timed)
            self._barrier.wait()
            enough = agree([sum(pass_) for pass_ in self.plain])  # 3: the same for all threads, and processes
            if self._companions is not None:
                enough = self._companions.largest(float(not enough)) == 0.0
            self._barrier.wait()
            if enough and made >= rounds_at_least:
                return


class _Meeting:
    """A barrier for the processes in the place of one for threads."""

    def __init__(self, companions: Companions) -> None:
        self.wait = companions.wait

    def abort(self) -> None:
        """Nothing: a process that fails after its first pass ends, and its group notices."""


def _typical_times(
    rows: int, workers: int, plain: Sequence[tuple[float, float]], timed: Sequence[TimedPass]
) -> GraphTimes:
    """The median of every operator's seconds, scaled so that the sums are those of the plain passes."""
    totals = sorted(map(sum, plain))
    if not agree(totals):
        span = f"{totals[0] * 1e3:.3g} to {totals[-1] * 1e3:.3g} ms"
        log.info("%d passes over %d samples took %s and still disagree; keeping the median", len(totals), rows, span)
    # Disturbances only ever add time: of an even number of passes, the lower of the middle two.
    typical = statistics.median_low
    forward = {n: typical([t.forward[n] for t in timed]) for n in timed[0].forward}
    backward = {n: typical([t.backward[n] for t in timed]) for n in timed[0].backward}
    accumulation = {n: typical([t.accumulation[n] for t in timed]) for n in timed[0].accumulation}
    loss_forward, loss_backward = (typical([t.loss[phase] for t in timed]) for phase in (0, 1))
    scale_f = _ratio(typical([p[0] for p in plain]), sum(forward.values()) + loss_forward)
    scale_b = _ratio(typical([p[1] for p in plain]), sum(backward.values()) + loss_backward)
    return GraphTimes(
        rows,
        workers,
        {n: s * scale_f for n, s in forward.items()},
        {n: s * scale_b for n, s in backward.items()},
        loss_forward * scale_f,
        loss_backward * scale_b,
        spread(totals),
        {n: s * scale_b for n, s in accumulation.items() if s > 0},
    )


def measure_accumulate(device: torch.device, nbytes: int = 1 << 24) -> float:
    """Seconds per byte of adding one gradient to another in place.

    Several pairs take turns, as many as caches forget: those of a model come from memory.
    """
    pairs = [[torch.full((nbytes // 4,), float(i), device=device) for i in range(2)] for _ in range(_PAIRS)]
    clock = device_clock(device)
    spans = []
    for turn in range(4):
        for total, part in pairs:
            start = clock.mark()
            total.add_(part)
            spans += [(start, clock.mark())] if turn else []  # the first turn finds memory that nobody has touched
    clock.wait()
    seconds = sorted(clock.between(*span) for span in spans)
    return seconds[len(seconds) // 4] / nbytes  # disturbances only ever add time


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the thread's current one, as it is in workers."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _to(value: Any, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to(device).requires_grad_(value.requires_grad)


def _ratio(whole: float, parts: float) -> float:
    return whole / parts if parts > 0 and whole > 0 else 1.0
