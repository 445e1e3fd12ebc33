"""Accelerate for modules whose parts are on ranks: what it would do with one copy of the model per process is replaced.

| of the accelerator | with a pipelined module on ranks |
|---|---|
| `prepare` | leaves it as it is, but for autocast |
| a scheduler's `step` | one step, as in one process, not one for each process |
| `clip_grad_norm_` | clips by the norm over all ranks |
| `scaler` | `autopar.GradScaler`, with which all ranks skip a step together |
| `get_state_dict`, and so `save_model` | the whole model on rank 0, nothing on the others |
| `save_state`, `load_state` | module and optimizer by `autopar.save` and `load`, all else as Accelerate does |
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, PartialState

from autopar.errors import CheckpointError, InputError, warn
from autopar.runtime.checkpoints.load import load
from autopar.runtime.checkpoints.save import save
from autopar.runtime.grad_scaler import GradScaler
from autopar.runtime.gradient_norm import clip_grad_norm_
from autopar.runtime.ranks.module import RankedModule
from autopar.runtime.ranks.whole_state import whole_state_dict

STATES = "autopar"  # in a checkpoint of Trainer or Accelerate: what autopar.load reads


def for_ranks(accelerator: Accelerator) -> Accelerator:
    """The same accelerator, which takes pipelined modules as they are: not wrapped, clipped over all ranks, and saved
    whole."""
    prepare, clip = accelerator.prepare_model, accelerator.clip_grad_norm_
    prepare_schedule = accelerator.prepare_scheduler

    def prepare_model(model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        if type(model) is not RankedModule:
            return prepare(model, device_placement=device_placement, evaluation_mode=evaluation_mode)
        check_shares(model)
        for schedule in accelerator._schedulers:
            step_once(schedule)
        return prepare(model, device_placement=False, evaluation_mode=True)  # autocast alone

    def prepare_scheduler(scheduler: Any) -> Any:
        schedule = prepare_schedule(scheduler)
        if ranked_models():
            step_once(schedule)
        return schedule

    def ranked_models() -> list[RankedModule]:
        return [model for model in accelerator._models if type(model) is RankedModule]

    def clip_grad_norm(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        ranked = ranked_models()
        if not ranked:
            return clip(parameters, max_norm, norm_type)
        accelerator.unscale_gradients()
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        keys = {id(parameter) for parameter in given}
        # The module itself, if they are its own: a rank may have none of them.
        whole = next((model for model in ranked if keys == {id(p) for p in model.parameters()}), None)
        return clip_grad_norm_(given if whole is None else whole, max_norm, norm_type)

    vars(accelerator).update(
        prepare_model=prepare_model, prepare_scheduler=prepare_scheduler, clip_grad_norm_=clip_grad_norm
    )
    _States(accelerator)
    scaler = accelerator.scaler
    if isinstance(scaler, torch.amp.GradScaler) and accelerator.num_processes > 1:
        accelerator.scaler = GradScaler(
            accelerator.device.type,
            init_scale=scaler.get_scale(),
            growth_factor=scaler.get_growth_factor(),
            backoff_factor=scaler.get_backoff_factor(),
            growth_interval=scaler.get_growth_interval(),
            enabled=scaler.is_enabled(),
        )
    return accelerator


def check_shares(module: RankedModule) -> None:
    """Raise InputError for a module to which every rank would pass the whole batch."""
    if not module.takes_shares:
        raise InputError(
            "Accelerate and Trainer give every rank samples of its own: make the module with "
            "autopar.parallelize(model, data='per-rank')"
        )


def step_once(schedule: AcceleratedScheduler) -> None:
    """From now on, `schedule.step()` is one step, as in one process: the batch of a step is that of all ranks.

    Accelerate makes a step for each process, unless the processes split one batch (`split_batches=True`). Warns where
    that makes a difference, since a schedule may have been written for it.
    """
    if schedule.split_batches or not schedule.step_with_optimizer:
        return
    inner, step = schedule.scheduler, schedule.step

    def one_step(*args: Any, **kwargs: Any) -> None:
        # With split_batches, Accelerate lets OneCycleLR raise after its last step; in one process, it stays there.
        ended = schedule.gradient_state.sync_gradients and inner._step_count > getattr(inner, "total_steps", math.inf)
        if not ended:
            step(*args, **kwargs)

    vars(schedule).update(split_batches=True, step=one_step)
    n = AcceleratorState().num_processes
    if n > 1 and PartialState().is_main_process:
        warn(
            f"{type(inner).__name__} steps once a step of the optimizer, as in one process with all ranks' batch; "
            f"Accelerate would step it {n} times, once for each process: give it numbers of steps on ranks, such as "
            "len(loader) of the prepared loader"
        )


def inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """torch's own, inside of Accelerate's."""
    found: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found


class _States:
    """Saving and loading of an accelerator. Its hooks save and load module and optimizer, and take them off the lists
    of what Accelerate itself saves and loads."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._get, self._save, self._load = accelerator.get_state_dict, accelerator.save_state, accelerator.load_state
        self._is_saving = False
        accelerator.register_save_state_pre_hook(self._save_parts)
        accelerator.register_load_state_pre_hook(self._load_parts)
        vars(accelerator).update(
            get_state_dict=self.get_state_dict, save_state=self.save_state, load_state=self.load_state
        )

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        if type(model) is not RankedModule:
            return self._get(model, unwrap=unwrap)
        if self._is_saving:
            return {}  # _save_parts saves it
        if self._accelerator.project_configuration.save_on_each_node:
            raise InputError("save_on_each_node=True does not work on ranks: rank 0 alone gets the whole model")
        return whole_state_dict(model)

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        with self._optimizers_lent():
            self._is_saving = True
            try:
                return self._save(*args, **kwargs)
            finally:
                self._is_saving = False

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        with self._optimizers_lent():
            return self._load(*args, **kwargs)

    @contextmanager
    def _optimizers_lent(self) -> Iterator[None]:
        """Inside, the accelerator has a list of its optimizers that hooks may clear."""
        own = self._accelerator._optimizers
        self._accelerator._optimizers = list(own)
        try:
            yield
        finally:
            self._accelerator._optimizers = own

    def _save_parts(self, models: list[Any], weights: list[Any], folder: str) -> None:
        if any(type(model) is RankedModule for model in models):
            model, optimizer = self._only(models, "save")
            save(Path(folder) / STATES, model, optimizer, step=0)
            weights.clear()
            self._accelerator._optimizers.clear()

    def _load_parts(self, models: list[Any], folder: str) -> None:
        states = Path(folder) / STATES
        if states.is_dir():
            model, optimizer = self._only(models, "load")
            load(states, model, optimizer, random_state=False)
            models.clear()
            self._accelerator._optimizers.clear()
        elif any(type(model) is RankedModule for model in models):
            raise CheckpointError(
                f"{folder} was not saved by ranks: it has no directory {STATES!r}; load its weights with "
                "autopar.parallelize(model, weights=) or before parallelize"
            )

    def _only(self, models: list[Any], verb: str) -> tuple[Any, torch.optim.Optimizer | None]:
        """The accelerator's model, and its optimizer if it has one. Raises InputError if there are several."""
        optimizers = self._accelerator._optimizers
        if len(models) != 1 or len(optimizers) > 1:
            raise InputError(
                f"accelerator.{verb}_state() {verb}s one pipelined module with one optimizer, got {len(models)} models "
                f"and {len(optimizers)} optimizers; {verb} each with autopar.{verb}(directory, model, optimizer)"
            )
        model = self._accelerator.unwrap_model(models[0])
        return model, inner_optimizer(optimizers[0]) if optimizers else None
