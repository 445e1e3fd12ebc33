"""What the workers of one call do: forwards and backwards of parts, each with one micro-batch.

A forward takes what earlier stages sent for the micro-batch, runs the stage, keeps its outputs for the backward, and
sends them on; a backward sums what later stages sent, runs autograd on the same thread, and sends gradients back to
where the inputs came from. It may come in two actions, for inputs and for parameters (`split_backward`). A stage that
recomputes keeps its inputs alone and runs its forward again, with the same random numbers, when the backward comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from autopar.analysis.batch_proof import OutputCombination
from autopar.capture import module_hooks, torch_private
from autopar.lower.deferred_batch_norm import Statistics, collecting
from autopar.lower.random_operators import mix_seed, seeded
from autopar.lower.stages import Constant
from autopar.runtime.error_context import check_not_nan
from autopar.runtime.executable import Executable, Part
from autopar.runtime.mailbox import Address, Mailbox
from autopar.runtime.micro_batches import split_leaf, split_tree
from autopar.runtime.outputs import OutputCollector
from autopar.runtime.split_backward import GradientRoot, WeightPart, input_part
from autopar.runtime.transfers import arrived, as_leaf, moved, push
from autopar.schedule.clock import Phase

LossFunction = Callable[[Any, Any], torch.Tensor]


@dataclass
class _Kept:
    """What a part keeps of a micro-batch between its forward and the end of its backward."""

    own: list[Any]  # the model's inputs
    received: list[Any]
    values: tuple[Any, ...] | None  # outputs with their graph; None where they are to be computed again
    loss: torch.Tensor | None = None  # in the last stage, where it is computed inside
    loss_inputs: tuple[Any, ...] = ()  # leaves that the loss starts from, where the outputs are computed again
    weights: WeightPart | None = None  # after the input part of a split backward


class Passes:
    """The tensors of one call, and the actions on them."""

    def __init__(
        self,
        executable: Executable,
        leaves: Sequence[Any],
        sizes: Sequence[int],
        outputs: Sequence[OutputCombination],
        *,
        grad: bool,
        seed: int | None,
        loss: LossFunction | None,
        target: Any,
        target_dims: Sequence[int],
    ) -> None:
        self.executable = executable
        self.sizes = tuple(sizes)
        self.total = sum(sizes)
        self.results = OutputCollector(outputs, sizes)
        self.statistics = Statistics()
        self.losses: list[torch.Tensor | None] = [None] * len(sizes)
        self.mail = Mailbox(0)
        self.keep_graph = False
        self._grad = grad
        self._seed = seed
        self._loss_function = loss
        inputs = zip(leaves, executable.program.inputs, strict=True)
        self._inputs = [split_leaf(x, i.batch_dim, self.sizes) for x, i in inputs]
        self._targets = split_tree(target, self.sizes, target_dims) if loss is not None else []
        self._kept: dict[tuple[int, int], _Kept] = {}  # (stage, micro-batch)
        self._input_gradients: dict[tuple[int, int, int], torch.Tensor] = {}  # (flat input, micro-batch, stage)

    def actions(self) -> dict[Phase, Callable[[Part, int], None]]:
        """What each phase does with a part and a micro-batch. (Not kept here: methods would hold what holds them.)"""
        return {
            Phase.FORWARD: self._forward,
            Phase.BACKWARD: self._backward,
            Phase.INPUT: self._backward_inputs,
            Phase.WEIGHT: self._backward_weights,
        }

    @property
    def differentiable(self) -> bool:
        """Whether anything is kept for a backward."""
        return bool(self._kept)

    def start_backward(self, gradients: Sequence[torch.Tensor | None], keep_graph: bool) -> None:
        """A backward from the gradients of the flat outputs is about to run."""
        self.results.gradients = list(gradients)
        self._input_gradients.clear()
        self.keep_graph = keep_graph

    def forget(self) -> None:
        """After a failure: nothing is differentiated any more."""
        self._kept.clear()
        self.executable.drop_gradients()

    def mean_loss(self) -> torch.Tensor:
        """Of the batch: micro-batches weighted by their samples."""
        parts = zip(self.losses, self.sizes, strict=True)
        return torch.stack([loss * (size / self.total) for loss, size in parts if loss is not None]).sum()

    def input_gradients(self, index: int) -> torch.Tensor | None:
        """The gradient of flat input `index`, summed over the stages that read it."""
        totals: list[torch.Tensor | None] = [None] * len(self.sizes)
        for (leaf, microbatch, _), gradient in sorted(self._input_gradients.items(), key=lambda item: item[0]):
            if leaf == index:
                before = totals[microbatch]
                totals[microbatch] = gradient if before is None else before + gradient.to(before.device)
        found = [t for t in totals if t is not None]
        if not found:
            return None
        dim = self.executable.program.inputs[index].batch_dim
        if dim is None:
            return sum(found[1:], found[0])
        pieces = [torch.zeros_like(self._inputs[index][i]) if t is None else t for i, t in enumerate(totals)]
        return torch.cat([p.to(found[0].device) for p in pieces], dim)

    # -- forward ----------------------------------------------------------------------------------------------------

    def _forward(self, part: Part, microbatch: int) -> None:
        stage, device, here = part.stage, part.device, part.stage.index
        sent = {s: self.mail.receive(part.slot, Address(Phase.FORWARD, s, here, microbatch)) for s in stage.sources}
        own = [as_leaf(push(self._inputs[i][microbatch], device), device, self._grad) for i in stage.model_inputs]
        received = [as_leaf(sent[s][position], device, self._grad) for s, position in stage.received]
        del sent
        again = part.recompute and self._grad
        if again:
            with torch.autograd.graph.saved_tensors_hooks(_forget, _forgotten):
                values = self._compute(part, microbatch, own, received)
            # The graph has told what needs a gradient; it goes, and the outputs stay.
            values = tuple(as_leaf(value, device) for value in values)
        else:
            values = self._compute(part, microbatch, own, received)
        if self.executable.watch_nan:
            check_not_nan(values, part, [*own, *received])
        for consumer in self.executable.consumers[here]:
            self._send_on(part, consumer, microbatch, values)
        kept = _Kept(own, received, None if again else values)
        if here == self.executable.n_stages - 1:
            if self._loss_function is not None:
                kept.loss = self._loss(values, microbatch, device)
                kept.loss_inputs = values if again else ()
            else:
                self.results.add(self._flat(values), microbatch)
        if self._grad:
            self._kept[here, microbatch] = kept

    def _send_on(self, part: Part, consumer: int, microbatch: int, values: tuple[Any, ...]) -> None:
        here, target = part.stage.index, self.executable.part(consumer, microbatch)
        message: Any = values
        if target.device != part.device:
            message = {place: push(values[place], target.device) for place in self.executable.reads[here, consumer]}
        self.mail.send(target.slot, Address(Phase.FORWARD, here, consumer, microbatch), message)

    def _compute(
        self, part: Part, microbatch: int, own: list[Any], received: list[Any], *, again: bool = False
    ) -> tuple[Any, ...]:
        stage = part.stage
        if not part.in_context:
            return part.compute(*own, *received)
        with ExitStack() as contexts:
            if stage.random and self._seed is not None:
                contexts.enter_context(seeded(mix_seed(self._seed, microbatch, stage.index)))
            if stage.hooked:
                contexts.enter_context(module_hooks.running())
            if stage.deferred and not again:
                contexts.enter_context(collecting(self.statistics, microbatch))
            return part.compute(*own, *received)

    def _flat(self, values: tuple[Any, ...]) -> list[Any]:
        """The model's flat outputs, from those of the last stage."""
        return [p.value if isinstance(p, Constant) else values[p] for p in self.executable.lowered.results]

    def _loss(self, values: tuple[Any, ...], microbatch: int, device: torch.device) -> torch.Tensor:
        assert self._loss_function is not None
        program = self.executable.program
        output = torch_private.tree_unflatten(self._flat(values)[: program.n_outputs], program.out_spec)
        target = self._targets[microbatch]
        if device.type != "cpu":  # nobody outside knows on which device the plan lets the model end
            target = torch_private.tree_map(lambda x: moved(x, device), target)
        loss = self._loss_function(output, target)
        self.losses[microbatch] = loss.detach()
        return loss

    # -- backward ---------------------------------------------------------------------------------------------------

    def _backward(self, part: Part, microbatch: int) -> None:
        kept = self._taken(part, microbatch)
        roots = self._roots(part, microbatch, kept)
        if roots:
            torch_private.run_backward([v for v, _ in roots], [g for _, g in roots], self.keep_graph)
        del roots
        self._send_back(part, microbatch, [_take_gradient(leaf) for leaf in (*kept.own, *kept.received)])

    def _backward_inputs(self, part: Part, microbatch: int) -> None:
        if self._is_whole(part):
            self._backward(part, microbatch)
            return
        kept = self._kept[part.stage.index, microbatch]
        roots = self._roots(part, microbatch, kept)
        inputs = [*kept.own, *kept.received]
        wanted = [i for i, leaf in enumerate(inputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        found, kept.weights = input_part(roots, [inputs[i] for i in wanted])
        gradients: list[torch.Tensor | None] = [None] * len(inputs)
        for i, gradient in zip(wanted, found, strict=True):
            gradients[i] = gradient
        self._send_back(part, microbatch, gradients)

    def _backward_weights(self, part: Part, microbatch: int) -> None:
        if self._is_whole(part):
            return
        kept = self._taken(part, microbatch)
        weights, kept.weights = kept.weights, None
        assert weights is not None, "the input part comes first"
        weights.run(self.keep_graph)

    def _is_whole(self, part: Part) -> bool:
        """Whether the input part of a backward is all of it: a compiled one is one kernel call, and one over several
        devices has their exchanges within."""
        return bool(self.executable.compiled) or part.stage.shards > 1

    def _taken(self, part: Part, microbatch: int) -> _Kept:
        key = (part.stage.index, microbatch)
        return self._kept[key] if self.keep_graph else self._kept.pop(key)

    def _roots(self, part: Part, microbatch: int, kept: _Kept) -> list[GradientRoot]:
        """Where the backward of a stage starts: its outputs that need a gradient, with what arrived for them."""
        last = part.stage.index == self.executable.n_stages - 1
        if kept.loss is not None:
            share = self.executable.share(self.sizes[microbatch], self.total, kept.loss)
            if kept.values is not None:
                return [(kept.loss, share)]
            kept.loss.backward(share, retain_graph=self.keep_graph)
            gradients = [_take_gradient(leaf) for leaf in kept.loss_inputs]
        elif last:
            gradients = self.results.gradients_of(microbatch)
        else:
            gradients = self._arrived_gradients(part, microbatch)
        if all(gradient is None for gradient in gradients):
            return []  # nothing to run a forward again for
        values = self._recomputed(part, microbatch, kept) if kept.values is None else kept.values
        tensors = tuple(self._flat(values)) if kept.loss is None and last else values
        return [
            (v, g if g.device == v.device else moved(g, v.device))
            for v, g in zip(tensors, gradients, strict=True)
            if g is not None and isinstance(v, torch.Tensor) and v.requires_grad
        ]

    def _arrived_gradients(self, part: Part, microbatch: int) -> list[torch.Tensor | None]:
        """Of every output of the stage, the sum of what later stages sent."""
        here = part.stage.index
        gradients: list[torch.Tensor | None] = [None] * len(part.stage.outputs)
        for consumer in self.executable.consumers[here]:
            message = self.mail.receive(part.slot, Address(Phase.BACKWARD, consumer, here, microbatch))
            for position, sent in message.items():
                gradient, before = arrived(sent, part.device), gradients[position]
                gradients[position] = gradient if before is None else before + gradient
        return gradients

    def _recomputed(self, part: Part, microbatch: int, kept: _Kept) -> tuple[Any, ...]:
        """The outputs once more, with their graph; running statistics do not move a second time."""
        buffers = [buffer.tensor for buffer in part.buffers if buffer.written]
        before = [buffer.clone() for buffer in buffers]
        with torch.enable_grad():
            values = self._compute(part, microbatch, kept.own, kept.received, again=True)
        for buffer, old in zip(buffers, before, strict=True):
            buffer.data.copy_(old)  # behind autograd's back, which has saved the buffer with its version
        return values

    def _send_back(self, part: Part, microbatch: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Gradients of the stage's inputs, first of the model's own, to where the inputs came from."""
        stage, n_own = part.stage, len(part.stage.model_inputs)
        if self.executable.watch_nan:
            check_not_nan(gradients, part)
        for index, gradient in zip(stage.model_inputs, gradients[:n_own], strict=True):
            if gradient is not None:
                self._input_gradients[index, microbatch, stage.index] = gradient
        back: dict[int, dict[int, Any]] = {source: {} for source in stage.sources}
        for (source, position), gradient in zip(stage.received, gradients[n_own:], strict=True):
            if gradient is not None:
                target = self.executable.part(source, microbatch)
                back[source][position] = push(gradient, target.device)
        for source, message in back.items():
            slot = self.executable.part(source, microbatch).slot
            self.mail.send(slot, Address(Phase.BACKWARD, stage.index, source, microbatch), message)


def _take_gradient(leaf: Any) -> torch.Tensor | None:
    """The gradient of a leaf, which then has none."""
    if not isinstance(leaf, torch.Tensor):
        return None
    gradient, leaf.grad = leaf.grad, None
    return gradient


def _forget(tensor: torch.Tensor) -> None:
    return None


def _forgotten(nothing: None) -> torch.Tensor:
    raise AssertionError("a forward that is to be run again was differentiated")
