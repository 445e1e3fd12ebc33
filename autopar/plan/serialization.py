"""A plan as a JSON file to be read and edited by hand.

    {
     "autopar_plan": 2,
     "checksum": "5f0c...",
     "stages": [
      {"devices": ["cuda:0"], "operators": ["embed: embedding#0", "layers.0.fc: linear#0"], "recompute": false, ...},
      ...

Keys are the names of the fields of `Plan`, `Stage`, `StageTransfer`, `StageSharding`, `Assumptions`, `StepWork` and
`RunnerUp`. Fields that are None or empty are left out. One line lists the operators `module.path/operator#k` of one
module that follow each other: moving the line to another stage moves these operators.
The checksum tells a plan that was edited, whose predictions no longer belong to it; editors need not update it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import re
import types
import typing
from collections import Counter
from collections.abc import Callable
from typing import Any

from autopar.errors import PlanError
from autopar.sharding.stage_sharding import (
    TensorRedistribution,
    parse_passage,
    parse_stored,
    parse_strategy,
    passage_text,
    stored_text,
    strategy_text,
)

VERSION = 2
_CHECKSUM_DIGITS = 16
_MOST_DIGITS = 30  # of a whole number: longer ones are no quantity, and too large for a float
_LINE = re.compile(r"([^:]*): (\S+#\d+(?: \S+#\d+)*)")
_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", tuple: "a list"}


def write(plan: Any) -> str:
    """The JSON of a Plan."""
    head = {"autopar_plan": VERSION, "checksum": checksum(plan)}
    return json.dumps({**head, **_plain(plan)}, indent=1, allow_nan=False)


def checksum(plan: Any) -> str:
    """A checksum of everything in a Plan."""
    return hashlib.sha256(json.dumps(_plain(plan), allow_nan=False).encode()).hexdigest()[:_CHECKSUM_DIGITS]


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        fields = ((f, getattr(value, f.name)) for f in dataclasses.fields(value))
        kept = (
            (f.name, item)
            for f, item in fields
            if item != f.default or (item not in (None, "", ()) and f.name not in _LATER)
        )
        return {name: _SPECIAL[name][0](item) if name in _SPECIAL else _plain(item) for name, item in kept}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def read(text: str, kind: Any) -> tuple[dict[str, Any], Any, list[str]]:
    """(fields by name, the recorded checksum, everything wrong) of the dataclass `kind` that `write` wrote.

    A field that cannot be read is None, also inside a nested dataclass. Raises ValueError for text that is not JSON, or
    of another version.
    """
    problems: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(name for name, _ in pairs)
        problems.extend(f"'{name}' appears twice" for name, count in counts.items() if count > 1)
        return dict(pairs)

    try:
        data = json.loads(text, object_pairs_hook=unique, parse_int=_parsed_int)
    except RecursionError:
        raise ValueError("lists in lists too deep to read") from None
    version = data.pop("autopar_plan", None) if isinstance(data, dict) else None
    if type(version) is not int or version != VERSION:
        raise ValueError(f"'autopar_plan' must be the version of the format, {VERSION}, got {version!r}")
    recorded = data.pop("checksum", None)
    return _fields(kind, data, "", problems), recorded, problems


def _parsed_int(digits: str) -> float:
    """An int, or infinity for one with too many digits, which the checks of its field then refuse by name."""
    if len(digits) <= _MOST_DIGITS:
        return int(digits)
    return -math.inf if digits.startswith("-") else math.inf


def _fields(kind: Any, data: dict[str, Any], where: str, problems: list[str]) -> dict[str, Any]:
    """The fields of dataclass `kind`. Missing and unknown fields and values of a wrong type go into `problems`."""
    hints = typing.get_type_hints(kind)
    saved = {f.name: f for f in dataclasses.fields(kind)}
    problems += [f"{where}{name} is unknown" for name in data if name not in saved]
    values: dict[str, Any] = {}
    for name, field in saved.items():
        if name in data:
            reader = _SPECIAL[name][1] if name in _SPECIAL else _value
            values[name] = reader(hints[name], data[name], f"{where}{name}", problems)
        else:
            if field.default is dataclasses.MISSING:
                problems.append(f"{where}{name} is missing")
            values[name] = None if field.default is dataclasses.MISSING else field.default
    return values


def _value(kind: Any, data: Any, where: str, problems: list[str]) -> Any:
    """`data` as a value of type `kind`; None if it is not one."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):  # X | None
        return None if data is None else _value(typing.get_args(kind)[0], data, where, problems)
    if typing.get_origin(kind) is tuple and isinstance(data, list):
        item = typing.get_args(kind)[0]
        items = tuple(_value(item, part, f"{where}[{index}]", problems) for index, part in enumerate(data))
        return None if any(part is None for part in items) else items
    if dataclasses.is_dataclass(kind):
        if isinstance(data, dict):
            return kind(**_fields(kind, data, f"{where}.", problems))  # type: ignore[operator]
        problems.append(f"{where} must be an object, got {data!r}")
        return kind(**{field.name: None for field in dataclasses.fields(kind)})  # type: ignore[operator]
    if type(data) is kind or (kind is float and type(data) is int):
        return data
    problems.append(f"{where} must be {_WORDS[typing.get_origin(kind) or kind]}, got {data!r}")
    return None


def _operator_lines(operators: tuple[str, ...]) -> list[str]:
    """`layer.0: conv2d#0 relu#0`: one line per run of operators of one module."""
    parts = (key.rpartition("/") for key in operators)
    runs = itertools.groupby(parts, key=lambda part: part[0])
    return [f"{path}: {' '.join(name for _, _, name in run)}" for path, run in runs]


def _operators(kind: Any, data: Any, where: str, problems: list[str]) -> Any:
    lines = _value(kind, data, where, problems)
    if lines is None:
        return None
    keys: list[str] = []
    for index, line in enumerate(lines):
        match = _LINE.fullmatch(line)
        if match:
            keys += (f"{match[1]}/{name}" for name in match[2].split(" "))
        else:
            problems.append(f"{where}[{index}] must be like 'module.path: linear#0 relu#1', got {line!r}")
    return tuple(keys) or (None if lines else ())


def _named_texts(write: Callable[[Any], str], parse: Callable[[str], Any]) -> tuple[Any, Any]:
    """(to JSON, from JSON) of pairs (name, value) whose values are texts in JSON."""

    def read(kind: Any, data: Any, where: str, problems: list[str]) -> Any:
        if not isinstance(data, dict) or any(not isinstance(text, str) for text in data.values()):
            problems.append(f"{where} must be an object from names to placements such as 'S0R', got {data!r}")
            return None
        return _parsed(parse, data, where, problems)

    return lambda pairs: {name: write(value) for name, value in pairs}, read


def _parsed(parse: Callable[[str], Any], texts: dict[str, str], where: str, problems: list[str]) -> Any:
    """(name, value) of every text; None if one cannot be parsed."""
    found = []
    for name, text in texts.items():
        try:
            found.append((name, parse(text)))
        except PlanError as error:
            problems.append(f"{where}: {name}: {error}")
    return tuple(found) if len(found) == len(texts) else None


def _redistribution_lines(redistributions: tuple[TensorRedistribution, ...]) -> list[list[str]]:
    """[tensor, reader, steps that readers share, steps of this reader]."""
    return [[one.tensor, one.reader, passage_text(one.shared), passage_text(one.own)] for one in redistributions]


def _redistributions(kind: Any, data: Any, where: str, problems: list[str]) -> Any:
    found = []
    for index, line in enumerate(data if isinstance(data, list) else [data]):
        if not isinstance(line, list) or len(line) != 4 or any(not isinstance(text, str) for text in line):
            problems.append(f"{where}[{index}] must be [tensor, reader, shared steps, own steps], got {line!r}")
            return None
        passages = _parsed(parse_passage, {"shared": line[2], "own": line[3]}, f"{where}[{index}]", problems)
        if passages is None:
            return None
        found.append(TensorRedistribution(line[0], line[1], *(passage for _, passage in passages)))
    return tuple(found)


def _split(kind: Any, data: Any, where: str, problems: list[str]) -> Any:
    if not isinstance(data, dict):
        problems.append(f"{where} must be an object from module paths to stages, got {data!r}")
        return None
    wrong = {path: stage for path, stage in data.items() if type(stage) is not int}
    problems += [f"{where}: '{path}' must have a stage number, got {stage!r}" for path, stage in wrong.items()]
    return tuple(data.items()) if not wrong else None


_LATER = (
    *("layerwise", "keeps_products", "regather"),
    *("gradient_bytes", "optimizer_bytes", "transient_bytes", "usable_memory", "work"),
)
"""Fields that formats of before did not have: left out at their default, so that the checksums of such files hold."""

_SPECIAL: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any, str, list[str]], Any]]] = {
    # field: (to JSON, from JSON)
    "operators": (_operator_lines, _operators),
    "split": (dict, _split),
    "strategies": _named_texts(strategy_text, parse_strategy),
    "parameters": _named_texts(stored_text, parse_stored),
    "redistributions": (_redistribution_lines, _redistributions),
}
