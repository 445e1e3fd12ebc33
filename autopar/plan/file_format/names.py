"""Lines of a plan file that name several operators or parameters of equal modules.

line                                        names
"mlp.gate,up: linear#0"                     mlp.gate/linear#0, mlp.up/linear#0: modules beside each other
"mlp: mul add#1"                            every mul of mlp, whatever its number, and mlp/add#1
"mlp/add#1"                                 the operator's key, as well
"*_norm: mul"                               of modules beside each other: those whose names match and that have a mul
"mlp.gate,up: weight bias"                  of parameters: mlp.gate.weight, mlp.gate.bias, mlp.up.weight, ...
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

LINE = re.compile(r"([^:\s]*): (\S+(?: \S+)*)")
_FEWEST = 2  # characters of a pattern besides "*"
_PATH = re.compile(r"[^:\s,*]*")  # of a module that a line can name
_NAME = re.compile(r"[^:\s]+")
OPERATORS, PARAMETERS = "/", "."  # between a module's path and the name
OUTPUT = "> "  # and a tensor: the reader of what a stage sends on, which is "" in a file


class Known(NamedTuple):
    """The operators or the parameters that lines may name."""

    separator: str
    names: Mapping[str, Sequence[str]]  # by module
    keys: frozenset[str]

    @classmethod
    def of(cls, keys: Iterable[str], separator: str) -> Known:
        listed = list(keys)
        names: dict[str, list[str]] = defaultdict(list)
        for key in listed:
            module, name = split(key, separator)
            names[module].append(name)
        return cls(separator, names, frozenset(listed))

    def matching(self, path: str, names: Sequence[str]) -> list[str]:
        """Modules of a path such as `mlp.gate,up` or `*_norm`; of several, those that have some of the names."""
        parent, dot, last = path.rpartition(".")
        if "*" not in last:
            return [f"{parent}{dot}{beside}" for beside in last.split(",")]
        found = []
        before, _, after = last.partition("*")
        for module, mine in self.names.items():
            own_parent, _, name = module.rpartition(".")
            beside = own_parent == parent and len(name) >= len(last) - 1
            if not beside or not name.startswith(before) or not name.endswith(after):
                continue
            if self.separator == PARAMETERS or any(one in names or _kind(one) in names for one in mine):
                found.append(module)
        return found


def split(key: str, separator: str) -> tuple[str, str]:
    """(module, name)"""
    module, _, name = key.rpartition(separator)
    return module, name


def joined(module: str, name: str, separator: str) -> str:
    """A parameter of the model itself has no module."""
    return f"{module}{separator}{name}" if module or separator == OPERATORS else name


def lines_for(chosen: Iterable[str], known: Known, others: Set[str] = frozenset()) -> list[str]:
    """Lines that name exactly these of the known keys, and perhaps some `others`, which are named by their numbers
    elsewhere."""
    by_module: dict[str, list[str]] = defaultdict(list)
    lines: list[str] = []
    for key in chosen:
        module, name = split(key, known.separator)
        if _PATH.fullmatch(module) and _NAME.fullmatch(name) and joined(module, name, known.separator) == key:
            by_module[module].append(name)
        else:
            lines.append(key)
    beside: dict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    for module, names in by_module.items():
        parent, dot, last = module.rpartition(".")
        short = _short(module, names, known, others) if known.separator == OPERATORS else names
        beside[f"{parent}{dot}", tuple(short)].append(last)
    for (parent, some), modules in beside.items():
        lines.append(f"{parent}{_together(parent, modules, some, known)}: {' '.join(some)}")
    return lines


def _together(parent: str, modules: Sequence[str], names: Sequence[str], known: Known) -> str:
    """`*_norm` of modules beside each other, if no other one there would be named; or `gate,up`."""
    before, after = _common(modules), _common([module[::-1] for module in modules])[::-1]
    patterns = [f"*{after}", f"{before}*"] if len(modules) > 1 else []
    for pattern in sorted(patterns, key=len, reverse=True):
        if len(pattern) > _FEWEST and set(known.matching(f"{parent}{pattern}", names)) == {
            f"{parent}{m}" for m in modules
        }:
            return pattern
    return ",".join(modules)


def _common(texts: Sequence[str]) -> str:
    """What all texts begin with."""
    first, last = min(texts), max(texts)
    n = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:n]


def _short(module: str, names: Sequence[str], known: Known, others: Set[str]) -> list[str]:
    """`mul` for all operators mul#0, mul#1 ... of a module, unless some are left."""
    left = {_kind(name) for name in known.names[module] if name not in names and f"{module}/{name}" not in others}
    return list(dict.fromkeys(name if _kind(name) in left or not _kind(name) else _kind(name) for name in names))


def _kind(name: str) -> str:
    return name.rpartition("#")[0]


class Named(NamedTuple):
    """What a line names."""

    keys: list[str]
    missing: list[str]  # keys, as the line says them, that nothing known has


def named(line: str, known: Known) -> Named:
    """A name without a number means every operator of that name."""
    if line in known.keys or line.startswith(OUTPUT):
        return Named([line], [])
    match = LINE.fullmatch(line)
    if match is None:
        return Named([line], []) if known.separator == PARAMETERS else Named([], [line])
    found: dict[str, None] = {}
    modules = known.matching(match[1], match[2].split(" "))
    missing = [line] if not modules else []
    for module in modules:
        names = known.names.get(module, ())
        for name in match[2].split(" "):
            if known.separator == PARAMETERS:
                found[joined(module, name, PARAMETERS)] = None
                continue
            mine = [name] if name in names else [one for one in names if _kind(one) == name]
            if not mine:
                missing.append(joined(module, name, known.separator))
            found |= dict.fromkeys(joined(module, one, known.separator) for one in mine)
    return Named(list(found), missing)
