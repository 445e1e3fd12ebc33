"""What ranks watch at every optimizer's step: it steps on this rank's parameters, all ranks step or none, and none
that `optimizers.py` refuses."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any
from weakref import finalize, ref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar.errors import InputError
from autopar.runtime.initial_values.missing_values import follow
from autopar.runtime.ranks.parameters.optimizers import WHOLE_ONLY, all_optimizers, is_cut
from autopar.runtime.ranks.world import World

_FRAMES = 12  # of callers that are looked at: torch's scaler is among the first


class OptimizerWatch:
    """Watches the steps of every optimizer with parameters of one model."""

    def __init__(self, world: World, parameters: Any) -> None:
        """`parameters`: the model's `RankParameters`. torch keeps the hooks as long as this lives; they hold nothing
        alive."""
        self._world = world
        self._waiting: list[ref[torch.optim.Optimizer]] = []  # in a step while nothing is placed: it has a closure
        self._cut: str | None = None  # a parameter that some rank has a part of
        alive, watch = ref(parameters), ref(self)

        def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            found, here = alive(), watch()
            follow(optimizer)
            if found is not None and here is not None and found.has_any(optimizer):
                here.before_step(found, optimizer)

        def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            found, here = alive(), watch()
            if found is not None and found.placed:
                found.stepped(optimizer)
            if here is not None:
                here._waiting = [one for one in here._waiting if one() is not optimizer]

        for hook in (register_optimizer_step_pre_hook(before_step), register_optimizer_step_post_hook(after_step)):
            finalize(self, hook.remove)

    def placed(self, parameters: Any) -> None:
        """The parameters have been placed: optimizers that have those from before get the new ones. Collective.

        One that has states already is refused at its next step.
        """
        cut = [name for name, p in parameters.named() if is_cut(p)]
        self._cut = next((names[0] for names in self._world.gathered(cut[:1]) if names), None)
        for optimizer in all_optimizers():
            follow(optimizer)
            if parameters.has_any(optimizer) and not _has_stepped(optimizer):
                parameters.adopt(optimizer)
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            stepping = one()
            if stepping is not None:
                self.before_step(parameters, stepping)

    def before_step(self, parameters: Any, optimizer: torch.optim.Optimizer) -> None:
        """Raise InputError for a step that would not be that of one process.

        Every rank that comes here raises, and shows its error: rank 0 may not be among them, because it skips the step,
        or its optimizer has no parameter of this model.
        """
        if not parameters.placed:
            self._waiting.append(ref(optimizer))
            return
        _refuse_plain_scaler()
        parameters.apart.refuse("an optimizer's step")
        parameters.adopt(optimizer)
        parameters.check_works(optimizer)
        if isinstance(optimizer, WHOLE_ONLY) and self._cut is not None:  # of another rank: all refuse together
            raise InputError(
                f"torch.optim.{type(optimizer).__name__} cannot step parts of a parameter, and '{self._cut}' is cut "
                "over ranks: use AdamW or SGD, or a plan that leaves parameters and states whole"
            )


def _has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it has states of steps. Adagrad begins with states of none, and L-BFGS counts before it computes."""
    states = optimizer.state.values()
    return any(state.get("step", 1) and any(isinstance(x, torch.Tensor) for x in state.values()) for state in states)


def _refuse_plain_scaler() -> None:
    """Raise InputError inside `step` of torch's own GradScaler, which on every rank skips by its own gradients.

    It calls optimizers without saying so: the calling frames show it.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            return
        owner = frame.f_locals.get("self") if frame.f_code.co_name in ("step", "_maybe_opt_step") else None
        if isinstance(owner, torch.amp.GradScaler):
            if getattr(owner, "agrees_over_ranks", False) or not owner.is_enabled():
                return
            raise InputError(
                f"{type(owner).__name__}.step() skips by the gradients of its own rank alone, so that ranks would go "
                "apart: use autopar.GradScaler, which agrees over ranks, and is torch's with one process"
            )
        frame = frame.f_back
