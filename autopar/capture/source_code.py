"""The source code of a user's function or class, as far as it can be read."""

from __future__ import annotations

import inspect
import tokenize
from typing import Any


def source_code(code: Any) -> str | None:
    """The text of a function or class; None where there is none: built-in, or its file is gone or has changed since."""
    try:
        return inspect.getsource(code)
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):  # the last two: a file that was edited meanwhile
        return None
