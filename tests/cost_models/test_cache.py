"""The measurement cache: what is put is found again, whatever happens to the file."""

import json
import math
import multiprocessing
import random
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import each_warning_once
from cost_models import MeasurementCache, signature_key
from cost_models.measuring import cache
from cost_models.measuring.calibration import Calibration
from cost_models.measuring.operator_times import GraphTimes

KEYS = 40  # of each writer

names = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "below" / "measurements.sqlite"


def write_keys(path: Path, writer: str, start: Barrier) -> None:
    """A process of its own: opens the file with the others, and writes a key at a time."""
    start.wait()
    with MeasurementCache(path) as store:
        for index in range(KEYS):
            store.put(f"{writer}-{index}", [writer, index])


def age(path: Path, days: float) -> None:
    """Make every measurement `days` older."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE measurements SET created = created - ?", [days * 86400])


@pytest.mark.slow
@given(st.dictionaries(names, json_values, max_size=5))
def test_what_is_put_is_found(values: dict[str, Any]) -> None:
    with MeasurementCache(Path(":memory:")) as store:
        store.put_many(values)
        assert store.get_many(values) == values
        assert all(store.get(key) == value for key, value in values.items())


def test_measurements_outlive_the_cache(path: Path) -> None:
    with MeasurementCache(path) as store:
        store.put("link", {"latency": 2e-6, "bandwidth": math.inf})
    with MeasurementCache(path) as store:
        assert store.get("link") == {"latency": 2e-6, "bandwidth": math.inf}


def test_a_later_value_takes_the_place_of_an_earlier_one(path: Path) -> None:
    with MeasurementCache(path) as store:
        store.put("key", 1)
        store.put("key", 2)
        assert store.get("key") == 2


def test_only_known_keys_are_answered(path: Path) -> None:
    with MeasurementCache(path) as store:
        store.put("known", 1)
        assert store.get("unknown") is None
        assert store.get_many(["known", "unknown"]) == {"known": 1}
        assert store.get_many([]) == {}


@pytest.mark.slow
def test_many_keys_are_one_question(path: Path) -> None:
    values = {str(i): i for i in range(50_000)}  # more than SQLite's parameters
    with MeasurementCache(path) as store:
        store.put_many(values)
        assert store.get_many(values) == values


def test_cleared_measurements_are_gone_for_good(path: Path) -> None:
    with MeasurementCache(path) as store:
        store.put_many({"a": 1, "b": 2})
        store.clear()
    with MeasurementCache(path) as store:
        assert store.get_many(["a", "b"]) == {}


def test_a_value_that_is_no_json_is_refused_and_nothing_is_put(path: Path) -> None:
    with MeasurementCache(path) as store:
        with pytest.raises(TypeError):
            store.put_many({"good": 1, "bad": object()})
        assert store.get("good") is None


@pytest.mark.slow
def test_processes_may_open_and_write_at_once(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(2, timeout=60)
    writers = [context.Process(target=write_keys, args=(path, name, start)) for name in ("a", "b")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    expected = {f"{writer}-{index}": [writer, index] for writer in "ab" for index in range(KEYS)}
    with MeasurementCache(path) as store:
        assert store.get_many(expected) == expected


def find_damage_late(path: Path, found: Event, replaced: Event) -> None:
    """A process that finds the damaged file, and moves it aside after another process has replaced it."""
    move = cache.move_aside_if_damaged

    def late(path: Path) -> Path | None:
        found.set()
        assert replaced.wait(60)
        return move(path)

    cache.move_aside_if_damaged = late
    with MeasurementCache(path) as store:
        store.put("late", 2)


def write_slowly(path: Path, found: Event, replaced: Event) -> None:
    """A process that replaces the damaged file, and is in a transaction while the other one finds out."""
    assert found.wait(60)
    with warnings.catch_warnings(), MeasurementCache(path) as store:
        warnings.simplefilter("ignore")  # of the damage
        store.put("early", 1)

        def rows() -> Iterator[tuple[str, str, float]]:
            now = time.time()
            for index in range(3000):  # more than SQLite's page cache takes: the journal and the file are written
                yield f"slow-{index}", json.dumps("x" * 4000), now
            replaced.set()
            time.sleep(1)  # the other process has time to do harm
            yield "slow", "3", now

        store._connection.execute("PRAGMA cache_size = 10")
        store._write("INSERT OR REPLACE INTO measurements VALUES (?, ?, ?)", rows())


@pytest.mark.slow
def test_a_process_that_finds_damage_late_leaves_the_file_that_replaced_it(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"this is no database " * 100)
    context = multiprocessing.get_context("spawn")
    found, replaced = context.Event(), context.Event()
    late, slow = (
        context.Process(target=work, args=(path, found, replaced)) for work in (find_damage_late, write_slowly)
    )
    for process in (late, slow):
        process.start()
    for process in (late, slow):
        process.join(120)
    assert (late.exitcode, slow.exitcode) == (0, 0)
    with MeasurementCache(path) as store:
        keys = ["early", "slow-0", "slow-2999", "slow", "late"]
        assert store.get_many(keys) == dict(zip(keys, [1, "x" * 4000, "x" * 4000, 3, 2], strict=True))
        assert store._connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert path.with_name(path.name + ".corrupt").read_bytes().startswith(b"this is no database")


def test_a_damaged_files_journal_is_not_left_to_the_next_file(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"this is no database " * 100)
    journal = path.with_name(path.name + "-journal")
    journal.write_bytes(b"this is no journal")
    with pytest.warns(UserWarning, match="is damaged"):
        store = MeasurementCache(path)
    assert not journal.exists()
    store.put("key", 1)
    store.close()
    with MeasurementCache(path) as store:
        assert store.get("key") == 1


def test_threads_may_share_a_cache(path: Path) -> None:
    with MeasurementCache(path) as store:

        def write(writer: int) -> None:
            for index in range(KEYS):
                store.put(f"{writer}-{index}", index)
                store.get(f"{writer}-{index}")

        threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(store.get_many(f"{writer}-{index}" for writer in range(4) for index in range(KEYS))) == 4 * KEYS


@pytest.mark.filterwarnings("error")
def test_a_file_of_another_version_is_emptied(path: Path) -> None:
    with MeasurementCache(path) as store:
        store.put("key", 1)
    with sqlite3.connect(path) as connection:
        connection.execute("ALTER TABLE measurements ADD COLUMN other")
        connection.execute(f"PRAGMA user_version = {cache.CACHE_VERSION + 1}")
    connection.close()
    with MeasurementCache(path) as store:
        assert store.get("key") is None
        store.put("key", 2)
        assert store.get("key") == 2


def test_a_damaged_file_is_moved_away_and_replaced(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"this is no database " * 100)
    with pytest.warns(UserWarning, match="is damaged") as caught, MeasurementCache(path) as store:
        store.put("key", 1)
    assert str(path) in str(caught[0].message)
    assert path.with_name(path.name + ".corrupt").read_bytes().startswith(b"this is no database")
    with MeasurementCache(path) as store:
        assert store.get("key") == 1


def test_damage_beyond_the_header_is_found_when_the_file_is_opened(path: Path) -> None:
    with MeasurementCache(path) as store:
        store.put_many({str(index): "x" * 100 for index in range(1000)})
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))
    with pytest.warns(UserWarning, match="is damaged"):
        store = MeasurementCache(path)
    with store:
        assert store.get("1") is None
        store.put("1", "again")
    with MeasurementCache(path) as store:
        assert store.get("1") == "again"


def test_a_place_that_cannot_be_written_leaves_the_cache_in_memory(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    with pytest.warns(UserWarning, match=f"{in_the_way}.*in memory"):
        store = MeasurementCache(in_the_way / "measurements.sqlite")
    assert store.path is None
    store.put("key", 1)
    assert store.get("key") == 1
    store.close()


def test_a_file_that_stops_taking_writes_leaves_the_cache_in_memory(path: Path) -> None:
    with MeasurementCache(path) as store:
        store._connection.execute("PRAGMA query_only = on")  # even root is refused
        with pytest.warns(UserWarning, match="in memory"):
            store.put("key", 1)
        assert store.get("key") == 1


def test_a_closed_cache_refuses_to_work(path: Path) -> None:
    store = MeasurementCache(path)
    store.close()
    with pytest.raises(sqlite3.ProgrammingError):
        store.get("key")


def test_the_environment_says_where_the_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    with MeasurementCache() as store:
        store.put("key", 1)
        assert store.path is not None
        assert store.path.parent == tmp_path
        assert store.path.exists()


def test_without_the_environment_the_file_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOPAR_CACHE_DIR", raising=False)
    assert "autopar" in str(cache.default_cache_path())


@pytest.mark.slow
def test_keys_are_equal_in_every_process() -> None:
    parts = ("aten.mm", [[2, 3], [3, 4]], {"b": 1, "a": None})
    script = f"from cost_models import signature_key; print(signature_key(*{parts!r}))"
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert output.strip() == signature_key("aten.mm", ((2, 3), (3, 4)), {"a": None, "b": 1})


def test_keys_differ_by_part_and_by_version_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {
        signature_key("a"),
        signature_key("a", "b"),
        signature_key("ab"),
        signature_key(["a", "b"]),
        signature_key(),
    }
    monkeypatch.setattr(cache, "CACHE_VERSION", cache.CACHE_VERSION + 1)
    keys.add(signature_key("a"))
    assert len(keys) == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"backends.cuda.matmul.allow_tf32": True},
        {"backends.cuda.matmul.fp32_precision": "tf32"},
        {"backends.cudnn.allow_tf32": False},
        {"backends.cudnn.benchmark": True},
        {"backends.cudnn.deterministic": True},
        {"backends.cudnn.enabled": False},
        {"backends.mkldnn.matmul.fp32_precision": "bf16"},
        {"__version__": "2.11.0+cpu"},
        {"__config__.show": lambda: "built with other compilers"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_keys_differ_by_torchs_build_and_settings(changes: dict[str, Any]) -> None:
    script = """
import sys, torch
from operator import attrgetter
from cost_models import signature_key
before = signature_key("a")
assert signature_key("a") == before
"""
    for name, value in changes.items():
        *where, last = name.split(".")
        place = ".".join(["torch", *where])
        text = "lambda: 'other compilers'" if callable(value) else repr(value)
        script += f"import cost_models.measuring.environment as e; e._build.cache_clear(); {place}.{last} = {text}\n"
    script += "assert signature_key('a') != before"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_keys_differ_by_the_variables_of_cpu_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    one = signature_key("a")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert signature_key("a") != one


def test_measurements_expire(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with MeasurementCache(path) as store:
        store.put("key", 1)
    age(path, cache.MAX_AGE_DAYS - 1)
    with MeasurementCache(path) as store:
        assert store.get("key") == 1
        monkeypatch.setenv("AUTOPAR_CACHE_DAYS", "7")
        assert store.get("key") is None
        store.put("key", 2)
        assert store.get("key") == 2  # measured anew
    age(path, 1000)
    with MeasurementCache(path) as store:
        monkeypatch.delenv("AUTOPAR_CACHE_DAYS")
        assert store.get("key") is None
        monkeypatch.setenv("AUTOPAR_CACHE_DAYS", "inf")
        assert store.get("key") == 2


@pytest.mark.parametrize("days", ["soon", "-1", "nan"])
def test_an_age_that_is_none_is_warned_about(monkeypatch: pytest.MonkeyPatch, days: str) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE_DAYS", days)
    with pytest.warns(UserWarning, match=f"AUTOPAR_CACHE_DAYS.*{days}"):
        assert cache.max_age_seconds() == cache.MAX_AGE_DAYS * 86400


@pytest.mark.parametrize(
    "wrong", [None, 1, "text", [], [1, 2], {"peak_flops": 1}, {"forward": {}, "backward": {}, "rows": 2}]
)
@pytest.mark.parametrize(
    "parse", [Calibration.from_json, lambda value: GraphTimes.from_json(value, ["a"])], ids=["calibration", "times"]
)
def test_a_value_of_another_shape_counts_as_missing(path: Path, wrong: Any, parse: Callable[[Any], Any]) -> None:
    with MeasurementCache(path) as store:
        store.put("key", wrong)
        assert store.get("key", parse) is None


def test_unusable_values_are_said_once_with_their_number(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def read_twice() -> None:
        for _ in range(2):
            with MeasurementCache(path) as store:
                for key in ("a", "b", "c"):
                    assert store.get(key, Calibration.from_json) is None

    with MeasurementCache(path) as store:
        store.put_many({"a": 1, "b": 2, "c": 3})
    read_twice()
    assert len(caplog.messages) == 2, "one message a cache"
    caplog.clear()
    with each_warning_once(set()):  # as in a call that opens several
        read_twice()
    (message,) = caplog.messages
    assert message.startswith("3 cached measurements are unusable and will be repeated: ")


def test_times_that_are_none_count_as_missing(path: Path) -> None:
    good = GraphTimes(2, 1, {"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 0.0}, 0.5, 0.25, accumulation={"a": 0.5})
    parse = partial(GraphTimes.from_json, nodes=["a", "b"])
    with MeasurementCache(path) as store:
        store.put("good", good.to_json())
        for name, changed in {
            "others": {"forward": {"a": 1.0, "c": 1.0}},
            "fewer": {"backward": {"a": 1.0}},
            "negative": {"loss_forward": -1.0},
            "infinite": {"forward": {"a": math.inf, "b": 1.0}},
            "text": {"forward": {"a": "1", "b": 1.0}},
            "accumulation": {"accumulation": {"c": 1.0}},
        }.items():
            store.put(name, {**good.to_json(), **changed})
        store.put("older", {name: value for name, value in good.to_json().items() if name != "accumulation"})
        names = ["good", "others", "fewer", "negative", "infinite", "text", "accumulation", "older"]
        assert store.get_many(names, parse) == {"good": good}


def test_text_that_is_no_json_counts_as_missing(path: Path) -> None:
    with MeasurementCache(path) as store:
        store.put("key", 1)
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE measurements SET value = '{'")
        assert store.get("key") is None


def test_a_part_without_a_stable_text_is_refused() -> None:
    with pytest.raises(TypeError):
        signature_key(object())


PRECISIONS = {
    "nothing set": "",
    "older setting": "torch.backends.cuda.matmul.allow_tf32 = True",
    "newer setting": "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "float32 on cuDNN": "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
    "bfloat16 on a CPU": "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
    "older text": "torch.set_float32_matmul_precision('high')",
}


@pytest.mark.slow
@pytest.mark.parametrize("setting", PRECISIONS.values(), ids=list(PRECISIONS))
def test_float32_products_are_exact_inside_and_as_they_were_set_afterwards(setting: str) -> None:
    script = f"""
import torch
from cost_models.measuring.environment import _FP32_PRECISIONS, _setting, full_float32, torch_environment

def older():
    seen = []
    for read in (lambda: torch.backends.cuda.matmul.allow_tf32, lambda: torch.backends.cudnn.allow_tf32,
                 torch.get_float32_matmul_precision):
        try:
            seen.append(read())
        except RuntimeError:
            seen.append("mixed with newer settings")
    return seen

{setting}
before = torch_environment(), older()
with full_float32():
    assert all(_setting(name) == "ieee" for name in _FP32_PRECISIONS)
assert (torch_environment(), older()) == before
try:
    with full_float32():
        raise KeyError
except KeyError:
    assert (torch_environment(), older()) == before
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.slow
def test_a_setting_that_follows_a_general_one_follows_it_afterwards() -> None:
    script = """
import torch
from cost_models.measuring.environment import full_float32
torch.backends.fp32_precision = "tf32"
with full_float32():
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"
assert torch.backends.cuda.matmul.fp32_precision == "tf32"
torch.backends.fp32_precision = "ieee"
assert torch.backends.cuda.matmul.fp32_precision == "ieee"
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("damage", [(b"created", b"creaXed"), (b"value TEXT", b"val\xffe TEXT")])
@pytest.mark.filterwarnings("ignore:measurement cache")
def test_a_cache_whose_names_are_damaged_keeps_what_is_put(tmp_path: Path, damage: tuple[bytes, bytes]) -> None:
    path = tmp_path / "cache.sqlite"
    with MeasurementCache(path) as store:
        store.put("old", 1.0)
    content = path.read_bytes()
    assert damage[0] in content
    path.write_bytes(content.replace(*damage))
    with MeasurementCache(path) as store:
        store.put("new", 2.0)
        assert store.get("new") == 2.0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:measurement cache")
def test_whatever_bytes_of_a_cache_are_damaged_it_keeps_what_is_put(tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"
    with MeasurementCache(path) as store:
        store.put_many({f"{number} " * 40: number for number in range(50)})
    content, chance = path.read_bytes(), random.Random(0)
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(chance.choice([1, 8, 64])):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        path.write_bytes(bytes(damaged))
        with MeasurementCache(path) as store:
            store.put("new", 2.0)
            assert store.get("new") == 2.0
