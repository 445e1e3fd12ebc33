"""Names that messages list or suggest, and the check of a call's keywords."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, get_type_hints

from autopar.errors import InputError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_MAX_LISTED = 3  # names in a message
_ALIKE = 0.6  # share of equal letters of names that are alike


def few(names: Sequence[str]) -> str:
    """The names as messages list them: `'a', 'b', 'c' and 5 more`."""
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(f"'{name}'" for name in names[:_MAX_LISTED]) + more


def near(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'layers.8' or 'layers.0'?`, or which names there are; empty if there are none."""
    names = list(dict.fromkeys(known))
    meant = similar(name, names)
    return f"; {meant}" if meant else f"; there are {few(names)}" if names else ""


def similar(name: str, known: Iterable[str], *, most: int = _MAX_LISTED, alike: float = _ALIKE) -> str:
    """`did you mean 'layers.8' or 'layers.0'?`; empty if no name is similar.

    `most`: names that are suggested. `alike`: share of letters that must be equal.
    """
    return did_you_mean(*difflib.get_close_matches(name, list(dict.fromkeys(known)), most, alike))


def did_you_mean(*names: str) -> str:
    """The same for names that were found; empty for none."""
    return f"did you mean {' or '.join(map(repr, names))}?" if names else ""


def check_names(call: str, known: type, keywords: Mapping[str, Any]) -> None:
    """Raise InputError for keywords of `call` that are none of `known`, a TypedDict, with the closest known name."""
    _check_names(call, list(get_type_hints(known)), keywords)


def with_checked_names(call: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """`call`, with InputError instead of TypeError for a keyword that it does not have: it says the closest name."""
    names = [name for name in inspect.signature(call).parameters if name != "self"]

    @functools.wraps(call)
    def checked(*args: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
        _check_names(call.__name__, names, keywords)
        return call(*args, **keywords)

    return checked


def _check_names(call: str, names: list[str], keywords: Mapping[str, Any]) -> None:
    problems = []
    for name in (name for name in keywords if name not in names):
        hint = similar(name, names, most=1) or f"its options are {', '.join(names)}"
        problems.append(f"{call} has no option {name!r}; {hint}")
    if problems:
        raise InputError("; ".join(problems))
