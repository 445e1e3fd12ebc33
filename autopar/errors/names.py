"""Names that messages list or suggest, and the check of a call's keywords."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, get_args, get_type_hints

from autopar.errors import InputError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_MAX_LISTED = 3  # names in a message
_ALIKE = 0.6  # share of equal letters of names that are alike


def few(names: Sequence[str]) -> str:
    """The names as messages list them: `'a', 'b', 'c' and 5 more`."""
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(f"'{name}'" for name in names[:_MAX_LISTED]) + more


def with_article(noun: str) -> str:
    """`an int`, `a tuple`; also `a UNet`, as most names of classes that begin with a U are spoken so."""
    return f"{'an' if noun[:1].lower() in tuple('aeio') else 'a'} {noun}"


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


def with_checked_names(call: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """`call`, with InputError instead of TypeError for arguments that it does not have, or that it lacks: Python's
    message names classes that the user never sees, and no closest name.

    Keywords of `**options: Unpack[SomeTypedDict]` are those of the TypedDict; other `**keywords` may have any name.
    """
    signature = inspect.signature(call)
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    rest = next((p for p in parameters if p.kind is p.VAR_KEYWORD), None)
    further = [] if rest is None else _names_of(rest, call)
    named = [p.name for p in parameters if p is not rest]
    options = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] + further or named

    @functools.wraps(call)
    def checked(*args: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
        if rest is None or further:
            _check_names(call.__name__, [*named, *further], options, keywords)
        try:
            signature.bind(*args, **keywords)
        except TypeError as error:
            raise InputError(f"{call.__name__}: {error}") from None
        return call(*args, **keywords)

    return checked


def _names_of(rest: inspect.Parameter, call: Callable[..., Any]) -> list[str]:
    """The keywords that `**options: Unpack[SomeTypedDict]` takes; none where it says no TypedDict."""
    annotation = rest.annotation
    if isinstance(annotation, str):
        annotation = eval(annotation, call.__globals__)
    return [name for known in get_args(annotation) for name in get_type_hints(known)]


def _check_names(call: str, names: Sequence[str], options: Sequence[str], keywords: Mapping[str, Any]) -> None:
    """Raise InputError for `keywords` that are none of `names`, with the closest ones, and all `options`."""
    unknown = [name for name in keywords if name not in names]
    if unknown:
        meant = {name: similar(name, names, most=1) for name in unknown}
        problems = [f"{call} has no option {name!r}" + (f"; {meant[name]}" if meant[name] else "") for name in unknown]
        text = "; ".join(problems)
        raise InputError(f"{text}{' Its' if text.endswith('?') else '; its'} options are {', '.join(options)}")
