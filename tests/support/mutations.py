"""Files as a careless editor, another program or a broken disk leaves them: mutations of JSON values and of texts."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

NUMBERS = st.one_of(
    st.integers(-3, 12), st.sampled_from([10**9, 10**40, -(10**40), 2**63]), st.floats(allow_nan=True, width=64)
)
WORDS = st.one_of(
    st.text(max_size=6), st.sampled_from(["", "cpu:0", "cpu:1", "S0 R -> S0", "S0R", "0", "1f1b", "gpipe", "\x1b[31m"])
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, WORDS)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=4,
)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [(value, key) for key in keys] + [place for key in keys for place in _places(value[key])]


def _mutate_once(draw: Any, data: Any) -> None:
    places = _places(data)
    if not places:
        return
    container, key = draw(st.sampled_from(places))
    how = draw(st.sampled_from(["replace", "like", "delete", "swap", "move", "rename", "repeat"]))
    if how == "replace":
        container[key] = draw(VALUES)
    elif how == "like" and isinstance(container[key], int | float):
        container[key] = draw(NUMBERS)
    elif how == "like" and isinstance(container[key], str):
        container[key] = mutated_text(draw, container[key])
    elif how == "delete":
        del container[key]
    elif how == "swap":
        other, place = draw(st.sampled_from(places))
        if container is other:
            container[key], other[place] = other[place], container[key]
    elif how == "move" and isinstance(container, list):
        lists = [value for holder, k in places if isinstance(value := holder[k], list) and value is not container[key]]
        target = draw(st.sampled_from(lists)) if lists else container
        item = container.pop(key)
        target.insert(draw(st.integers(0, len(target))), item)
    elif how == "rename" and isinstance(container, dict):
        container[draw(WORDS)] = container.pop(key)
    elif how == "repeat" and isinstance(container, list):
        container.insert(key, copy.deepcopy(container[key]))


def mutated_text(draw: Any, text: str) -> str:
    """The text with a few characters or a line removed, replaced, inserted or repeated."""
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(len(text), start + 8)))
        if draw(st.booleans()):
            text = text[:start] + draw(WORDS) + text[end:]
        else:
            lines = text.splitlines(keepends=True) or [""]
            line = draw(st.integers(0, len(lines) - 1))
            lines[line : line + 1] = [lines[line]] * draw(st.sampled_from([0, 2]))
            text = "".join(lines)
    return text


@st.composite
def mutated_json(draw: Any, text: str) -> str:
    """JSON with a few values changed, moved, missing, or broken as text."""
    data = json.loads(text)
    for _ in range(draw(st.integers(1, 3))):
        _mutate_once(draw, data)
    changed = json.dumps(data, indent=1)
    return mutated_text(draw, changed) if draw(st.integers(0, 4)) == 0 else changed


@st.composite
def mutated(draw: Any, text: str) -> str:
    return mutated_text(draw, text)


@st.composite
def mutated_bytes(draw: Any, content: bytes) -> bytes:
    """A file cut off, or with bytes overwritten."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, max(0, len(changed) - 1)))
        block = draw(st.binary(min_size=1, max_size=64))
        changed[start : start + len(block)] = block
    return bytes(changed[: draw(st.integers(0, len(changed)))]) if draw(st.booleans()) else bytes(changed)
