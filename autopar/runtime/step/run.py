r"""One call of a pipelined model: the batch passes through the workers, and its gradients pass back.

```
 caller's thread                                  worker threads: a stage and a micro-batch per action

 x ─(1) split into micro-batches   call.py
     │
    (2) one node in the caller's autograd graph   autograd.py
     │
    (3) every worker gets its list of actions ──> (4) take what earlier stages sent    mailbox.py, transfers.py
        run.py, execution.py                      (5) compute the stage                 passes.py
                                                  (6) send its outputs to later stages
                                                  (7) last stage: store them, or compute the loss
 y <─(8) join the micro-batches    outputs.py <────┘

 dy ─(9) every worker gets its backward actions ─> (10) take the gradients of the outputs
                                                   (11) run autograd in the worker's thread
                                                   (12) send the gradients of the inputs to earlier stages
 dx, .grad <─(13) sum over micro-batches, stages and replicas <──┘
```
The numbers mark the lines that do each step. A training step does (4) to (7) and (10) to (12) in one execution, in the
order of the schedule:

```
   slot 0   F0 F1 ....... B0 F2 B1
               \  \     /     \
   slot 1      F0 B0 F1 B1 ...  F2 B2
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from autopar.analysis.checked_loss import check_trains
from autopar.capture import torch_private
from autopar.runtime.call_checks import UNWRAP
from autopar.runtime.memory_watch import DeviceContext
from autopar.runtime.stages.executable import Executable
from autopar.runtime.stages.stage_replica import StageReplica, Work
from autopar.runtime.step.call import CallTensors, PipelineCall
from autopar.runtime.step.execution import Execution
from autopar.runtime.step.mailbox import Mailbox
from autopar.runtime.step.passes import Passes
from autopar.runtime.step.transfers import Transfers
from autopar.runtime.step_recorder import StepRecorder
from autopar.schedule.clock import Phase

Acts = dict[Phase, Callable[[StageReplica, int], None]]


class Run:
    """One call, between its forward and its backward. `tensors`: what the workers have stored of it so far."""

    instead = UNWRAP  # what to do about what a pipelined module cannot

    def __init__(
        self,
        executable: Executable,
        call: PipelineCall,
        lock: AbstractContextManager[Any],
        *,
        device_context: DeviceContext | None = None,
        recorder: StepRecorder | None = None,
    ) -> None:
        """`lock`: held while the call runs: calls of several threads would mix their gradients in the workers' leaves.
        `device_context`: for a device's name, a context that its worker enters. `recorder`: times every action."""
        self.executable = executable
        self.call = call
        self.lock = lock
        self.tensors = CallTensors(call, executable.output_device)
        self._device_context = device_context
        self._recorder = recorder

    def forward(self) -> list[Any]:
        """Run all forwards. Returns the flat outputs of the whole batch, detached."""
        self._execute(training=False)
        self._update_buffers()
        return self.tensors.outputs.finish()  # (8)

    @property
    def _has_activations(self) -> bool:
        """Whether a backward may follow."""
        return bool(self.tensors.kept)

    def backward(self, gradients: Sequence[torch.Tensor | None], keep_graph: bool) -> None:
        """Run all backwards, from the gradients of the flat outputs.

        `keep_graph`: another backward may follow. Raises RuntimeError if an earlier backward has freed the activations.
        """
        if not self._has_activations:
            raise RuntimeError(
                "Trying to backward through the pipeline a second time: its activations are freed after the first "
                "backward. Call backward with retain_graph=True to keep them."
            )
        self.tensors.outputs.gradients = list(gradients)
        self.tensors.input_gradients.clear()
        self._execute(training=True, only_backward=True, keep_graph=keep_graph)  # (9)

    def step(self) -> torch.Tensor:
        """Run forwards and backwards in the order of the schedule. Returns the loss of the batch.

        Raises InputError if the loss has no gradient.
        """
        self._execute(training=True)
        self._check_trains()
        self._update_buffers()
        return self.tensors.loss()

    def _check_trains(self) -> None:
        assert self.call.loss is not None
        check_trains(self.tensors.has_gradient, self.call.loss)

    def _execute(self, *, training: bool, only_backward: bool = False, keep_graph: bool = False) -> None:
        """(3) Have the workers do the schedule's actions: forwards, with `training` also backwards."""
        executable, recorder, n_microbatches = self.executable, self._recorder, self.call.n_microbatches
        work = executable.work(
            n_microbatches,
            training=training,
            only_backward=only_backward,
            every_worker=self._device_context is not None,
        )
        mailbox = self._mailbox(training, only_backward)
        mailbox = mailbox if recorder is None else recorder.mailbox(mailbox)
        loss = self.call.loss if recorder is None or self.call.loss is None else recorder.timed_loss(self.call.loss)
        streams = self.call.state.streams
        transfers = Transfers(streams) if recorder is None else recorder.transfers(streams)
        off = self.call.state.backward_without_autocast(of_step=not only_backward)
        acts = Passes(
            executable, self.call, self.tensors, mailbox, transfers, loss, keep_graph=keep_graph, without_autocast=off
        ).acts()
        if recorder is not None:
            acts = recorder.timed_acts(acts)
        acts = self._followed(acts, work)
        execution = Execution(acts, mailbox, self.call.state, self._device_context)
        executable.start_execution(training)
        compiling = torch_private.compile_seconds() if executable.compiled else 0.0
        try:
            execution.run(work)
        except BaseException:
            self.tensors.kept.clear()  # a failed call cannot be differentiated
            executable.drop_gradients()
            raise
        finally:
            executable.end_execution(execution.is_finished)
            if execution.is_finished:
                transfers.finish()
        if executable.compiled:
            executable.compile_seconds += torch_private.compile_seconds() - compiling
        executable.compare_with_overhead(sum(execution.cpu_seconds), n_microbatches, not only_backward, training)

    def _followed(self, acts: Acts, work: Work) -> Acts:
        """What else happens after an action, in its worker."""
        return acts

    def _mailbox(self, training: bool, only_backward: bool) -> Mailbox:
        """For the messages of one execution."""
        return Mailbox(len(self.executable.workers))

    def _update_buffers(self) -> None:
        """After forwards: bring the model's buffers (running statistics) up to date with what stages wrote."""
        self.executable.write_back()
        deferred = self.executable.lowered.deferred
        if deferred:
            self.tensors.statistics.update(deferred, self.executable.tensor)
