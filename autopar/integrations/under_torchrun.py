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

from autopar.errors import InputError, warn
from autopar.integrations.accelerate_on_ranks import STATES, check_shares, for_ranks, inner_optimizer
from autopar.integrations.weight_files import load_weight_files
from autopar.runtime.checkpoints.load import load
from autopar.runtime.checkpoints.save import save
from autopar.runtime.ranks.module import RankedModule
from autopar.runtime.ranks.whole_state import whole_state_dict

__all__ = ["PipelinedTrainer", "for_ranks"]

_OPTIMIZER, _SCHEDULER = "optimizer.pt", "scheduler.pt"  # as Trainer calls them


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
                    "average_tokens_across_devices=False does not work on ranks, whose loss is that of the whole "
                    "batch; leave it True"
                )
            if self.args.save_on_each_node:
                raise InputError("save_on_each_node=True does not work on ranks: rank 0 alone gets the whole model")

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
        """Trainer multiplies the loss by the number of ranks, for DistributedDataParallel; undo that for the model's
        own loss, which is already that of the whole batch."""
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
        save(Path(output_dir) / STATES, self._ranked, inner_optimizer(self.optimizer), step=self.state.global_step)
        if self.args.should_save and self.lr_scheduler is not None:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        ranked, folder = self._ranked, Path(resume_from_checkpoint)
        if ranked is not None and (folder / STATES).is_dir():
            return  # with the optimizer's states, below
        if ranked is not None and ranked.placed:
            load_weight_files(folder, ranked)
        elif ranked is not None and ranked.lacks_values:
            ranked.when_placed(lambda: load_weight_files(folder, ranked))
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """What ranks have written can be loaded into any model."""
        states = None if checkpoint is None else Path(checkpoint) / STATES
        if checkpoint is None or states is None or (self._ranked is None and not states.is_dir()):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        model: Any = self.model
        optimizer, schedule = inner_optimizer(self.optimizer), Path(checkpoint) / _SCHEDULER
        begins_anew = not states.is_dir()
        if begins_anew:
            self._say_what_begins_anew(Path(checkpoint))
        else:
            load(states, model, optimizer, random_state=False)
        if self.lr_scheduler is not None and (schedule.is_file() or not begins_anew):
            self.lr_scheduler.load_state_dict(torch.load(schedule, weights_only=True))
            if begins_anew:  # its state has the rates, which the optimizer's would have brought
                for group, rate in zip(optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
                    group["lr"] = rate

    def _say_what_begins_anew(self, checkpoint: Path) -> None:
        if not self.is_world_process_zero():
            return
        why = (
            f"its {_OPTIMIZER} was written in one process, and ranks cannot read it"
            if (checkpoint / _OPTIMIZER).is_file()
            else "it has none, as with save_only_model=True"
        )
        what = "the optimizer begins" if (checkpoint / _SCHEDULER).is_file() else "optimizer and learning rates begin"
        warn(f"{checkpoint} is resumed without the optimizer's states ({why}): {what} anew")

    def _load_best_model(self) -> None:
        if self._ranked is None:
            super()._load_best_model()
            return
        folder = Path(str(self.state.best_model_checkpoint))
        if (folder / STATES).is_dir():
            load(folder / STATES, self._ranked, random_state=False)
        else:
            load_weight_files(folder, self._ranked)
