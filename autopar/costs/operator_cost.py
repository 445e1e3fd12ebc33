"""The cost of one operator, apart from its seconds: what it is, which bytes it makes, keeps and reads."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import networkx as nx

from autopar.plan.recompute import Recompute
from cost_models import Precision, optimizer_state_bytes
from cost_models.memory.graph_bytes import Place
from cost_models.memory.optimizer_state import optimizer_state_elements
from cost_models.memory.optimizer_step import Implementation, StepShare


class Weight(NamedTuple):
    """A parameter or buffer that an operator reads."""

    nbytes: int  # bytes of the whole tensor
    trained: bool
    shape: tuple[int, ...]
    parts: int = 1  # shards of the tensor; each device holds one
    state_parts: int = 1  # shards of the optimizer's state
    once: float = 0.0  # s once a step on a mesh, for all operators of a stage that read it together
    gradient_parts: int | None = None  # shards of its gradient; None: as many as of the tensor
    precision: Precision | None = None  # of its tensors in training; None: all have its own dtype
    beside: int = 0  # each device stores one of this number of shards beside what it reads; 0: it stores what it reads

    @property
    def elements(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape)

    @property
    def held(self) -> float:
        """Bytes on each device."""
        return self.nbytes / self.parts + (self.nbytes / self.beside if self.beside else 0.0)

    @property
    def gradient(self) -> float:
        """Bytes of its gradient on each device, if it is trained."""
        whole = self.nbytes if self.precision is None else self.elements * self.precision.gradient
        return whole / (self.gradient_parts or self.parts)

    @property
    def fresh_gradient(self) -> float:
        """Bytes on each device of the gradient of one micro-batch, until it is added to the sum over micro-batches.

        0 if the sum has a wider type: then the kernel that computes the gradient adds it to the sum, as in Megatron-LM
        (--no-gradient-accumulation-fusion turns that off). 0 if it is scattered: `gathered_bytes` counts it.
        """
        wider = self.precision is not None and self.precision.gradient > self.precision.parameter
        scattered = self.gradient_parts not in (None, self.parts)
        return 0.0 if not self.trained or wider or scattered else self.gradient

    def state(self, optimizer: str) -> float:
        """Bytes of the optimizer's state, and of a master copy, on each device."""
        if not self.trained:
            return 0.0
        if self.precision is None:
            return optimizer_state_bytes(optimizer, self.nbytes, self.shape) / self.state_parts
        states = optimizer_state_elements(optimizer, self.shape) * self.precision.state
        return (states + self.elements * self.precision.master) / self.state_parts

    def step(self, optimizer: str, implementation: Implementation) -> StepShare:
        """What each device does for it in the optimizer's step: its part of the state."""
        own = self.nbytes // max(1, self.elements)
        precision = self.precision or Precision(own, own, 0, own)
        elements = self.elements / self.state_parts if self.trained else 0
        return StepShare.of(optimizer, elements, precision=precision, implementation=implementation)


@dataclass(frozen=True)
class OperatorCost:
    """An operator of the cost graph. Bytes are those of the whole batch on one device of its stage.

    The seconds lie in cost tables, because they depend on the device kind and on the micro-batch size.
    """

    key: str  # `module.path/operator#k`
    operator: str  # e.g. "linear"
    module: str  # path; "" for the model itself
    source: str  # line of the user's code; "" if unknown
    position: int  # in program order, from 0
    replicable: bool  # every stage computes it for itself: positions, masks, sizes
    repeatable: bool  # it may run again for its backward
    weight_share: float  # fraction of its backward's time that only gradients of parameters need
    output_bytes: float  # of its result
    gradient_bytes: float  # of the gradient that flows back to its result; 0 if none does
    allocated_bytes: float  # newly allocated while it runs
    saved: Mapping[Hashable, float]  # storage -> bytes kept for the backward
    parameters: Mapping[str, Weight]  # by storage: a tied parameter has one entry
    core: int | None = None  # number of the attention whose core it belongs to, which may run again by itself
    rebuilt: frozenset[Hashable] = frozenset()  # storages of `saved` that the core makes, and so can make again
    saved_places: Mapping[Hashable, Place] = field(default_factory=dict)  # storage -> which of its tensors is kept
    block: int | None = None  # number of the layer that it belongs to, if that may run again by itself
    kept: bool = False  # its result is kept where the other operators of its layer are recomputed one by one
    results: Mapping[Hashable, float] = field(default_factory=dict)  # storage of what it returns -> bytes
    copies: int = 1  # devices of a mesh, in one node, that hold the same of its result
    # Bytes of gathered tensors whose shards alone are in `saved`: the backward gathers these tensors again.
    regathered_bytes: float = 0.0
    saved_within: Mapping[Hashable, float] | None = None  # `saved` where its layer runs again; None: the same
    gather: float = 0.0  # s for all micro-batches to gather the result from a part on each of them

    def runs_again(self, recompute: Recompute) -> bool:
        """Whether it runs again within the backward of a stage with this mode; a whole forward is a pass of its own."""
        if recompute == Recompute.SELECTIVE:
            return self.core is not None
        return recompute.by_layer and self.block is not None and not (recompute == Recompute.OPERATORS and self.kept)

    def with_bytes(self, **changes: object) -> OperatorCost:
        """The same operator with other fields: `dataclasses.replace`, but without running the constructor of a frozen
        class field by field. A search makes some 100,000 of these."""
        other = object.__new__(OperatorCost)
        other.__dict__.update(self.__dict__, **changes)
        return other


def operator_costs(graph: nx.DiGraph) -> dict[str, OperatorCost]:
    """The cost of every operator by node name, in program order."""
    return dict(graph.nodes(data="cost"))
