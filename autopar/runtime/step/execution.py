"""Actions on worker threads: one execution has every worker do its list of actions in order.

```
   caller      submit every list ------------- poll: has every worker finished? ------------> return, or raise
                 |                                                                   ^
   worker 0      F0 F1 ....... B0 F2 B1 ... finished --------------------------------|
   worker 1      ..F0 B0 F1 B1 .... F2 B2 .. finished -------------------------------/
```
Where one worker of a CPU does everything, the caller's thread may do so in its place, which saves waking the worker.

The first failure stops all workers. It aborts their mailboxes, so that a worker that waits for a message stops at once;
every other worker stops before its next action. Ctrl-C in the caller's thread is such a failure, too.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from autopar.capture import torch_private
from autopar.capture.thread_state import CallerState
from autopar.runtime.memory_watch import DeviceContext
from autopar.runtime.stages.stage_replica import ReplicaAction, StageReplica, Work
from autopar.runtime.step.error_context import PHASE_NAMES, add_context, in_words
from autopar.runtime.step.mailbox import Aborted, Mailbox
from autopar.runtime.step.workers import Worker
from autopar.schedule.clock import Phase
from cost_models.hardware.devices import operator_threads

Act = Callable[[StageReplica, int], None]  # does an action's phase on a stage, for a micro-batch

_PATIENCE = 0.5  # s that an interrupted caller waits for operators that are running
_POLL = 0.25  # s between two looks at the workers: a signal handled by another thread does not interrupt a wait


class Execution:
    """One execution of actions. `cpu_seconds`: what each worker's thread took."""

    def __init__(
        self,
        acts: Mapping[Phase, Act],
        mailbox: Mailbox,
        state: CallerState,
        device_context: DeviceContext | None,
    ) -> None:
        """`state`: what every worker applies around its actions. `device_context`: for a device's name, a context that
        its worker enters."""
        self.cpu_seconds: list[float] = []
        self._acts = acts
        self._mailbox = mailbox
        self._state = state
        self._device_context = device_context
        self._failure: BaseException | None = None
        self._n_workers = 0
        self._finished: list[Worker] = []
        self._wake_caller: queue.SimpleQueue[None] = queue.SimpleQueue()

    @property
    def is_finished(self) -> bool:
        """Whether no worker is busy with it. After an interrupt, one may still be inside a long operator."""
        return len(self._finished) == self._n_workers

    def run(self, work: Work) -> None:
        """Have every worker do its actions; returns when all have. Raises what the first failing worker raised."""
        self._n_workers = len(work.of_workers)
        try:
            if work.by_one and self._may_run_here():
                ((worker, actions),) = work.of_workers
                with torch.autograd.set_multithreading_enabled(False), operator_threads(worker.device.threads):
                    self._work(worker, actions)
            else:
                for worker, actions in work.of_workers:
                    worker.submit(partial(self._work, worker, actions))
            while not self.is_finished:
                with contextlib.suppress(queue.Empty):
                    self._wake_caller.get(timeout=_POLL)
        except BaseException as interrupt:  # Ctrl-C, or a closed worker: stop the workers before raising it
            self._fail(interrupt)
            self._wait_for_stopping_workers()
        if self._failure is not None:
            # Without a reference from here: the error's traceback refers to this execution and to its tensors.
            failure, self._failure = self._failure, None
            raise failure

    def _wait_for_stopping_workers(self) -> None:
        """Workers inside a long operator are not waited for: their threads end by themselves."""
        end = time.monotonic() + _PATIENCE
        while not self.is_finished and time.monotonic() < end:
            with contextlib.suppress(queue.Empty, KeyboardInterrupt):  # the user may press Ctrl-C again
                self._wake_caller.get(timeout=max(0.0, end - time.monotonic()))

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        self._mailbox.abort()

    def _may_run_here(self) -> bool:
        """Whether the caller's thread may do the actions of a worker.

        Not inside a backward: theirs would be part of it. Not under autocast: it would keep its casts of parameters
        until the caller leaves it, also over an optimizer's step.
        """
        return not torch_private.in_backward() and not any(enabled for _, enabled, _ in self._state.autocast)

    # -- in the workers' threads ------------------------------------------------------------------------------------

    def _work(self, worker: Worker, actions: Sequence[ReplicaAction]) -> None:
        device = worker.device
        try:
            context = self._device_context(device.name) if self._device_context is not None else nullcontext()
            with self._state.applied(device.torch_device), context:
                start = time.thread_time()
                self._act(actions)
                self.cpu_seconds.append(time.thread_time() - start)
        except Aborted:
            pass
        except BaseException as error:  # `run` raises it in the caller's thread
            self._fail(error)
        finally:
            self._finished.append(worker)
            self._wake_caller.put(None)

    def _act(self, actions: Sequence[ReplicaAction]) -> None:
        profiling, acts = torch_private.profiler_is_on(), self._acts
        for replica, phase, microbatch in actions:
            if self._failure is not None:
                raise Aborted
            try:
                if profiling:
                    with _profiler_range(phase, replica.stage.index, microbatch):
                        acts[phase](replica, microbatch)
                else:
                    acts[phase](replica, microbatch)
            except Aborted:
                raise
            except Exception as error:
                raised = in_words(error)
                add_context(raised, replica, phase, microbatch)
                if raised is not error:
                    raise raised from error
                raise


def _profiler_range(phase: Phase, stage: int, microbatch: int) -> AbstractContextManager[Any]:
    """A range that torch.profiler shows."""
    record: Callable[..., Any] = torch.profiler.record_function
    return record(f"autopar stage {stage} {PHASE_NAMES[phase]}", f"micro-batch {microbatch}")
