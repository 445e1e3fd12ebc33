"""One call of a pipelined model: micro-batches through the slots, messages between them, gradients back.

Every slot works through its list of actions. A forward takes what earlier stages sent for the micro-batch, runs the
stage, keeps its outputs for the backward, and sends them on; a backward sums what later stages sent, runs autograd on
the same thread, and sends gradients back to where the inputs came from:

```
   slot 0   F0 F1 ....... B0 F2 B1          message (phase, sender's stage, micro-batch) -> values
               \\  \\     /     \
   slot 1      F0 B0 F1 B1 ...  F2 B2       a slot that waits for one puts aside the others that arrive
```
Mailboxes belong to the call, so one that failed leaves nothing behind for the next.
"""

from __future__ import annotations

import linecache
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from autopar import _torch
from autopar.batching import Output
from autopar.capture import describe, users_frames
from autopar.lower import Constant
from autopar.lower.random import mix_seed, seeded
from autopar.runtime.executable import Executable, Slot
from autopar.runtime.memory import Watch
from autopar.runtime.threads import CallerState
from autopar.schedule import Action, Phase

LossFunction = Callable[[Any, Any], torch.Tensor]


class _Aborted(Exception):
    """Another slot failed; this one stops waiting."""


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
        self.outputs = outputs
        self.state = state
        self.seed = seed
        self.loss_function = loss
        self.watch = watch
        self.inputs = [self._split(x, i.batch_dim) for x, i in zip(leaves, executable.program.inputs, strict=True)]
        self.targets = split_tree(target, self.sizes) if loss is not None else []
        self.losses: list[torch.Tensor | None] = [None] * len(sizes)
        self.results: list[Any] = [None] * len(outputs)
        self.differentiable = [False] * len(outputs)
        self.result_gradients: list[torch.Tensor | None] = []
        self._kept: dict[tuple[int, int], tuple[list[Any], list[Any], tuple[Any, ...]]] = {}
        self._input_gradients: dict[tuple[int, int, int], torch.Tensor] = {}  # (flat input, micro-batch, stage)
        self._results_lock = threading.Lock()
        self._pieces: dict[int, dict[int, torch.Tensor]] = {}  # flat output -> micro-batch -> its value, to be reduced
        self._shares: dict[int, list[float]] = {}  # flat output that is a mean -> weight of each micro-batch, sum 1
        self._mail: list[queue.SimpleQueue[Any]] = []
        self._failure: BaseException | None = None
        self._keep_graph = False

    # -- the caller's side ------------------------------------------------------------------------------------------

    def forward(self) -> list[Any]:
        """All forwards; the flat outputs of the whole batch (detached)."""
        table = self.executable.table(len(self.sizes), training=False)
        self._execute(table.actions)
        for index, pieces in self._pieces.items():
            # In the order of micro-batches, not in that of arrival: the same bits every time.
            ordered = [pieces[i] for i in range(len(self.sizes))]
            if self.outputs[index].combine == "mean":
                self._shares[index] = shares = self._mean_shares(index)
                ordered = [p * s for p, s in zip(ordered, shares, strict=True) if s]
            self.results[index] = sum(ordered[1:], ordered[0])
        self._pieces.clear()
        return self.results

    def _mean_shares(self, index: int) -> list[float]:
        """What each micro-batch weighs in the mean that flat output `index` is."""
        place = self.outputs[index].weight
        if place is None:
            return [size / self.total for size in self.sizes]
        counts = [float(self._pieces[place][i]) for i in range(len(self.sizes))]
        # Nothing to average at all is 0/0 in the model; a single share of one keeps that.
        return [c / sum(counts) for c in counts] if any(counts) else [1.0] + [0.0] * (len(counts) - 1)

    def backward(self, gradients: Sequence[torch.Tensor | None], keep_graph: bool) -> None:
        """All backwards, from the gradients of the flat outputs."""
        if not self._kept:
            raise RuntimeError(
                "Trying to backward through the pipeline a second time: its activations are freed after the first "
                "backward. Call backward with retain_graph=True to keep them."
            )
        self.result_gradients = list(gradients)
        self._input_gradients.clear()
        self._keep_graph = keep_graph
        table = self.executable.table(len(self.sizes), training=True)
        self._execute([[a for a in actions if a.phase is Phase.BACKWARD] for actions in table.actions])

    def step(self) -> torch.Tensor:
        """Forwards and backwards by the schedule; the mean loss of the batch."""
        self._execute(self.executable.table(len(self.sizes), training=True).actions)
        losses = torch.stack([loss for loss in self.losses if loss is not None])
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
        pieces = [torch.zeros_like(self.inputs[index][i]) if t is None else t for i, t in enumerate(totals)]
        return torch.cat([p.to(found[0].device) for p in pieces], dim)

    def _execute(self, actions: Sequence[Sequence[Action]]) -> None:
        slots = self.executable.slots
        self._mail = [queue.SimpleQueue() for _ in slots]
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        for slot, mine in zip(slots, actions, strict=True):
            slot.worker.submit(lambda slot=slot, mine=mine: self._work(slot, mine, done))  # type: ignore[misc]
        waiting = len(slots)
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

    def _split(self, leaf: Any, dim: int | None) -> list[Any]:
        """One piece a micro-batch."""
        if not isinstance(leaf, torch.Tensor):
            return [leaf] * len(self.sizes)
        whole = leaf.detach()
        pieces = list(whole.split(list(self.sizes), dim)) if dim is not None else [whole] * len(self.sizes)
        return [p.detach().requires_grad_() for p in pieces] if leaf.requires_grad else pieces

    # -- the workers' side ------------------------------------------------------------------------------------------

    def _work(self, slot: Slot, actions: Sequence[Action], done: queue.SimpleQueue[None]) -> None:
        aside: dict[tuple[Phase, int, int], Any] = {}
        try:
            watched = self.watch(slot.worker.device.name) if self.watch is not None else nullcontext()
            with self.state.applied(), watched:
                for action in actions:
                    if self._failure is not None:
                        raise _Aborted
                    try:
                        if action.phase is Phase.FORWARD:
                            self._forward(slot, action.microbatch, aside)
                        else:
                            self._backward(slot, action.microbatch, aside)
                    except _Aborted:
                        raise
                    except Exception as error:
                        _explain(error, slot, action)
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

    def _receive(self, slot: Slot, key: tuple[Phase, int, int], aside: dict[tuple[Phase, int, int], Any]) -> Any:
        mailbox = self._mail[slot.number]
        while key not in aside:
            message = mailbox.get()
            if message is None:
                raise _Aborted
            aside[message[0]] = message[1]
        return aside.pop(key)

    def _forward(self, slot: Slot, microbatch: int, aside: dict[tuple[Phase, int, int], Any]) -> None:
        stage, device = slot.stage, slot.device
        arrived = {s: self._receive(slot, (Phase.FORWARD, s, microbatch), aside) for s in stage.sources}
        own = [self.inputs[i][microbatch] for i in stage.model_inputs]
        received = [arrived[s][position] for s, position in stage.received]
        enter = _leaf if self.state.grad else _moved
        own, received = [enter(x, device) for x in own], [enter(x, device) for x in received]
        if stage.random and self.seed is not None:
            with seeded(mix_seed(self.seed, microbatch, stage.index)):
                values = slot.compute(*own, *received)
        else:
            values = slot.compute(*own, *received)
        for consumer in self.executable.consumers[stage.index]:
            target = self.executable.slot(consumer, microbatch)
            self._mail[target.number].put(((Phase.FORWARD, stage.index, microbatch), values))
        if stage.index == len(self.executable.replicas) - 1:
            values = self._finish(values, microbatch, device)
        if self.state.grad:
            self._kept[stage.index, microbatch] = (own, received, values)

    def _finish(self, values: tuple[Any, ...], microbatch: int, device: torch.device) -> tuple[Any, ...]:
        """In the last stage: the loss of the micro-batch, or its share of the whole batch's outputs."""
        flat = [p.value if isinstance(p, Constant) else values[p] for p in self.executable.lowered.results]
        if self.loss_function is not None:
            program = self.executable.program
            output = _torch.tree_unflatten(flat[: program.n_outputs], program.out_spec)
            target = self.targets[microbatch]
            if device.type != "cpu":  # nobody outside knows on which device the plan lets the model end
                target = _torch.tree_map(lambda x: _moved(x, device), target)
            loss = self.loss_function(output, target)
            self.losses[microbatch] = loss.detach()
            return (loss,)
        start = sum(self.sizes[:microbatch])
        for index, (value, how) in enumerate(zip(flat, self.outputs, strict=True)):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                self.differentiable[index] = True
            self._combine(index, value, how, microbatch, start)
        return tuple(flat)

    def _combine(self, index: int, value: Any, how: Output, microbatch: int, start: int) -> None:
        if how.combine in ("first", "constant") or len(self.sizes) == 1:
            if microbatch == 0:
                self.results[index] = value.detach() if isinstance(value, torch.Tensor) else value
            return
        piece, rows = value.detach() if isinstance(value, torch.Tensor) else value, self.sizes[microbatch]
        if how.combine == "cat":
            assert how.batch_dim is not None
            factor = piece.shape[how.batch_dim] // rows  # a dimension may hold several entries a sample
            with self._results_lock:
                if self.results[index] is None:
                    shape = list(piece.shape)
                    shape[how.batch_dim] = factor * self.total
                    self.results[index] = piece.new_empty(shape)
            self.results[index].narrow(how.batch_dim, factor * start, factor * rows).copy_(piece)
            return
        with self._results_lock:
            self._pieces.setdefault(index, {})[microbatch] = piece

    def _output_gradients(self, microbatch: int) -> list[torch.Tensor | None]:
        """What the caller's gradients of the whole outputs mean for one micro-batch."""
        start, rows = sum(self.sizes[:microbatch]), self.sizes[microbatch]
        result: list[torch.Tensor | None] = []
        for index, (gradient, how) in enumerate(zip(self.result_gradients, self.outputs, strict=True)):
            if gradient is None or len(self.sizes) == 1:
                result.append(gradient)
            elif how.combine == "cat":
                assert how.batch_dim is not None
                factor = gradient.shape[how.batch_dim] // self.total
                result.append(gradient.narrow(how.batch_dim, factor * start, factor * rows))
            elif how.combine == "sum":
                result.append(gradient)
            elif index in self._shares:
                share = self._shares[index][microbatch]
                result.append(gradient * share if share else None)  # a mean over nothing has no gradient but NaN
            else:  # the same for all micro-batches: the mean of equal values
                result.append(gradient * (rows / self.total))
        return result

    def _backward(self, slot: Slot, microbatch: int, aside: dict[tuple[Phase, int, int], Any]) -> None:
        stage = slot.stage
        last = stage.index == len(self.executable.replicas) - 1
        key = (stage.index, microbatch)
        own, received, values = self._kept[key] if self._keep_graph else self._kept.pop(key)
        gradients: list[torch.Tensor | None] = [None] * len(values)
        if last:
            gradients = [None] if self.loss_function is not None else self._output_gradients(microbatch)
        for consumer in self.executable.consumers[stage.index]:
            message = self._receive(slot, (Phase.BACKWARD, consumer, microbatch), aside)
            for position, gradient in message.items():
                gradient = gradient.to(slot.device)
                before = gradients[position]
                gradients[position] = gradient if before is None else before + gradient
        if last and self.loss_function is not None:
            share = torch.full_like(values[0], self.sizes[microbatch] / self.total)
            values[0].backward(share, retain_graph=self._keep_graph)
        else:
            pairs = [
                (v, g.to(v.device))
                for v, g in zip(values, gradients, strict=True)
                if g is not None and isinstance(v, torch.Tensor) and v.requires_grad
            ]
            if pairs:
                torch.autograd.backward([v for v, _ in pairs], [g for _, g in pairs], retain_graph=self._keep_graph)
        del values, gradients
        for leaf, index in zip(own, stage.model_inputs, strict=True):
            if isinstance(leaf, torch.Tensor) and leaf.grad is not None:
                self._input_gradients[index, microbatch, stage.index], leaf.grad = leaf.grad, None
        back: dict[int, dict[int, torch.Tensor]] = {source: {} for source in stage.sources}
        for leaf, (source, position) in zip(received, stage.received, strict=True):
            if isinstance(leaf, torch.Tensor) and leaf.grad is not None:
                back[source][position], leaf.grad = leaf.grad, None
        for source, message in back.items():
            target = self.executable.slot(source, microbatch)
            self._mail[target.number].put(((Phase.BACKWARD, stage.index, microbatch), message))


def _leaf(value: Any, device: torch.device) -> Any:
    """A received tensor as the start of this stage's own autograd graph."""
    moved = _moved(value, device)
    return moved.requires_grad_() if isinstance(value, torch.Tensor) and value.requires_grad else moved


def _moved(value: Any, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach() if value.device == device else value.detach().to(device)


def split_sizes(batch: int, n_microbatches: int, least: int = 1) -> list[int]:
    """Samples in each micro-batch, as even as they go, larger ones first; none with fewer than `least`."""
    parts = max(1, min(n_microbatches, batch // least))
    small, more = divmod(batch, parts)
    return [small + 1] * more + [small] * (parts - more)


def split_tree(tree: Any, sizes: Sequence[int]) -> list[Any]:
    """`tree` for each micro-batch: tensors with the batch's number of samples are split on dimension 0."""
    leaves, spec = _torch.tree_flatten(tree)
    pieces = [
        list(x.split(list(sizes)))
        if isinstance(x, torch.Tensor) and x.dim() and x.shape[0] == sum(sizes)
        else [x] * len(sizes)
        for x in leaves
    ]
    return [_torch.tree_unflatten([p[i] for p in pieces], spec) for i in range(len(sizes))]


def _explain(error: Exception, slot: Slot, action: Action) -> None:
    """Say which stage, micro-batch and line of the user's model an error came from."""
    way = "forward" if action.phase is Phase.FORWARD else "backward"
    note = f"in the {way} of stage {slot.stage.index} ({slot.worker.device.name}), micro-batch {action.microbatch}"
    names = {node.name: node for node in slot.stage.module.graph.nodes}
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        line = linecache.getline(code.co_filename, trace.tb_lineno).strip()
        node = names.get(line.partition(" ")[0])
        if node is not None and trace.tb_frame.f_locals.get("self") is slot.module:
            note += f", at {describe(node)}"
            written = users_frames(node)
            if written:
                note += f"\nThe model's code:\n{written}"
        trace = trace.tb_next
    error.add_note(note)
