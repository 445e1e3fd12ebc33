"""What torch.autocast does on one type of device, to do the same in other threads."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Autocast:
    """The state of torch.autocast in a thread."""

    device_type: str
    dtype: torch.dtype | None = None  # None: off
    cache: bool = True  # keep casts of parameters until the outermost context ends

    @classmethod
    def of_this_thread(cls, device_type: str) -> Autocast:
        if not torch.is_autocast_enabled(device_type):
            return cls(device_type)
        return cls(device_type, torch.get_autocast_dtype(device_type), torch.is_autocast_cache_enabled())

    @property
    def signature(self) -> list[Any]:
        """For keys of caches."""
        return [self.device_type, None if self.dtype is None else str(self.dtype), self.cache]

    def applied(self) -> AbstractContextManager[Any]:
        """A context in which torch.autocast is as it was in that thread, for a thread in which it is off."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype, cache_enabled=self.cache)


def autocasts(device_types: Iterable[str]) -> dict[str, Autocast]:
    """By device type, the torch.autocast of this thread."""
    return {device_type: Autocast.of_this_thread(device_type) for device_type in sorted(set(device_types))}
