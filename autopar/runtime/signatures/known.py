"""The signatures that a model has been called with, each bound to the plan in force.

call ── captured?                                               ── no: capture it (captures.py)
     ── does the plan in force fit the call?                    ── no: decide on a plan
     ── is the signature bound to that plan?                    ── no: lower the plan, place it on the devices
     ── do the meshes' shards divide the batch?                 ── no: use the same plan without shards
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from autopar.analysis.example import END_OF_MODEL, Example, LossFunction, has_backward, ordinary, under_default_device
from autopar.analysis.loss_split import LossSplit
from autopar.analysis.own_loss import check_own_loss, own_loss
from autopar.capture.call_answers import TYPES_ASKED
from autopar.capture.program import Program
from autopar.errors import InputError, PlanError, each_warning_once
from autopar.plan.plan import Plan, with_notes, with_unproven_split, with_whole_batch
from autopar.runtime.signatures.bound_signature import (
    BoundSignature,
    RunSettings,
    bind,
    whole_because,
    without_shards,
)
from autopar.runtime.signatures.captures import BoundCall, CallArguments, Captures
from autopar.runtime.signatures.dynamic import Bucket, bucket
from autopar.runtime.signatures.loss_splits import LossSplits, default_target_dims
from autopar.runtime.step.workers import WorkerPool
from autopar.runtime.user_warnings import OneTimeWarnings
from cost_models.hardware.devices import Device

Decide = Callable[[Example], Plan]


@dataclass(frozen=True)
class _Decision:
    """A plan that was decided on for one bucket of sizes."""

    plan: Plan
    knows_loss: bool  # the last stage has room for the loss; the model's own is part of the program

    def holds_for(self, program: Program, *, training: bool, loss: LossFunction | None) -> bool:
        return (
            (self.plan.training or not training)
            and (loss is None or self._serves(loss))
            and (self.plan.batch_size != 1 or program.batch_size <= 1)  # one sample cannot show how to split a batch
        )

    def _serves(self, loss: LossFunction) -> bool:
        """Whether the plan fits steps with `loss`. The model's own loss needs no extra memory, but its backwards
        need not wait for all forwards."""
        waits = self.plan.barrier and self.plan.n_microbatches > 1
        return self.knows_loss or (loss is own_loss and not waits)


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
        # The user's plan is completed at the first call (`_user_plan_here`). One that names modules shows only then.
        self.plan = user_plan if user_plan is not None and not user_plan.split else None
        self.user_plan = user_plan
        self.settings = settings
        self.warnings = OneTimeWarnings()
        self._model = model
        self._devices = tuple(devices)
        self._decide = decide
        self._user_plan_completed = False
        self._captures = Captures(model, devices, settings, self.warnings)
        self._decisions: dict[Bucket, _Decision] = {}
        self.workers = WorkerPool(devices)

    def follow(self, other: Signatures) -> None:
        """Start with the plan that `other` has in force, and do not repeat its warnings."""
        self.plan, self._decisions = other.plan, dict(other._decisions)
        self._user_plan_completed = other._user_plan_completed
        self.warnings.given = set(other.warnings.given)

    def adopt(self, example: Example) -> None:
        """Take over the capture of an example call of a module that this one is a copy of."""
        self._captures.adopt(example.program, example.batching)

    def close(self) -> None:
        """End the workers and forget all captures."""
        self.workers.close()
        self._captures.clear()

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All plans that were decided on, by bucket of sizes."""
        return tuple(decision.plan for _, decision in sorted(self._decisions.items()))

    def newest(self) -> BoundSignature | None:
        """The one captured last of those that follow the plan in force."""
        return next((s for s in reversed(self._captures.known) if s.plan is self.plan), None)

    def bind(self, call: CallArguments) -> BoundCall:
        """Capture, plan and place for `call`, as far as that is not done yet. Raises InputError for an empty batch."""
        self._drop_abandoned()
        with each_warning_once(self.warnings.given):
            return self._bound(call)

    def _bound(self, call: CallArguments) -> BoundCall:
        bound = self._captures.find(call)
        signature = bound.signature
        if bound.batch_size == 0 and signature.program.batch_size:
            raise self._refusal("the batch has no samples; give at least one")
        bound = bound._replace(loss_split=self._loss_split(bound, call))
        plan = self._plan_for(bound, call)
        if signature.plan is not plan:
            signature.plan_of_other_call = self._is_of_other_call(signature, plan)
            self._place(signature, plan, check_hints=self.user_plan is not None)
            assert signature.lowered is not None
            self.warnings.undivided(signature.lowered)
            if signature.executable is not None:
                self.warnings.left_alone(signature.executable.left_alone, self.settings.compile)
        if TYPES_ASKED in signature.program.learned and signature.executable is not None:
            self.warnings.types_without_autocast({device.torch_device.type for device in self._devices})
        return bound._replace(signature=self._divisible(signature, bound.batch_size))

    def _loss_split(self, bound: BoundCall, call: CallArguments) -> LossSplit | None:
        if call.loss is None:
            return None
        signature, batch_dim = bound.signature, self.settings.batch_dim
        if call.loss is own_loss:
            check_own_loss(signature.program, signature.batching.tail)
        if signature.loss_splits is None:
            signature.loss_splits = LossSplits(signature.program, signature.batching)
        dims = default_target_dims(batch_dim)
        return signature.loss_splits.of(call.loss, call.target, bound.batch_size, call.target_dim, dims)

    def _refusal(self, message: str) -> InputError:
        """What every process that runs the model raises for a call."""
        return InputError(message)

    def _plan_for(self, bound: BoundCall, call: CallArguments) -> Plan:
        """The plan in force; a new one if there is none, or none that fits the call."""
        if self.user_plan is not None:
            same_mode = bound.signature.program.training == self.user_plan.training
            if self.plan is None or (same_mode and not self._user_plan_completed):
                self.plan = self._user_plan_here(self.user_plan, bound.signature)
                self._user_plan_completed = same_mode
            self.plan = with_notes(self.plan, bound.signature.program.uncaptured)
            self.plan = with_unproven_split(self.plan, bound.signature.batching.unproven)
        else:
            self.plan = self._decided(bound, call)
        self.warnings.uncaptured(bound.signature.program)
        self.warnings.batch_stays_whole(bound.signature.batching)
        if self.settings.batch_norm == "per-microbatch":
            self.warnings.statistics_are_of_microbatches(self.plan, bound.signature.batching)
        return self.plan

    def _user_plan_here(self, plan: Plan, signature: BoundSignature) -> Plan:
        """The user's plan on the devices at hand."""
        plan = plan.on([device.name for device in self._devices])
        if signature.program.batch_size > 1:
            plan = with_whole_batch(plan, whole_because(signature.batching, self.settings))
        tail = signature.batching.tail
        if tail is not None and not any(note.startswith(END_OF_MODEL) for note in plan.notes):
            plan = with_notes(plan, [f"{END_OF_MODEL}{tail.why}"])
        return plan.listing(signature.program, signature.batching.storages)

    def _is_of_other_call(self, signature: BoundSignature, plan: Plan) -> bool:
        """Whether the plan was made for another call than this one: it lists other operators, or the call that it was
        made for follows it already."""
        made, program = self.user_plan or plan, signature.program
        try:
            own = program.training == made.training and made.listing(program, signature.batching.storages) is made
        except PlanError:
            own = False
        followers = (s.plan for s in self._captures.known if s is not signature and not s.plan_of_other_call)
        return not own or any(one is not None and one.stages is plan.stages for one in followers)

    def _decided(self, bound: BoundCall, call: CallArguments) -> Plan:
        signature = bound.signature
        program = replace(signature.program, batch_size=bound.batch_size)  # the capture may be of other samples
        training = has_backward(self._model, program, call.loss)
        key = bucket(self.settings.dynamic, self._model, call.args, call.kwargs, bound.leaves)
        decision = self._decisions.get(key)
        if decision is not None and decision.holds_for(program, training=training, loss=call.loss):
            plan = with_notes(decision.plan, program.uncaptured)
            if plan is not decision.plan:
                self._decisions[key] = replace(decision, plan=plan)
            return plan
        self._captures.complete(call, signature)
        loss = under_default_device(call.loss)
        args, kwargs, leaves, target = ordinary((call.args, call.kwargs, bound.leaves, call.target))
        example = Example(
            self._model,
            program,
            signature.batching,
            args,
            kwargs,
            leaves,
            training,
            loss,
            target,
            bound.loss_split,
        )
        plan = with_notes(self._decide(example), program.uncaptured)
        self._decisions[key] = _Decision(plan, knows_loss=call.loss is not None)
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
        # Later calls may train: neither the model's tensors nor their copies may become inference tensors.
        with torch.inference_mode(False):
            bind(signature, plan, self._model, self._devices, self.workers, self.settings, check_hints=check_hints)

    def _drop_abandoned(self) -> None:
        """After an interrupt in the middle of a long operator, a worker is still inside it: place everything anew, on
        new workers."""
        if any(s.executable is not None and s.executable.is_abandoned for s in self._all()):
            self.workers.close()
            for signature in self._captures.known:
                signature.plan = signature.executable = signature.whole = None

    def _all(self) -> Iterator[BoundSignature]:
        for signature in self._captures.known:
            yield signature
            if signature.whole is not None:
                yield signature.whole
