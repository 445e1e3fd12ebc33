"""The shapes of what stages send each other, derived on every rank by running the stages without values.

Both ends of a message need its shapes before it is sent: the receiver posts its receive ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from autopar.errors import PlanError
from autopar.lower.stages import Lowered, StageProgram, replica
from autopar.runtime.ranks.messages.packing import SentTensor, Spec, Values
from cost_models.kernels.autocast_casts import AutocastCasts

_META = torch.device("meta")
_MOST_KEPT = 64

Autocast = tuple[tuple[str, bool, torch.dtype], ...]
"""For each device type: whether torch.autocast is on, and its dtype."""


class SentValues:
    """What every stage but the last sends for a micro-batch of some shape."""

    def __init__(self, outputs: list[list[Spec]]) -> None:
        self.outputs = outputs
        self._known: dict[tuple[int, int], Values] = {}

    def of(self, sender: int, receiver: int, positions: Sequence[int]) -> Values:
        """The outputs of `sender` at `positions`, which `receiver` reads."""
        if (sender, receiver) not in self._known:
            self._known[sender, receiver] = Values({p: self.outputs[sender][p] for p in positions})
        return self._known[sender, receiver]


class StageShapes:
    """What every stage sends, by the shapes of a micro-batch's inputs."""

    def __init__(self, lowered: Lowered, tensor: Callable[[str], torch.Tensor], captured: torch.device) -> None:
        """`tensor(name)`: one of the shape of the model's tensor; `captured`: the device of the program's constants."""
        self._lowered = lowered
        self._modules = [_without_values(stage, tensor, captured) for stage in lowered.stages[:-1]]
        self._known: dict[tuple[Any, ...], SentValues] = {}

    def of(self, inputs: Sequence[Any], autocast: Autocast = ()) -> SentValues:
        """What the stages send. `inputs`: the model's flat inputs of one micro-batch. `autocast`:
        that the call runs under."""
        casts = tuple(one for one in autocast if one[1])
        key = casts, *((tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x for x in inputs)
        if key not in self._known:
            if len(self._known) >= _MOST_KEPT:
                self._known.clear()
            with _under(casts):
                self._known[key] = SentValues(self._derived(inputs))
        return self._known[key]

    def _derived(self, inputs: Sequence[Any]) -> list[list[Spec]]:
        inputs = [torch.empty_like(x, device=_META) if isinstance(x, torch.Tensor) else x for x in inputs]
        made: list[tuple[Any, ...]] = []
        for stage, module in zip(self._lowered.stages, self._modules, strict=False):
            received = [made[source][position] for source, position in stage.received]
            try:
                with torch.no_grad():
                    made.append(module(*(inputs[i] for i in stage.model_inputs), *received))
            except (RuntimeError, NotImplementedError) as error:
                raise PlanError(
                    f"the shapes that stage {stage.index} sends depend on values ({str(error).splitlines()[0]}), and "
                    "stages in different processes need shapes that follow from those of the inputs; cut the model "
                    "elsewhere, or run it in one process (devices=)"
                ) from error
        return [[_spec(x) for x in outputs] for outputs in made]


@contextmanager
def _under(casts: Autocast) -> Iterator[None]:
    """Only `casts`, whatever autocast this thread is in: a backward may run outside of that of its forward."""
    with ExitStack() as stack:
        for device_type in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        for device_type, _, dtype in casts:
            stack.enter_context(torch.autocast(device_type, dtype, cache_enabled=False))
            stack.enter_context(AutocastCasts(device_type))
        yield


def _spec(value: Any) -> Spec:
    return SentTensor(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else type(value)


def _without_values(stage: StageProgram, tensor: Callable[[str], torch.Tensor], captured: torch.device) -> Any:
    tensors: Mapping[str, torch.Tensor] = {
        piece.attribute: torch.empty_like(piece.taken(tensor(piece.name)), device=_META) for piece in stage.pieces
    }
    return replica(stage, tensors, [_META] * stage.shards, captured)
