"""Device kinds and networks as toml tables: reading the tables, checking every field, and look-up by name.

A table gives the fields of a dataclass. A `Rule` per field says which values are valid:

    {"memory": 80e9, "launch": -1}   --problems-->   ["launch must be a finite number >= 0, got -1", ...]
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from importlib.resources import files
from typing import Any

from cost_models.errors import DeviceError

Rule = tuple[Callable[[Any], bool], str]  # (whether a value is valid, which values are)


def is_number(value: Any) -> bool:
    """Whether `value` is an int or a float other than NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def maps_names(values: Any, valid: Callable[[Any], bool]) -> bool:
    """Whether `values` maps strings to valid values."""
    return isinstance(values, Mapping) and all(isinstance(key, str) and valid(value) for key, value in values.items())


RATE: Rule = (lambda v: is_number(v) and v > 0, "a number > 0")
FINITE_RATE: Rule = (lambda v: is_number(v) and 0 < v < math.inf, "a finite number > 0")
FRACTION: Rule = (lambda v: is_number(v) and 0 < v <= 1, "a fraction > 0 and <= 1")
AMOUNT: Rule = (lambda v: is_number(v) and 0 <= v < math.inf, "a finite number >= 0")
GAIN: Rule = (lambda v: is_number(v) and 1 <= v <= 2, "a number from 1 to 2")
COUNT: Rule = (lambda v: type(v) is int and v >= 0, "an integer >= 0")
CARDS: Rule = (lambda v: type(v) is int and v >= 1, "an integer >= 1")
FLAG: Rule = (lambda v: isinstance(v, bool), "true or false")
TEXT: Rule = (lambda v: isinstance(v, str), "a string")
TEXTS: Rule = (lambda v: maps_names(v, TEXT[0]), "a table of strings")


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass instance except its name, as they appear in a toml file."""
    return {key: item for key, item in asdict(value).items() if key != "name"}


def problems(rules: Mapping[str, Rule], cls: type[Any], values: Mapping[str, Any]) -> list[str]:
    """One message per missing field, unknown field and invalid value of a `cls` table."""
    required = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
    missing = [f"{name} is missing; give {rules[name][1]}" for name in rules if name in required - set(values)]
    unknown = [f"{name} is no field; there are {', '.join(rules)}" for name in values if name not in rules]
    wrong = [
        f"{name} must be {right}, got {values[name]!r}"
        for name, (is_right, right) in rules.items()
        if name in values and not is_right(values[name])
    ]
    return missing + unknown + wrong


def read_tables(tables: Any, rules: Mapping[str, Rule], cls: type[Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """The valid tables as `cls` instances by name, and the problems of the others. `where`: what their file calls the
    table of them all; "" for a file that has nothing else."""
    if not maps_names(tables, lambda v: isinstance(v, Mapping)):
        return {}, [f"{where or 'this'} must be a table of tables by name, got {tables!r}"]
    inside = f"{where}." if where else ""
    valid, wrong = {}, []
    for name, table in tables.items():
        if found := problems(rules, cls, table):
            wrong += [f"{inside}{name}: {problem}" for problem in found]
        else:
            valid[name] = cls(name=name, **table)
    return valid, wrong


def read_data(file: str, rules: Mapping[str, Rule], cls: type[Any]) -> dict[str, Any]:
    """The tables of `cost_models/data/<file>` as `cls` instances by name."""
    tables = tomllib.loads(files("cost_models").joinpath("data", file).read_text())
    values, wrong = read_tables(tables, rules, cls, "")
    raise_problems(file, wrong)
    return values


def raise_problems(where: str, wrong: list[str]) -> None:
    """Raise one DeviceError that lists all problems; do nothing if there are none."""
    if wrong:
        raise DeviceError(f"{where}: " + "; ".join(wrong))


def look_up(what: str, name: str, known: Mapping[str, Any]) -> Any:
    """The value called `name`, whatever its case, dashes, underscores and spaces.

    Raises:
        DeviceError: no such name; the message lists the known ones.
    """

    def plain(text: str) -> str:
        return re.sub(r"[-_ ]", "", text).lower()

    if name in known:
        return known[name]
    for other, value in known.items():
        if plain(other) == plain(name):
            return value
    raise DeviceError(f"unknown {what} {name!r}; known are {', '.join(known)}")
