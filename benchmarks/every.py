"""All benchmarks behind README's table and figures, each in a process of its own, one after another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.kept import Kept, depends_on
from benchmarks.machine import CHANGING, machine_header
from benchmarks.readme import remake
from benchmarks.registry import IN_README

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent.parent / "README.md"
STDOUT = Path("-")
INTERRUPTED = 130  # exit status, as of a shell


def run_all(results: Path, *, quick: bool, fresh: bool, data: Path | None) -> int:
    """Run them, and remake README's table from full results. An interrupted run goes on where it ended.

    Returns the first exit status that is not 0.

    `data`: where one JSON file with all results goes; `STDOUT`: printed.
    """
    name = "all-quick" if quick else "all"
    kept = Kept(results / f"{name}.partial.jsonl", depends_on(machine_header(), CHANGING))
    if fresh:
        kept.drop()
    status = 0
    for one in IN_README:
        if kept.get(one) is not None and _file(results, one, quick).is_file():
            continue
        command = [sys.executable, "-m", "benchmarks", "run", one, "--results", str(results)]
        command += ["--quick"] * quick + ["--fresh"] * fresh
        try:
            done = subprocess.run(command, stdout=sys.stderr if data == STDOUT else None, check=False).returncode
        except KeyboardInterrupt:
            done = INTERRUPTED
        if done:
            print(f"{one} ended with exit status {done}", file=sys.stderr)
            status = status or done
            if done < 0 or done == INTERRUPTED:
                return status
            continue
        kept.put(one, value=True)
    there = [one for one in IN_README if kept.get(one) and _file(results, one, quick).is_file()]
    found = {one: json.loads(_file(results, one, quick).read_text()) for one in there}
    if data is not None:
        text = json.dumps(found, indent=1) + "\n"
        if data == STDOUT:
            print(text, end="")
        else:
            data.write_text(text)
    if not status:
        kept.drop()
        if not quick and results.resolve() == RESULTS.resolve() and not remake(README, results):
            print(f"{README} has no place for the measured table", file=sys.stderr)
    return status


def _file(results: Path, name: str, quick: bool) -> Path:
    return results / f"{name}{'-quick' if quick else ''}.json"
