"""Named plans as written on the command line: `NAME=FILE`, `NAME=MODULE:STAGE,...`, `NAME=DEGREE=VALUE,...` and
`TOOL=FILE`."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import typer

from autopar.plan.degrees import DEGREES
from autopar.plan.plan import Plan


class NamedPlans(dict[str, Plan | None]):
    """Plans to compare; None is the automatic one."""

    def add(self, option: str, name: str, plan: Plan) -> None:
        """Raises BadParameter for a name that there is already: one of both would silently not be compared."""
        if name in self:
            whose = "the automatic plan has" if self[name] is None else "another plan has"
            raise typer.BadParameter(f"{whose} the name {name!r}; give this one another", param_hint=option)
        self[name] = plan


def named_plan(entry: str) -> tuple[str, Plan]:
    name, equals, path = entry.partition("=")
    if not (name and equals):
        raise typer.BadParameter(f"{entry!r} is not NAME=FILE", param_hint="--plan")
    if not Path(path).is_file():
        raise typer.BadParameter(f"there is no file {path!r}", param_hint="--plan")
    return name, Plan.load(path)


def named_split(entry: str) -> tuple[str, dict[str, int]]:
    """The name and the stages of `NAME=h.0:0,h.6:1`."""
    name, equals, text = entry.partition("=")
    parts = [part.strip().rpartition(":") for part in text.split(",")]
    if not (name and equals) or not all(colon and stage.isdecimal() for _, colon, stage in parts):
        raise typer.BadParameter(f"{entry!r} is not NAME=MODULE:STAGE,...", param_hint="--split")
    modules = [module for module, _, _ in parts]
    twice = next((module for module in modules if modules.count(module) > 1), None)
    if twice is not None:
        raise typer.BadParameter(f"{entry!r} gives {twice!r} twice", param_hint="--split")
    return name, {module: int(stage) for module, _, stage in parts}


def named_degrees(entry: str) -> tuple[str, dict[str, Any]]:
    """The name and the degrees of `NAME=tensor=8,pipeline=4`. Raises BadParameter that names what is wrong."""
    name, equals, text = entry.partition("=")
    if not (name and equals and text):
        raise typer.BadParameter(f"{entry!r} is not NAME=DEGREE=VALUE,...", param_hint="--by-hand")
    degrees: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        if key not in DEGREES:
            close = difflib.get_close_matches(key, DEGREES, 1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(DEGREES)}"
            raise typer.BadParameter(f"{entry!r}: there is no degree {key!r}; {hint}", param_hint="--by-hand")
        if key in degrees:
            raise typer.BadParameter(f"{entry!r} gives {key} twice", param_hint="--by-hand")
        degrees[key] = _value(value)
    return name, degrees


def named_configuration(entry: str) -> tuple[str, Path]:
    """The tool and the file of `TOOL=FILE`."""
    tool, equals, file = entry.partition("=")
    if not (tool and equals and file):
        raise typer.BadParameter(f"{entry!r} is not TOOL=FILE", param_hint="--configuration")
    return tool, Path(file)


def _value(text: str) -> int | bool | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if text.isdecimal() else text
