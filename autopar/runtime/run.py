"""One call of a pipelined model: micro-batches through the parts, messages between them, gradients back.

Every slot (a device with its worker) works through its list of actions. A forward takes what earlier stages sent for
the micro-batch, runs the stage, keeps its outputs for the backward, and sends them on; a backward sums what later
stages sent, runs autograd on the same thread, and sends gradients back to where the inputs came from:

```
   slot 0   F0 F1 ....... B0 F2 B1          message (way, sender's stage, receiver's stage, micro-batch) -> values
               \\  \\     /     \
   slot 1      F0 B0 F1 B1 ...  F2 B2       a slot that waits for one puts aside the others that arrive
```
A backward may come in two actions, for inputs and for parameters (`split_backward`). A stage that recomputes keeps its
inputs alone and runs its forward again, with the same random numbers, when the backward comes.

Mailboxes belong to the call, so one that failed leaves nothing behind for the next.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from autopar import _torch
from autopar.batching import Output
from autopar.lower import Constant
from autopar.lower.random import mix_seed, seeded
from autopar.runtime.batches import as_data, as_leaf, split_leaf, split_tree
from autopar.runtime.executable import Executable, Part
from autopar.runtime.faults import explain
from autopar.runtime.memory import Watch
from autopar.runtime.results import Results
from autopar.runtime.split_backward import Root, WeightPart, input_part
from autopar.runtime.threads import CallerState, Worker
from autopar.schedule import Action, Phase

LossFunction = Callable[[Any, Any], torch.Tensor]


class _Aborted(Exception):
    """Another slot failed; this one stops waiting."""


class _Address(NamedTuple):
    """What a message is."""

    way: Phase  # FORWARD or BACKWARD
    sender: int  # stage
    receiver: int  # stage
    microbatch: int


@dataclass
class _Kept:
    """What a part keeps of a micro-batch between its forward and the end of its backward."""

    own: list[Any]  # the model's inputs
    received: list[Any]
    values: tuple[Any, ...] | None  # outputs with their graph; None where they are to be computed again
    loss: torch.Tensor | None = None  # in the last stage, where it is computed inside
    loss_inputs: tuple[Any, ...] = ()  # leaves that the loss starts from, where the outputs are computed again
    weights: WeightPart | None = None  # after the input part of a split backward


class Run:
    """The state of one call between its forward and its backward."""

    def __init__(
        self,
        executable: Executable,
        leaves: Sequence[Any],
        sizes: Sequence[int],
        outputs: Sequence[Output],
        state: CallerState,
        *,
        seed: int | None = None,
        loss: LossFunction | None = None,
        target: Any = None,
        watch: Watch | None = None,
    ) -> None:
        """`leaves`: flat inputs; `sizes`: samples in each micro-batch; `outputs`: how the flat outputs combine.

        With `loss`, the last stage ends in loss(output, target) of every micro-batch, weighted by its samples.
        `watch`: for a device's name, a context that its worker works in.
        """
        self.executable = executable
        self.sizes = tuple(sizes)
        self.total = sum(sizes)
        self.results = Results(outputs, sizes)
        self._state = state
        self._seed = seed
        self._loss_function = loss
        self._watch = watch
        inputs = zip(leaves, executable.program.inputs, strict=True)
        self._inputs = [split_leaf(x, i.batch_dim, self.sizes) for x, i in inputs]
        self._targets = split_tree(target, self.sizes) if loss is not None else []
        self._losses: list[torch.Tensor | None] = [None] * len(sizes)
        self._kept: dict[tuple[int, int], _Kept] = {}  # (stage, micro-batch)
        self._input_gradients: dict[tuple[int, int, int], torch.Tensor] = {}  # (flat input, micro-batch, stage)
        self._mail: list[queue.SimpleQueue[Any]] = []
        self._failure: BaseException | None = None
        self._keep_graph = False

    # -- the caller's side ------------------------------------------------------------------------------------------

    def forward(self) -> list[Any]:
        """All forwards; the flat outputs of the whole batch (detached)."""
        self._execute(self.executable.table(len(self.sizes), training=False).actions)
        return self.results.finish()

    def backward(self, gradients: Sequence[torch.Tensor | None], keep_graph: bool) -> None:
        """All backwards, from the gradients of the flat outputs."""
        if not self._kept:
            raise RuntimeError(
                "Trying to backward through the pipeline a second time: its activations are freed after the first "
                "backward. Call backward with retain_graph=True to keep them."
            )
        self.results.gradients = list(gradients)
        self._input_gradients.clear()
        self._keep_graph = keep_graph
        table = self.executable.table(len(self.sizes), training=True)
        self._execute([[a for a in actions if a.phase is not Phase.FORWARD] for actions in table.actions])

    def step(self) -> torch.Tensor:
        """Forwards and backwards by the schedule; the mean loss of the batch."""
        self._execute(self.executable.table(len(self.sizes), training=True).actions)
        losses = torch.stack([loss for loss in self._losses if loss is not None])
        shares = torch.tensor([size / self.total for size in self.sizes], dtype=losses.dtype, device=losses.device)
        return (losses * shares).sum()

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

    def _execute(self, actions: Sequence[Sequence[Action]]) -> None:
        workers = self.executable.workers
        self._mail = [queue.SimpleQueue() for _ in workers]
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        for slot, (worker, mine) in enumerate(zip(workers, actions, strict=True)):
            worker.submit(lambda slot=slot, worker=worker, mine=mine: self._work(slot, worker, mine, done))  # type: ignore[misc]
        waiting = len(workers)
        while waiting:
            try:
                done.get()
                waiting -= 1
            except BaseException as interrupt:  # Ctrl-C: stop the workers, then hand it on
                self._fail(interrupt)
        self._mail = []
        if self._failure is not None:
            failure, self._failure = self._failure, None
            self._kept.clear()
            self.executable.drop_gradients()
            raise failure

    # -- the workers' side ------------------------------------------------------------------------------------------

    def _work(self, slot: int, worker: Worker, actions: Sequence[Action], done: queue.SimpleQueue[None]) -> None:
        aside: dict[_Address, Any] = {}
        todo = {
            Phase.FORWARD: self._forward,
            Phase.BACKWARD: self._backward,
            Phase.INPUT: self._backward_inputs,
            Phase.WEIGHT: self._backward_weights,
        }
        try:
            watched = self._watch(worker.device.name) if self._watch is not None else nullcontext()
            with self._state.applied(), watched:
                for phase, stage, microbatch in actions:
                    if self._failure is not None:
                        raise _Aborted
                    part = self.executable.part(stage, microbatch)
                    try:
                        todo[phase](part, microbatch, aside)
                    except _Aborted:
                        raise
                    except Exception as error:
                        explain(error, part, phase, microbatch)
                        raise
        except _Aborted:
            aside.clear()
        except BaseException as error:  # re-raised by the caller
            self._fail(error)
        finally:
            done.put(None)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        for mailbox in self._mail:
            mailbox.put(None)

    def _send(self, address: _Address, message: Any) -> None:
        target = self.executable.part(address.receiver, address.microbatch)
        self._mail[target.slot].put((address, message))

    def _receive(self, slot: int, address: _Address, aside: dict[_Address, Any]) -> Any:
        mailbox = self._mail[slot]
        while address not in aside:
            message = mailbox.get()
            if message is None:
                raise _Aborted
            aside[message[0]] = message[1]
        return aside.pop(address)

    def _forward(self, part: Part, microbatch: int, aside: dict[_Address, Any]) -> None:
        stage, device, here = part.stage, part.device, part.stage.index
        arrived = {
            s: self._receive(part.slot, _Address(Phase.FORWARD, s, here, microbatch), aside) for s in stage.sources
        }
        enter = as_leaf if self._state.grad else as_data
        own = [enter(self._inputs[i][microbatch], device) for i in stage.model_inputs]
        received = [enter(arrived[s][position], device) for s, position in stage.received]
        again = part.recompute and self._state.grad
        if again:
            with torch.autograd.graph.saved_tensors_hooks(_forget, _forgotten):
                values = self._compute(part, microbatch, own, received)
            # The graph has told what needs a gradient; it goes, and the outputs stay.
            values = tuple(as_leaf(value, device) for value in values)
        else:
            values = self._compute(part, microbatch, own, received)
        for consumer in self.executable.consumers[here]:
            self._send(_Address(Phase.FORWARD, here, consumer, microbatch), values)
        kept = _Kept(own, received, None if again else values)
        if here == self.executable.n_stages - 1:
            if self._loss_function is not None:
                kept.loss = self._loss(values, microbatch, device)
                kept.loss_inputs = values if again else ()
            else:
                self.results.add(self._flat(values), microbatch)
        if self._state.grad:
            self._kept[here, microbatch] = kept

    def _compute(self, part: Part, microbatch: int, own: list[Any], received: list[Any]) -> tuple[Any, ...]:
        if part.stage.random and self._seed is not None:
            with seeded(mix_seed(self._seed, microbatch, part.stage.index)):
                return part.compute(*own, *received)
        return part.compute(*own, *received)

    def _flat(self, values: tuple[Any, ...]) -> list[Any]:
        """The model's flat outputs, from those of the last stage."""
        return [p.value if isinstance(p, Constant) else values[p] for p in self.executable.lowered.results]

    def _loss(self, values: tuple[Any, ...], microbatch: int, device: torch.device) -> torch.Tensor:
        assert self._loss_function is not None
        program = self.executable.program
        output = _torch.tree_unflatten(self._flat(values)[: program.n_outputs], program.out_spec)
        target = self._targets[microbatch]
        if device.type != "cpu":  # nobody outside knows on which device the plan lets the model end
            target = _torch.tree_map(lambda x: as_data(x, device), target)
        loss = self._loss_function(output, target)
        self._losses[microbatch] = loss.detach()
        return loss

    def _backward(self, part: Part, microbatch: int, aside: dict[_Address, Any]) -> None:
        kept = self._taken(part, microbatch)
        roots = self._roots(part, microbatch, kept, aside)
        if roots:
            torch.autograd.backward([v for v, _ in roots], [g for _, g in roots], retain_graph=self._keep_graph)
        del roots
        inputs = [*kept.own, *kept.received]
        self._send_back(part, microbatch, [_take_gradient(leaf) for leaf in inputs])

    def _backward_inputs(self, part: Part, microbatch: int, aside: dict[_Address, Any]) -> None:
        kept = self._kept[part.stage.index, microbatch]
        roots = self._roots(part, microbatch, kept, aside)
        inputs = [*kept.own, *kept.received]
        wanted = [i for i, leaf in enumerate(inputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        found, kept.weights = input_part(roots, [inputs[i] for i in wanted])
        gradients: list[torch.Tensor | None] = [None] * len(inputs)
        for i, gradient in zip(wanted, found, strict=True):
            gradients[i] = gradient
        self._send_back(part, microbatch, gradients)

    def _backward_weights(self, part: Part, microbatch: int, aside: dict[_Address, Any]) -> None:
        kept = self._taken(part, microbatch)
        weights, kept.weights = kept.weights, None
        assert weights is not None, "the input part comes first"
        weights.run(self._keep_graph)

    def _taken(self, part: Part, microbatch: int) -> _Kept:
        key = (part.stage.index, microbatch)
        return self._kept[key] if self._keep_graph else self._kept.pop(key)

    def _roots(self, part: Part, microbatch: int, kept: _Kept, aside: dict[_Address, Any]) -> list[Root]:
        """Where the backward of a stage starts: its outputs that need a gradient, with what arrived for them."""
        if kept.loss is not None:
            share = torch.full_like(kept.loss, self.sizes[microbatch] / self.total)
            if kept.values is not None:
                return [(kept.loss, share)]
            kept.loss.backward(share, retain_graph=self._keep_graph)
            gradients = [_take_gradient(leaf) for leaf in kept.loss_inputs]
        elif part.stage.index == self.executable.n_stages - 1:
            gradients = self.results.gradients_of(microbatch)
        else:
            gradients = self._arrived_gradients(part, microbatch, aside)
        if all(gradient is None for gradient in gradients):
            return []  # nothing to run a forward again for
        values = self._recomputed(part, microbatch, kept) if kept.values is None else kept.values
        tensors = values
        if kept.loss is None and part.stage.index == self.executable.n_stages - 1:
            tensors = tuple(self._flat(values))
        return [
            (v, g.to(v.device))
            for v, g in zip(tensors, gradients, strict=True)
            if g is not None and isinstance(v, torch.Tensor) and v.requires_grad
        ]

    def _arrived_gradients(self, part: Part, microbatch: int, aside: dict[_Address, Any]) -> list[torch.Tensor | None]:
        """Of every output of the stage, the sum of what later stages sent."""
        here = part.stage.index
        gradients: list[torch.Tensor | None] = [None] * len(part.stage.outputs)
        for consumer in self.executable.consumers[here]:
            message = self._receive(part.slot, _Address(Phase.BACKWARD, consumer, here, microbatch), aside)
            for position, gradient in message.items():
                gradient = gradient.to(part.device)
                before = gradients[position]
                gradients[position] = gradient if before is None else before + gradient
        return gradients

    def _recomputed(self, part: Part, microbatch: int, kept: _Kept) -> tuple[Any, ...]:
        """The outputs once more, with their graph; running statistics do not move a second time."""
        buffers = [part.buffers[name] for name in part.stage.written_buffers if name in part.buffers]
        before = [buffer.clone() for buffer in buffers]
        with torch.enable_grad():
            values = self._compute(part, microbatch, kept.own, kept.received)
        for buffer, old in zip(buffers, before, strict=True):
            buffer.data.copy_(old)  # behind autograd's back, which has saved the buffer with its version
        return values

    def _send_back(self, part: Part, microbatch: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Gradients of the stage's inputs, first of the model's own, to where the inputs came from."""
        stage, n_own = part.stage, len(part.stage.model_inputs)
        for index, gradient in zip(stage.model_inputs, gradients[:n_own], strict=True):
            if gradient is not None:
                self._input_gradients[index, microbatch, stage.index] = gradient
        back: dict[int, dict[int, torch.Tensor]] = {source: {} for source in stage.sources}
        for (source, position), gradient in zip(stage.received, gradients[n_own:], strict=True):
            if gradient is not None:
                back[source][position] = gradient
        for source, message in back.items():
            self._send(_Address(Phase.BACKWARD, stage.index, source, microbatch), message)


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
