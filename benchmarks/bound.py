"""A step against the simulator's bounds: what its actions take, laid out by the schedule without links.

`Noted` takes what they take in the step itself, without their waiting: what is above that bound the runtime has lost.
`Alone` lets one worker act at a time: what is above that bound is lost to what the workers share (memory, caches, the
interpreter's lock), too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from statistics import median

from autopar import PipelinedModule
from autopar.capture.thread_state import CallerState
from autopar.runtime.signatures.captures import CallArguments
from autopar.runtime.stages.stage_replica import StageReplica
from autopar.runtime.step.mailbox import Mailbox
from autopar.runtime.step.passes import Passes
from autopar.runtime.step.transfers import Transfers
from autopar.runtime.step_recorder import StepRecorder
from autopar.schedule.clock import Action, Phase, chain
from autopar.schedule.simulate import StageTimes, simulate
from autopar.schedule.table import Schedule
from benchmarks.models import Workload


class Noted:
    """What every action of a step takes in it, waiting for messages left out."""

    def __init__(self, module: PipelinedModule, step: Callable[[], object]) -> None:
        """`step`: one of the module's."""
        self._module, self._step = module, step
        self.taken: list[dict[Action, float]] = []  # s, of every step so far

    def step(self) -> object:
        """The step itself; recording costs some microseconds an action."""
        recorder = StepRecorder()
        with self._module.recording(recorder):
            result = self._step()
        self.taken.append(recorder.seconds())
        return result


class Alone:
    """The actions of a module's step, each done by the worker that does it in a step while all others wait."""

    def __init__(self, module: PipelinedModule, workload: Workload) -> None:
        """`module`: with a plan of micro-batches."""
        self._module = module
        self._call = CallArguments((), workload.inputs, workload.loss, workload.target)
        self._bound = module._signatures.bind(self._call)
        self.taken: list[dict[Action, float]] = []  # s, of every step so far

    @property
    def schedule(self) -> Schedule:
        signature = self._bound.signature
        assert signature.executable is not None
        return signature.executable.table(signature.n_microbatches, training=True)

    def step(self) -> None:
        """Forwards and backwards in an order that a step might have, so that as much memory is held as in a step.

        Parameters get no gradients by it.
        """
        run, seconds = self._module._calls._run(self._bound, self._call), {}
        executable, call = run.executable, run.call
        mailbox = Mailbox(len(executable.workers))
        transfers = Transfers(call.state.streams)
        acts = Passes(executable, call, run.tensors, mailbox, transfers, call.loss, keep_graph=False).acts()
        for _, action in executable.order(call.n_microbatches, training=True):
            replica = executable.replica(action.stage, action.microbatch)
            seconds[action] = _seconds_on_worker(replica, acts[action.phase], action.microbatch)
        transfers.finish()
        executable.drop_gradients()
        self.taken.append(seconds)


def _seconds_on_worker(replica: StageReplica, act: Callable[[StageReplica, int], None], microbatch: int) -> float:
    """In the replica's own thread: its memory comes from other places than the caller's, which takes other times."""
    future: Future[float] = Future()
    state = CallerState.of_this_thread([replica.device], training=True)

    def work() -> None:
        try:
            with state.applied(replica.device):
                start = time.perf_counter()
                act(replica, microbatch)
                future.set_result(time.perf_counter() - start)
        except BaseException as error:  # raised by result(): a worker must not
            future.set_exception(error)

    replica.worker.submit(work)
    return future.result()


def lower_bound(schedule: Schedule, taken: Sequence[Mapping[Action, float]]) -> float:
    """Seconds of a step whose actions take the medians of what they took, and whose transfers take nothing."""
    m = schedule.n_microbatches

    def times(phase: Phase, stage: int) -> tuple[float, ...]:
        return tuple(median(step[Action(phase, stage, i)] for step in taken) for i in range(m))

    stages = []
    for stage in range(schedule.n_stages):
        forward = times(Phase.FORWARD, stage)
        if schedule.splits_backward:
            inputs, weight = times(Phase.INPUT, stage), times(Phase.WEIGHT, stage)
            both = tuple(a + b for a, b in zip(inputs, weight, strict=True))
            stages.append(StageTimes(forward, both, weight))
        else:
            stages.append(StageTimes(forward, times(Phase.BACKWARD, stage)))
    return simulate(schedule, stages, chain(schedule.n_stages, m)).step_time
