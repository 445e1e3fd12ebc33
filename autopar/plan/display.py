"""How a value that knows nothing of reports and searches still answers print() and explain().

The rooms above register what they do for a type: reports the text of it, the search the reasons for it. Importing
`autopar` imports them all.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any


@singledispatch
def shown(value: Any) -> str:
    """The text that `print(value)` shows."""
    raise NotImplementedError(f"no report is registered for {type(value).__name__}")


@singledispatch
def explained(value: Any) -> Any:
    """Why the value is as it is."""
    raise NotImplementedError(f"nothing explains {type(value).__name__}")


@singledispatch
def inside_explained(value: Any, path: str) -> Any:
    """Why the part of the value that is called `path` is as it is."""
    raise NotImplementedError(f"nothing explains parts of {type(value).__name__}")
