"""What a step does once on the whole batch, in the caller's thread: the end of a model that needs all samples
(`analysis/batch_tail.py`), and a loss that is not split into micro-batches.

    stage 0    | F0 | F1 | F2 |    |                        | B0 | B1 | B2 |
    stage 1         | F0 | F1 | F2 |                   | B0 | B1 | B2 |
    caller                         | whole batch, F+B  |

Neither the partition nor the schedule changes what it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from autopar.analysis.batch_tail import Tail
from autopar.analysis.example import LEFT_OUT, Example
from autopar.analysis.operators import on_device, requires_grad_nodes
from autopar.capture import torch_private
from autopar.capture.program import Program
from autopar.costs.call_signature import graph_signature, loss_signature
from autopar.costs.cost_table import Calls, LossNeedsValues, OnWholeBatch
from autopar.errors import InputError, first_line
from cost_models.graphs import Loss, may_have_gradient, on_meta, private_copy, run_nodes, storage_key, tensors_in
from cost_models.kernels.operator_work import OperatorWork, count_call
from cost_models.measuring.autocast import Autocast
from cost_models.measuring.call_seconds import call_seconds
from cost_models.memory.call_memory import as_on_device, call_memory

META = torch.device("meta")


@dataclass(frozen=True)
class WholeBatch:
    """The end of the example's model, and the loss where the whole batch is needed for it."""

    program: Program  # less the tail
    leaves: Sequence[Any]  # flat inputs of the example
    tail: Tail | None
    loss_fn: Callable[[Any, Any], torch.Tensor] | None  # None: a loss that the caller computes is not known
    target: Any
    training: bool

    @classmethod
    def of(cls, example: Example) -> WholeBatch | None:
        """None where nothing runs on the whole batch, as far as is known, or where the loss failed on the example."""
        split, tail = example.loss_split, example.batching.tail
        whole = split is not None and split.combine == "whole" and not split.error
        if tail is None and not whole:
            return None
        loss_fn = example.loss if whole else None
        return cls(example.program, example.leaves, tail, loss_fn, example.target, example.training)

    @property
    def signature(self) -> list[Any]:
        """What its measured seconds depend on beside the device, for the keys of caches."""
        tail = [] if self.tail is None else [f"{self.tail.graph.module.graph}"]
        return [graph_signature(self.program), *tail, loss_signature(self.loss_fn, self.target), self.training]

    def roots(self, outputs: Sequence[Any], leaves: Sequence[Any]) -> list[torch.Tensor]:
        """Run it on the flat outputs of the program's graph. Returns where its backward starts: at the loss, or at all
        outputs of the model where the caller computes one."""
        found = list(outputs)[: self.program.n_outputs]
        if self.tail is not None:
            found = self.tail(found, leaves)
        if self._loss is None:
            return [t for t in tensors_in(found) if t.requires_grad]
        return [self._loss(tuple(found))]

    def loss(self, outputs: Sequence[Any]) -> torch.Tensor:
        """The loss by the flat outputs of the program's graph; only with `loss_fn`."""
        (found,) = self.roots(outputs, self.leaves)
        return found

    @cached_property
    def _loss(self) -> Loss | None:
        """Of the model's flat outputs."""
        n_outputs = self.program.n_outputs if self.tail is None else len(self.tail.returned)
        whole = replace(self.program, n_outputs=n_outputs)
        return Calls(whole, list(self.leaves), self.loss_fn, self.target).loss(max(whole.batch_size, 1))

    def on_meta(self) -> WholeBatch:
        """The same for tensors without values."""
        target = torch_private.tree_map(on_meta, self.target)
        return replace(self, leaves=[on_meta(x) for x in self.leaves], target=target)

    def outputs(self, place: torch.device) -> list[Any]:
        """The flat outputs of the program's graph for the whole batch, as a step hands them over."""
        module = private_copy(on_device(self.program.graph_module, self.program.device, place), place, gradients=False)
        with torch.no_grad():
            found = run_nodes(module, [_to(x, place) for x in self.leaves])
        graded = requires_grad_nodes(module) if self.training else set()
        nodes = list(self.program.graph.output_node().args[0])  # type: ignore[arg-type]
        names = {node.name for node in graded}
        return [
            value.detach().requires_grad_(getattr(node, "name", "") in names and may_have_gradient(value))
            if isinstance(value, torch.Tensor)
            else value
            for node, value in zip(nodes, found, strict=True)
        ]

    def work(self) -> OperatorWork:
        """Its kernels, forward and backward, without running them."""
        meta = self.on_meta()
        outputs = tuple(meta.outputs(META))
        with torch.set_grad_enabled(self.training):
            return count_call(lambda *flat: meta.roots(flat, meta.leaves), outputs)[1]

    def memory(self, device_type: str, autocast: torch.dtype | None = None) -> tuple[int, int]:
        """`OnWholeBatch.nbytes` and `outputs`, on devices of a type, without running it. `autocast`: None: off."""
        meta = self.on_meta()
        with as_on_device(device_type, autocast):
            outputs = meta.outputs(META)
        there = tensors_in([outputs, list(meta.leaves), [*torch_private.tree_leaves(meta.target)]])
        nbytes = call_memory(
            lambda: meta.roots(outputs, meta.leaves), there, device_type, training=self.training, autocast=autocast
        )
        return nbytes, sum({storage_key(t): t.untyped_storage().nbytes() for t in tensors_in(outputs)}.values())

    def seconds(self, place: torch.device, autocast: Autocast) -> float:
        """Seconds of its forward and backward on a device at hand, with the threads that this one computes with."""
        with autocast.applied():
            outputs = self.outputs(place)
        leaves = [_to(x, place) for x in self.leaves]

        def once() -> None:
            with torch.set_grad_enabled(self.training), autocast.applied():
                roots = [t for t in self.roots(outputs, leaves) if t.requires_grad]
                if roots:
                    torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
            for value in (*outputs, *leaves):
                if isinstance(value, torch.Tensor):
                    value.grad = None

        return call_seconds(once, place)


def priced(
    whole: WholeBatch | None, price: Callable[[WholeBatch], dict[str, OnWholeBatch]]
) -> tuple[dict[str, OnWholeBatch], list[str]]:
    """`price(whole)`, where its loss fails the price of the end of the model alone, and notes of what prices leave out.
    Raises InputError for what is no loss."""
    if whole is None:
        return {}, []
    try:
        return price(whole), []
    except Exception as error:
        if isinstance(error, InputError) and not isinstance(error, LossNeedsValues):
            raise
        what = "end of the model" if whole.loss_fn is None else "loss"
        why = why_unknown(error)
        rest = whole.tail is not None and whole.loss_fn is not None
        found, notes = priced(replace(whole, loss_fn=None), price) if rest else ({}, [])
        return found, [f"{LEFT_OUT}{what}, because {why}", *notes]


def why_unknown(error: Exception) -> str:
    """Why something is not known without values, from what it raised."""
    if isinstance(error, NotImplementedError):  # torch's, with advice for those who write operators
        return "the sizes of its tensors depend on values"
    return str(error) if isinstance(error, LossNeedsValues) else first_line(error)


def _to(value: Any, place: torch.device) -> Any:
    return value.detach().to(place).requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value
