"""Named plans as written on the command line: `NAME=FILE`, `NAME=MODULE:STAGE,...`, `NAME=DEGREE=VALUE,...` and
`TOOL=FILE`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from autopar.errors import InputError, PlanError
from autopar.errors.names import similar
from autopar.options import AHEAD_ONLY
from autopar.plan.degrees import DEGREES
from autopar.plan.plan import Plan
from autopar.runtime.comparing.comparison import SINGLE

_BY_HAND = (*DEGREES, *AHEAD_ONLY)


def check_names_differ(entries: Mapping[str, Sequence[str]], systems: Sequence[str]) -> None:
    """Raise BadParameter for a name that there is already: one of both would silently not be compared.

    `entries`: NAME=... by option. Checked before anything is made of them, which takes its time.
    """
    owners = {"auto": "the automatic plan", SINGLE: "the plain model", **dict.fromkeys(systems, "another system")}
    for option, texts in entries.items():
        for text in texts:
            name = text.partition("=")[0]
            if name in owners:
                raise typer.BadParameter(
                    f"{owners[name]} has the name {name!r}; give this one another", param_hint=option
                )
            owners[name] = "another plan"


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
    parts = [part.strip().split(":") for part in text.split(",")]
    wrong = next((part for part in parts if len(part) != 2 or not part[1].isdecimal()), None)
    if not (name and equals) or wrong is not None:
        of = f": {':'.join(wrong)!r} is no MODULE:STAGE" if equals and wrong is not None else ""
        raise typer.BadParameter(f"{entry!r} is not NAME=MODULE:STAGE,...{of}", param_hint="--split")
    modules = [module for module, _ in parts]
    twice = next((module for module in modules if modules.count(module) > 1), None)
    if twice is not None:
        raise typer.BadParameter(f"{entry!r} gives {twice!r} twice", param_hint="--split")
    return name, {module: int(stage) for module, stage in parts}


def plan_of_split(name: str, stages: Mapping[str, int], n_microbatches: int, schedule: str) -> Plan:
    """The plan of what `named_split` read. Raises what `Plan.from_split` raises, with the name."""
    try:
        return Plan.from_split(stages, n_microbatches=n_microbatches, schedule=schedule)
    except (InputError, PlanError) as error:
        raise type(error)(f"{name}: {error}") from error


def named_degrees(entries: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """The names and the degrees of `NAME=tensor=8,pipeline=4,overlap=gradients`, with how a step is run.

    Raises BadParameter that names everything that is wrong with any of them.
    """
    read, refused = [], []
    for entry in entries:
        name, degrees, problems = _named_degrees(entry)
        read.append((name, degrees))
        refused += [f"{entry!r}: {'; '.join(problems)}"] if problems else []
    if refused:
        raise typer.BadParameter("\n".join(refused), param_hint="--by-hand")
    return read


def _named_degrees(entry: str) -> tuple[str, dict[str, Any], list[str]]:
    """The name and the degrees of an entry, and what is wrong with it."""
    name, equals, text = entry.partition("=")
    if not (name and equals and text):
        return name, {}, ["it is not NAME=DEGREE=VALUE,..."]
    if name in _BY_HAND and "=" not in text.partition(",")[0]:
        return name, {}, [f"it has no name; write NAME={entry}"]
    degrees: dict[str, Any] = {}
    problems = []
    for part in text.split(","):
        key, equals, value = (side.strip() for side in part.partition("="))
        if key not in _BY_HAND:
            hint = similar(key, _BY_HAND, most=1) or f"known are {', '.join(_BY_HAND)}"
            problems.append(f"there is no degree {key!r}; {hint}")
        elif not value:
            problems.append(f"{key} has no value; write {key}=VALUE")
        elif key in degrees:
            problems.append(f"it gives {key} twice")
        else:
            degrees[key] = _value(value)
    return name, degrees, problems


def plans_by_hand(
    entries: Sequence[tuple[str, Mapping[str, Any]]], devices: Any, call: Mapping[str, Any], how: Mapping[str, Any]
) -> list[tuple[str, Plan]]:
    """The plans of what `named_degrees` read, with their names. `how`: of a step, where an entry says nothing else.

    Raises PlanError that says of every plan what contradicts.
    """
    plans: list[tuple[str, Plan]] = []
    refused = []
    for name, degrees in entries:
        try:
            plans.append((name, Plan.by_hand(devices=devices, **{**how, **call, **degrees})))
        except (InputError, PlanError) as error:
            refused.append(f"{name}: {error}")
    if refused:
        raise PlanError("\n".join(refused))
    return plans


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
