"""What an action does with tensors: the forward or backward of one stage, for one micro-batch.

The numbers are those of the drawing in run.py. A backward may come as two actions, for inputs and for parameters
(split_backward.py). A stage that recomputes keeps only its inputs, and its backward runs the forward again first, with
the same random numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch

from autopar.analysis.checked_loss import computed_loss
from autopar.analysis.example import LossFunction
from autopar.capture import module_hooks, torch_private, torch_private_autograd
from autopar.capture.thread_state import autocast_off
from autopar.lower.deferred_batch_norm import collecting
from autopar.lower.random_operators import generators_held, mix_seed, seeded
from autopar.lower.split_backward import GradientRoot, input_part
from autopar.runtime.stages.device_tensors import separate_gradients
from autopar.runtime.stages.executable import Executable
from autopar.runtime.stages.stage_replica import StageReplica
from autopar.runtime.step.call import CallTensors, KeptForward, PipelineCall
from autopar.runtime.step.error_context import check_not_nan
from autopar.runtime.step.mailbox import Address, Mailbox
from autopar.runtime.step.transfers import Transfers, as_leaf
from autopar.schedule.clock import Phase
from cost_models.memory.saved_tensors import hooked


class Passes:
    """The actions of one execution, on the tensors of its call."""

    def __init__(
        self,
        executable: Executable,
        call: PipelineCall,
        tensors: CallTensors,
        mailbox: Mailbox,
        transfers: Transfers,
        loss: LossFunction | None,
        *,
        keep_graph: bool,
        without_autocast: Sequence[str] = (),
    ) -> None:
        """`loss`: the call's, possibly timed. `keep_graph`: another backward of the same call may follow.
        `without_autocast`: the types of devices whose autocast is off in backwards, though it is on in the call."""
        self._executable = executable
        self._call = call
        self._tensors = tensors
        self._mailbox = mailbox
        self._transfers = transfers
        self._loss_function = loss
        self._keep_graph = keep_graph
        # What runs again in a backward does so outside of these, or restores its autocast itself.
        self._autograd: Callable[..., Any] = torch_private_autograd.run_backward
        self._input_part: Callable[..., Any] = input_part
        self._without_autocast = without_autocast
        if without_autocast:
            decorated = autocast_off(without_autocast)
            self._autograd, self._input_part = decorated(self._autograd), decorated(self._input_part)
        self._grad = call.state.grad
        self._several = len(call.sizes) > 1  # micro-batches, whose gradients add up
        self._went_back: set[int] = set()  # ids of replicas that have gradients of a micro-batch

    def acts(self) -> dict[Phase, Callable[[StageReplica, int], None]]:
        """What each phase does with a stage and a micro-batch."""
        return {
            Phase.FORWARD: self._forward,
            Phase.BACKWARD: self._backward,
            Phase.INPUT: self._backward_inputs,
            Phase.WEIGHT: self._backward_weights,
        }

    # -- forward ----------------------------------------------------------------------------------------------------

    def _forward(self, replica: StageReplica, microbatch: int) -> None:
        self._transfers.begin_action()
        model_inputs, received = self._stage_inputs(replica, microbatch)
        recompute = replica.recompute and self._grad
        if recompute:
            with hooked(_forget, _forgotten, forget=True):
                outputs = self._compute(replica, microbatch, model_inputs, received)
            # The graph has shown which outputs need a gradient. The leaves keep that, and the graph is freed.
            outputs = tuple(map(as_leaf, outputs))
        else:
            outputs = self._compute(replica, microbatch, model_inputs, received)
        if self._executable.watch_nan:
            check_not_nan(outputs, replica, [*model_inputs, *received])
        for consumer in self._executable.consumers[replica.stage.index]:
            self._send_outputs(replica, consumer, microbatch, outputs)
        kept = KeptForward(model_inputs, received, None if recompute else outputs)
        if replica.is_last:  # (7)
            if self._call.return_outputs:
                self._tensors.outputs.add(self._executable.model_outputs(outputs), microbatch)
            if self._loss_function is not None:
                needs = self._grad and self._call.targets_need_gradients
                if recompute or needs or self._call.guards_gradients:  # its backward ends at leaves of its own
                    kept.loss_inputs = outputs if recompute else tuple(map(as_leaf, outputs))
                read = kept.loss_inputs or outputs
                target = self._target(microbatch, replica.device)
                kept.targets = tuple(torch_private.tree_leaves(target)) if needs else ()
                kept.loss = self._loss(self._loss_function, read, target, microbatch)
        if self._grad:
            self._tensors.kept[replica.stage.index, microbatch] = kept

    def _stage_inputs(self, replica: StageReplica, microbatch: int) -> tuple[list[Any], list[Any]]:
        """(4) The model's inputs that the stage reads, and what earlier stages sent: leaves of a new autograd graph."""
        stage, device, grad, transfers = replica.stage, replica.device, self._grad, self._transfers
        model_inputs: list[Any] = []
        for index in stage.model_inputs:
            piece = transfers.push_input(self._call.inputs[index][microbatch], device)
            model_inputs.append(transfers.leaf(piece, device, grad))
        received: list[Any] = []
        if stage.received:
            messages = {
                source: self._mailbox.receive(replica.slot, Address(Phase.FORWARD, source, stage.index, microbatch))
                for source in stage.sources
            }
            received = [transfers.leaf(messages[source][position], device, grad) for source, position in stage.received]
        return model_inputs, received

    def _send_outputs(self, replica: StageReplica, consumer: int, microbatch: int, outputs: tuple[Any, ...]) -> None:
        """(6) Send the outputs that stage `consumer` reads."""
        here, target = replica.stage.index, self._executable.replica(consumer, microbatch)
        message: Any = outputs
        if target.device != replica.device:
            positions = self._executable.reads[here, consumer]
            message = {position: self._transfers.push(outputs[position], target.device) for position in positions}
        self._mailbox.send(target.slot, Address(Phase.FORWARD, here, consumer, microbatch), message)

    def _compute(
        self,
        replica: StageReplica,
        microbatch: int,
        model_inputs: list[Any],
        received: list[Any],
        *,
        again: bool = False,
    ) -> tuple[Any, ...]:
        """(5) The stage's outputs. `again`: it is recomputed, so that its statistics have been collected already."""
        stage = replica.stage
        if not replica.needs_context:
            return replica.compute(*model_inputs, *received)
        with ExitStack() as contexts:
            if stage.random and self._call.seed is not None:
                contexts.enter_context(seeded(mix_seed(self._call.seed, microbatch, stage.index)))
            if stage.hooked:
                contexts.enter_context(module_hooks.running())
            if stage.deferred and not again:
                contexts.enter_context(collecting(self._tensors.statistics, microbatch))
            return replica.compute(*model_inputs, *received)

    def _target(self, microbatch: int, device: torch.device) -> Any:
        """Of the last stage on `device`: the caller cannot know where the plan puts it."""
        target, transfers = self._call.targets[microbatch], self._transfers
        if not self._call.state.streams:
            return target
        return torch_private.tree_map(
            lambda x: transfers.leaf(transfers.push_input(x, device), device, self._grad), target
        )

    def _loss(self, function: LossFunction, outputs: tuple[Any, ...], target: Any, microbatch: int) -> torch.Tensor:
        known = self._tensors.loss_leaves
        ends = known.ends((*outputs, *torch_private.tree_leaves(target))) if known is not None else None
        output = self._executable.returned(outputs)
        loss = computed_loss(function, output, target, self._call.loss)
        if known is not None and ends is not None:
            known.find(loss, ends)
        self._tensors.losses[microbatch] = loss.detach()
        self._tensors.has_gradient |= loss.requires_grad
        return loss

    # -- backward ---------------------------------------------------------------------------------------------------

    def _backward(self, replica: StageReplica, microbatch: int) -> None:
        self._transfers.begin_action()
        kept = self._take_kept(replica, microbatch)
        roots = self._roots(replica, microbatch, kept)
        if roots:  # (11)
            tensors, of_tensors = zip(*roots, strict=True)
            redraws = replica.stage.uncaptured and replica.stage.random  # in checkpoints of its own
            with generators_held(replica.device) if redraws else nullcontext():
                self._autograd(tensors, of_tensors, self._keep_graph)
            del tensors, of_tensors
        gradients = [_take_gradient(leaf) for leaf in (*kept.model_inputs, *kept.received)]
        if self._several and id(replica) not in self._went_back:
            self._went_back.add(id(replica))
            separate_gradients(replica.leaves, gradients)
        del roots, kept  # sending needs neither; free them before, as the receiver allocates at once
        self._send_gradients(replica, microbatch, gradients)

    def _backward_inputs(self, replica: StageReplica, microbatch: int) -> None:
        key = (replica.stage.index, microbatch)
        kept = self._tensors.kept[key]
        if self._has_whole_backward(replica, kept):
            self._backward(replica, microbatch)
            return
        self._transfers.begin_action()
        roots = self._roots(replica, microbatch, kept)
        leaves = [*kept.model_inputs, *kept.received]
        wanted = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        # Hooks on what autograd saves would bring all of it back at once: from another memory, or by a second run.
        keep = self._keep_graph or replica.stage.reruns or self._call.state.saved_tensors_hooks is not None
        wanted_gradients, kept.weights = self._input_part(roots, [leaves[i] for i in wanted], keep)
        gradients: list[torch.Tensor | None] = [None] * len(leaves)
        for i, gradient in zip(wanted, wanted_gradients, strict=True):
            gradients[i] = gradient
        if not self._keep_graph:
            self._tensors.kept[key] = KeptForward([], [], None, weights=kept.weights)
        if self._several and id(replica) not in self._went_back:
            self._went_back.add(id(replica))
            separate_gradients(replica.leaves, gradients)
            storages = [g.untyped_storage() for g in gradients if g is not None and g.layout is torch.strided]
            self._tensors.kept[key].sent = [weakref.ref(storage) for storage in storages]
            del storages
        del kept, roots, leaves, wanted_gradients  # as in `_backward`
        self._send_gradients(replica, microbatch, gradients)

    def _backward_weights(self, replica: StageReplica, microbatch: int) -> None:
        kept = self._tensors.kept.get((replica.stage.index, microbatch))
        if kept is None or kept.weights is None:
            return  # the input action has done all of it
        self._take_kept(replica, microbatch)
        weights, kept.weights = kept.weights, None
        if self._without_autocast:
            with autocast_off(self._without_autocast):
                weights.run(self._keep_graph)
        else:
            weights.run(self._keep_graph)
        if kept.sent is not None:
            living = [storage for sent in kept.sent if (storage := sent()) is not None]
            separate_gradients(replica.leaves, (), living)
            kept.sent = None

    def _has_whole_backward(self, replica: StageReplica, kept: KeptForward) -> bool:
        """Whether the input action of a split backward does all of it. A compiled backward is one kernel call; that of
        uncaptured code may do anything, such as run its forward again (reentrant checkpoints refuse partial backwards).
        Layers that run again would do so once for every part of their backward, and so would gathers of kept shards.
        Where no input needs a gradient, the other action does it, unless other ranks of a mesh have inputs that do:
        all of them exchange gradients in the same action."""
        stage = replica.stage
        if bool(self._executable.compiled) or stage.uncaptured or stage.regathers:
            return True
        leaves = (*kept.model_inputs, *kept.received)
        needed = any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves)
        return (stage.layerwise and needed) or (stage.shards > 1 and not needed)

    def _take_kept(self, replica: StageReplica, microbatch: int) -> KeptForward:
        key = (replica.stage.index, microbatch)
        return self._tensors.kept[key] if self._keep_graph else self._tensors.kept.pop(key)

    def _roots(self, replica: StageReplica, microbatch: int, kept: KeptForward) -> list[GradientRoot]:
        """(10) Where the stage's backward starts: the outputs that need a gradient, each with its gradient."""
        last = replica.is_last
        if kept.loss is not None:
            weight = self._loss_weight(kept.loss, microbatch)
            if weight is None or not kept.loss.requires_grad:
                return []  # nothing to average, or a constant for these samples
            if not kept.loss_inputs:
                return [(kept.loss, weight)]
            self._autograd((kept.loss,), (weight,), self._keep_graph)
            gradients = self._guarded([_take_gradient(leaf) for leaf in kept.loss_inputs], weight)
            of_targets = self._guarded([_take_gradient(leaf) for leaf in kept.targets], weight)
            self._store_input_gradients(replica, microbatch, len(self._call.inputs), of_targets)
        elif last:
            gradients = self._tensors.outputs.gradients_of(microbatch)
        else:
            gradients = self._received_gradients(replica, microbatch)
        if all(gradient is None for gradient in gradients):
            return []  # nothing to recompute for
        outputs = self._recompute(replica, microbatch, kept) if kept.outputs is None else kept.outputs
        tensors = self._executable.model_outputs(outputs) if kept.loss is None and last else outputs
        return [
            (t, g if g.device == t.device else self._transfers.moved(g, t.device))
            for t, g in zip(tensors, gradients, strict=True)
            if g is not None and isinstance(t, torch.Tensor) and t.requires_grad
        ]

    def _guarded(self, gradients: list[torch.Tensor | None], weight: torch.Tensor) -> list[torch.Tensor | None]:
        """Zeros where the loss has no targets, and its gradient may be NaN."""
        if not self._call.guards_gradients:
            return gradients
        return [None if g is None else torch.where(weight != 0, g, torch.zeros_like(g)) for g in gradients]

    def _store_input_gradients(
        self, replica: StageReplica, microbatch: int, first: int, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Of the flat targets, which are counted after the inputs, from number `first` on."""
        for index, gradient in enumerate(gradients, first):
            if gradient is not None:
                self._tensors.input_gradients[index, microbatch, replica.stage.index] = gradient

    def _loss_weight(self, loss: torch.Tensor, microbatch: int) -> torch.Tensor | None:
        """The gradient of a micro-batch's loss; None for a mean over no targets: its gradient counts nothing."""
        weight = self._call.loss_weights[microbatch]
        if isinstance(weight, torch.Tensor):
            moved: torch.Tensor = self._transfers.moved_input(weight, loss.device)
            return moved.to(loss.dtype).reshape(loss.shape)
        return self._executable.loss_weight(weight, loss) if weight else None

    def _received_gradients(self, replica: StageReplica, microbatch: int) -> list[torch.Tensor | None]:
        """For each output of the stage, the sum of the gradients that later stages sent."""
        here = replica.stage.index
        gradients: list[torch.Tensor | None] = [None] * len(replica.stage.outputs)
        for consumer in self._executable.consumers[here]:
            message = self._mailbox.receive(replica.slot, Address(Phase.BACKWARD, consumer, here, microbatch))
            for position, sent in message.items():
                gradient, before = self._transfers.arrived(sent, replica.device), gradients[position]
                gradients[position] = gradient if before is None else before + gradient
        return gradients

    def _recompute(self, replica: StageReplica, microbatch: int, kept: KeptForward) -> tuple[Any, ...]:
        """The outputs once more, with their graph. Running statistics stay as the first forward left them."""
        buffers = [buffer.tensor for buffer in replica.buffers if buffer.written]
        before = [buffer.clone() for buffer in buffers]
        with torch.enable_grad():
            outputs = self._compute(replica, microbatch, kept.model_inputs, kept.received, again=True)
        for buffer, old in zip(buffers, before, strict=True):
            buffer.data.copy_(old)  # `.data`: autograd saved the buffer and must not see its version change
        return outputs

    def _send_gradients(self, replica: StageReplica, microbatch: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """(12) Send the gradients of the stage's inputs, those of the model's inputs first, to where they came from."""
        stage, n_model_inputs = replica.stage, len(replica.stage.model_inputs)
        if self._executable.watch_nan:
            check_not_nan(gradients, replica)
        for index, gradient in zip(stage.model_inputs, gradients[:n_model_inputs], strict=True):
            if gradient is not None:
                self._tensors.input_gradients[index, microbatch, stage.index] = gradient
        if not stage.sources:
            return
        messages: dict[int, dict[int, Any]] = {source: {} for source in stage.sources}
        for (source, position), gradient in zip(stage.received, gradients[n_model_inputs:], strict=True):
            if gradient is not None:
                target = self._executable.replica(source, microbatch)
                messages[source][position] = self._transfers.push(gradient, target.device)
        for source, message in messages.items():  # an empty message, too: its receiver waits for one
            slot = self._executable.replica(source, microbatch).slot
            self._mailbox.send(slot, Address(Phase.BACKWARD, stage.index, source, microbatch), message)


def _take_gradient(leaf: Any) -> torch.Tensor | None:
    """The gradient of a leaf, which then has none."""
    if not isinstance(leaf, torch.Tensor):
        return None
    gradient, leaf.grad = leaf.grad, None
    return gradient


def _forget(tensor: torch.Tensor) -> None:
    return None


def _forgotten(nothing: None) -> torch.Tensor:
    raise AssertionError("a forward without saved tensors was differentiated; its stage should have recomputed it")
