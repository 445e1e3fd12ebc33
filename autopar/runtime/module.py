"""PipelinedModule: looks like the model, runs by the plan."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from autopar.analysis.example import Example, examine, has_backward, under_default_device
from autopar.capture import torch_private
from autopar.capture.thread_state import CallerState
from autopar.costs.history import Record, costs_of, remember
from autopar.errors import InputError
from autopar.plan.display import shown
from autopar.plan.plan import Plan
from autopar.runtime.autograd import PipelinedCall, PipelinedTrainStep
from autopar.runtime.bound_signature import (
    BoundSignature,
    RunSettings,
    build,
    model_state,
    one_microbatch,
    without_shards,
)
from autopar.runtime.memory_watch import Watch
from autopar.runtime.micro_batches import split_sizes
from autopar.runtime.passes import LossFunction
from autopar.runtime.plain_model import plain_call, plain_step
from autopar.runtime.run import Run
from autopar.runtime.step_profile import StepProfile
from autopar.runtime.step_recorder import StepRecorder, timed
from autopar.runtime.user_warnings import OneTimeWarnings
from autopar.runtime.workers import Worker
from cost_models.hardware.devices import Device, find_device

Decide = Callable[[Example], Plan]

_SHARED = (  # tables of a torch.nn.Module
    *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks"),
)


class PipelinedModule(nn.Module):
    """The model, pipelined. Called like the model; parameters, names and `state_dict` are the model's own.

    `plan`: the plan in force (None until the first call). `stages`: one torch.fx.GraphModule a stage. `last_profile`:
    the step that `train_step` profiled last (None until it did).
    """

    def __init__(
        self,
        model: nn.Module,
        devices: Sequence[Device],
        decide: Decide,
        *,
        plan: Plan | None = None,
        settings: RunSettings | None = None,
        record: bool = False,
    ) -> None:
        """`decide(example)` makes a plan where none is given. Users call `autopar.parallelize` instead.

        `record`: profiled steps go into the history of predictions (`autopar.accuracy`).
        """
        super().__init__()
        self.__dict__["_model"] = model
        for table in _SHARED:  # the model's own, not copies: names, tensors, hooks and later changes are the model's
            self.__dict__[table] = model.__dict__[table]
        self.training = model.training
        self.__dict__["_all_modules"] = list(model.modules())
        self._devices = tuple(devices)
        self._decide = decide
        self._given = plan
        self._plan = plan if plan is not None and not plan.split else None
        self._plan_knows_loss = plan is not None
        self._settings = settings or RunSettings()
        self._entries: list[BoundSignature] = []
        self._workers: dict[str, Worker] = {}
        self._told = OneTimeWarnings()
        self._watch: Watch | None = None
        self._notes: StepRecorder | None = None
        self._record = record
        self.last_profile: StepProfile | None = None

    @property
    def _is_full_backward_hook(self) -> bool | None:
        """Which kind of backward hook the root has; torch sets it where a hook is registered: on either."""
        model = self.__dict__.get("_model")
        return model.__dict__["_is_full_backward_hook"] if model is not None else None

    @_is_full_backward_hook.setter
    def _is_full_backward_hook(self, value: bool | None) -> None:
        if "_model" in self.__dict__:
            self.unwrap()._is_full_backward_hook = value

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelinedModule:
        """A pipelined deep copy of the model with the same plan."""
        model = copy.deepcopy(self.unwrap(), memo)
        given, settings = self._given, self._settings
        new = PipelinedModule(model, self._devices, self._decide, plan=given, settings=settings, record=self._record)
        new._plan, new._plan_knows_loss, new._told = self._plan, self._plan_knows_loss, OneTimeWarnings(self._told.said)
        memo[id(self)] = new
        return new

    def __reduce__(self) -> Any:
        raise TypeError("a pipelined module has threads and cannot be pickled; save state_dict(), unwrap() or the plan")

    # -- what a user sees -------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        return self._plan

    @property
    def stages(self) -> list[fx.GraphModule]:
        """One GraphModule a stage, over the model's own parameters; empty until the first call."""
        entry = next((e for e in reversed(self._entries) if e.plan is self._plan), None)
        return [stage.module for stage in entry.lowered.stages] if entry is not None and entry.lowered else []

    def unwrap(self) -> nn.Module:
        """The original model with its trained weights."""
        model: nn.Module = self.__dict__["_model"]
        return model

    def report(self) -> str:
        """The plan, its stages and predictions as text."""
        return shown(self)

    def prepare(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        loss_fn: LossFunction | None = None,
        target: Any = None,
    ) -> Plan:
        """Capture, profile and plan for a call like this one, without running it."""
        self._entry(args, kwargs, loss_fn, target)
        assert self._plan is not None
        return self._plan

    def train(self, mode: bool = True) -> PipelinedModule:
        self.unwrap().train(mode)
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.unwrap().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return self.unwrap().load_state_dict(state_dict, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_model" not in self.__dict__:
                raise
            return getattr(self.__dict__["_model"], name)  # config, dtype, ...: what else the model has

    def close(self) -> None:
        """End the worker threads; the next call starts new ones."""
        self._close_workers()
        self._entries.clear()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for the whole batch."""
        entry, leaves, batch = self._entry(args, kwargs, None, None)
        if entry.executable is None:
            return plain_call(self.unwrap(), self._only_device, args, kwargs)
        run, wanted = self._run(entry, leaves, batch)
        inputs = [(i, x) for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.requires_grad]
        parameters = [p for p in entry.executable.parameters if p.requires_grad]
        if wanted and (inputs or parameters):
            indices = tuple(i for i, _ in inputs)
            results = PipelinedCall.apply_to(run, indices, parameters, [x for _, x in inputs])
        else:
            results = run.forward()
        return torch_private.tree_unflatten(results[: entry.program.n_outputs], entry.program.out_spec)

    def train_step(
        self,
        *args: Any,
        target: Any,
        loss_fn: LossFunction,
        profile: bool | Any = False,  # Any: for type checkers, a caller's **inputs might hold every keyword
        **kwargs: Any,
    ) -> torch.Tensor:
        """Forward and backward by the schedule; returns the detached mean loss of the batch.

        `loss_fn(output, target)` is called for every micro-batch inside the last stage, so that activations are freed
        early; it must be a mean over samples. Tensors in `target` with the batch's size in dimension 0 (or `batch_dim`)
        are split with it. Gradients are accumulated in `.grad` as after `loss.backward()`. Hooks of the root do not
        run: nobody sees the whole batch's output.

        `profile`: note what the stages take, in `last_profile`, and record the step's time beside its prediction. The
        step does the same as always. Capture and planning, where it is the first, come before and do not count, but the
        first step warms up; and on GPUs every action is waited for, so that a profiled step is slower than others.
        """
        _check_target(target)
        if profile:
            with torch.enable_grad():
                _, _, batch = self._entry(args, kwargs, loss_fn, target)
            return self._profiled(lambda: self.train_step(*args, target=target, loss_fn=loss_fn, **kwargs), batch)
        with torch.enable_grad():
            entry, leaves, batch = self._entry(args, kwargs, loss_fn, target)
            if entry.executable is None:
                return plain_step(self.unwrap(), self._only_device, args, kwargs, loss_fn, target, self._notes)
            run, _ = self._run(entry, leaves, batch, loss_fn, target)
            inputs = [(i, x) for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.requires_grad]
            parameters = [p for p in entry.executable.parameters if p.requires_grad]
            indices = tuple(i for i, _ in inputs)
            loss = PipelinedTrainStep.apply(run, indices, len(parameters), *parameters, *[x for _, x in inputs])
            result = loss.detach()
            loss.backward()
        return result

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """Inside, every device's part of a call runs in the context `watch(its name)`: for measurements."""
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None

    @contextmanager
    def noted(self, notes: StepRecorder) -> Iterator[None]:
        """Inside, `notes` takes down what every action of a call takes."""
        self._notes = notes
        try:
            yield
        finally:
            self._notes = None

    # -- inside -----------------------------------------------------------------------------------------------------

    def _profiled(self, step: Callable[[], torch.Tensor], batch: int) -> torch.Tensor:
        assert self._plan is not None
        notes = StepRecorder()
        with self.noted(notes):
            loss, seconds = timed(step, self._devices)
        self.last_profile = notes.profile(self._plan, seconds, batch)
        if self._record and self.last_profile.predicted is not None:
            costs = costs_of(self._plan)
            remember([Record.of(self._plan, self.unwrap(), self._devices, [seconds], source="train_step", costs=costs)])
        return loss

    @property
    def _only_device(self) -> Device:
        assert self._plan is not None
        name = self._plan.used_devices[0]
        return find_device(self._devices, name)

    def _run(
        self,
        entry: BoundSignature,
        leaves: list[Any],
        batch: int,
        loss_fn: LossFunction | None = None,
        target: Any = None,
    ) -> tuple[Run, bool]:
        executable, lowered = entry.executable, entry.lowered
        assert executable is not None
        assert lowered is not None
        executable.refresh()
        devices = [d.torch_device for d in self._devices]
        state = CallerState.of_this_thread(devices, training=loss_fn is not None)
        sizes = split_sizes(batch, entry.n_microbatches, entry.batching.least_rows, lowered.multiple)
        seed = int(torch.randint(1 << 62, (), device="cpu").item()) if lowered.random else None
        run = Run(
            executable,
            leaves,
            sizes,
            entry.batching.outputs,
            state,
            seed=seed,
            loss=loss_fn,
            target=target,
            target_dims=(chosen, 0) if isinstance(chosen := self._settings.batch_dim, int) else (0,),
            watch=self._watch,
            notes=self._notes,
        )
        return run, state.grad

    def _entry(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], loss_fn: LossFunction | None, target: Any
    ) -> tuple[BoundSignature, list[Any], int]:
        """The entry for a call, captured, planned and placed as far as it is not yet; its flat inputs and batch."""
        model = self.unwrap()
        self._forget_abandoned()
        state = model_state(self._all_modules)
        for entry in self._entries:
            bound = entry.program.bind(args, kwargs) if entry.state == state else None
            if bound is not None:
                break
        else:
            types = {d.torch_device.type for d in self._devices}
            program, batching = examine(
                model, args, kwargs, types, batch_dim=self._settings.batch_dim, verify=self._settings.verify
            )
            bound = program.bind(args, kwargs)
            entry = BoundSignature(state, program, batching)
            self._entries.append(entry)
        assert bound is not None
        if bound[1] == 0 and entry.program.batch_size:
            raise InputError("the batch has no samples; give at least one")
        self._plan_for(entry, args, kwargs, bound[0], loss_fn, target)
        if entry.plan is not self._plan:
            assert self._plan is not None
            self._build(entry, self._plan, check_hints=self._given is not None)
            assert entry.lowered is not None
            self._told.undivided(entry.lowered)
        return self._for_batch(entry, bound[1]), *bound

    def _build(self, entry: BoundSignature, plan: Plan, *, check_hints: bool) -> None:
        build(entry, plan, self.unwrap(), self._devices, self._worker, self._settings, check_hints=check_hints)

    def _for_batch(self, entry: BoundSignature, batch: int) -> BoundSignature:
        """The entry itself, or for a batch that does not come apart as its shards need it, the same without shards."""
        assert entry.lowered is not None
        assert entry.plan is not None
        if batch % entry.lowered.multiple == 0:
            return entry
        if entry.whole is None:
            whole = BoundSignature(entry.state, entry.program, entry.batching)
            self._build(whole, without_shards(entry.plan), check_hints=False)
            entry.whole = whole
        self._told.without_shards(batch, entry.lowered.multiple)
        return entry.whole

    def _plan_for(
        self,
        entry: BoundSignature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Any],
        loss_fn: LossFunction | None,
        target: Any,
    ) -> None:
        """Make a plan if there is none that fits: none at all, one for inference when training starts, or one made
        before the loss was known, for which the last stage must make room."""
        program, batching = entry.program, entry.batching
        if self._plan is None and self._given is not None:
            self._plan = self._given.on([d.name for d in self._devices])
            whole = one_microbatch(batching, self._settings)
            if program.batch_size > 1 and whole and self._plan.n_microbatches > 1:
                self._plan = replace(self._plan, n_microbatches=1)
        elif self._given is None:
            training = has_backward(self.unwrap(), program, loss_fn)
            old = self._plan
            fits = (
                old is not None
                and (old.training or not training)
                and (loss_fn is None or self._plan_knows_loss)
                and (old.batch_size != 1 or program.batch_size <= 1)  # one sample taught nothing about micro-batches
            )
            if not fits:
                loss = under_default_device(loss_fn)
                example = Example(self.unwrap(), program, batching, args, kwargs, leaves, training, loss, target)
                self._plan, self._plan_knows_loss = self._decide(example), loss_fn is not None
        assert self._plan is not None
        self._told.batch_stays_whole(batching)
        if self._settings.batch_norm == "per-microbatch":
            self._told.statistics_are_of_microbatches(self._plan, batching)

    def _worker(self, name: str) -> Worker:
        if name not in self._workers:
            self._workers[name] = Worker(find_device(self._devices, name))
        return self._workers[name]

    def _forget_abandoned(self) -> None:
        """Start anew after a call that was interrupted while a worker was inside a long operator."""
        every = [*self._entries, *(entry.whole for entry in self._entries if entry.whole is not None)]
        if any(e.executable is not None and e.executable.abandoned for e in every):
            self._close_workers()
            for entry in self._entries:
                entry.plan = entry.executable = entry.whole = None

    def _close_workers(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()


def _check_target(target: Any) -> None:
    if target is None:
        raise InputError("train_step needs target=: what loss_fn(output, target) compares the output with")
