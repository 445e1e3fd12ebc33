"""The signatures that a model has been called with: each is captured once, and bound to the plan in force.

call ── captured for such inputs and such a state of the model? ── no: capture it
     ── does the plan in force fit the call?                    ── no: decide on a plan
     ── is the signature bound to that plan?                    ── no: lower the plan, place it on the devices
     ── do the meshes' shards divide the batch?                 ── no: use the same plan without shards
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn

from autopar.analysis.example import Example, LossFunction, examine, has_backward, under_default_device
from autopar.analysis.loss import LossSplit
from autopar.errors import InputError
from autopar.plan.plan import Plan, with_notes
from autopar.runtime.bound_signature import (
    BoundSignature,
    RunSettings,
    bind,
    keeps_batch_whole,
    model_state,
    without_shards,
)
from autopar.runtime.loss_splits import LossSplits, TargetDim
from autopar.runtime.user_warnings import OneTimeWarnings
from autopar.runtime.workers import WorkerPool
from cost_models.hardware.devices import Device

Decide = Callable[[Example], Plan]


@dataclass(frozen=True)
class CallArguments:
    """What a module is called with; `loss` and `target` in a training step."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: LossFunction | None = None
    target: Any = None
    target_dim: TargetDim = None


class BoundCall(NamedTuple):
    """A call, ready to run."""

    signature: BoundSignature
    leaves: list[Any]  # the call's flat inputs
    batch_size: int  # samples; 0 where no input has a batch dimension
    loss_split: LossSplit | None = None  # in a training step


class Signatures:
    """All signatures of one model. `plan`: the plan in force, None until the first call needs one."""

    def __init__(
        self,
        model: nn.Module,
        devices: Sequence[Device],
        decide: Decide,
        user_plan: Plan | None,
        settings: RunSettings,
    ) -> None:
        """`decide(example)` makes a plan for a call like the example, unless the user gave one."""
        # A plan from `Plan.from_split` is completed at the first call (`_user_plan_here`).
        self.plan = user_plan if user_plan is not None and not user_plan.split else None
        self.user_plan = user_plan
        self.settings = settings
        self.warnings = OneTimeWarnings()
        self._model = model
        self._devices = tuple(devices)
        self._decide = decide
        self._plan_knows_loss = user_plan is not None
        self._known: list[BoundSignature] = []
        self._workers = WorkerPool(devices)

    def follow(self, other: Signatures) -> None:
        """Start with the plan that `other` has in force, and do not repeat its warnings."""
        self.plan, self._plan_knows_loss = other.plan, other._plan_knows_loss
        self.warnings = OneTimeWarnings(other.warnings.given)

    def close(self) -> None:
        """End the workers and forget all captures."""
        self._workers.close()
        self._known.clear()

    def newest(self) -> BoundSignature | None:
        """The one captured last of those that follow the plan in force."""
        return next((s for s in reversed(self._known) if s.plan is self.plan), None)

    def bind(self, call: CallArguments) -> BoundCall:
        """Capture, plan and place for `call`, as far as that is not done yet. Raises InputError for an empty batch."""
        self._drop_abandoned()
        bound = self._captured(call)
        signature = bound.signature
        if bound.batch_size == 0 and signature.program.batch_size:
            raise InputError("the batch has no samples; give at least one")
        bound = bound._replace(loss_split=self._loss_split(bound, call))
        plan = self._plan_for(bound, call)
        if signature.plan is not plan:
            self._place(signature, plan, check_hints=self.user_plan is not None)
            assert signature.lowered is not None
            self.warnings.undivided(signature.lowered)
        return bound._replace(signature=self._divisible(signature, bound.batch_size))

    def _captured(self, call: CallArguments) -> BoundCall:
        state = model_state(_modules(self._model))
        for signature in self._known:
            bound = signature.program.bind(call.args, call.kwargs) if signature.state == state else None
            if bound is not None:
                return BoundCall(signature, *bound)
        types = {device.torch_device.type for device in self._devices}
        settings = self.settings
        program, batching = examine(
            self._model,
            call.args,
            call.kwargs,
            types,
            batch_dim=settings.batch_dim,
            verify=settings.verify,
            strict=settings.strict,
        )
        bound = program.bind(call.args, call.kwargs)
        assert bound is not None
        self._known.append(BoundSignature(state, program, batching))
        return BoundCall(self._known[-1], *bound)

    def _loss_split(self, bound: BoundCall, call: CallArguments) -> LossSplit | None:
        if call.loss is None:
            return None
        signature, batch_dim = bound.signature, self.settings.batch_dim
        if signature.loss_splits is None:
            signature.loss_splits = LossSplits(signature.program, signature.batching)
        dims = (batch_dim, 0) if isinstance(batch_dim, int) else (0,)
        return signature.loss_splits.of(call.loss, call.target, call.target_dim, dims)

    def _plan_for(self, bound: BoundCall, call: CallArguments) -> Plan:
        """The plan in force; a new one if there is none, or none that fits the call."""
        if self.user_plan is not None:
            self.plan = self.plan or self._user_plan_here(self.user_plan, bound.signature)
        else:
            self.plan = self._decided(bound, call)
        self.plan = with_notes(self.plan, bound.signature.program.uncaptured)
        self.warnings.uncaptured(bound.signature.program)
        self.warnings.batch_stays_whole(bound.signature.batching)
        if self.settings.batch_norm == "per-microbatch":
            self.warnings.statistics_are_of_microbatches(self.plan, bound.signature.batching)
        return self.plan

    def _user_plan_here(self, plan: Plan, signature: BoundSignature) -> Plan:
        """The user's plan on the devices at hand."""
        plan = plan.on([device.name for device in self._devices])
        whole = keeps_batch_whole(signature.batching, self.settings)
        if signature.program.batch_size > 1 and whole and plan.n_microbatches > 1:
            return replace(plan, n_microbatches=1)
        return plan

    def _decided(self, bound: BoundCall, call: CallArguments) -> Plan:
        program, batching = bound.signature.program, bound.signature.batching
        training = has_backward(self._model, program, call.loss)
        plan = self.plan
        if (
            plan is not None
            and (plan.training or not training)
            and (call.loss is None or self._plan_knows_loss)  # the last stage must have room for the loss
            and (plan.batch_size != 1 or program.batch_size <= 1)  # one sample cannot show how to split a batch
        ):
            return plan
        loss = under_default_device(call.loss)
        example = Example(
            self._model,
            program,
            batching,
            call.args,
            call.kwargs,
            bound.leaves,
            training,
            loss,
            call.target,
            bound.loss_split,
        )
        plan = self._decide(example)
        self._plan_knows_loss = call.loss is not None
        return plan

    def _divisible(self, signature: BoundSignature, batch_size: int) -> BoundSignature:
        """`signature`, or the same without shards if its shards do not divide the batch."""
        assert signature.lowered is not None
        assert signature.plan is not None
        multiple = signature.lowered.multiple
        if batch_size % multiple == 0:
            return signature
        if signature.whole is None:
            whole = BoundSignature(signature.state, signature.program, signature.batching)
            self._place(whole, without_shards(signature.plan), check_hints=False)
            signature.whole = whole
        self.warnings.without_shards(batch_size, multiple)
        return signature.whole

    def _place(self, signature: BoundSignature, plan: Plan, *, check_hints: bool) -> None:
        bind(signature, plan, self._model, self._devices, self._workers, self.settings, check_hints=check_hints)

    def _drop_abandoned(self) -> None:
        """After an interrupt in the middle of a long operator, a worker is still inside it: place everything anew, on
        new workers."""
        if any(s.executable is not None and s.executable.is_abandoned for s in self._all()):
            self._workers.close()
            for signature in self._known:
                signature.plan = signature.executable = signature.whole = None

    def _all(self) -> Iterator[BoundSignature]:
        for signature in self._known:
            yield signature
            if signature.whole is not None:
                yield signature.whole


def _modules(model: nn.Module) -> list[nn.Module]:
    """All modules of `model`, each once and the root first, in a fraction of the time of `model.modules()`."""
    seen: dict[nn.Module, None] = {}
    stack = [model]
    while stack:
        module = stack.pop()
        if module not in seen:
            seen[module] = None
            stack.extend(child for child in module._modules.values() if child is not None)
    return list(seen)
