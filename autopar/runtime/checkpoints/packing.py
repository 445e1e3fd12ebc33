"""Values of any kind as bytes, and back."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def packed(value: Any) -> bytes:
    """As it is now, whatever becomes of its parts later."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def unpacked(data: bytes) -> Any:
    """A checkpoint of torch.distributed runs code when it is read, as pickles do: this adds nothing to that."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def holds_parts(value: Any) -> bool:
    """Whether `packed` would have DTensors in it: this rank's parts, of which no other plan could make use."""
    search = _Search(io.BytesIO())
    search.dump(value)
    return search.has_found


class _Search(pickle.Pickler):
    """Goes where pickling goes, and leaves the tensors' values out."""

    has_found = False

    def persistent_id(self, value: Any) -> str | None:
        self.has_found |= isinstance(value, DTensor)
        return "tensor" if isinstance(value, torch.Tensor) else None
