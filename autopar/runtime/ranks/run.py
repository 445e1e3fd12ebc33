"""One call of a pipelined model on one rank.

```
   every rank: the whole batch -> its slot's actions (Run, with a wire for a mailbox) -> losses and outputs to all ranks
```
Afterwards every rank has all losses, and all outputs where the caller gets them: it goes on as if it had run alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopar.analysis.example import LossFunction
from autopar.errors import InputError
from autopar.runtime.call_checks import IN_ONE_PROCESS
from autopar.runtime.ranks.batch_statistics import share_statistics
from autopar.runtime.ranks.executable import RankExecutable
from autopar.runtime.ranks.faults.heartbeats import ANOTHER_BACKWARD
from autopar.runtime.ranks.gradients.input_gradients import needing_gradients, share_input_gradients
from autopar.runtime.ranks.gradients.loss_gradients import share_loss_gradients
from autopar.runtime.ranks.gradients.output_gradients import OutputGradientAgreement
from autopar.runtime.ranks.gradients.reduction import GradientSums
from autopar.runtime.ranks.losses import SharedLosses
from autopar.runtime.ranks.messages.packing import Values
from autopar.runtime.ranks.messages.shapes import SentValues
from autopar.runtime.ranks.messages.wire import Wire
from autopar.runtime.ranks.one_message import on_all_ranks
from autopar.runtime.ranks.own_parameters import refuse_dtensors, refused_in
from autopar.runtime.ranks.parameters.own import RankParameters
from autopar.runtime.ranks.shared_outputs import SharedOutputs
from autopar.runtime.ranks.shares import Shares
from autopar.runtime.stages.stage_replica import StageReplica, Work
from autopar.runtime.step.execution import Act
from autopar.runtime.step.loss_leaves import LossLeaves
from autopar.runtime.step.mailbox import Address, Mailbox
from autopar.runtime.step.run import Acts, Run
from autopar.schedule.clock import Phase

_BACKWARDS = (Phase.BACKWARD, Phase.INPUT, Phase.WEIGHT)


class RankRun(Run):
    """One call, between its forward and its backward, on one rank."""

    executable: RankExecutable
    instead = IN_ONE_PROCESS

    def __init__(
        self,
        run: Run,
        placed: RankParameters,
        *,
        shares: Shares | None = None,
        agreement: OutputGradientAgreement | None = None,
        accumulates: bool = False,
    ) -> None:
        """`run`: the call as one process would run it, not started. `shares`: of a forward, where ranks share the
        batch, so that each starts the backward from its own samples. `agreement`: where all pass the whole batch, and
        start from the same gradients. `accumulates`: leave gradients of ranks apart."""
        assert isinstance(run.executable, RankExecutable)
        super().__init__(run.executable, run.call, run.lock, device_context=run._device_context, recorder=run._recorder)
        self._rank_parameters = placed
        run.executable.follow_parameters()
        self._buckets = placed.buckets
        self._shares, self._agreement, self._accumulates = shares, agreement, accumulates
        self._made: dict[int, tuple[torch.Size, torch.dtype]] = {}  # the outputs of the forward that are tensors
        self._wire: Wire | None = None
        self._losses: SharedLosses | None = None
        self._sent: dict[int, SentValues] = {}  # by micro-batch
        self._may_go_back = self._has_gone_back = False
        self._trained: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self._loss_reads_leaves = False  # on any rank
        if self.call.loss is not None:
            self.tensors.loss_leaves = LossLeaves()
        self.tensors.outputs = SharedOutputs(self.tensors.outputs)

    @property
    def _has_activations(self) -> bool:
        """The same on all ranks, also where this one has no stage or no micro-batch."""
        return self._may_go_back

    def _watched(self, acts: Acts) -> Acts:
        """The watcher knows which action this rank is in."""
        doing = self.executable.world.watcher.doing

        def watched(phase: Phase, act: Act) -> Act:
            def one(replica: StageReplica, microbatch: int) -> None:
                doing(phase, replica.stage.index, microbatch)
                act(replica, microbatch)

            return one

        return {phase: watched(phase, act) for phase, act in acts.items()}

    def forward(self) -> list[Any]:
        outputs = super().forward()
        self._made = {i: (x.shape, x.dtype) for i, x in enumerate(outputs) if isinstance(x, torch.Tensor)}
        return outputs

    def backward(self, gradients: Sequence[torch.Tensor | None], keep_graph: bool) -> None:
        refuse_dtensors(gradients)
        if not self._has_activations:
            super().backward(gradients, keep_graph)  # raises
        # If only some ranks run this backward, the message on the others names this call.
        what = ANOTHER_BACKWARD if self._has_gone_back else "backward"
        self._has_gone_back = True
        with self.executable.world.watcher.call(what):
            if self._agreement is not None:
                self._agreement.check(gradients, self.executable)
            if self._shares is not None:
                gradients = self._of_all_ranks(gradients, self._shares)
            super().backward(gradients, keep_graph)

    def _of_all_ranks(self, gradients: Sequence[torch.Tensor | None], shares: Shares) -> list[torch.Tensor | None]:
        """The gradients of the outputs of the whole batch: the loss is the mean of the ranks' losses, weighted by
        their samples, as if each were a mean over its own.

        Where a rank has no samples, its loss may be a mean over nothing, whose gradient is NaN and counts nothing.
        """
        world = self.executable.world
        share = shares.own / shares.total if shares.total else 1 / world.size
        has = [gradient is not None and share > 0 for gradient in gradients]
        found = world.gathered_numbers([*map(int, has)])
        joined: list[torch.Tensor | None] = []
        for place, gradient in enumerate(gradients):
            if not any(theirs[place] for theirs in found):
                joined.append(None)
                continue
            shape, dtype = self._made[place]
            device = self.executable.output_device
            if gradient is not None and has[place]:
                own = (gradient * share).to(device).contiguous()
            else:
                own = torch.zeros(shape, dtype=dtype, device=device)
            joined.append(world.all_reduced(own))
        return joined

    def _mailbox(self, training: bool, only_backward: bool) -> Mailbox:
        one = self.executable
        if one.slot < 0:
            return Mailbox(0)
        wanted = one.execution_messages(self.call.n_microbatches, training, only_backward)
        self._wire = one.world.new_wire(one.slot, one.routes, wanted, self._values, self._trained)
        return self._wire

    def _followed(self, acts: Acts, work: Work) -> Acts:
        """A stage's gradients start to travel after its last backward here, losses after the last forward."""
        actions = [action for _, of_worker in work.of_workers for action in of_worker]
        backwards = [action.replica.stage.index for action in actions if action.phase in _BACKWARDS]
        sums = self.executable.sums
        sums.begin(backwards)
        followed = {phase: _followed_by(act, sums) if phase in _BACKWARDS else act for phase, act in acts.items()}
        if self.call.loss is not None:
            n_forwards = sum(action.phase is Phase.FORWARD for action in actions)
            self._losses = SharedLosses(self.executable.world, self.tensors, self.executable.owner, n_forwards)
            self._losses.begin()
            forward = self._with_checked_loss(followed[Phase.FORWARD], self.call.loss)
            followed[Phase.FORWARD] = self._losses.following(forward)
        return self._watched(followed)

    def _with_checked_loss(self, forward: Act, loss_fn: LossFunction) -> Act:
        """`forward`, which raises InputError if the loss reads parameters of the model."""

        def act(replica: StageReplica, microbatch: int) -> None:
            with refused_in(loss_fn, self._rank_parameters):
                forward(replica, microbatch)
            refuse_dtensors([self.tensors.losses[microbatch]], loss_fn)

        return act

    def _values(self, address: Address) -> Values:
        _, sender, receiver, microbatch = address
        if microbatch not in self._sent:
            inputs = [pieces[microbatch] for pieces in self.call.inputs]
            self._sent[microbatch] = self.executable.shapes.of(inputs, self.call.state.autocast)
        return self._sent[microbatch].of(sender, receiver, self.executable.reads[sender, receiver])

    def _execute(self, *, training: bool, only_backward: bool = False, keep_graph: bool = False) -> None:
        sums, one = self.executable.sums, self._rank_parameters
        if training and not self._accumulates and one.apart.waiting and one.buckets is not self._buckets:
            raise on_all_ranks(
                InputError(
                    "this call began before another one, which was the first to read some parameters, and accumulate() "
                    "has left gradients of these apart: go back through calls in the order in which they began"
                )
            )
        one.failed = True  # unless it gets to the end
        if training:
            sums.apart = self._accumulates
            idle = one.changes.frozen.keys | self.executable.left_alone_parameters
            sums.leave_out(idle, waiting=one.apart.waiting)
            sums.waiting = {} if sums.apart else one.apart.take({key: one.parameters[key] for key in sums.apart_keys})
        watcher = self.executable.world.watcher
        with watcher.call("backward" if only_backward else "train_step" if training else "forward"):
            try:
                self._execute_and_share(training=training, only_backward=only_backward, keep_graph=keep_graph)
            except BaseException as error:
                self._put_back_of_loss()
                raised = watcher.lost(error)
                if raised is error:
                    raise
                raise raised from None
        self._may_go_back = keep_graph or not training
        self._rank_parameters.failed = False

    def _execute_and_share(self, *, training: bool, only_backward: bool, keep_graph: bool) -> None:
        super()._execute(training=training, only_backward=only_backward, keep_graph=keep_graph)
        if training:
            self.executable.sums.end_actions()
        if self._wire is not None:
            self._wire.finish()
            self._wire = None
        if not only_backward:
            if self._losses is not None:
                self._losses.finish()
                self._loss_reads_leaves = self._losses.has_leaves
                self._losses = None
            if self.call.return_outputs:
                assert isinstance(self.tensors.outputs, SharedOutputs)
                self.tensors.outputs.share(self.executable)
        if training and (indices := needing_gradients(self.call)):
            share_input_gradients(indices, self.call, self.tensors, self.executable)

    def _check_trains(self) -> None:
        """The same on all ranks. Where it raises, what waits in `.grad` for another backward waits on."""
        try:
            super()._check_trains()
            self._share_loss_gradients()
        except InputError:
            self._put_back_of_loss()
            if not self._accumulates:
                self._wait_on()
            raise

    def _share_loss_gradients(self) -> None:
        leaves, loss = self.tensors.loss_leaves, self.call.loss
        assert leaves is not None
        assert loss is not None
        if self._loss_reads_leaves:
            share_loss_gradients(leaves, loss, self.executable, self._rank_parameters, self.call.n_microbatches)

    def _put_back_of_loss(self) -> None:
        """The call has failed: what its loss reads has the gradients of before."""
        if self.tensors.loss_leaves is not None:
            self.tensors.loss_leaves.take()

    def _wait_on(self) -> None:
        """Give what `accumulate()` left apart back: its sums over ranks, which this call started, without a gradient
        of its own. Collective."""
        sums, one = self.executable.sums, self._rank_parameters
        found = {key: g for key, g in sums.finish().items() if key in sums.apart_keys}
        if one.apart.was_taken:
            parameters = {key: one.parameters[key] for key in sums.apart_keys}
            stored = {key: one.as_stored(key, g) for key, g in found.items() if one.is_first_of_its_sum(key)}
            one.apart.put_back(parameters, stored)

    def _update_buffers(self) -> None:
        one, statistics = self.executable, self.tensors.statistics
        one.write_back()
        if one.lowered.deferred:
            share_statistics(statistics, one, self.call.n_microbatches)
            statistics.update(one.lowered.deferred, one.kept_buffer)
        one.share_buffers()


def _followed_by(act: Act, sums: GradientSums) -> Act:
    def act_and_start(replica: StageReplica, microbatch: int) -> None:
        act(replica, microbatch)
        if replica.graphs is not None and sums.is_last(replica.stage.index):
            replica.graphs.give_gradients()
        sums.after_backward(replica.stage.index)

    return act_and_start
