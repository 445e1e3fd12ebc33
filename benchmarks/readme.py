"""README's measured table, from the results of `tutorial` and `gpt`: between two comments, so that it can be remade."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autopar.runtime.other_systems.independent import CEILING
from benchmarks.training import FREE, PLAIN, PLAIN_THREADS, PURE

BEGIN, END = "<!-- measured: python -m benchmarks all -->", "<!-- end of measured -->"
COLUMNS = ("tutorial", "gpt")  # benchmarks

Result = Mapping[str, Any]


def remake(readme: Path, results: Path) -> bool:
    """Write the table into the file. False where the file has no place for it."""
    text = readme.read_text()
    if BEGIN not in text or END not in text:
        return False
    found = {name: json.loads((results / f"{name}.json").read_text()) for name in COLUMNS}
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    readme.write_text(f"{before}{BEGIN}\n{section(found)}\n{END}{after}")
    return True


def section(results: Mapping[str, Result]) -> str:
    """The machine in a line, and the table."""
    machine = next(iter(results.values()))["machine"]
    rounds = {len(_row(result, PLAIN)["steps"]) for result in results.values()}
    head = (
        f"{machine['date'].split()[0]}, {machine['processor']}, torch {machine['torch']}, medians of "
        f"{' or '.join(map(str, sorted(rounds)))} rounds\n(`python -m benchmarks run tutorial`, `gpt`; "
        "[all results](docs/results.md))."
    )
    names = [result["title"] for result in results.values()]
    lines = [f"| two workers of one thread each | {' | '.join(names)} |", "|---|" + "--:|" * len(names)]
    rows: dict[str, Callable[[Result], str]] = {
        "plain model, one thread": lambda r: _seconds(_row(r, PLAIN)),
        "autopar": lambda r: _gain(_row(r, FREE), strong=True),
        "autopar, pure pipeline": lambda r: _gain(_row(r, PURE), strong=True),
        "plain model, two intra-op threads": lambda r: f"{_gain(_row(r, PLAIN_THREADS))} in its own rounds",
        "the machine's ceiling: two independent processes, half of the batch each": lambda r: _gain(_row(r, CEILING)),
        "automatic plan / best hand-made plan of the sweep, raced again": lambda r: _raced(r["finals"][0]),
        "automatic pure pipeline / best pipeline of the sweep, raced again": lambda r: _raced(r["finals"][1]),
        "predicted / measured step": lambda r: ", ".join(map(_predicted, (_row(r, FREE), _row(r, PURE)))),
    }
    lines += [f"| {name} | {' | '.join(cell(result) for result in results.values())} |" for name, cell in rows.items()]
    return "\n".join([head, "", *lines])


def _row(result: Result, name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(row for row in result["rows"] if row["name"] == name)
    return found


def _seconds(row: Mapping[str, Any]) -> str:
    return f"{row['measured']:.2f} s"


def _gain(row: Mapping[str, Any], strong: bool = False) -> str:
    gain = f"{row['speedup']:.2f}x"
    return f"{_seconds(row)}, {f'**{gain}**' if strong else gain}"


def _predicted(row: Mapping[str, Any]) -> str:
    return f"{row['predicted'] / row['measured']:.2f}"


def _raced(final: Mapping[str, Any]) -> str:
    if final["same"]:
        return "the same plan"
    low, high = final["interval"]["low"], final["interval"]["high"]
    return f"{final['over_best']:.3f} ({low:.3f} to {high:.3f})"
