"""An interrupted benchmark goes on where it ended, with the results of an undisturbed one."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autopar.runtime.other_systems.independent import CEILING
from benchmarks import __main__ as command
from benchmarks import every, readme, timing
from benchmarks.__main__ import INTERRUPTED, main
from benchmarks.kept import Kept
from benchmarks.output import Report
from benchmarks.registry import BENCHMARKS, Run
from benchmarks.timing import interleave
from benchmarks.training import FREE, PLAIN, PLAIN_THREADS, PURE

ON = {"torch": "2.13"}


def a_date() -> str:
    return "2026-11-22 10:00 UTC"


class Clock:
    """Time that passes where steps say so, and a user who interrupts step number `ends`."""

    def __init__(self, ends: int | None = None) -> None:
        self.now, self.calls, self.ends = 0.0, 0, ends

    def step(self, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.calls += 1
            if self.calls == self.ends:
                raise KeyboardInterrupt
            self.now += seconds

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now)
    return clock


def test_rounds_of_an_interrupted_run_are_those_of_an_undisturbed_one(clock: Clock, tmp_path: Path) -> None:
    steps = {"a": clock.step(1.0), "b": clock.step(2.0), 3: clock.step(4.0)}
    undisturbed = tmp_path / "undisturbed.jsonl"
    expected = interleave(steps, 4, kept=Kept(undisturbed, ON, date=a_date))
    path = tmp_path / "interrupted.jsonl"
    clock.calls, clock.ends = 0, 11  # within the third round that counts: 3 of the warm-up, 3, 3, and 1
    with pytest.raises(KeyboardInterrupt):
        interleave(steps, 4, kept=Kept(path, ON, date=a_date))
    clock.calls, clock.ends = 0, None
    assert interleave(steps, 4, kept=Kept(path, ON, date=a_date)) == expected
    assert clock.calls == 3 + 2 * 3  # a warm-up and the two rounds that were missing
    assert sorted(map(read, path.read_text().splitlines()), key=str) == sorted(
        map(read, undisturbed.read_text().splitlines()), key=str
    )
    interleave(steps, 4, kept=Kept(path, ON))
    assert clock.calls == 9  # nothing is missing: nothing runs, not even to warm up


def read(line: str) -> object:
    return json.loads(line)


def test_rounds_of_other_systems_are_not_taken(clock: Clock) -> None:
    kept = Kept()
    interleave({"a": clock.step(1.0)}, 2, kept=kept)
    assert interleave({"b": clock.step(2.0)}, 2, kept=kept) == {"b": (2.0, 2.0)}


def test_a_line_that_was_cut_off_is_made_again_and_the_file_stays_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    kept = Kept(path, ON)
    kept.put("a", 1, value={"s": 0.1})
    kept.put("b", value=2)
    path.write_text(path.read_text()[:-9])
    again = Kept(path, ON)
    assert (again.get("a", 1), again.get("b")) == ({"s": 0.1}, None)
    assert again.part("a").case(1, make=fail) == {"s": 0.1}
    again.part("b").part().put(value=3)
    assert Kept(path, ON).get("b") == 3
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_lines_that_are_no_results_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    Kept(path, ON).put("a", value=1)
    with path.open("ab") as file:
        file.write(b'\xff\xfe\n{"key": 5}\n[1]\n{"key": [[]], "date": "", "value": 1}\n{"key": ["b"]}\n' + b"[" * 9999)
    again = Kept(path, ON)
    assert (again.get("a"), again.count) == (1, 1)


def fail() -> None:
    raise AssertionError("this value is kept")


def test_values_are_what_the_file_holds_also_in_the_run_that_made_them(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "x.jsonl", ON)
    assert kept.case("a", make=lambda: {1: (0.1, 2)}) == {"1": [0.1, 2]} == Kept(tmp_path / "x.jsonl", ON).get("a")


def test_results_of_another_machine_or_code_are_put_aside_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x.partial.jsonl"
    Kept(path, {"torch": "2.12", "processor": "a"}).put("a", value=1)
    with caplog.at_level(logging.WARNING):
        kept = Kept(path, {"torch": "2.13", "processor": "a"})
    assert kept.get("a") is None
    assert "another torch;" in caplog.text
    assert not path.exists()
    assert "2.12" in (tmp_path / "x.partial.other.jsonl").read_text()


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A benchmark of three cases, called "gpt"; the user interrupts the case that is called last."""
    ran: list[str] = []

    def run(run: Run) -> Report:
        def case(name: str) -> dict[str, float]:
            ran.append(name)
            if ran == ["a", "b"]:
                raise KeyboardInterrupt
            return {"seconds": float(ord(name))}

        return Report("R", (), {name: run.kept.case(name, make=lambda n=name: case(n)) for name in "abc"})

    monkeypatch.setitem(BENCHMARKS, "gpt", ("", run))
    monkeypatch.setattr(command, "machine_header", lambda: {"date": "today", "torch": "2.13"})
    return ran


def test_an_interrupted_command_goes_on_and_writes_what_an_undisturbed_one_does(
    benchmark: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Kept, "dates", a_date())
    apart, whole = tmp_path / "apart", tmp_path / "whole"
    assert main(["run", "gpt", "--results", str(apart)]) == INTERRUPTED
    assert "1 results are kept" in capsys.readouterr().err
    assert main(["run", "gpt", "--results", str(apart)]) == 0
    assert benchmark == ["a", "b", "b", "c"]
    benchmark[:] = ["as if interrupted before"]
    assert main(["run", "gpt", "--results", str(whole)]) == 0
    assert (apart / "gpt.json").read_bytes() == (whole / "gpt.json").read_bytes()
    assert not list(tmp_path.rglob("*.jsonl")), "a complete run starts from nothing the next time"


def test_fresh_forgets_what_was_kept(benchmark: list[str], tmp_path: Path) -> None:
    main(["run", "gpt", "--results", str(tmp_path)])
    assert main(["run", "gpt", "--results", str(tmp_path), "--fresh"]) == 0
    assert benchmark == ["a", "b", "a", "b", "c"]


def test_all_goes_on_with_the_benchmark_that_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    class Done:
        returncode = 0

    def run(line: list[str], **_: object) -> Done:
        ran.append(line[4])
        done = Done()
        if ran == ["tutorial", "gpt", "gpt"]:
            raise KeyboardInterrupt
        done.returncode = INTERRUPTED if ran == ["tutorial", "gpt"] else 0
        (tmp_path / f"{line[4]}.json").write_text(json.dumps({"title": line[4]}))
        return done

    monkeypatch.setattr(every.subprocess, "run", run)
    monkeypatch.setattr(every, "machine_header", lambda: {"torch": "2.13"})
    monkeypatch.setattr(every, "IN_README", ("tutorial", "gpt", "peers"))
    assert main(["all", "--results", str(tmp_path)]) == INTERRUPTED
    assert main(["all", "--results", str(tmp_path)]) == INTERRUPTED
    capsys.readouterr()
    assert main(["all", "--results", str(tmp_path), "--json"]) == 0
    assert ran == ["tutorial", "gpt", "gpt", "gpt", "peers"]
    assert list(json.loads(capsys.readouterr().out)) == ["tutorial", "gpt", "peers"]


def test_all_writes_what_there_is_where_a_result_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Done:
        def __init__(self, returncode: int) -> None:
            self.returncode = returncode

    def run(line: list[str], **_: object) -> Done:
        if line[4] == "gpt" or (tmp_path / "lost").exists():
            return Done(1)
        (tmp_path / f"{line[4]}.json").write_text("{}")
        return Done(0)

    monkeypatch.setattr(every.subprocess, "run", run)
    monkeypatch.setattr(every, "machine_header", lambda: {"torch": "2.13"})
    monkeypatch.setattr(every, "IN_README", ("tutorial", "gpt", "peers"))
    assert main(["all", "--results", str(tmp_path)]) == 1
    (tmp_path / "peers.json").unlink()
    (tmp_path / "lost").touch()
    capsys.readouterr()
    assert main(["all", "--results", str(tmp_path), "--json"]) == 1
    assert list(json.loads(capsys.readouterr().out)) == ["tutorial"]


# -- README -----------------------------------------------------------------------------------------------------------


def result(title: str, plain: float) -> dict[str, object]:
    def row(name: str, measured: float, predicted: float | None = None) -> dict[str, object]:
        return {
            "name": name,
            "steps": [measured] * 5,
            "measured": measured,
            "predicted": predicted,
            "speedup": plain / measured,
        }

    rows = [row(PLAIN, plain), row(FREE, 1.0, 0.9), row(PURE, 1.25, 1.0), row(PLAIN_THREADS, 1.1), row(CEILING, 0.95)]
    finals = [
        {"same": True, "over_best": 1.0, "interval": {"low": 1.0, "high": 1.0}},
        {"same": False, "over_best": 0.97, "interval": {"low": 0.95, "high": 1.01}},
    ]
    machine = {"date": "2026-12-01", "processor": "a CPU, 2 usable cores", "torch": "2.13.0"}
    return {"title": title, "machine": machine, "rows": rows, "finals": finals}


def test_readmes_table_is_remade_in_its_place_from_the_results(tmp_path: Path) -> None:
    readme_file = tmp_path / "README.md"
    for name, title in zip(readme.COLUMNS, ("ResNet", "GPT"), strict=True):
        (tmp_path / f"{name}.json").write_text(json.dumps(result(title, 2.0)))
    readme_file.write_text(f"head\n{readme.BEGIN}\nold\n{readme.END}\nfoot\n")
    assert readme.remake(readme_file, tmp_path)
    text = readme_file.read_text()
    assert text.startswith("head\n")
    assert text.endswith("\nfoot\n")
    assert "old" not in text
    assert "2026-12-01, a CPU, 2 usable cores, torch 2.13.0, medians of 5 rounds" in text
    assert "| two workers of one thread each | ResNet | GPT |" in text
    assert "| autopar | 1.00 s, **2.00x** | 1.00 s, **2.00x** |" in text
    assert "| the same plan | the same plan |" in text
    assert "0.970 (0.950 to 1.010)" in text
    assert readme.remake(readme_file, tmp_path)
    assert readme_file.read_text() == text
    (tmp_path / "other.md").write_text("no place")
    assert not readme.remake(tmp_path / "other.md", tmp_path)


def test_the_readme_has_a_place_for_the_table() -> None:
    text = every.README.read_text()
    assert text.count(readme.BEGIN) == text.count(readme.END) == 1
