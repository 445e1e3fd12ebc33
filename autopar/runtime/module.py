"""PipelinedModule: looks like the model, and runs by the plan."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch
from torch import fx, nn

from autopar.analysis.example import Example, LossFunction
from autopar.analysis.own_loss import own_loss
from autopar.capture.torch_private import has_dispatch_mode
from autopar.costs.history import Record, costs_of, remember
from autopar.errors import InputError, warn
from autopar.errors.names import with_checked_names
from autopar.plan.display import printable, reported
from autopar.plan.plan import Plan
from autopar.plan.plan_report import ReportKeywords
from autopar.runtime.arguments import check_loss_and_target
from autopar.runtime.call_checks import UNWRAP, Pipelined, check_caller, check_tensors
from autopar.runtime.memory_watch import DeviceContext
from autopar.runtime.model_surface import ModelForward, device_map, left_to_python, visible_class
from autopar.runtime.own_devices import takes_cache
from autopar.runtime.signatures.bound_signature import RunSettings
from autopar.runtime.signatures.captures import CallArguments
from autopar.runtime.signatures.known import Decide, Signatures
from autopar.runtime.signatures.loss_splits import TargetDim
from autopar.runtime.stages.stage_code import check_compile
from autopar.runtime.step.call_runner import CallRunner
from autopar.runtime.step_profile import StepProfile
from autopar.runtime.step_recorder import StepRecorder, timed
from cost_models.hardware.devices import Device

if TYPE_CHECKING:
    from autopar.report.document import Report

_SHARED = (  # tables of torch.nn.Module that the pipelined module shares with the model
    *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks"),
)


PLAN_COMES = "the first call makes it; to have it at once, give parallelize example_args= or example_kwargs="


class PipelinedModule(Pipelined, nn.Module):
    """The model, pipelined. Called like the model; parameters, names and `state_dict` are the model's own.

    `plan`: the plan in force (None until the first call, which makes it; `print(pm)` says so). `stages`: one
    torch.fx.GraphModule per stage. `last_profile`: the last step that `train_step` profiled (None if there is none).
    """

    _instead = UNWRAP  # what to do about what a pipelined module cannot

    # All attributes that are neither defined nor declared in this class are those of the model.
    _process: int
    _devices: tuple[Device, ...]
    _decide: Decide
    _signatures: Signatures
    _calls: CallRunner
    _record: bool
    last_profile: StepProfile | None

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
        """`decide(example)` makes a plan unless `plan` is given. Users call `autopar.parallelize` instead.

        `record`: profiled steps go into the history of predictions that `autopar.accuracy` shows.
        """
        check_compile(settings.compile if settings else False, devices)
        super().__init__()
        self.__dict__["_model"] = model
        kinds = [kind for kind in type(self).__mro__ if issubclass(kind, nn.Module)]
        self.__dict__["_own"] = {name for kind in kinds for name in (*vars(kind), *kind.__annotations__)}
        self.__dict__["_forward_function"] = PipelinedModule.__dict__["forward"].like(model)
        for table in _SHARED:  # shared, not copied: later changes to the model show here
            self.__dict__[table] = model.__dict__[table]
        self._process = os.getpid()
        self._devices = tuple(devices)
        self._decide = decide
        self._signatures = Signatures(model, devices, decide, plan, settings or RunSettings())
        self._calls = CallRunner(model, devices, self._signatures)
        self._record = record
        self.last_profile = None

    @property
    def __class__(self) -> type:
        """The model's class, so that code that asks for it (`isinstance(pm, PreTrainedModel)`) treats it as the model.

        `isinstance(pm, PipelinedModule)` and `type(pm) is PipelinedModule` are true as well.
        """
        model = self.__dict__.get("_model")
        return PipelinedModule if model is None else visible_class(model, PipelinedModule)

    @__class__.setter
    def __class__(self, value: type) -> None:
        """torch gives a module with parametrizations a class of its own."""
        self.unwrap().__class__ = value

    @property
    def training(self) -> bool:
        """The model's mode, also where it is set without `train()`, as Lightning does."""
        model = self.__dict__.get("_model")
        return True if model is None else model.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_model" in self.__dict__:
            self.unwrap().training = mode

    @property
    def _is_full_backward_hook(self) -> bool | None:
        """Which kind of backward hook the root has. torch sets it on registration of a hook, here or on the model."""
        model = self.__dict__.get("_model")
        return model.__dict__["_is_full_backward_hook"] if model is not None else None

    @_is_full_backward_hook.setter
    def _is_full_backward_hook(self, value: bool | None) -> None:
        if "_model" in self.__dict__:
            self.unwrap()._is_full_backward_hook = value

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelinedModule:
        """A pipelined deep copy of the model with the same plan."""
        model = copy.deepcopy(self.unwrap(), memo)
        old = self._signatures
        new = PipelinedModule(
            model, self._devices, self._decide, plan=old.user_plan, settings=old.settings, record=self._record
        )
        new._signatures.follow(old)
        memo[id(self)] = new
        return new

    def __reduce__(self) -> Any:
        raise TypeError("a pipelined module has threads and cannot be pickled; save state_dict(), unwrap() or the plan")

    # -- what a user sees -------------------------------------------------------------------------------------------

    @property
    def hf_device_map(self) -> dict[str, str]:
        """Where the model is, as transformers and Accelerate ask for it: they then leave it there. Not on CPUs."""
        places = device_map(self._devices)
        if places is None:
            raise AttributeError("the module is not on accelerators, so it has no hf_device_map")
        return places

    @property
    def plan(self) -> Plan | None:
        return self._signatures.plan

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All plans that calls of this module follow: several where `dynamic` has buckets of sizes."""
        return self._signatures.plans or ((self.plan,) if self.plan is not None else ())

    @property
    def stages(self) -> list[fx.GraphModule]:
        """One GraphModule per stage, over the model's own parameters; empty until the first call."""
        newest = self._signatures.newest()
        return [stage.module for stage in newest.lowered.stages] if newest is not None and newest.lowered else []

    @property
    def code_text(self) -> str:
        """With `compile`: which stages are compiled or recorded, what that took, and why others are not."""
        newest = self._signatures.newest()
        return newest.executable.code_text if newest is not None and newest.executable is not None else ""

    def unwrap(self) -> nn.Module:
        """The original model with its trained weights."""
        model: nn.Module = self.__dict__["_model"]
        return model

    def __repr__(self) -> str:
        """The plan in a line, or when there will be one, and the model."""
        plan = self.plan
        head = f"plan of {plan.places}, {plan.schedule}" if plan is not None else f"no plan yet: {PLAN_COMES}"
        return f"{PipelinedModule.__name__}({printable(head)})\n{self.unwrap()!r}"

    @with_checked_names
    def report(self, **wanted: Unpack[ReportKeywords]) -> Report:
        """The plan in force as a `Report`, with the last profiled step beside its prediction. `wanted`: as for
        `Plan.report`. Raises InputError for other names, and values that do not fit."""
        # A plain call of `reported` would look for reports on the model's class.
        made: Report = reported.dispatch(PipelinedModule)(self, **wanted)
        return made

    def prepare(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        loss_fn: LossFunction | None = None,
        target: Any = None,
    ) -> Plan:
        """Capture, profile and plan for a call like this one, without running it."""
        check_caller(self._process, self._signatures.workers)
        self._calls.prepare(CallArguments(args, kwargs, loss_fn, target))
        assert self.plan is not None
        return self.plan

    def adopt(self, example: Example) -> None:
        """Take over the capture of an example call of a module that this one is a copy of, instead of capturing it."""
        self._signatures.adopt(example)

    def train(self, mode: bool = True) -> PipelinedModule:
        self.unwrap().train(mode)
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
            value = getattr(self.__dict__["_model"], name)  # other attributes of the model: config, dtype, ...
            return self._generating(value) if name == "generate" and callable(value) else value

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes of the model are set on the model, which computes with them. Those that it does not have are what
        others remember about this module, as Accelerate does."""
        model = self.__dict__.get("_model")
        own = model is None or name in self.__dict__ or name in self.__dict__["_own"]
        if not own and (name in vars(model) or hasattr(type(model), name)):
            setattr(model, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__ or "_model" not in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self.unwrap(), name)

    def close(self) -> None:
        """End the worker threads; the next call starts new ones."""
        self._signatures.close()

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Leave the module as it is, with a warning: torch.compile cannot see into a pipeline."""
        warn(
            "compile() does nothing for a pipelined module; autopar.parallelize(..., compile=True) compiles its stages"
        )

    @ModelForward
    @left_to_python
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for the whole batch."""
        # For example in a loss that is being captured. `is_exporting` alone is also true if another thread exports.
        if torch.compiler.is_exporting() and has_dispatch_mode():
            return self.unwrap().forward(*args, **kwargs)
        check_caller(self._process, self._signatures.workers)
        call = CallArguments(args, kwargs)
        if self._calls.runs_the_model(call):
            return self._calls.plain_call(call)
        check_tensors(args, kwargs, self._instead)
        if takes_cache(args, kwargs):
            with self._calls.unpipelined(
                "a call with a key-value cache", "a captured model could not update it in place"
            ):
                return self.unwrap().forward(*args, **kwargs)
        return self._calls.forward(call)

    @overload
    def train_step(
        self,
        *args: Any,
        target: Any = ...,
        loss_fn: LossFunction | None = ...,
        target_dim: TargetDim | Any = ...,
        return_outputs: Literal[True],
        profile: bool | Any = ...,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]: ...

    @overload
    def train_step(
        self,
        *args: Any,
        target: Any = ...,
        loss_fn: LossFunction | None = ...,
        target_dim: TargetDim | Any = ...,
        return_outputs: Any = ...,
        profile: bool | Any = ...,
        **kwargs: Any,
    ) -> torch.Tensor: ...

    @left_to_python
    def train_step(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: LossFunction | None = None,
        target_dim: TargetDim | Any = None,
        return_outputs: bool | Any = False,  # Any: for type checkers, a caller's **inputs might hold every keyword
        profile: bool | Any = False,
        **kwargs: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """Forward and backward by the schedule; returns the detached loss of the batch, as the plain model would.

        The last stage calls `loss_fn(output, target)` for every micro-batch, so that activations are freed early. The
        loss is captured once to prove how the losses of micro-batches make the loss of the batch: a mean over samples,
        a sum, or a sum divided by what the targets count (ignored targets, class weights, masks). Any other loss runs
        on the outputs of the whole batch, between all forwards and all backwards, and a warning says so once. Gradients
        are accumulated in `.grad` as by `loss.backward()`, and hooks on parameters run; those on autograd's
        accumulation nodes need a hook on a parameter, or an input that requires a gradient. Hooks of the root module
        do not run.

        Without `target` and `loss_fn`, the loss is the one that the model returns: its output's `loss`, the first
        entry of a tuple, or the output itself. InputError if there is none.

        `target_dim`: the dimension of the targets that counts samples, or one entry per flat leaf of `target` (None:
        the tensor belongs to no sample). By default a tensor is split on dimension 0 (or `batch_dim`) if it has the
        batch's size there and the captured loss agrees.

        `return_outputs`: return (loss, what the model returns for the whole batch, detached), for metrics.

        `profile`: store in `last_profile` how long every stage computes and waits, and record the step's time next to
        its prediction. The step computes the same. Capture and planning at a first call do not count, but a first step
        still warms up. On GPUs, times are those of events in the GPUs' own queues: no thread waits for a GPU before
        the step has ended.
        """
        check_caller(self._process, self._signatures.workers)
        check_loss_and_target(loss_fn, target, (self.unwrap(), kwargs))
        call = CallArguments(args, kwargs, loss_fn or own_loss, target, target_dim, bool(return_outputs))
        if not profile and self._calls.runs_the_model(call):
            loss, outputs = self._calls.plain_step(call)
        else:
            loss, outputs = self._pipelined_step(call, profile=bool(profile))
        return (loss, outputs) if return_outputs else loss

    def accumulate(self) -> AbstractContextManager[None]:
        """Calls inside leave out the sum over ranks: the backward of the next call outside makes it, once.

        For gradient accumulation: all calls of a step but the last inside. The call counts, not its backward: what
        `pm(x)` returned inside has a backward without the sum, also where that runs outside. Gradients add up in
        `.grad` as without it, and in one process it changes nothing. Under torchrun, `.grad` is incomplete until the
        last backward; clipping and an optimizer's step before are refused.
        """
        return nullcontext()

    def device_context(self, context: DeviceContext) -> AbstractContextManager[None]:
        """Inside, the worker of every device does its part of a call in `context(name of the device)`."""
        return self._calls.device_context(context)

    def recording(self, recorder: StepRecorder) -> AbstractContextManager[None]:
        """Inside, `recorder` records the times of a call's actions."""
        return self._calls.recording(recorder)

    def _generating(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """`generate` of the model, on the devices of its stages."""

        @functools.wraps(generate)
        def on_stages(*args: Any, **kwargs: Any) -> Any:
            with self._calls.unpipelined("generate()", "every token needs the one before it") as mode:
                if mode is not None and hasattr(getattr(self.unwrap(), "generation_config", None), "disable_compile"):
                    kwargs.setdefault("disable_compile", True)  # compiled code would not see the mode
                return generate(*args, **kwargs)

        return on_stages

    def _pipelined_step(self, call: CallArguments, *, profile: bool) -> tuple[torch.Tensor, Any]:
        check_tensors(call.args, call.kwargs, self._instead)
        if takes_cache(call.args, call.kwargs):
            raise InputError("train_step does not update a key-value cache; leave past_key_values out")
        with torch.enable_grad():
            return self._profiled(call) if profile else self._calls.train_step(call)

    def _profiled(self, call: CallArguments) -> tuple[torch.Tensor, Any]:
        """A training step whose times go to `last_profile`."""
        bound = self._calls.prepare(call)  # so that the time of a step does not include capture and planning
        assert self.plan is not None
        recorder = StepRecorder(self._devices)
        with self.recording(recorder):
            result, seconds = timed(lambda: self._calls.train_step(call), self._devices)
        self.last_profile = profile = self._profile_of(recorder, self.plan, seconds, bound.batch_size)
        if self._record and profile.predicted is not None:
            costs = costs_of(self.plan)
            remember([Record.of(self.plan, self.unwrap(), self._devices, [seconds], source="train_step", costs=costs)])
        return result

    def _profile_of(self, recorder: StepRecorder, plan: Plan, seconds: float, batch_size: int) -> StepProfile:
        return recorder.profile(plan, seconds, batch_size)
