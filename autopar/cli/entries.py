"""Named plans as written on the command line: `NAME=FILE`, `NAME=MODULE:STAGE,...` and `NAME=DEGREE=VALUE,...`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from autopar.errors import InputError, PlanError
from autopar.options import AHEAD_ONLY
from autopar.plan.degrees import DEGREES
from autopar.plan.plan import Plan

_BY_HAND = (*DEGREES, *AHEAD_ONLY)


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
    return name, {module: int(stage) for module, _, stage in parts}


def named_degrees(entry: str) -> tuple[str, dict[str, Any]]:
    """The name and the degrees of `NAME=tensor=8,pipeline=4,overlap=gradients`, with how a step is run.

    Raises BadParameter that names everything that is wrong.
    """
    name, equals, text = entry.partition("=")
    if not (name and equals and text):
        raise typer.BadParameter(f"{entry!r} is not NAME=DEGREE=VALUE,...", param_hint="--by-hand")
    degrees: dict[str, Any] = {}
    problems = []
    for part in text.split(","):
        key, equals, value = (side.strip() for side in part.partition("="))
        if key not in _BY_HAND:
            close = difflib.get_close_matches(key, _BY_HAND, 1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(_BY_HAND)}"
            problems.append(f"there is no degree {key!r}; {hint}")
        elif not value:
            problems.append(f"{key} has no value; write {key}=VALUE")
        elif key in degrees:
            problems.append(f"{key} is given twice")
        else:
            degrees[key] = _value(value)
    if problems:
        raise typer.BadParameter(f"{entry!r}: {'; '.join(problems)}", param_hint="--by-hand")
    return name, degrees


def plans_by_hand(
    entries: Sequence[str], devices: Any, call: Mapping[str, Any], how: Mapping[str, Any]
) -> dict[str, Plan]:
    """The plans of `NAME=DEGREE=VALUE,...`, by name. `how`: of a step, where an entry says nothing else.

    Raises BadParameter for entries that cannot be read, and PlanError that says of every plan what contradicts.
    """
    wanted = [named_degrees(entry) for entry in entries]
    names = [name for name, _ in wanted]
    twice = dict.fromkeys(name for name in names if names.count(name) > 1)
    if twice:
        raise typer.BadParameter(f"several plans are called {', '.join(twice)}", param_hint="--by-hand")
    plans: dict[str, Plan] = {}
    refused = []
    for name, degrees in wanted:
        try:
            plans[name] = Plan.by_hand(devices=devices, **{**how, **call, **degrees})
        except (InputError, PlanError) as error:
            refused.append(f"{name}: {error}")
    if refused:
        raise PlanError("\n".join(refused))
    return plans


def _value(text: str) -> int | bool | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if text.isdecimal() else text
