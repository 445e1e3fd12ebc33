"""Format 3 of a plan file: the fields of format 2, with equal layers written once, and shorter where people edit.

field of format 2                                     here
operators, strategies, parameters, redistributions,   rows and layers (`folding.py`), definitions under "layers"
exchanges, repeated
exchanges [{"collective": "all_reduce", ...}, ...]    "exchanges": [[operator, tensor, 3], ...]: collectives[3]
recompute, selective, layerwise, keeps_products       "recompute": "full", as `Plan.by_hand` calls it
mesh [2, 4], axes ["data", "tensor"]                  "mesh": {"data": 2, "tensor": 4}
backward_bytes of a transfer                          left out where they are its forward_bytes
device_kinds ["H100", "H100", ...]                    "device_kinds": "H100", if all are
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from autopar.hints.module_paths import near
from autopar.plan.file_format.collectives import Collectives
from autopar.plan.file_format.fields import OPERATOR_LINE, UNREADABLE, operator_lines
from autopar.plan.file_format.folding import Definitions, Folded, Item, Row, fold, unfolded
from autopar.plan.recompute import NAMES, RECOMPUTE, Recompute, recompute_flags
from autopar.sharding.stage_sharding import totals

_LAYERS = "layers"
_FIRST = ("n_microbatches", "schedule", "batch_size", "training", "predicted_step_time")  # in a file, before the stages
_FLAGS = ("recompute", "selective", "layerwise", "keeps_products")
_DEFAULT = "A"
_MOST_LAYERS = 100_000  # of one entry
_REFERENCE = re.compile(r"(?:(?P<parent>.+)\.)?(?P<first>0|[1-9]\d{0,8})(?:-(?P<last>\d{1,9}))?")
_ENTRY = re.compile(r"(?P<path>\S+)(?: as (?P<name>\S+))?(?: from (?P<start>\S+))?(?: before (?P<stop>\S+))?")
_PART = re.compile(r"as (?P<name>[^\[\] ]+)(?:\[(?P<start>\d{0,9}):(?P<stop>\d{0,9})\])?")
_COLLECTIVES = "collectives"
_NUMBER = (int, float)


class _Kind(NamedTuple):
    """How a field with rows is written. `read` yields rows and what is folded, or says what is wrong."""

    name: str
    sharding: bool  # of a stage's sharding rather than of the stage
    rows: Callable[[Any], list[Row]]  # of its value in format 2
    value: Callable[[list[Row]], Any]
    subject: Callable[[Row], str]
    write: Callable[[Sequence[Item], Any], Any]  # items and the definitions by parent, as JSON
    read: Callable[[Any], Iterator[Row | _Reference | str]]
    pairs: bool = False  # rows are (name, value), and the last one of a name counts


class _Reference(NamedTuple):
    """Layers named in a file."""

    text: str
    path: str
    name: str  # of a definition
    start: str | int | None = None  # of the definition's rows: the name or the number of the first one
    stop: str | int | None = None  # ... and of the one behind the last one


# -- writing ----------------------------------------------------------------------------------------------------------


def layered(flat: dict[str, Any]) -> dict[str, Any]:
    """The fields of format 2 as format 3."""
    stages = [dict(stage) for stage in flat["stages"]]
    for stage in stages:
        if "sharding" in stage:
            stage["sharding"] = _with_named_axes(stage["sharding"])
        mode = _mode(stage)
        for flag in _FLAGS:
            stage.pop(flag, None)
        if mode is not Recompute.NONE:
            stage["recompute"] = NAMES[mode]
    collectives = Collectives()
    for stage in stages:
        if "exchanges" in stage.get("sharding", ()):
            _leave_out_totals(stage["sharding"])
            stage["sharding"]["exchanges"] = collectives.rows(stage["sharding"]["exchanges"])
    layers: dict[str, dict[str, Any]] = {}
    alone: dict[int, dict[str, Folded]] = defaultdict(dict)  # by sharding and field: the layers that are all it has
    for kind in _KINDS:
        holders = [h for h in (s.get("sharding") if kind.sharding else s for s in stages) if h and kind.name in h]
        lists = [kind.rows(holder[kind.name]) for holder in holders]
        folded, definitions = fold(lists, kind.subject, exceptions=kind.pairs)
        if any(_expanded(kind, items, definitions) != rows for items, rows in zip(folded, lists, strict=True)):
            folded, definitions = [list(rows) for rows in lists], {}  # names that look like those of folded layers
        for holder, items in zip(holders, folded, strict=True):
            holder[kind.name] = kind.write(items, definitions)
            if kind.sharding and len(items) == 1 and isinstance(items[0], Folded) and items[0].part == (0, None):
                alone[id(holder)][kind.name] = items[0]
        for parent, found in definitions.items():
            mine = {name: kind.write(rows, definitions) for name, rows in found.rows.items()}
            layers.setdefault(parent, {})[kind.name] = mine
    for stage in stages:
        if "sharding" in stage:
            stage["sharding"] = _with_layers_alone(stage["sharding"], alone[id(stage["sharding"])], layers)
    first = {name: flat[name] for name in _FIRST if name in flat and not (name == "training" and flat[name])}
    rest = {name: value for name, value in flat.items() if name not in (*_FIRST, "stages")}
    if "transfers" in rest:
        rest["transfers"] = [_short_transfer(one) for one in rest["transfers"]]
    rest = _without(rest, "one_worker")
    kinds = rest.get("device_kinds")
    if kinds and len(set(kinds)) == 1 and len(kinds) == len(flat.get("devices", ())):
        rest["device_kinds"] = kinds[0]
    shared = {_LAYERS: layers, _COLLECTIVES: collectives.table}
    return {**first, "stages": stages, **{name: value for name, value in shared.items() if value}, **rest}


def _short_transfer(transfer: dict[str, Any]) -> dict[str, Any]:
    """Without the bytes of gradients if they are those of values, as they mostly are."""
    same = transfer["backward_bytes"] == transfer["forward_bytes"]
    short = _without(transfer, "blocking")
    return {name: value for name, value in short.items() if not (same and name == "backward_bytes")}


def _with_layers_alone(sharding: dict[str, Any], alone: dict[str, Folded], layers: dict[str, Any]) -> dict[str, Any]:
    """One reference for all fields of a sharding that have no more than the same layers."""
    if not alone:
        return sharding
    common, times = Counter(alone.values()).most_common(1)[0]
    mine = {name for name, folded in alone.items() if folded == common}
    defined = {name for name, found in layers[common.parent].items() if common.definition in found}
    others = [kind for kind in _KINDS if kind.sharding and kind.name in defined - mine]
    if times < 2 or any(kind.pairs or kind.name not in sharding for kind in others):
        return sharding  # a reader would take such a field from the layers
    rest = {name: value for name, value in sharding.items() if name not in mine | {"mesh"}}
    return {"mesh": sharding["mesh"], _LAYERS: f"{common.path} as {common.definition}", **rest}


def _without(fields: dict[str, Any], flag: str) -> dict[str, Any]:
    """The fields, but for a flag that is not set."""
    return {name: value for name, value in fields.items() if name != flag or value}


def _leave_out_totals(sharding: dict[str, Any]) -> None:
    """Without sums that follow from other fields; `null` where there are none although there could be."""
    for name, value in _totals(sharding).items():
        if sharding.get(name) == value:
            del sharding[name]
        else:
            sharding.setdefault(name, None)


def _totals(sharding: dict[str, Any]) -> dict[str, Any]:
    """By field, what exchanges and repeated work add up to."""
    each = ((one["nbytes"], one["seconds"]) for one in sharding["exchanges"] if not one.get("once"))
    repeated = (one["seconds"] for one in sharding.get("repeated", ()))
    return dict(zip(("collective_bytes", "collective_time", "repeated_time"), totals(each, repeated), strict=True))


def _with_named_axes(sharding: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in sharding.items() if name not in ("mesh", "axes")}
    return {"mesh": dict(zip(sharding["axes"], sharding["mesh"], strict=True)), **rest}


def _mode(stage: dict[str, Any]) -> Recompute:
    flags = {name: stage.get(name, False) for name in _FLAGS}
    return RECOMPUTE[next(name for name in RECOMPUTE if recompute_flags(name) == flags)]


def _expanded(kind: _Kind, items: Sequence[Item], definitions: dict[str, Definitions]) -> list[Row]:
    rows: list[Row] = []
    for item in items:
        rows += unfolded(item, definitions[item.parent].rows[item.definition]) if isinstance(item, Folded) else [item]
    return list(dict(rows).items()) if kind.pairs else rows


def _as(folded: Folded) -> str:
    return f" as {folded.definition}" if folded.definition != _DEFAULT else ""


def _labels(rows: Sequence[Row]) -> list[str]:
    """What the rows of a definition are called: `mlp/linear#0`."""
    return [str(row[0]).removeprefix("@").removeprefix(".") for row in rows]


def _ends(folded: Folded, definitions: dict[str, Definitions]) -> str:
    """` from mlp/linear#0 before /add#1`; "" for a whole layer."""
    labels, (start, stop) = _labels(definitions[folded.parent].rows[folded.definition]), folded.part
    return f" from {labels[start]}" * (start > 0) + (f" before {labels[stop]}" if stop is not None else "")


# -- reading ----------------------------------------------------------------------------------------------------------


def flattened(data: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Format 3 as the fields of format 2, as far as it can be read; what cannot goes into `problems`."""
    data = dict(data)
    definitions = _Definitions(data.pop(_LAYERS, {}), problems)
    collectives = Collectives.read(data.pop(_COLLECTIVES, []), problems)
    if isinstance(data.get("device_kinds"), str):
        devices = data.get("devices", [])
        data["device_kinds"] = [data["device_kinds"]] * len(devices) if isinstance(devices, list) else UNREADABLE
    if isinstance(data.get("transfers"), list):
        data["transfers"] = [
            {"backward_bytes": one.get("forward_bytes", UNREADABLE), **one} if isinstance(one, dict) else one
            for one in data["transfers"]
        ]
    if isinstance(data.get("stages"), list):
        data["stages"] = [
            _flat_stage(stage, f"stages[{number}].", definitions, collectives, problems)
            if isinstance(stage, dict)
            else stage
            for number, stage in enumerate(data["stages"])
        ]
    return data


def _flat_stage(
    stage: dict[str, Any], where: str, definitions: _Definitions, collectives: Collectives, problems: list[str]
) -> dict[str, Any]:
    stage = dict(stage)
    for flag in _FLAGS[1:]:
        if flag in stage:
            problems.append(f"{where}{flag} is unknown; write 'recompute' with one of {', '.join(RECOMPUTE)}")
            del stage[flag]
    name = stage.pop("recompute", "none")
    if isinstance(name, str) and name in RECOMPUTE:
        stage |= {flag: True for flag, on in recompute_flags(name).items() if on}
    else:
        problems.append(f"{where}recompute must be one of {', '.join(RECOMPUTE)}, got {name!r}")
    sharding = stage.get("sharding")
    if isinstance(sharding, dict):
        stage["sharding"] = sharding = dict(sharding)
        mesh = sharding.get("mesh")
        if isinstance(mesh, dict):
            sharding["mesh"], sharding["axes"] = list(mesh.values()), list(mesh)
        elif "mesh" in sharding:
            problems.append(f"{where}sharding.mesh must be an object from axes to numbers of devices, got {mesh!r}")
            sharding["mesh"], sharding["axes"] = [1], ["unknown"]
        _take_from_layers(sharding, f"{where}sharding.", definitions, problems)
    for kind in _KINDS:
        holder, place = (sharding, f"{where}sharding.") if kind.sharding else (stage, where)
        if isinstance(holder, dict) and kind.name in holder:
            holder[kind.name] = definitions.rows_of(kind, holder[kind.name], f"{place}{kind.name}")
    if isinstance(sharding, dict) and isinstance(sharding.get("exchanges"), list):
        sharding["exchanges"] = collectives.exchanges(sharding["exchanges"], f"{where}sharding.exchanges", problems)
        # Values that are no numbers are refused by whoever reads the fields.
        with contextlib.suppress(TypeError, OverflowError, ValueError):
            sharding |= {name: value for name, value in _totals(sharding).items() if name not in sharding}
    return stage


def _take_from_layers(sharding: dict[str, Any], where: str, definitions: _Definitions, problems: list[str]) -> None:
    """Put the reference to layers in the place of all fields that are left out and that these layers have. Rows by name
    that the sharding has besides are exceptions."""
    if _LAYERS not in sharding:
        return
    text = sharding.pop(_LAYERS)
    found = _ENTRY.fullmatch(text) if isinstance(text, str) else None
    match = _REFERENCE.fullmatch(found["path"]) if found is not None else None
    if found is None or match is None or not found["name"]:
        problems.append(f"{where}{_LAYERS} must be like 'model.layers.0-7 as A', got {text!r}")
        return
    kinds = [kind for kind in _KINDS if kind.sharding and definitions.has(match["parent"] or "", kind, found["name"])]
    if not kinds:
        problems.append(f"{where}{_LAYERS}: '{text}': '{_LAYERS}' defines nothing '{found['name']}' of these layers")
    for kind in kinds:
        reference = f"as {found['name']}"
        if kind.pairs and isinstance(sharding.get(kind.name, {}), dict):
            sharding[kind.name] = {found["path"]: reference} | sharding.get(kind.name, {})
        elif not kind.pairs:
            sharding.setdefault(kind.name, [[found["path"], reference]])


class _Definitions:
    """What a file has under "layers"."""

    def __init__(self, layers: Any, problems: list[str]) -> None:
        self._problems = problems
        self._rows: dict[tuple[str, str], dict[str, list[Row]]] = {}
        kinds = {kind.name: kind for kind in _KINDS}
        for place, parent, name, found in self._listed(layers):
            if name not in kinds:
                problems.append(f"{place} is unknown")
                continue
            for definition, value in found.items():
                rows: list[Row] = []
                for entry in kinds[name].read(value):
                    if isinstance(entry, _Reference):
                        problems.append(f"{place}.{definition}: '{entry.text}' names layers inside of a layer")
                    elif isinstance(entry, str):
                        problems.append(f"{place}.{definition}{entry}")
                    else:
                        rows.append(entry)
                self._rows.setdefault((parent, name), {})[definition] = rows

    def _listed(self, layers: Any) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
        """(place, parent, field, definitions)"""
        if not isinstance(layers, dict) or any(not isinstance(fields, dict) for fields in layers.values()):
            self._problems.append(f"{_LAYERS} must be an object from module paths to objects, got {layers!r}")
            return
        for parent, fields in layers.items():
            for name, found in fields.items():
                place = f"{_LAYERS}['{parent}'].{name}"
                if isinstance(found, dict):
                    yield place, parent, name, found
                else:
                    self._problems.append(f"{place} must be an object from names to definitions, got {found!r}")

    def has(self, parent: str, kind: _Kind, name: str) -> bool:
        return name in self._rows.get((parent, kind.name), ())

    def rows_of(self, kind: _Kind, value: Any, where: str) -> Any:
        """The field's value in format 2."""
        rows: list[Row] = []
        for entry in kind.read(value):
            if isinstance(entry, str):
                self._problems.append(f"{where}{entry}")
            elif isinstance(entry, _Reference):
                try:
                    rows += self._expanded(kind, entry)
                except ValueError as error:
                    self._problems.append(f"{where}: '{entry.text}': {error}")
            else:
                rows.append(entry)
        if not isinstance(value, (dict if kind.pairs else list)):
            return value  # whose type is refused by whoever reads the fields
        if kind.pairs:
            rows = list(dict(rows).items())
        # Where nothing could be read, an empty list would be refused once more, as one without operators.
        return kind.value(rows) if rows or not value else UNREADABLE

    def _expanded(self, kind: _Kind, entry: _Reference) -> Iterator[Row]:
        """Raises ValueError."""
        match = _REFERENCE.fullmatch(entry.path)
        assert match is not None, "readers refuse other paths"
        parent, first, last = match["parent"] or "", int(match["first"]), int(match["last"] or match["first"])
        known = self._rows.get((parent, kind.name))
        if known is None:
            defined = [name for name, field in self._rows if field == kind.name]
            raise ValueError(f"'{_LAYERS}' defines no {kind.name} of layers of '{parent}'{near(parent, defined)}")
        if entry.name not in known:
            raise ValueError(
                f"'{_LAYERS}' defines no {kind.name} '{entry.name}' of '{parent}'; it has {', '.join(known)}"
            )
        if not first <= last < first + _MOST_LAYERS:
            raise ValueError(f"a range of layers goes from the lower number to the higher, at most {_MOST_LAYERS}")
        rows = known[entry.name]
        labels = _labels(rows)
        ends: list[int | None] = []
        for label in (entry.start, entry.stop):
            if isinstance(label, str) and label not in labels:
                raise ValueError(f"such a layer has no '{label}'{near(label, labels)}")
            ends.append(labels.index(label) if isinstance(label, str) else label)
        return unfolded(Folded(parent, first, last, entry.name, (ends[0] or 0, ends[1])), rows)


# -- fields -----------------------------------------------------------------------------------------------------------


def _operator_rows(lines: list[str]) -> list[Row]:
    return [
        (f"{path}/{name}",) for path, _, names in (line.rpartition(": ") for line in lines) for name in names.split()
    ]


def _write_operators(items: Sequence[Item], definitions: dict[str, Definitions]) -> list[str]:
    found: list[str] = []
    keys: list[str] = []
    for item in items:
        if not isinstance(item, Folded):
            keys.append(item[0])
            continue
        found += operator_lines(keys)
        keys = []
        found.append(f"{item.path}{_as(item)}{_ends(item, definitions)}")
    return found + operator_lines(keys)


def _read_operators(value: Any) -> Iterator[Row | _Reference | str]:
    for index, entry in enumerate(value if isinstance(value, list) else ()):
        line = OPERATOR_LINE.fullmatch(entry) if isinstance(entry, str) else None
        if line is not None:
            yield from ((f"{line[1]}/{name}",) for name in line[2].split(" "))
            continue
        found = _ENTRY.fullmatch(entry) if isinstance(entry, str) else None
        if found is None or _REFERENCE.fullmatch(found["path"]) is None:
            yield (
                f"[{index}] must be like 'module.path: linear#0 relu#1', or layers such as 'model.layers.0-7', got "
                f"{entry!r}"
            )
        else:
            yield _Reference(entry, found["path"], found["name"] or _DEFAULT, found["start"], found["stop"])


def _write_pairs(items: Sequence[Item], definitions: dict[str, Definitions]) -> dict[str, str]:
    """Neighbouring operators of one module with one value make one entry, `mlp: linear#0 add#1`."""
    found: dict[str, str] = {}
    for (module, text), run in itertools.groupby(items, key=_module_and_value):
        for item in run if module is None else ():
            if isinstance(item, Folded):
                found[item.path] = f"as {item.definition}{_ends(item, definitions)}"
            else:
                found[item[0]] = item[1]
        if module is not None:
            line = operator_lines(row[0] for row in run)[0]
            found[line if " " in line.partition(": ")[2] else line.replace(": ", "/")] = text
    return found


def _module_and_value(item: Item) -> tuple[str | None, str]:
    """Of an operator's row; (None, "") for other ones."""
    if isinstance(item, Folded):
        return None, ""
    module, slash, operator = item[0].rpartition("/")
    return (module, item[1]) if slash and OPERATOR_LINE.fullmatch(f"{module}: {operator}") else (None, "")


def _read_pairs(value: Any) -> Iterator[Row | _Reference | str]:
    for name, text in value.items() if isinstance(value, dict) else ():
        found = _ENTRY.fullmatch(f"{name} {text}") if isinstance(text, str) and text.startswith("as ") else None
        line = OPERATOR_LINE.fullmatch(name)
        if found is not None and _REFERENCE.fullmatch(name):
            yield _Reference(f"{name}: {text}", name, found["name"], found["start"], found["stop"])
        elif line is not None:
            yield from ((f"{line[1]}/{operator}", text) for operator in line[2].split(" "))
        else:
            yield name, text


def _write_lists(items: Sequence[Item], _: Any) -> list[list[Any]]:
    return [_reference_row(item) if isinstance(item, Folded) else list(item) for item in items]


def _reference_row(item: Folded) -> list[str]:
    start, stop = item.part
    part = "" if item.part == (0, None) else f"[{start or ''}:{'' if stop is None else stop}]"
    return [item.path, f"as {item.definition}{part}"]


def _row_reference(row: Any) -> _Reference | None:
    """What `["model.layers.0-7", "as A[2:]"]` names."""
    if not isinstance(row, list) or len(row) != 2 or not isinstance(row[0], str) or not isinstance(row[1], str):
        return None
    found = _PART.fullmatch(row[1])
    if found is None or not _REFERENCE.fullmatch(row[0]):
        return None
    start, stop = (int(text) if text else None for text in (found["start"], found["stop"]))
    return _Reference(" ".join(row), row[0], found["name"], start, stop)


def _lists(
    *types: type | tuple[type, ...], more: type | None = None
) -> Callable[[Any], Iterator[Row | _Reference | str]]:
    """Reads rows of these types, and of any number of values of the type `more`."""

    def read(value: Any) -> Iterator[Row | _Reference | str]:
        for index, row in enumerate(value if isinstance(value, list) else ()):
            reference = _row_reference(row)
            if reference is not None:
                yield reference
            elif not isinstance(row, list) or len(row) < len(types) or (len(row) > len(types) and more is None):
                example = "['model.layers.0-7', 'as A']"
                yield f"[{index}] must be a list of {len(types)} values, or layers such as {example}, got {row!r}"
            else:
                each = [*types, *[more or object] * (len(row) - len(types))]
                wrong = [cell for cell, kind in zip(row, each, strict=True) if not isinstance(cell, kind)]
                if wrong:
                    yield f"[{index}] has a value of a wrong type, {wrong[0]!r}, in {row!r}"
                else:
                    yield tuple(row)

    return read


def _write_redistributions(items: Sequence[Item], definitions: Any) -> list[list[Any]]:
    """[tensor, steps that readers share, steps of each reader, readers ...]."""
    found: list[list[Any]] = []
    for item in items:
        if isinstance(item, Folded):
            found += _write_lists([item], definitions)
            continue
        tensor, reader, *passages = item
        if found and found[-1][:3] == [tensor, *passages]:
            found[-1].append(reader)
        else:
            found.append([tensor, *passages, reader])
    return found


def _read_redistributions(value: Any) -> Iterator[Row | _Reference | str]:
    for entry in _lists(str, str, str, str, more=str)(value):
        if isinstance(entry, tuple) and not isinstance(entry, _Reference):
            tensor, shared, own, *readers = entry
            yield from ((tensor, reader, shared, own) for reader in readers)
        else:
            yield entry


def _write_repeated(items: Sequence[Item], definitions: Any) -> list[list[Any]]:
    """Neighbouring operators of one module make one row, `["mlp: linear#0 add#1", 1e-6, 2e-6]`."""
    found: list[list[Any]] = []
    for module, run in itertools.groupby(items, key=lambda item: _module_and_value(item)[0]):
        rows = list(run)
        if module is None:
            found += _write_lists(rows, definitions)
        else:
            found.append([operator_lines(row[0] for row in rows)[0], *(row[1] for row in rows)])
    return found


def _read_repeated(value: Any) -> Iterator[Row | _Reference | str]:
    each = _lists(str, _NUMBER)
    for index, row in enumerate(value if isinstance(value, list) else ()):
        line = OPERATOR_LINE.fullmatch(row[0]) if isinstance(row, list) and row and isinstance(row[0], str) else None
        names = [f"{line[1]}/{name}" for name in line[2].split(" ")] if line is not None else []
        if names and len(names) + 1 != len(row):
            yield f"[{index}] has {len(names)} operators and {len(row) - 1} numbers of seconds, {row!r}"
        for one in each([[name, seconds] for name, seconds in zip(names, row[1:], strict=False)] if names else [row]):
            yield one if not isinstance(one, str) else f"[{index}]{one[3:]}"


_KINDS = (
    _Kind(
        "operators",
        False,
        _operator_rows,
        lambda rows: operator_lines(row[0] for row in rows),
        lambda row: str(row[0]),
        _write_operators,
        _read_operators,
    ),
    *(
        _Kind(
            name,
            True,
            lambda value: list(value.items()),
            dict,
            lambda row: str(row[0]),
            _write_pairs,
            _read_pairs,
            True,
        )
        for name in ("strategies", "parameters")
    ),
    _Kind(
        "redistributions",
        True,
        lambda value: [tuple(row) for row in value],
        lambda rows: [list(row) for row in rows],
        lambda row: str(row[1] or row[0]),
        _write_redistributions,
        _read_redistributions,
    ),
    _Kind(
        "exchanges",
        True,
        lambda value: [tuple(row) for row in value],
        lambda rows: [list(row) for row in rows],
        lambda row: str(row[0]),
        _write_lists,
        _lists(str, str, more=int),
    ),
    _Kind(
        "repeated",
        True,
        lambda value: [(one["operator"], one["seconds"]) for one in value],
        lambda rows: [dict(zip(("operator", "seconds"), row, strict=True)) for row in rows],
        lambda row: str(row[0]),
        _write_repeated,
        _read_repeated,
    ),
)
