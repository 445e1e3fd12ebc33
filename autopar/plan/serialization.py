"""A plan as a JSON file to be read and edited by hand.

    {
    "autopar_plan": "6.1", "checksum": "5f0c...", "n_microbatches": 8, "schedule": "1f1b", ...
    "stages": [
     {"devices": ["0.0-1:H100"], "operators": ["embed: embedding#0", "layers.0-7"], "figures": "A",
     "sharding": {"mesh": {"tensor": 2}, "layers": "A", "strategies": {"S0 R -> P": "embed: embedding"}}},
     ...
    ],
    "layers": {"layers": {"operators": {"A": ["attention.q: linear", "attention.k: linear", ...]},
     "strategies": {"A": {"R S0 -> S2": ["attention.q,k,v: linear", "mlp.*_in: linear"], ...}}}},
    ...

To move a layer, edit the ranges of layers: `layers.0-8` and `layers.9-15`. To move an operator, write the line of its
module, `layers.8.attention.q: linear#0`, or say where the stage ends, `layers.0-8 before mlp/mul#0` (and `layers.8-15
from mlp/mul#0` in the next stage). What the operators of equal layers have stands once, under "layers"; what a stage
says of an operator overrides it (`file_format/writing.py`).

"every_stage" has fields of all stages that do not have them themselves, and "figures" numbers of some. Other keys are
the names of the fields of `Plan`, `Stage`, `StageTransfer`, `StageSharding` and what these hold. The checksum tells a
plan that was edited, whose predictions no longer belong to it; editors need not update it.

The version is "format.addition". An addition only has fields that older readers can leave out: they say so in a note.
Another format is refused. Formats 5, 4 and 3, which say the same at more length, and format 2, without layers, can be
read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from autopar.plan.file_format import earlier, reading
from autopar.plan.file_format.fields import plain, read_fields
from autopar.plan.file_format.json_text import json_text
from autopar.plan.file_format.writing import layered

FORMAT, ADDITION = 6, 1
_EARLIER = (5, 4, 3)  # formats with layers
_FLAT = 2  # the format without layers
_CHECKSUM_DIGITS = 16
_MOST_DIGITS = 30  # of a whole number: longer ones are no quantity, and too large for a float
_VERSION = re.compile(r"(\d{1,9})\.(\d{1,9})")


def write(plan: Any) -> str:
    """The JSON of a Plan, in format 2 where its names look like those of folded layers: it reads as the same Plan."""
    flat = plain(_saved(plan))
    text = json_text({"autopar_plan": f"{FORMAT}.{ADDITION}", "checksum": _checksum(flat), **layered(flat)})
    found = read(text, type(plan))
    if not found.problems and all(value == getattr(plan, name) for name, value in found.values.items()):
        return text
    return json.dumps({"autopar_plan": _FLAT, "checksum": _checksum(flat), **flat}, indent=1, allow_nan=False)


def checksum(plan: Any) -> str:
    """A checksum of everything in a Plan."""
    return _checksum(plain(_saved(plan)))


def _saved(plan: Any) -> Any:
    """A Plan without the memory that was free on devices at hand."""
    if plan.assumed is not None:
        return plan
    return dataclasses.replace(plan, stages=tuple(dataclasses.replace(s, usable_memory=None) for s in plan.stages))


def _checksum(flat: Any) -> str:
    return hashlib.sha256(json.dumps(flat, allow_nan=False).encode()).hexdigest()[:_CHECKSUM_DIGITS]


@dataclasses.dataclass
class Reading:
    """What a file says."""

    values: dict[str, Any]  # by field; None where one cannot be read, also inside a nested dataclass
    checksum: Any  # as recorded
    problems: list[str]  # everything wrong
    left_out: list[str]  # fields of a later addition to the format


def read(text: str, kind: Any) -> Reading:
    """The dataclass `kind` that `write` wrote. Raises ValueError for text that is not JSON, or of another version."""
    try:
        data = json.loads(text, object_pairs_hook=_Object, parse_int=_parsed_int)
        problems = list(_twice(data, ""))
    except RecursionError:
        raise ValueError("lists in lists too deep to read") from None
    if not isinstance(data, dict):
        raise ValueError(f"it holds no JSON object but {'a list' if isinstance(data, list) else repr(data)}")
    version, addition = _version(data.pop("autopar_plan", None))
    recorded = data.pop("checksum", None)
    if version == FORMAT:
        data = reading.flattened(data, problems)
    elif version in _EARLIER:
        data = earlier.flattened(data, problems)
    values = read_fields(kind, data, "", problems)
    unknown = [problem for problem in problems if problem.endswith(" is unknown")] if addition > ADDITION else []
    problems = [problem for problem in problems if problem not in unknown]
    return Reading(values, recorded, problems, [problem.removesuffix(" is unknown") for problem in unknown])


class _Object(dict[str, Any]):
    """A JSON object that knows which names appear in it twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]


def _twice(data: Any, where: str) -> Iterator[str]:
    """Names that an object has twice, with their places."""
    if isinstance(data, _Object):
        yield from (f"{where}{'.' if where else ''}{name} appears twice" for name in data.twice)
    if isinstance(data, (dict, list)):
        for name, part in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _twice(part, f"{where}[{name}]" if isinstance(data, list) else f"{where}.{name}".lstrip("."))


def _version(found: Any) -> tuple[int, int]:
    """(format, addition). Raises ValueError for those that cannot be read."""
    if found == _FLAT and type(found) is int:
        return _FLAT, 0
    match = _VERSION.fullmatch(found) if isinstance(found, str) else None
    if match is not None and int(match[1]) in (FORMAT, *_EARLIER):
        return int(match[1]), int(match[2])
    later = " a later autopar wrote this file;" if match is not None and int(match[1]) > FORMAT else ""
    raise ValueError(
        f"'autopar_plan' must be the version of the format, '{FORMAT}.{ADDITION}' or {_FLAT}, got {found!r};{later} "
        "plan again, or save the plan with this version"
    )


def _parsed_int(digits: str) -> float:
    """An int, or infinity for one with too many digits, which the checks of its field then refuse by name."""
    if len(digits) <= _MOST_DIGITS:
        return int(digits)
    return -math.inf if digits.startswith("-") else math.inf
