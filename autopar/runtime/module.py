"""PipelinedModule: looks like the model, runs by the plan."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from autopar import _torch
from autopar.annotations import read_hints, resolve, violations
from autopar.batching import Batching, study
from autopar.capture import Program, capture
from autopar.errors import AutoparWarning, InputError, PlanError
from autopar.lower import Lowered, lower
from autopar.plan import Plan
from autopar.report.text import module_text
from autopar.runtime.autograd import Call, Step
from autopar.runtime.batches import split_sizes
from autopar.runtime.example import Example, has_backward, untouched
from autopar.runtime.executable import Executable
from autopar.runtime.memory import Watch
from autopar.runtime.run import LossFunction, Run
from autopar.runtime.threads import CallerState, Worker, neutral_state
from cost_models.device import Device

Decide = Callable[[Example], Plan]


@dataclass
class _Entry:
    """One captured signature and how it runs."""

    state: tuple[Any, ...]  # of the model: training or not, by module; which parameters, and their dtypes
    program: Program
    batching: Batching
    plan: Plan | None = None  # that it was built for
    n_microbatches: int = 1
    lowered: Lowered | None = None
    executable: Executable | None = None  # None: the plan is the plain model on one device


class PipelinedModule(nn.Module):
    """The model, pipelined. Called like the model; parameters, names and `state_dict` are the model's own.

    `plan`: the plan in force (None until the first call). `stages`: one torch.fx.GraphModule a stage.
    """

    def __init__(
        self,
        model: nn.Module,
        devices: Sequence[Device],
        decide: Decide,
        *,
        plan: Plan | None = None,
        batch_dim: int | dict[str, int | None] | None = None,
        batch_norm: str = "per-microbatch",
    ) -> None:
        """`decide(example)` makes a plan where none is given. Users call `autopar.parallelize` instead."""
        super().__init__()
        # The model's own tables, not copies: names, tensors and later changes are the model's.
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.training = model.training
        self.__dict__["_model"] = model
        self.__dict__["_all_modules"] = list(model.modules())
        self._devices = tuple(devices)
        self._decide = decide
        self._given = plan
        self._plan = plan if plan is not None and not plan.split else None
        self._plan_knows_loss = plan is not None
        self._batch_dim = batch_dim
        self._batch_norm = batch_norm
        self._entries: list[_Entry] = []
        self._workers: dict[str, Worker] = {}
        self._warned: set[str] = set()
        self._watch: Watch | None = None

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
        return module_text(self._plan, self.stages)

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
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        self._entries.clear()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for the whole batch."""
        entry, leaves, batch = self._entry(args, kwargs, None, None)
        if entry.executable is None:
            return self._direct(args, kwargs)
        run, wanted = self._run(entry, leaves, batch)
        inputs = [(i, x) for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.requires_grad]
        parameters = [p for p in entry.executable.parameters if p.requires_grad]
        if wanted and (inputs or parameters):
            indices = tuple(i for i, _ in inputs)
            results = Call.apply_to(run, indices, parameters, [x for _, x in inputs])
        else:
            results = run.forward()
        return _torch.tree_unflatten(results[: entry.program.n_outputs], entry.program.out_spec)

    def train_step(self, *args: Any, target: Any, loss_fn: LossFunction, **kwargs: Any) -> torch.Tensor:
        """Forward and backward by the schedule; returns the detached mean loss of the batch.

        `loss_fn(output, target)` is called for every micro-batch inside the last stage, so that activations are freed
        early; it must be a mean over samples. Gradients are accumulated in `.grad` as after `loss.backward()`.
        """
        _check_target(target)
        with torch.enable_grad():
            entry, leaves, batch = self._entry(args, kwargs, loss_fn, target)
            if entry.executable is None:
                loss = loss_fn(self._direct(args, kwargs), self._to_only_device(target))
                loss.backward()
                return loss.detach()
            run, _ = self._run(entry, leaves, batch, loss_fn, target)
            inputs = [(i, x) for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.requires_grad]
            parameters = [p for p in entry.executable.parameters if p.requires_grad]
            indices = tuple(i for i, _ in inputs)
            loss = Step.apply(run, indices, len(parameters), *parameters, *[x for _, x in inputs])
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

    # -- inside -----------------------------------------------------------------------------------------------------

    def _direct(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The plain model on the plan's only device."""
        args, kwargs = self._to_only_device((args, kwargs))
        return self.unwrap()(*args, **kwargs)

    def _to_only_device(self, tree: Any) -> Any:
        assert self._plan is not None
        name = self._plan.used_devices[0]
        device = next(d.torch_device for d in self._devices if d.name == name)
        if device.type == "cpu":
            return tree
        return _torch.tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, tree)

    def _run(
        self,
        entry: _Entry,
        leaves: list[Any],
        batch: int,
        loss_fn: LossFunction | None = None,
        target: Any = None,
    ) -> tuple[Run, bool]:
        executable, lowered = entry.executable, entry.lowered
        assert executable is not None
        assert lowered is not None
        executable.refresh()
        types = {d.torch_device.type for d in self._devices}
        state = CallerState.of_this_thread(types, training=loss_fn is not None)
        sizes = split_sizes(batch, entry.n_microbatches, entry.batching.least_rows)
        seed = int(torch.randint(1 << 62, ()).item()) if lowered.random else None
        run = Run(
            executable,
            leaves,
            sizes,
            entry.batching.outputs,
            state,
            seed=seed,
            loss=loss_fn,
            target=target,
            watch=self._watch,
        )
        return run, state.grad

    def _entry(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], loss_fn: LossFunction | None, target: Any
    ) -> tuple[_Entry, list[Any], int]:
        """The entry for a call, captured, planned and placed as far as it is not yet; its flat inputs and batch."""
        model = self.unwrap()
        modules = self._all_modules
        state = (
            tuple(m.training for m in modules),
            tuple((id(p), p.dtype) for m in modules for p in m._parameters.values() if p is not None),
        )
        for entry in self._entries:
            bound = entry.program.bind(args, kwargs) if entry.state == state else None
            if bound is not None:
                break
        else:
            with untouched(model), neutral_state({d.torch_device.type for d in self._devices}):
                program = capture(model, args, kwargs, batch_dim=self._batch_dim)
                bound = program.bind(args, kwargs)
                assert bound is not None, "a captured program takes the call that it was captured from"
                batching = study(program, bound[0])
            entry = _Entry(state, program, batching)
            self._entries.append(entry)
        assert bound is not None
        if bound[1] == 0 and entry.program.batch_size:
            raise InputError("the batch has no samples; give at least one")
        self._plan_for(entry, args, kwargs, bound[0], loss_fn, target)
        if entry.plan is not self._plan:
            self._build(entry)
        return entry, *bound

    def _plan_for(
        self,
        entry: _Entry,
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
            if program.batch_size > 1 and self._one_microbatch(batching) and self._plan.n_microbatches > 1:
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
                example = Example(self.unwrap(), program, batching, args, kwargs, leaves, training, loss_fn, target)
                self._plan, self._plan_knows_loss = self._decide(example), loss_fn is not None
        assert self._plan is not None
        self._warn_unsafe(self._plan, batching)

    def _one_microbatch(self, batching: Batching) -> bool:
        return not batching.splittable or (self._batch_norm == "exact" and bool(batching.batch_norms))

    def _build(self, entry: _Entry) -> None:
        """Lower the plan for the entry's program and place it."""
        plan = self._plan
        assert plan is not None
        stage_of = plan.assign(entry.program)
        self._check_hints(plan, entry, stage_of)
        lowered = lower(entry.program, stage_of, entry.batching.storages)
        if len(lowered.stages) != len(plan.stages):
            raise PlanError(
                f"the plan has {len(plan.stages)} stages, but operators of this model fill only "
                f"{len(lowered.stages)}; leave the empty ones out"
            )
        for stage, lowered_stage in zip(plan.stages, lowered.stages, strict=True):
            if stage.recompute and lowered_stage.unrepeatable:
                raise PlanError(
                    f"stage {lowered_stage.index} cannot be recomputed: {lowered_stage.unrepeatable} writes a buffer "
                    "that the model reads; a second run would give something else, let the stage keep its activations"
                )
        n_microbatches = 1 if self._one_microbatch(entry.batching) else plan.n_microbatches
        executable = None
        if len(plan.used_devices) == 1 and n_microbatches == 1 and not any(s.recompute for s in plan.stages):
            device = next(d.torch_device for d in self._devices if d.name == plan.used_devices[0])
            if any(t.device != device for t in [*self.parameters(), *self.buffers()]):
                self.unwrap().to(device)
        else:
            workers = [[self._worker(name) for name in stage.devices] for stage in plan.stages]
            executable = Executable(
                entry.program,
                lowered,
                workers,
                plan.schedule,
                _Lookup(self.unwrap()),
                chunks=plan.chunks,
                recompute=[stage.recompute for stage in plan.stages],
            )
        entry.plan, entry.n_microbatches, entry.lowered, entry.executable = plan, n_microbatches, lowered, executable

    def _check_hints(self, plan: Plan, entry: _Entry, stage_of: Mapping[fx.Node, int]) -> None:
        """A plan that was given must do what the hints on the model ask; the search does so by itself."""
        hints = read_hints(self.unwrap()) if self._given is not None else None
        if not hints:
            return
        resolved = resolve(hints, entry.program, len(self._devices), entry.batching.storages)
        # Without a backward there is nothing to recompute for.
        recompute = [stage.recompute or not entry.program.training for stage in plan.stages]
        problems = violations({node.name: stage for node, stage in stage_of.items()}, recompute, resolved)
        if problems:
            raise PlanError("the plan does not follow the hints on the model:\n  " + "\n  ".join(problems))

    def _worker(self, name: str) -> Worker:
        if name not in self._workers:
            self._workers[name] = Worker(next(d for d in self._devices if d.name == name))
        return self._workers[name]

    def _warn_unsafe(self, plan: Plan, batching: Batching) -> None:
        if batching.obstacle and batching.obstacle != "the batch has one sample":
            self._warn_once(f"the batch is not split into micro-batches: {batching.obstacle}")
        if batching.batch_norms and plan.n_microbatches > 1 and self._batch_norm == "per-microbatch":
            self._warn_once(
                f"batch norm uses the statistics of each micro-batch (1/{plan.n_microbatches} of the batch), first in "
                f"'{batching.batch_norms[0]}'; batch_norm='exact' keeps the batch whole"
            )

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, AutoparWarning, stacklevel=_callers_level())


class _Lookup:
    """The model's tensors by name, as they are now (`.to()` replaces buffers)."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._found: dict[str, tuple[nn.Module, str]] = {}

    def __call__(self, name: str) -> torch.Tensor:
        if name not in self._found:
            path, _, leaf = name.rpartition(".")
            self._found[name] = (self._model.get_submodule(path), leaf)
        owner, leaf = self._found[name]
        value = getattr(owner, leaf)
        if not isinstance(value, torch.Tensor):
            raise AttributeError(f"{name} is no tensor of the model")
        return value


def _callers_level() -> int:
    """The `stacklevel` for warnings.warn that names the user's line: the first outside autopar and torch."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("autopar", "torch"):
        frame, level = frame.f_back, level + 1
    return level


def _check_target(target: Any) -> None:
    if target is None:
        raise InputError("train_step needs target=: what loss_fn(output, target) compares the output with")
