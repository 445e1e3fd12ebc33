"""`python -m benchmarks diff` on made-up results: equal ones, noisy ones, and code that became slower."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.diff import FASTER, SAME, SLOWER, ResultError, compare
from benchmarks.output import Report, Rounds, to_json

CEILING = "ceiling"


def result(seed: int, *, system: float = 1.0, machine: float = 1.0, noise: float = 0.03, rounds: int = 7) -> Any:
    """Times of 12 systems in rounds in which the machine is 0 to 50 % slower. The first system takes `system` times
    as long as in other results, and everything `machine` times."""
    random = np.random.default_rng(seed)
    speed = machine * random.uniform(1, 1.5, rounds)
    seconds = {}
    for number in range(12):
        own = 1 + 0.1 * number
        own *= system if number == 0 else 1.0
        seconds[f"system {number}"] = list(own * speed * (1 + noise * random.standard_normal(rounds)))
    seconds[CEILING] = list(speed * (1 + noise * random.standard_normal(rounds)))
    report = Report("R", (), {"rows": []}, measured=(Rounds("a model", seconds, CEILING),))
    return json.loads(to_json(report, {"processor": "a", "torch": "2.13"}))


def verdicts(before: Any, after: Any) -> dict[str, str]:
    return {one.system: one.verdict for one in compare(before, after, 0.05)}


def test_equal_results_have_no_difference() -> None:
    same = result(0)
    assert set(verdicts(same, same).values()) == {SAME}


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_not_called_a_difference(seed: int) -> None:
    found = verdicts(result(2 * seed), result(2 * seed + 1))
    assert set(found.values()) == {SAME}
    assert CEILING not in found


@pytest.mark.parametrize("seed", range(5))
def test_what_is_really_slower_is_found_and_nothing_else(seed: int) -> None:
    before, after = result(2 * seed), result(2 * seed + 1, system=1.4)
    assert [name for name, verdict in verdicts(before, after).items() if verdict == SLOWER] == ["system 0"]
    assert [name for name, verdict in verdicts(after, before).items() if verdict == FASTER] == ["system 0"]


def test_a_machine_that_was_slower_as_a_whole_is_no_regression() -> None:
    before, after = result(0), result(1, machine=1.6)
    assert set(verdicts(before, after).values()) == {SAME}
    for one in (before, after):
        one["measured"][0]["ceiling"] = None
        del one["measured"][0]["seconds"][CEILING]
    assert SLOWER in verdicts(before, after).values(), "without a ceiling nobody can tell"


def test_few_rounds_claim_nothing() -> None:
    assert set(verdicts(result(0, rounds=3), result(1, system=3.0, rounds=3)).values()) == {"too few rounds (3)"}


def test_differences_within_the_tolerance_are_none() -> None:
    before, after = result(0, noise=0.001), result(1, system=1.04, noise=0.001)
    assert verdicts(before, after)["system 0"] == SAME
    assert {one.verdict for one in compare(before, after, 0.02) if one.system == "system 0"} == {SLOWER}


def test_results_with_nothing_in_common_are_refused() -> None:
    other = result(0)
    other["measured"][0]["what"] = "another model"
    with pytest.raises(ResultError, match="in common"):
        compare(result(0), other, 0.05)


def test_the_command_exits_1_for_a_regression_and_2_for_what_is_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def written(name: str, data: Any) -> str:
        path = tmp_path / name
        path.write_text(json.dumps(data))
        return str(path)

    before, after = written("a.json", result(0)), written("b.json", result(1, system=1.5))
    assert main(["diff", before, before]) == 0
    assert "0 slower" in capsys.readouterr().out
    assert main(["diff", before, after]) == 1
    printed = capsys.readouterr().out
    assert "1 slower, 0 faster, of 12" in printed
    assert main(["diff", before, after, "--tolerance", "0.9"]) == 0
    every = written("all.json", {"gpt": result(0), "peers": result(1)}), written("all2.json", {"gpt": result(2)})
    assert main(["diff", *every]) == 0
    assert "only before: peers: a model" in " ".join(capsys.readouterr().out.split())
    assert main(["diff", before, str(tmp_path / "none.json")]) == 2
    (tmp_path / "broken.json").write_text("{")
    assert main(["diff", before, str(tmp_path / "broken.json")]) == 2
    other = result(3)
    other["machine"]["processor"] = "b"
    main(["diff", before, written("c.json", other)])
    assert "another processor: a; b" in capsys.readouterr().out


def test_a_plan_with_two_names_runs_twice_a_round_and_is_compared_without_the_ceiling() -> None:
    both = result(0), result(1)
    for one in both:
        one["measured"][0]["seconds"]["system 0"] *= 2
    changes = {change.system: change for change in compare(*both, 0.05)}
    assert not changes["system 0"].by_ceiling
    assert changes["system 1"].by_ceiling


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"seconds": {CEILING: [1.0], "A": [0.0]}}, "a model, A: seconds must be numbers above 0"),
    ({"seconds": {CEILING: [1.0], "A": []}}, "one or more"),
    ({"seconds": {CEILING: [1.0], "A": "fast"}}, "got 'fast'"),
    ({"seconds": {"A": [1.0]}}, "no times of 'ceiling', the ceiling"),
    ({"seconds": None}, "no times of"),
    ({"seconds": {CEILING: [1.0], "A": [float("inf")]}}, "a model, A: seconds must be numbers above 0"),
    ({"seconds": {CEILING: [1.0], "A": [True]}}, "a model, A: seconds must be numbers above 0"),
    ({"ceiling": [CEILING]}, r"no times of \['ceiling'\], the ceiling"),
    ({"what": ["a model"]}, '"what" of an entry of "measured" must be a text'),
]


@pytest.mark.parametrize(("change", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_times_that_no_benchmark_writes_are_refused(change: dict[str, Any], message: str) -> None:
    broken = result(0)
    broken["measured"][0] |= change
    with pytest.raises(ResultError, match=message):
        compare(broken, result(1), 0.05)


def test_results_of_another_version_or_without_steps_are_refused_by_what_they_lack() -> None:
    with pytest.raises(ResultError, match="must have what, ceiling, seconds"):
        compare({"measured": [{"model": "a"}]}, result(1), 0.05)
    with pytest.raises(ResultError, match='"measured" must be a list of rounds, got 3'):
        compare({"measured": 3}, result(1), 0.05)
    with pytest.raises(ResultError, match="the second file has no measured steps"):
        compare(result(0), {"rows": []}, 0.05)


@pytest.mark.parametrize("tolerance", ["-1", "nan", "inf", "much"])
def test_a_tolerance_is_a_fraction(tolerance: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["diff", "a.json", "b.json", f"--tolerance={tolerance}"])
    assert ended.value.code == 2
    assert "at least 0, such as 0.05" in capsys.readouterr().err


def test_every_result_has_its_spread() -> None:
    (rounds,) = result(0)["measured"]
    for name, taken in rounds["seconds"].items():
        spread = rounds["spread"][name]
        assert spread["median"] == pytest.approx(np.median(taken))
        assert spread["low"] <= spread["median"] <= spread["high"]
