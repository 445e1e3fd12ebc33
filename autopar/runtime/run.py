"""One call of a pipelined model: the schedule's actions on the workers, and what comes of them.

Every slot (a device with its worker) works through its list of actions; what an action needs arrives by `mail`:

```
   slot 0   F0 F1 ....... B0 F2 B1          message (way, sender's stage, receiver's stage, micro-batch) -> values
               \\  \\     /     \
   slot 1      F0 B0 F1 B1 ...  F2 B2
```
Where all operators are so small that Python takes longer than they do, two threads only wait for each other: Python
runs one at a time. One worker then does the actions of all slots, in the order in which they would have run.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from autopar.analysis.batch_proof import OutputCombination
from autopar.capture import torch_private
from autopar.capture.thread_state import CallerState
from autopar.runtime.error_context import WAYS, explain
from autopar.runtime.executable import Executable
from autopar.runtime.mailbox import Aborted, Mailbox
from autopar.runtime.memory_watch import Watch
from autopar.runtime.passes import LossFunction, Passes
from autopar.runtime.step_recorder import StepRecorder
from autopar.runtime.workers import Worker
from autopar.schedule.clock import Action, Phase

Slots = Sequence[tuple[int, Action]]  # actions in order, each with its slot

PATIENCE = 0.5  # s that an interrupted call waits for operators that are running
_LOOK_UP = 0.25  # s: a signal that another thread got wakes nobody who waits; he has to look himself


class Run:
    """The state of one call between its forward and its backward."""

    def __init__(
        self,
        executable: Executable,
        leaves: Sequence[Any],
        sizes: Sequence[int],
        outputs: Sequence[OutputCombination],
        state: CallerState,
        *,
        seed: int | None = None,
        loss: LossFunction | None = None,
        target: Any = None,
        target_dims: Sequence[int] = (0,),
        watch: Watch | None = None,
        notes: StepRecorder | None = None,
    ) -> None:
        """`leaves`: flat inputs; `sizes`: samples in each micro-batch; `outputs`: how the flat outputs combine.

        With `loss`, the last stage ends in loss(output, target) of every micro-batch, weighted by its samples; tensors
        in `target` are split on the first of `target_dims` that has the batch's size.
        `watch`: for a device's name, a context that its worker works in. `notes`: takes down what every action takes.
        """
        self.executable = executable
        self._passes = Passes(
            executable,
            leaves,
            sizes,
            outputs,
            grad=state.grad,
            seed=seed,
            loss=notes.loss(loss) if notes is not None and loss is not None else loss,
            target=target,
            target_dims=target_dims,
        )
        self.results = self._passes.results
        self.input_gradients = self._passes.input_gradients
        self._state = state
        self._watch = watch
        self._notes = notes
        self._failure: BaseException | None = None
        self._seconds: list[float] = []  # CPU seconds of every worker in one execution

    def forward(self) -> list[Any]:
        """All forwards; the flat outputs of the whole batch (detached)."""
        self._execute(training=False, backward=False)
        return self.results.finish()

    def backward(self, gradients: Sequence[torch.Tensor | None], keep_graph: bool) -> None:
        """All backwards, from the gradients of the flat outputs."""
        if not self._passes.differentiable:
            raise RuntimeError(
                "Trying to backward through the pipeline a second time: its activations are freed after the first "
                "backward. Call backward with retain_graph=True to keep them."
            )
        self._passes.start_backward(gradients, keep_graph)
        self._execute(training=True, backward=True)

    def step(self) -> torch.Tensor:
        """Forwards and backwards by the schedule; the mean loss of the batch."""
        self._execute(training=True, backward=False)
        return self._passes.mean_loss()

    # -- the caller's side ------------------------------------------------------------------------------------------

    def _execute(self, *, training: bool, backward: bool) -> None:
        """Have the schedule's actions done; `backward`: those that are no forwards alone."""
        executable, n_microbatches = self.executable, len(self._passes.sizes)
        workers = executable.workers
        self._passes.mail = Mailbox(len(workers)) if self._notes is None else self._notes.mail(len(workers))
        self._seconds.clear()
        if executable.tiny and self._watch is None:
            lists = [(workers[0], executable.order(n_microbatches, training))]
        else:
            actions = executable.table(n_microbatches, training).actions
            lists = [(w, [(slot, a) for a in actions[slot]]) for slot, w in enumerate(workers)]
        if backward:
            lists = [(w, [(slot, a) for slot, a in mine if a.phase is not Phase.FORWARD]) for w, mine in lists]
        if executable.dirty:
            executable.drop_gradients()
        executable.dirty = training
        finished: list[Worker] = []
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        executable.abandoned = True  # until every worker has told that it is through: the caller may leave at any line
        try:
            for worker, mine in lists:
                worker.submit(lambda worker=worker, mine=mine: self._work(worker, mine, finished, done))  # type: ignore[misc]
            while len(finished) < len(lists):
                with contextlib.suppress(queue.Empty):
                    done.get(timeout=_LOOK_UP)
        except BaseException as interrupt:  # Ctrl-C, or a closed worker: stop the workers, then hand it on
            self._fail(interrupt)
            self._wait(finished, len(lists), done)
        executable.abandoned = len(finished) < len(lists)
        self._passes.mail = Mailbox(0)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            self._passes.forget()
            raise failure
        executable.note(sum(self._seconds), n_microbatches, int(not backward), int(training))
        if not backward:
            executable.write_back()
        if not backward and executable.lowered.deferred:
            self._passes.statistics.update(executable.lowered.deferred, executable.tensor)

    def _wait(self, finished: list[Worker], n_workers: int, done: queue.SimpleQueue[None]) -> None:
        """For workers that are to stop; those that are inside a long operator are given up, and end by themselves."""
        end = time.monotonic() + PATIENCE
        while len(finished) < n_workers and time.monotonic() < end:
            with contextlib.suppress(queue.Empty, KeyboardInterrupt):  # pressed again
                done.get(timeout=max(0.0, end - time.monotonic()))

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        self._passes.mail.abort()

    # -- the workers' side ------------------------------------------------------------------------------------------

    def _work(self, worker: Worker, actions: Slots, finished: list[Worker], done: queue.SimpleQueue[None]) -> None:
        try:
            watched = self._watch(worker.device.name) if self._watch is not None else nullcontext()
            with self._state.applied(worker.device.torch_device), watched:
                start = time.thread_time()
                self._act(actions)
                self._seconds.append(time.thread_time() - start)
        except Aborted:
            pass
        except BaseException as error:  # re-raised by the caller
            self._fail(error)
        finally:
            finished.append(worker)
            done.put(None)

    def _act(self, actions: Slots) -> None:
        ways, parts = self._passes.actions(), self.executable.part
        if self._notes is not None:
            ways = self._notes.actions(ways)
        name_ranges = torch_private.profiler_is_on()
        for _, (phase, stage, microbatch) in actions:
            if self._failure is not None:
                raise Aborted
            part = parts(stage, microbatch)
            try:
                if name_ranges:
                    with _range(phase, stage, microbatch):
                        ways[phase](part, microbatch)
                else:
                    ways[phase](part, microbatch)
            except Aborted:
                raise
            except Exception as error:
                explain(error, part, phase, microbatch)
                raise


def _range(phase: Phase, stage: int, microbatch: int) -> AbstractContextManager[Any]:
    """A range that torch.profiler shows."""
    record: Callable[..., Any] = torch.profiler.record_function
    return record(f"autopar stage {stage} {WAYS[phase]}", f"micro-batch {microbatch}")
