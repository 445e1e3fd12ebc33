"""`python -m benchmarks list | run NAME | all | diff BEFORE.json AFTER.json`.

    list [--json]
    run NAME [--quick] [--json [OUT]] [--results DIR] [--figure OUT.png] [--fresh]
    all [--quick] [--json [OUT]] [--results DIR] [--fresh]

Results are written as they come, and an interrupted run goes on where it ended. `python -m benchmarks NAME` is
`run NAME`.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from autopar import AutoparWarning, DeviceError, keep_freed_memory
from benchmarks import gpu
from benchmarks.every import INTERRUPTED, RESULTS, STDOUT, run_all
from benchmarks.kept import Kept, depends_on
from benchmarks.machine import CHANGING, machine_header
from benchmarks.output import Report, show, to_json, to_markdown
from benchmarks.published_runs.tables import TableError
from benchmarks.registry import BENCHMARKS, WITH_FIGURE, WITHOUT_KEPT_MEMORY, Run

_COMMANDS = ("list", "run", "all", "diff")


def main(arguments: Sequence[str] | None = None, *, own_process: bool = False) -> int:
    """The exit status: 0 (also where there is nothing to run), 1 for a missing package or device and for a regression
    that `diff` finds, 2 for names, options and files that cannot be used, 130 for an interrupted run.
    `own_process`: settings of the whole process may change."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["--list"]:
        given = ["list"]
    if given and given[0] not in (*_COMMANDS, "-h", "--help"):
        given = ["run", *given]
    options = _parser().parse_args(given)
    if options.command == "list":
        print(json.dumps({name: what for name, (what, _) in BENCHMARKS.items()}) if options.json else _listing())
        return 0
    if options.command == "diff":
        from benchmarks.diff import run_diff

        return run_diff(options.before, options.after, options.tolerance)
    if options.command == "all":
        unwritable = _unwritable(options)
        if unwritable:
            print(unwritable, file=sys.stderr)
            return 2
        return run_all(options.results, quick=options.quick, fresh=options.fresh, data=options.json)
    name = getattr(options, "name", None)
    if name not in BENCHMARKS:
        what = f"no benchmark {name!r}" if name else "give the name of a benchmark"
        if name is None and str(getattr(options, "json", "")) in BENCHMARKS:
            what = f"--json took {options.json} as the file to write; put the name first: run {options.json} --json"
        print(f"{what}; there are\n{_listing()}", file=sys.stderr)
        return 2
    refused = _of_another_benchmark(options) or _unusable(options) or _unwritable(options)
    if refused:
        print(refused, file=sys.stderr)
        return 2
    return _run(options, own_process)


_DEVICE = re.compile(r"cuda(:\d{1,3})?|cpu")
_FIGURES = (".png", ".svg", ".pdf")  # what a figure can be written as
_OPTIONS_OF = {
    "instances": "partition_instances",
    "tables": "published",
    "device": "gpu",
    "models": "gpu",
    "parts": "gpu",
}


def _of_another_benchmark(options: argparse.Namespace) -> str | None:
    """What is wrong with options that `run NAME` does not read."""
    for option, benchmark in _OPTIONS_OF.items():
        if getattr(options, option) and options.name != benchmark:
            return f"--{option} is an option of {benchmark}; {options.name} does not read it"
    if options.figure is not None and options.name not in WITH_FIGURE:
        return f"--figure is an option of {' and '.join(WITH_FIGURE)}; {options.name} draws none"
    return None


def _unusable(options: argparse.Namespace) -> str | None:
    """What is wrong with the values of options that `run NAME` reads."""
    try:
        gpu.check_names("model", _names(options.models), gpu.MODELS)
        gpu.check_names("part", _names(options.parts), gpu.part_names())
    except DeviceError as error:
        return str(error)
    if options.device is not None and not _DEVICE.fullmatch(options.device):
        return f"--device {options.device}: give cuda, cuda:N or cpu"
    for name in ("instances", "tables"):
        folder = getattr(options, name)
        if folder is not None and not folder.is_dir():
            return f"--{name} {folder}: there is no such folder"
    if options.figure is not None and options.figure.suffix not in _FIGURES:
        return f"--figure {options.figure}: give a name that ends in {', '.join(_FIGURES)}"
    return None


def _unwritable(options: argparse.Namespace) -> str | None:
    """Why results could not be written; found out before a benchmark runs for minutes."""
    files = {"--json": options.json, "--figure": getattr(options, "figure", None)}
    folders = {"--results": options.results}
    for name, file in files.items():
        if file is None or file == STDOUT:
            continue
        if file.is_dir():
            return f"{name} {file} is a folder; give the name of a file"
        folders[name] = file.parent
    for name, folder in folders.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            return f"{name}: cannot write in {folder}: {error.strerror or error}; give a folder that can be written"
    return None


def _run(options: argparse.Namespace, own_process: bool) -> int:
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("benchmarks").setLevel(logging.INFO)
    warnings.simplefilter("ignore", AutoparWarning)  # batch norm of micro-batches is what is measured here
    header = machine_header()
    if own_process and options.name not in WITHOUT_KEPT_MEMORY:
        header["freed memory"] = "kept by the process" if keep_freed_memory() else "given back"
    stem = _stem(options)
    kept = Kept(stem.with_suffix(".partial.jsonl"), depends_on(header, CHANGING) | _asked(options))
    if options.fresh:
        kept.drop()
    folder = options.instances or options.tables
    run = Run(options.quick, kept, folder, options.device, _names(options.models), _names(options.parts))
    try:
        report = BENCHMARKS[options.name][1](run)
    except TableError as error:
        print(error, file=sys.stderr)
        return 2
    except DeviceError as error:
        print(error, file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(f'{error}; the benchmarks need it: pip install -e ".[bench]"', file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        where = f"{kept.count} results are kept in {stem}.partial.jsonl" if kept.count else "nothing is kept"
        print(f"interrupted: {where}; the same command goes on from there", file=sys.stderr)
        return INTERRUPTED
    if report is None:
        print(_nothing_to_run(options))
        return 0
    if kept.dates:
        header["date"] = kept.dates
    console = Console(width=None if sys.stdout.isatty() else 160, stderr=options.json == STDOUT)
    show(report, header, console)
    _write(report, header, options, console)
    kept.drop()
    return 0


def _names(listed: str) -> tuple[str, ...]:
    return tuple(name for name in listed.split(",") if name)


def _asked(options: argparse.Namespace) -> dict[str, str]:
    """What the results depend on besides machine and code."""
    asked = {"device": options.device, "folder": options.instances or options.tables}
    return {name: str(value) for name, value in asked.items() if value}


def _nothing_to_run(options: argparse.Namespace) -> str:
    option, folder, needed = (
        ("--tables", options.tables, "a folder of csv files of published runs")
        if options.name == "published"
        else (
            "--instances",
            options.instances,
            "the folder with LayerGraphs/ and OperatorGraphs/ of github.com/msr-fiddle/dnn-partitioning",
        )
    )
    why = f"{option} is missing" if folder is None else f"there is nothing to run in {folder}"
    return f"skipped: {why}; give {option} DIR, {needed}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Benchmarks of autopar.")
    commands = parser.add_subparsers(dest="command", metavar="list | run NAME | all | diff BEFORE AFTER")
    listing = commands.add_parser("list", help="show the benchmarks")
    listing.add_argument("--json", action="store_true", help="as JSON: what each shows, by name")
    run = commands.add_parser("run", help="run one benchmark")
    run.add_argument("name", nargs="?", help="see list")
    every = commands.add_parser("all", help="run the benchmarks behind README's table and figures, and remake them")
    for command in (run, every):
        command.add_argument("--quick", action="store_true", help="tiny models and few steps: shows that it runs")
        command.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
        command.add_argument("--fresh", action="store_true", help="forget the results of an interrupted run")
        command.add_argument(
            "--json",
            type=Path,
            nargs="?",
            const=STDOUT,
            metavar="OUT",
            help="default: NAME.json in the results directory; without OUT, print it, too",
        )
    run.add_argument("--figure", type=Path, metavar="OUT.png", help="default: NAME.png in the results directory")
    run.add_argument("--instances", type=Path, metavar="DIR", help="of partition_instances")
    run.add_argument("--tables", type=Path, metavar="DIR", help="of published")
    run.add_argument("--device", metavar="DEVICE", help="of gpu: default cuda; cpu runs what makes sense there")
    run.add_argument("--models", default="", metavar="A,B", help=f"of gpu: some of {', '.join(gpu.MODELS)}")
    run.add_argument("--parts", default="", metavar="A,B", help=f"of gpu: some of {', '.join(gpu.part_names())}")
    diff = commands.add_parser("diff", help="compare two result files; exit status 1 if anything became slower")
    diff.add_argument("before", type=Path, metavar="BEFORE.json")
    diff.add_argument("after", type=Path, metavar="AFTER.json")
    diff.add_argument(
        "--tolerance",
        type=_fraction,
        default=0.05,
        metavar="FRACTION",
        help="of a step time that two runs of the same code may differ by (default 0.05)",
    )
    return parser


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"give a fraction of at least 0, such as 0.05, got {text!r}")
    return value


def _listing() -> str:
    width = max(map(len, BENCHMARKS))
    return "\n".join(f"  {name:{width}}  {what}" for name, (what, _) in BENCHMARKS.items())


def _stem(options: argparse.Namespace) -> Path:
    """Of the files of results. Quick ones have names of their own, so that they replace no full ones."""
    stem: Path = options.results / (f"{options.name}-quick" if options.quick else options.name)
    return stem


def _write(report: Report, header: dict[str, str], options: argparse.Namespace, console: Console) -> None:
    """JSON, Markdown and the figure."""
    stem = _stem(options)
    page = stem.with_suffix(".md")
    on_stdout = options.json == STDOUT
    data = stem.with_suffix(".json") if options.json is None or on_stdout else options.json
    figure: Path | None = options.figure or stem.with_suffix(".png")
    assert figure is not None
    for path in (page, data, figure):
        path.parent.mkdir(parents=True, exist_ok=True)
    if report.draw is None:
        figure = None
    else:
        try:
            report.draw(figure)
        except ImportError as error:
            console.print(f'no figure: {error}; pip install -e ".[bench]"', markup=False)
            figure = None
    text = to_json(report, header)
    data.write_text(text)
    if on_stdout:
        print(text, end="")
    link = os.path.relpath(figure, page.parent) if figure else None
    page.write_text(to_markdown(report, header, link))
    written = [str(path) for path in (data, page, figure) if path]
    console.print(f"written: {', '.join(written)}", markup=False)


if __name__ == "__main__":
    sys.exit(main(own_process=True))
