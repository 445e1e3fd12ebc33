"""Other people's training loops. Each needs its own package, and is imported at its first use.

transformers' Trainer and Accelerate take a pipelined module as it is, so that nothing stands here for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.integrations.lightning import AutoparStrategy

__all__ = ["AutoparStrategy"]


def __getattr__(name: str) -> Any:
    if name != "AutoparStrategy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from autopar.integrations.lightning import AutoparStrategy
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lightning":
            raise
        raise ImportError('AutoparStrategy needs Lightning: pip install "autopar[integrations]"') from error
    return AutoparStrategy
