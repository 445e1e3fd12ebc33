"""Reports that commands write for a browser."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import typer

from autopar.errors import InputError
from autopar.report.document import Report


def save_report(report: Report, path: Path, *, quiet: bool) -> None:
    """Write a report, and name the file to open, on stderr if `quiet`. Raises InputError."""
    try:
        report.save(path)
    except OSError as error:
        raise InputError(f"--html {path}: the report cannot be written: {error}") from error
    typer.echo(f"\nThe report is in {path}; open it in a browser: {path.resolve().as_uri()}", err=quiet)


def typed_command() -> str:
    """What the user typed, for a shell."""
    return shlex.join(["autopar", *sys.argv[1:]])
