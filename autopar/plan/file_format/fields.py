"""The fields of a plan as JSON values by their types, without layers: format 2, and what format 5 is folded from.

Keys are the names of the fields of `Plan`, `Stage`, `StageTransfer`, `StageSharding`, `Assumptions` and `RunnerUp`.
Fields that are None or empty are left out. One line lists the operators `module.path/operator#k` of one module that
follow each other.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import types
import typing
from collections.abc import Callable, Iterable
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

UNREADABLE = object()  # in the place of a value that is refused already
OPERATOR_LINE = re.compile(r"([^:]*): (\S+#\d+(?: \S+#\d+)*)")
_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", tuple: "a list"}


def plain(value: Any) -> Any:
    """The JSON value of a dataclass, of its fields by name."""
    if dataclasses.is_dataclass(value):
        fields = ((f, getattr(value, f.name)) for f in dataclasses.fields(value))
        kept = (
            (f.name, item)
            for f, item in fields
            if item != f.default or (item not in (None, "", ()) and f.name not in _LATER)
        )
        return {name: _SPECIAL[name][0](item) if name in _SPECIAL else plain(item) for name, item in kept}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def read_fields(kind: Any, data: dict[str, Any], where: str, problems: list[str]) -> dict[str, Any]:
    """The fields of dataclass `kind`. Missing and unknown fields and values of a wrong type go into `problems`."""
    hints = typing.get_type_hints(kind)
    saved = {f.name: f for f in dataclasses.fields(kind)}
    problems += [f"{where}{name} is unknown" for name in data if name not in saved]
    values: dict[str, Any] = {}
    for name, field in saved.items():
        if name in data and data[name] is UNREADABLE:
            values[name] = None
        elif name in data:
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
            return kind(**read_fields(kind, data, f"{where}.", problems))  # type: ignore[operator]
        problems.append(f"{where} must be an object, got {data!r}")
        return kind(**{field.name: None for field in dataclasses.fields(kind)})  # type: ignore[operator]
    if type(data) is kind or (kind is float and type(data) is int):
        return data
    problems.append(f"{where} must be {_WORDS[typing.get_origin(kind) or kind]}, got {data!r}")
    return None


def operator_lines(operators: Iterable[str]) -> list[str]:
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
        match = OPERATOR_LINE.fullmatch(line)
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
    *("accumulation_time", "step_bytes", "again", "size_ratios", "barrier", "whole_batch_time"),
)
"""Fields that formats of before did not have: left out at their default, so that the checksums of such files hold."""

_SPECIAL: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any, str, list[str]], Any]]] = {
    # field: (to JSON, from JSON)
    "operators": (operator_lines, _operators),
    "split": (dict, _split),
    "strategies": _named_texts(strategy_text, parse_strategy),
    "parameters": _named_texts(stored_text, parse_stored),
    "redistributions": (_redistribution_lines, _redistributions),
}
