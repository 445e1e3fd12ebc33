"""Other people's training loops. Each needs its own package, and is imported at its first use.

In one process, transformers' Trainer and Accelerate take a pipelined module as it is. Under torchrun they need
`PipelinedTrainer` and `for_ranks`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.integrations.lightning import AutoparStrategy
    from autopar.integrations.under_torchrun import PipelinedTrainer, for_ranks

__all__ = ["AutoparStrategy", "PipelinedTrainer", "for_ranks"]

_PLACES = {  # name: module, packages that it imports with their titles
    "AutoparStrategy": ("lightning", {"lightning": "Lightning"}),
    "PipelinedTrainer": ("under_torchrun", {"transformers": "transformers", "accelerate": "Accelerate"}),
    "for_ranks": ("under_torchrun", {"transformers": "transformers", "accelerate": "Accelerate"}),
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place, packages = _PLACES[name]
    try:
        module = importlib.import_module(f"{__name__}.{place}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in packages:
            raise
        raise ImportError(f'{name} needs {packages[missing]}: pip install "autopar[integrations]"') from error
    return getattr(module, name)
