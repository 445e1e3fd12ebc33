"""The example call that a user's factory returns: `MODULE:FACTORY` on the command line.

Every error of the user's code becomes an InputError that starts with its file and line.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import operator
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from autopar.errors import AutoparError, InputError, first_line, short_path, users_line
from autopar.errors.names import did_you_mean, similar, with_article

_KNOWN = ("model", "example_args", "example_kwargs", "target", "loss_fn")


def load_call(name: str) -> dict[str, Any]:
    """What the factory `name` returns, as keyword arguments of the public calls. Raises InputError."""
    module_name, path = _parts(name)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the command's result
        factory = _attribute(_module(module_name), path, name)
        _check_takes_no_arguments(factory, name)
        with _named(name):
            result = factory()
    return _as_call(result, f"{_home(factory)}{name}")


def _parts(name: str) -> tuple[str, str]:
    """The module and the path in it that `name` gives. Raises InputError, with the name that was probably meant."""
    module_name, colon, path = name.partition(":")
    plain = module_name.removeprefix("./")
    meant, wanted = plain.removesuffix(".py").replace("/", "."), path.removesuffix("()")
    if colon and meant and wanted and (meant, wanted) != (module_name, path):
        raise InputError(f"{name!r} is not MODULE:FACTORY; {did_you_mean(f'{meant}:{wanted}')}")
    if module_name and path and not module_name.startswith("."):
        return module_name, path
    inside, dot, last = plain.rpartition(".")
    example = f"{meant if plain.endswith('.py') else inside if dot and not colon else meant or 'models'}"
    example += f":{last if dot and not colon and last != 'py' else 'factory'}"
    raise InputError(f"{name!r} is not MODULE:FACTORY; give a module and a callable in it, such as {example}")


def _module(name: str) -> ModuleType:
    try:
        with _named(f"the module {name}"):
            return importlib.import_module(name)
    except InputError as error:
        cause = error.__cause__
        missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
        if missing is None or not (name + ".").startswith(missing + "."):
            raise
        files = sorted(path.stem for path in Path().glob("*.py"))
        meant = similar(name, files, most=1)
        hint = f"; {meant}" if meant else f" in {os.getcwd()} or among the installed packages"
        raise InputError(f"there is no module {missing!r}{hint}") from cause


def _attribute(module: ModuleType, path: str, name: str) -> Callable[[], Any]:
    file = short_path(module.__file__ or "")
    try:
        factory = operator.attrgetter(path)(module)
    except AttributeError:
        callables = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        meant = similar(f"{module.__name__}:{path}", [f"{module.__name__}:{one}" for one in callables], most=1)
        hint = f"; {meant}" if meant else ""
        raise InputError(f"{file}: there is no {path!r} in the module{hint}") from None
    if not callable(factory):
        raise InputError(
            f"{file}: {name} is {with_article(type(factory).__name__)}, not a callable that returns a model"
        )
    return factory


def _check_takes_no_arguments(factory: Callable[..., Any], name: str) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # a callable written in C: calling it will tell
        return
    needed = [
        p.name
        for p in signature.parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        raise InputError(
            f"{_home(factory)}{name} takes {', '.join(needed)}, but a factory is called without arguments; "
            "give them defaults, or wrap it in a function without parameters"
        )


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Inside, every error of the user's code becomes an InputError that starts with its file and line.

    `what`: whose code it is.
    """
    try:
        yield
    except AutoparError:
        raise
    except SystemExit as error:
        where = users_line(error)
        raise InputError(
            f"{where + ': ' if where else ''}{what} ends the program (exit {error.code}); "
            "put what runs as a program under if __name__ == '__main__':"
        ) from error
    except Exception as error:
        where = users_line(error)
        raise InputError(f"{where}: {first_line(error)}" if where else f"{what} raises {first_line(error)}") from error


def _home(factory: Callable[..., Any]) -> str:
    """`file:line: ` of a callable; "" if it is not known."""
    try:
        code = inspect.unwrap(factory)
        return f"{short_path(inspect.getsourcefile(code) or '?')}:{inspect.getsourcelines(code)[1]}: "
    except (OSError, TypeError, ValueError):
        return ""


def _as_call(result: Any, where: str) -> dict[str, Any]:
    match result:
        case {"model": nn.Module()}:
            unknown = set(result) - set(_KNOWN)
            if unknown:
                names = ", ".join(map(repr, sorted(unknown, key=str)))
                raise InputError(f"{where} returned {names}; give only {', '.join(_KNOWN)}")
            return dict(result)
        case (nn.Module() as model, tuple() as args, dict() as kwargs):
            return {"model": model, "example_args": args, "example_kwargs": kwargs}
        case (nn.Module() as model, tuple() as args):
            return {"model": model, "example_args": args}
        case (nn.Module() as model, dict() as kwargs):
            return {"model": model, "example_kwargs": kwargs}
    raise InputError(
        f"{where} must return (model, args), (model, kwargs), (model, args, kwargs) or a dict with 'model', "
        f"where args is a tuple and kwargs a dict; got {type(result).__name__}"
    )
