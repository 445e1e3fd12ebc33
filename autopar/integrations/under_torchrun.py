"""transformers' Trainer and Accelerate for a module whose parts are on the ranks of torchrun.

    pm = autopar.parallelize(model, data="per-rank")      every rank passes the samples that Accelerate gives it
    PipelinedTrainer(model=pm, args=..., ...).train()     or   accelerator = for_ranks(Accelerator())

Both take the ranks for copies of one model: they would wrap it in DistributedDataParallel, clip by the norm of a rank's
own parameters, and save what rank 0 has. Here the ranks are one model, which adds up its gradients itself. For any
other module, and in one process, all of this is as without it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator

from autopar.errors import InputError
from autopar.runtime.checkpoints.load import load
from autopar.runtime.checkpoints.save import save
from autopar.runtime.gradient_norm import clip_grad_norm_
from autopar.runtime.ranks.module import RankedModule
from autopar.runtime.ranks.whole_state import whole_state_dict

_STATES = "autopar"  # in a checkpoint of Trainer: what autopar.load reads
_SCHEDULER = "scheduler.pt"  # as Trainer calls it


def for_ranks(accelerator: Accelerator) -> Accelerator:
    """The same accelerator, which takes pipelined modules as they are: not wrapped, and clipped over all ranks."""
    prepare, clip = accelerator.prepare_model, accelerator.clip_grad_norm_

    def prepare_model(model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        if type(model) is not RankedModule:
            return prepare(model, device_placement=device_placement, evaluation_mode=evaluation_mode)
        check_shares(model)
        return prepare(model, device_placement=False, evaluation_mode=True)  # autocast alone

    def clip_grad_norm(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        ranked = [model for model in accelerator._models if type(model) is RankedModule]
        if not ranked:
            return clip(parameters, max_norm, norm_type)
        accelerator.unscale_gradients()
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        keys = {id(parameter) for parameter in given}
        # The module itself, if they are its own: a rank may have none of them.
        whole = next((model for model in ranked if keys == {id(p) for p in model.parameters()}), None)
        return clip_grad_norm_(given if whole is None else whole, max_norm, norm_type)

    vars(accelerator).update(prepare_model=prepare_model, clip_grad_norm_=clip_grad_norm)
    return accelerator


def check_shares(module: RankedModule) -> None:
    """Raise InputError for a module to which every rank would pass the whole batch."""
    if not module.takes_shares:
        raise InputError(
            "Accelerate and Trainer give every rank samples of its own: make the module with "
            "autopar.parallelize(model, data='per-rank')"
        )


class PipelinedTrainer(transformers.Trainer):
    """transformers.Trainer, whose model may be what `autopar.parallelize(model, data="per-rank")` returned.

    The batch of a step is `per_device_train_batch_size` samples from each rank. A model's own loss is that of the whole
    batch. `save_model` writes the whole model, as in one process; checkpoints can be resumed with other ranks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._ranked is not None:
            check_shares(self._ranked)
            if not self.args.average_tokens_across_devices:
                raise InputError(
                    "the loss of ranks is one: leave TrainingArguments(average_tokens_across_devices=True)"
                )

    @property
    def _ranked(self) -> RankedModule | None:
        """The model, if its parts are on ranks."""
        model: Any = self.model
        return model if type(model) is RankedModule else None

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        for_ranks(self.accelerator)

    def _has_mixed_mesh_grads(self, model: Any) -> bool:
        """Gradients of stages lie on different meshes; `for_ranks` clips them."""
        return False if self._ranked is not None else bool(super()._has_mixed_mesh_grads(model))

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The model's own loss, divided by the tokens of all ranks, is that of the whole batch. Trainer multiplies it
        by the number of ranks, since DistributedDataParallel takes the mean over ranks."""
        own = self.compute_loss_func is None and (self.label_smoother is None or "labels" not in inputs)
        found = super().compute_loss(model, inputs, *args, **kwargs)
        items = kwargs.get("num_items_in_batch", args[1] if len(args) > 1 else None)
        if self._ranked is None or not own or not self.model_accepts_loss_kwargs or items is None:
            return found
        if isinstance(found, tuple):
            return found[0] / self.accelerator.num_processes, *found[1:]
        return found / self.accelerator.num_processes

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self._ranked is None:
            super().save_model(output_dir, _internal_call)
            return
        whole = whole_state_dict(self._ranked)
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, state_dict=whole)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._ranked is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        save(Path(output_dir) / _STATES, self._ranked, _inner(self.optimizer), step=self.state.global_step)
        if self.args.should_save and self.lr_scheduler is not None:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._ranked is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        load(Path(checkpoint) / _STATES, self._ranked, _inner(self.optimizer), random_state=False)
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, _SCHEDULER), weights_only=True))


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """torch's own, inside of Accelerate's."""
    found: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found
