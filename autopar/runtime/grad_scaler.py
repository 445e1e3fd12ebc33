"""torch.amp.GradScaler for one process or many."""

from __future__ import annotations

from typing import Any

import torch

from autopar.capture.torch_private_ranks import AgreeingGradScaler
from autopar.runtime.ranks.world import current


class GradScaler(AgreeingGradScaler):
    """`torch.amp.GradScaler` whose ranks skip a step together: one that finds an inf or NaN makes all skip.

    In one process it is torch's. Every rank calls it alike: `scale` on the loss (inside the loss function of
    `train_step`, or on a loss made of `pm(x)`), then `step` and `update`; `unscale_` and `autopar.clip_grad_norm_`
    before `step`, if gradients are clipped. The arguments are those of `torch.amp.GradScaler`; the device is by
    default "cuda" where there is one, else "cpu".
    """

    agrees_over_ranks = True

    def __init__(self, device: str | None = None, **settings: Any) -> None:
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(device, **settings)
        self._place = torch.device(device)
        if self.is_enabled():  # its scale must be there on every rank, also where no loss is computed
            self.scale(torch.zeros((), device=self._place))

    def agreed(self, found: dict[torch.device, torch.Tensor]) -> dict[torch.device, torch.Tensor]:
        world = current()
        if world is None:
            return found
        here = any(bool(one) for one in found.values())
        with world.watcher.call("GradScaler.step or unscale_"):
            there = any(theirs[0] for theirs in world.announced("GradScaler", [here]))
        return {place: torch.full((), float(there), device=place) for place in found or [self._place]}
