"""Commands that read what is saved: plans, checkpoints, and the history of predictions."""

from __future__ import annotations

import dataclasses
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

import autopar
from autopar import InputError, Plan
from autopar.cli.files import check_writable
from autopar.cli.parameters import AsJson
from autopar.plan.exits.tools import TOOLS, configuration_for


def accuracy(
    kind: Annotated[
        str | None, typer.Option(help="Only device types whose name contains this text, such as H200.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Show how far predicted step times were from measured ones, over all recorded steps."""
    result = autopar.accuracy(kind=kind)
    typer.echo(result.to_json() if json else result)


def diff(
    before: Annotated[Path, typer.Argument(help="A saved plan.", metavar="BEFORE.json")],
    after: Annotated[Path, typer.Argument(help="Another saved plan.", metavar="AFTER.json")],
    json: AsJson = False,
) -> None:
    """Say how two saved plans differ, and why one is slower. Exit status: 2 for invalid files, else 0."""
    result = Plan.load(before).diff(Plan.load(after))
    typer.echo(result.to_json() if json else result)


def convert(
    plan: Annotated[Path, typer.Argument(help="A saved plan.", metavar="PLAN.json")],
    to: Annotated[str, typer.Option(metavar="TOOL", help=f"One of {', '.join(TOOLS)}.")],
    save: Annotated[
        Path | None, typer.Option(help="Write it to this file, and the schedule that it needs to the same folder.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Print a saved plan as another tool's configuration; what the tool cannot express goes to stderr, by name."""
    result = configuration_for(Plan.load(plan), to)
    if save is not None:
        check_writable(save)
        try:
            result.save(save)
        except OSError as error:
            raise InputError(f"--save {save}: it cannot be written: {error}") from error
    typer.echo(dumps(dataclasses.asdict(result), default=dict) if json else result.text, nl=json)
    for one in result.not_expressed:
        typer.echo(f"not expressed: {one.name}: {one.why}", err=True)
    if result.companions and save is None:
        typer.echo(f"it needs {', '.join(result.companions)}, which --save writes to the same folder", err=True)


def export(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoints of a run, or the directory of one.")],
    file: Annotated[Path, typer.Argument(metavar="FILE.safetensors", help="The file to write.")],
    step: Annotated[
        int | None, typer.Option(help="The checkpoint of this step; default: the newest complete one.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Write the model's whole tensors, in their original names, from a checkpoint to one safetensors file."""
    from autopar.runtime.checkpoints.export import export as write

    check_writable(file, "")
    if not directory.is_dir():
        raise InputError(f"there is no directory {str(directory)!r}; give the one that autopar.save wrote to")
    folder = write(directory, file, step=step)
    size = file.stat().st_size
    found = {"checkpoint": str(folder), "file": str(file), "bytes": size}
    typer.echo(dumps(found) if json else f"{file}: {size} bytes, from {folder}")
