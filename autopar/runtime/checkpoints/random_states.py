"""The states of the random number generators that training draws from: torch's, Python's and numpy's."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def random_states() -> dict[str, Any]:
    """Of this process. Dropout of pipelined calls is seeded from torch's CPU generator, once a call."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """GPUs that the checkpoint does not know keep their states."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "numpy" in states:
        import numpy as np

        np.random.set_state(states["numpy"])
    if torch.cuda.is_available():
        for device, state in zip(range(torch.cuda.device_count()), states.get("cuda", ()), strict=False):
            torch.cuda.set_rng_state(state, device)
