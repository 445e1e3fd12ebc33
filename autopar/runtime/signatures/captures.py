"""The captures of one model: each signature is captured once, and calls of other sizes reuse a capture.

call ── captured for such inputs and such a state of the model?    ── use that
     ── does a capture with symbolic sizes fit?                    ── specialise it: milliseconds
     ── does the call differ from a captured one in sizes alone?   ── capture anew with symbols for these sizes
     ── otherwise                                                  ── capture for these sizes
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from autopar.analysis.batch_tail import studied_again
from autopar.analysis.batching import Batching
from autopar.analysis.example import LossFunction, capture_symbolic, examine, ordinary, study_call
from autopar.analysis.loss_split import LossSplit
from autopar.capture import torch_private
from autopar.capture.autocast_answers import Asking
from autopar.capture.call_answers import CallState
from autopar.capture.call_inputs import common_device, flattened, leaf_names
from autopar.capture.open_sizes import SymbolicProgram
from autopar.capture.program import OpenSize, Program
from autopar.capture.thread_state import grad_mode
from autopar.runtime.call_checks import UNWRAP, check_model, check_parameters
from autopar.runtime.own_devices import on_own_devices
from autopar.runtime.signatures.bound_signature import BoundSignature, RunSettings
from autopar.runtime.signatures.dynamic import changed_floats, describe_size, differing, open_sizes, value_of
from autopar.runtime.signatures.loss_splits import TargetDim
from autopar.runtime.signatures.model_state import ModelState, State
from autopar.runtime.user_warnings import OneTimeWarnings
from cost_models.hardware.devices import Device

_ATTEMPTS = 2  # a capture at one value may fix a size that a capture at another value leaves open: sizes of 2 often do
_MOST_KEPT = 64  # signatures that are kept; the one that was used longest ago goes


class CallArguments(NamedTuple):
    """What a module is called with; `loss` and `target` in a training step."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: LossFunction | None = None
    target: Any = None
    target_dim: TargetDim = None
    return_outputs: bool = False  # of a training step, besides the loss


class BoundCall(NamedTuple):
    """A call, ready to run."""

    signature: BoundSignature
    leaves: list[Any]  # the call's flat inputs
    batch_size: int  # samples; 0 where no input has a batch dimension
    loss_split: LossSplit | None = None  # in a training step


@dataclass
class _Symbolic:
    """A capture with symbolic sizes, in one state of the model."""

    state: State
    program: SymbolicProgram
    batching: Batching | None = None  # of the first program made from it


class Captures:
    """All captures of one model."""

    instead = UNWRAP  # what to do about what a pipelined module cannot

    def __init__(
        self, model: nn.Module, devices: Sequence[Device], settings: RunSettings, warnings: OneTimeWarnings
    ) -> None:
        self.known: list[BoundSignature] = []  # the one used last is the last
        self.state = ModelState(model)
        self._model = model
        self._types = {device.torch_device.type for device in devices}
        self._places = [device.torch_device for device in devices]
        # Where the model was before a plan spread it over the devices. All captures take it to be there.
        self._home: torch.device | None = None
        self._settings = settings
        self._warnings = warnings
        self._symbolic: list[_Symbolic] = []
        # The values at which captures fixed a size, by (structure of the call, size).
        self._fixed: defaultdict[tuple[str, OpenSize], set[int | float]] = defaultdict(set)

    def clear(self) -> None:
        self.known.clear()
        self._symbolic.clear()

    def find(self, call: CallArguments) -> BoundCall:
        """The signature of a call, captured if it is new. Raises CaptureError, InputError."""
        if call.loss is not None and (not torch.is_grad_enabled() or torch.is_inference_mode_enabled()):
            with grad_mode():
                return self.find(call)
        state = self.state.now()
        leaves, spec = flattened(call.args, call.kwargs)
        for signature in reversed(self.known):
            fits = signature.state == state and self._answers_hold(signature.program, leaves)
            bound = signature.program.bind_flat(leaves, spec) if fits else None
            if bound is not None:
                if signature is not self.known[-1]:
                    self.known.remove(signature)
                    self.known.append(signature)
                return BoundCall(signature, *bound)
        check_parameters(self._model, self.instead)
        check_model(self._model)  # a module may have been replaced since it was wrapped
        args, kwargs = ordinary((call.args, call.kwargs))
        call = call._replace(args=args, kwargs=kwargs)
        changed = self.state.changed_attribute(state, [signature.state for signature in self.known])
        if changed:
            self._warnings.changed_attribute(changed)
        signature = self._specialised(call, state, leaves) or self._captured(call, state, leaves, spec)
        self.state.leave_out(signature.program.live)
        signature.state = self.state.now()  # less what the model's code assigns
        for other in self.known:
            other.state = self.state.completed(other.state)
        self.known.append(signature)
        del self.known[:-_MOST_KEPT]
        bound = signature.program.bind_flat(leaves, spec)
        assert bound is not None
        return BoundCall(signature, *bound)

    def adopt(self, program: Program, batching: Batching) -> None:
        """Take over a capture of a module that this one is a copy of."""
        self._home = program.device
        self.state.leave_out(program.live)
        self.known.append(BoundSignature(self.state.now(), program, batching))

    def complete(self, call: CallArguments, signature: BoundSignature) -> None:
        """Study a signature whose study was reused, with the shapes that measuring needs."""
        if signature.reused:
            _, batching = self._studied(call, signature.program)
            signature.batching = replace(batching, tail=signature.batching.tail)
            signature.reused = False

    def _specialised(self, call: CallArguments, state: State, leaves: Sequence[Any]) -> BoundSignature | None:
        """The signature from a capture with symbolic sizes that fits the call."""
        for symbolic in reversed(self._symbolic):
            fits = symbolic.state == state and self._answers_hold(symbolic.program.program, leaves)
            program = symbolic.program.at(call.args, call.kwargs) if fits else None
            if program is None:
                continue
            again = studied_again(program, symbolic.batching) if symbolic.batching is not None else None
            if again is not None:
                return BoundSignature(state, *again, specialised=True, reused=True)
            program, batching = self._studied(call, program)
            symbolic.batching = symbolic.batching or batching
            return BoundSignature(state, program, batching, specialised=True)
        return None

    def _captured(
        self, call: CallArguments, state: State, leaves: Sequence[Any], spec: torch_private.TreeSpec
    ) -> BoundSignature:
        """A new capture: with symbols for the sizes that change, where the model allows it."""
        requested = self._changing(call, state, leaves, spec)
        requested = frozenset(size for size in requested if len(self._fixed[str(spec), size]) < _ATTEMPTS)
        symbolic = self._with_symbols(call, requested) if requested else None
        if symbolic is not None:
            self._note_fixed(symbolic.fixed, call, leaves, str(spec))
            if not symbolic.sizes:  # the model fixes all of them
                return BoundSignature(state, *self._studied(call, symbolic.program))
            self.state.leave_out(symbolic.program.live)
            self._symbolic.append(_Symbolic(self.state.now(), symbolic))
            signature = self._specialised(call, self.state.now(), leaves)
            if signature is not None:
                return signature
        settings = self._settings
        with self._on_own_devices():
            program, batching = examine(
                self._model,
                call.args,
                call.kwargs,
                self._types,
                batch_dim=settings.batch_dim,
                verify=settings.verify,
                strict=settings.strict,
                device=self._place_of_code(leaves),
            )
        if symbolic is None:  # a call that the model does not take says nothing about sizes
            self._note_fixed(requested, call, leaves, str(spec))
        self._note_floats(call, leaves, spec)
        return BoundSignature(state, program, batching)

    def _with_symbols(self, call: CallArguments, requested: frozenset[OpenSize]) -> SymbolicProgram | None:
        """A capture with symbols for the sizes `requested`; None if the model cannot be captured so."""
        with self._on_own_devices():
            return capture_symbolic(
                self._model,
                call.args,
                call.kwargs,
                self._types,
                batch_dim=self._settings.batch_dim,
                open_sizes=requested,
                device=self._place_of_code(flattened(call.args, call.kwargs)[0]),
            )

    def _note_fixed(
        self, fixed: frozenset[OpenSize], call: CallArguments, leaves: Sequence[Any], structure: str
    ) -> None:
        """Remember the values of sizes that are captured by themselves. A warning says so at the second value."""
        names = leaf_names(self._model, call.args, dict(sorted(call.kwargs.items())))
        for size in sorted(fixed, key=str):
            values = self._fixed[structure, size]
            values.add(value_of(size, leaves))
            if len(values) == _ATTEMPTS or isinstance(self._settings.dynamic, Mapping):
                self._warnings.fixed_size(describe_size(size, names), sorted(values))

    def _note_floats(self, call: CallArguments, leaves: Sequence[Any], spec: torch_private.TreeSpec) -> None:
        """Python floats are constants of a capture, so a float that changes is captured for every value."""
        changed = [
            floats
            for signature in self.known
            if signature.program.in_spec == spec and (floats := changed_floats(leaves, signature.program.inputs))
        ]
        if changed:
            self._note_fixed(changed[-1], call, leaves, str(spec))

    def _changing(
        self, call: CallArguments, state: State, leaves: Sequence[Any], spec: torch_private.TreeSpec
    ) -> frozenset[OpenSize]:
        """The sizes known to change between calls: by `dynamic`, or because earlier calls had others."""
        dynamic = self._settings.dynamic
        if dynamic is False:
            return frozenset()
        found = open_sizes(dynamic, self._model, call.args, call.kwargs, leaves)
        for signature in reversed(self.known):
            if signature.state == state and signature.program.in_spec == spec:
                differences = differing(leaves, signature.program.inputs)
                if differences is not None:
                    found |= differences
                    break
        for symbolic in self._symbolic:
            if symbolic.state == state and symbolic.program.program.in_spec == spec:
                # Another call of this structure may have None for an optional tensor, or a tensor for a number.
                inputs = symbolic.program.program.inputs
                found |= {size for size in symbolic.program.sizes if inputs[size.leaf].same_type(leaves[size.leaf])}
        # The tracer takes sizes of 0 and 1 for constants, because they broadcast.
        return frozenset(size for size in found if size.dim is None or leaves[size.leaf].shape[size.dim] > 1)

    def _studied(self, call: CallArguments, program: Program) -> tuple[Program, Batching]:
        with self._on_own_devices():
            return study_call(self._model, program, call.args, call.kwargs, self._types, verify=self._settings.verify)

    def _answers_hold(self, program: Program, leaves: Sequence[Any]) -> bool:
        """Whether the model's code would learn of torch.autocast and of the call what it did when the program was
        captured."""
        if program.autocast and not Asking.of(program.device, self._types).holds(program.autocast):
            return False
        return not program.learned or CallState(self._model, leaves).holds(program.learned)

    def _place_of_code(self, leaves: Sequence[Any]) -> torch.device | None:
        """Where a capture takes all tensors to be; None: where they are."""
        if self._home is None:
            self._home = common_device(self._model, leaves)
        tensors = [*self._model.parameters(), *self._model.buffers(), *leaves]
        places = {tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor)}
        return None if places <= {self._home} else self._home

    def _on_own_devices(self) -> AbstractContextManager[object]:
        """Inside, uncaptured parts of the model run although it may be on several devices."""
        return on_own_devices(self._model, self._places)
