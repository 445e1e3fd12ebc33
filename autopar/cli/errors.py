"""Errors of commands: one line without a traceback, and the exit status that says whose they are."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from autopar.errors import (
    AutoparError,
    InputError,
    PlanError,
    each_warning_once,
    first_line,
    users_line,
)
from autopar.plan.display import printable
from cost_models.errors import DeviceError

# What typer handles itself: it brings its own click, or uses click.
_OF_TYPER: tuple[type[BaseException], ...] = (typer.Exit, typer.Abort, *typer.BadParameter.__bases__)
_TRACEBACK = "AUTOPAR_TRACEBACK"  # environment variable: print the traceback of every error


class ErrorGroup(TyperGroup):
    """Prints errors without a traceback, and exits with the status that says whose they are."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with each_warning_once(set()):
                return super().invoke(ctx)
        except _OF_TYPER:
            raise
        except Exception as error:
            if os.environ.get(_TRACEBACK):
                traceback.print_exc()
            message, status = _message_and_status(error)
            typer.echo(f"error: {message}", err=True)
            raise typer.Exit(status) from error


def _message_and_status(error: Exception) -> tuple[str, int]:
    if isinstance(error, AutoparError):
        wrote = isinstance(error, (InputError, PlanError, DeviceError))
        return "\n".join(map(printable, str(error).splitlines())), 2 if wrote else 1
    where = users_line(error)
    if where is not None:  # the user's model or loss function raised it
        return f"{where}: {printable(first_line(error))}", 2
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    return f"inside autopar: {printable(first_line(error))} ({place}); {_TRACEBACK}=1 shows the traceback", 1
