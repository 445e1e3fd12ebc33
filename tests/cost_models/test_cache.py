"""The measurement cache: what is put is found again, whatever happens to the file."""

import math
import multiprocessing
import sqlite3
import subprocess
import sys
import threading
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import MeasurementCache, signature_key
from cost_models.measuring import cache

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


def test_damage_beyond_the_header_is_found_when_read(path: Path) -> None:
    with MeasurementCache(path) as store:
        store.put_many({str(index): "x" * 100 for index in range(1000)})
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))
    with MeasurementCache(path) as store:
        with pytest.warns(UserWarning, match="is damaged"):
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


def test_keys_are_equal_in_every_process() -> None:
    parts = ("aten.mm", [[2, 3], [3, 4]], {"b": 1, "a": None})
    script = f"from cost_models import signature_key; print(signature_key(*{parts!r}))"
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert output.strip() == signature_key("aten.mm", ((2, 3), (3, 4)), {"a": None, "b": 1})


def test_keys_differ_by_part_and_by_version(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {
        signature_key("a"),
        signature_key("a", "b"),
        signature_key("ab"),
        signature_key(["a", "b"]),
        signature_key(),
    }
    monkeypatch.setattr(cache, "CACHE_VERSION", cache.CACHE_VERSION + 1)
    keys.add(signature_key("a"))
    monkeypatch.setattr(cache.torch, "__version__", "0.0")
    keys.add(signature_key("a"))
    assert len(keys) == 7


def test_a_part_without_a_stable_text_is_refused() -> None:
    with pytest.raises(TypeError):
        signature_key(object())
