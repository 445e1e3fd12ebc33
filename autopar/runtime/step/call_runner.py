"""Runs the calls of one model by the plan: forwards, training steps, and what cannot be pipelined."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from autopar.analysis.checked_loss import check_trains, computed_loss
from autopar.analysis.own_loss import own_loss
from autopar.capture import torch_private
from autopar.capture.module_hooks import has_hooks
from autopar.capture.thread_state import CallerState, go_back
from autopar.capture.uncaptured import ChangedResultError, uncaptured_in
from autopar.plan.plan import Plan
from autopar.runtime import plain_model
from autopar.runtime.memory_watch import DeviceContext
from autopar.runtime.own_devices import on_own_devices
from autopar.runtime.plain_model import detached
from autopar.runtime.signatures.captures import BoundCall, CallArguments
from autopar.runtime.signatures.known import Signatures
from autopar.runtime.step import autograd
from autopar.runtime.step.call import PipelineCall
from autopar.runtime.step.error_context import run_tail
from autopar.runtime.step.outputs import scalars_at_inputs
from autopar.runtime.step.run import Run
from autopar.runtime.step_recorder import StepRecorder
from autopar.schedule.micro_batches import split_sizes
from cost_models.hardware.devices import Device, find_device


class _Kind(NamedTuple):
    """What, beside sizes, decides which plan a call follows."""

    training: bool  # mode of the model
    grad: bool  # mode of the thread
    own_loss: bool | None  # None: no training step


class CallRunner:
    """One thread at a time binds a call and has the workers run it; the calls of other threads wait."""

    def __init__(self, model: nn.Module, devices: Sequence[Device], signatures: Signatures) -> None:
        self._model = model
        self._devices = tuple(devices)
        self._signatures = signatures
        self._lock = threading.RLock()
        self._device_context: DeviceContext | None = None
        self._recorder: StepRecorder | None = None
        self._plain: tuple[Plan | None, set[_Kind]] = (None, set())  # a plan that runs the plain model for these calls

    def prepare(self, call: CallArguments) -> BoundCall:
        """Capture, plan and place for `call`, as far as that is not done yet."""
        with self._lock:
            return self._signatures.bind(call)

    def forward(self, call: CallArguments) -> Any:
        """What the model returns for the whole batch, with scalars as `scalars_at_inputs` places them."""
        return self._outputs(call, scalars_at_inputs)

    def _outputs(self, call: CallArguments, placed: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]) -> Any:
        """What the model returns. `placed(outputs, inputs)`: the flat outputs, moved to where they shall be."""
        with self._lock:
            bound = self._signatures.bind(call)
            program, tail = bound.signature.program, bound.signature.batching.tail
            if bound.signature.executable is not None:
                try:
                    results = autograd.call(self._run(bound), bound.leaves)[: program.n_outputs]
                except ChangedResultError as error:
                    return self._by_the_model(bound, call, error)
        if bound.signature.executable is None:
            self._remember_plain(call, bound)
            return self.plain_call(call)
        if tail is not None:
            results = run_tail(tail, results, bound.leaves, watch_nan=bound.signature.executable.watch_nan)
        return torch_private.tree_unflatten(list(placed(results, bound.leaves)), program.out_spec)

    def train_step(self, call: CallArguments) -> tuple[torch.Tensor, Any]:
        """The loss, and the outputs if the call asks for them, both detached. Accumulates gradients in `.grad`."""
        assert call.loss is not None
        with self._lock:
            bound = self._signatures.bind(call)
            program, split = bound.signature.program, bound.loss_split
            assert split is not None
            plain = bound.signature.executable is None
            why = split.whole_batch_needed(bound.leaves, torch_private.tree_leaves(call.target))
            has_tail = bound.signature.batching.tail is not None
            whole = bool(why) and not plain and (has_tail or len(self._sizes(bound)) > 1)
            if not plain and not whole:
                run = self._run(bound, call)
                try:
                    loss = autograd.step(run, [*bound.leaves, *torch_private.tree_leaves(call.target)])
                except ChangedResultError as error:
                    output = self._by_the_model(bound, call, error)
                    return self._trained_on(output, call)
        if plain:
            self._remember_plain(call, bound)
            return self.plain_step(call)
        if whole:
            self._signatures.warnings.loss_sees_whole_batch(why)
            outputs = self._outputs(CallArguments(call.args, call.kwargs), lambda found, _: found)
            return self._trained_on(outputs, call)
        # Without the lock: gradients of inputs may go on into another call of this model, on a thread of autograd.
        if loss.requires_grad:
            go_back(loss, loss.device)
        if not call.return_outputs:
            return loss.detach(), None
        outputs = run.tensors.outputs.finish()[: program.n_outputs]
        return loss.detach(), torch_private.tree_unflatten(outputs, program.out_spec)

    def runs_the_model(self, call: CallArguments) -> bool:
        """Whether the plan in force runs the plain model for calls of this kind: then no capture needs to be found.

        The model's own code is right for all sizes and after all changes of the model.
        """
        plan, kinds = self._plain
        return plan is not None and plan is self._signatures.plan and self._kind(call) in kinds

    def plain_call(self, call: CallArguments) -> Any:
        """What the model itself returns."""
        return plain_model.plain_call(self._model, self._only_device(), call.args, call.kwargs)

    def plain_step(self, call: CallArguments) -> tuple[torch.Tensor, Any]:
        """`train_step` of the model itself."""
        assert call.loss is not None
        return plain_model.plain_step(
            self._model,
            self._only_device(),
            call.args,
            call.kwargs,
            call.loss,
            call.target,
            self._recorder,
            return_outputs=call.return_outputs,
        )

    def unpipelined(self, what: str, why: str) -> AbstractContextManager[object]:
        """Inside, the model's own code runs on the devices of its stages. A warning says so once."""
        if len(self._devices) > 1:
            self._signatures.warnings.runs_unpipelined(what, why)
        return on_own_devices(self._model, [device.torch_device for device in self._devices])

    @contextmanager
    def device_context(self, context: DeviceContext) -> Iterator[None]:
        """Inside, the worker of every device does its part of a call in `context(name of the device)`."""
        self._device_context = context
        try:
            yield
        finally:
            self._device_context = None

    @contextmanager
    def recording(self, recorder: StepRecorder) -> Iterator[None]:
        """Inside, `recorder` records the times of a call's actions."""
        self._recorder = recorder
        try:
            yield
        finally:
            self._recorder = None

    @staticmethod
    def _trained_on(output: Any, call: CallArguments) -> tuple[torch.Tensor, Any]:
        """The loss on the outputs of the whole batch, and its backward: all forwards have run, all backwards follow."""
        assert call.loss is not None
        device = next((x.device for x in torch_private.tree_leaves(output) if isinstance(x, torch.Tensor)), None)
        target = torch_private.tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, call.target)
        loss = computed_loss(call.loss, output, target)
        check_trains(loss.requires_grad, call.loss)
        go_back(loss, loss.device)
        return loss.detach(), detached(output)

    def _remember_plain(self, call: CallArguments, bound: BoundCall) -> None:
        """The plan in force runs the plain model for `call`. Remember that, if it does so for all calls of its kind."""
        plan = self._signatures.plan
        assert plan is not None
        dynamic = self._signatures.settings.dynamic
        trains = torch.is_grad_enabled() and not plan.training
        if plan.batch_size != 1 and bound.batch_size and not trains and not isinstance(dynamic, Mapping):
            kinds = self._plain[1] if self._plain[0] is plan else set()
            self._plain = plan, {*kinds, self._kind(call)}

    def _kind(self, call: CallArguments) -> _Kind:
        own = None if call.loss is None else call.loss is own_loss
        return _Kind(self._model.training, torch.is_grad_enabled(), own)

    def _by_the_model(self, bound: BoundCall, call: CallArguments, error: ChangedResultError) -> Any:
        """What the model itself returns, after a pipelined call has met a shape that the graph was not captured for.

        Raises `error` if a second run of the same batch would leave the model in another state than one run.
        """
        assert bound.signature.lowered is not None
        stages = bound.signature.lowered.stages
        keeps_state = any(operator.effects.stateful for stage in stages for operator in uncaptured_in(stage.module))
        hooked = any(has_hooks(module) for module in self._model.modules() if module is not self._model)
        if keeps_state or hooked or any(stage.written_buffers or stage.deferred for stage in stages):
            raise error
        with self.unpipelined("a call", str(error)):
            return self._model.forward(*call.args, **call.kwargs)

    def _sizes(self, bound: BoundCall) -> list[int]:
        """Samples in each micro-batch."""
        signature = bound.signature
        assert signature.lowered is not None
        least, multiple = signature.batching.least_rows, signature.lowered.multiple
        return split_sizes(bound.batch_size, signature.n_microbatches, least, multiple)

    def _only_device(self) -> Device:
        """The device of a plan that uses only one."""
        if len(self._devices) == 1:
            return self._devices[0]
        assert self._signatures.plan is not None
        return find_device(self._devices, self._signatures.plan.used_devices[0])

    def _run(self, bound: BoundCall, step: CallArguments | None = None) -> Run:
        """A call, ready to start. `step`: of a training step, which computes the loss."""
        signature = bound.signature
        executable, lowered = signature.executable, signature.lowered
        assert executable is not None
        assert lowered is not None
        executable.refresh()
        devices = {d.torch_device for d in self._devices}
        tensors = [*bound.leaves, *(torch_private.tree_leaves(step.target) if step is not None else ())]
        devices |= {x.device for x in tensors if isinstance(x, torch.Tensor)}
        state = CallerState.of_this_thread(devices, training=step is not None)
        if state.checkpointed:
            self._signatures.warnings.checkpointed()
        call = PipelineCall.of(
            signature.program,
            bound.leaves,
            self._sizes(bound),
            signature.batching.outputs,
            state,
            seed=int(torch.randint(1 << 62, (), device="cpu").item()) if lowered.random else None,
            loss=step.loss if step is not None else None,
            target=step.target if step is not None else None,
            loss_split=bound.loss_split,
            return_outputs=step is not None and step.return_outputs,
        )
        return Run(executable, call, self._lock, device_context=self._device_context, recorder=self._recorder)
