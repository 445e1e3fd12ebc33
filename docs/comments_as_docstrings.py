"""For the reference: a field's comment is its docstring.

n_microbatches: int  # micro-batches per batch       the text after "#" is what the reference shows
"""

from __future__ import annotations

import io
import tokenize
from typing import Any

import griffe


class CommentsAsDocstrings(griffe.Extension):
    """Gives attributes of classes the comment at the end of their line as a docstring, where they have none."""

    def on_attribute_instance(self, *, attr: Any, **_: Any) -> None:
        """Called for each attribute that is read from source code."""
        if attr.docstring is not None or not attr.parent.is_class or attr.endlineno is None:
            return
        text = _comment(attr.lines_collection[attr.filepath][attr.endlineno - 1])
        if text:
            attr.docstring = griffe.Docstring(text, parent=attr, lineno=attr.endlineno)


def _comment(line: str) -> str:
    """The comment at the end of a line of code."""
    try:
        for token in tokenize.generate_tokens(io.StringIO(line.strip()).readline):
            if token.type == tokenize.COMMENT:
                return token.string.lstrip("# ").strip()
    except (tokenize.TokenError, IndentationError):  # the end of a longer statement
        return ""
    return ""
