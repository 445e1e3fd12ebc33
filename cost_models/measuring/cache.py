"""Measurements kept on disk, shared by threads and processes."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import platformdirs

from cost_models.measuring.environment import torch_environment
from cost_models.measuring.sqlite_file import BUSY_SECONDS, check_intact, is_corrupt, move_aside_if_damaged, using

log = logging.getLogger(__name__)

CACHE_VERSION = 2
"""Of the table's columns and of what the values mean. A file of another version is emptied; its keys never match."""

MAX_AGE_DAYS = 30.0
"""After this many days a measurement is repeated: drivers, clocks and neighbours of a machine change. The environment
variable AUTOPAR_CACHE_DAYS overrides it; "inf" keeps measurements for ever."""

T = TypeVar("T")

# created: seconds since 1970
_TABLE = "CREATE TABLE measurements (key TEXT PRIMARY KEY, value TEXT NOT NULL, created REAL NOT NULL)"
_OF_SQLITE = (sqlite3.Error, UnicodeDecodeError)  # the latter from messages with damaged names

_Unusable = dict[str, Exception]  # by key, why its value cannot be used
_counted: ContextVar[_Unusable | None] = ContextVar("counted", default=None)


@contextmanager
def unusable_values_counted() -> Iterator[None]:
    """Inside, caches say nothing of values that they cannot use; one message at the end has their number.

    Contexts nest: the outermost one counts, so that a call that opens several caches says it once.
    """
    if _counted.get() is not None:
        yield
        return
    unusable: _Unusable = {}
    token = _counted.set(unusable)
    try:
        yield
    finally:
        _counted.reset(token)
        _say_unusable(unusable)


def _say_unusable(unusable: _Unusable) -> None:
    if unusable:
        what = "a cached measurement is" if len(unusable) == 1 else f"{len(unusable)} cached measurements are"
        log.warning("%s unusable and will be repeated: %s", what, next(iter(unusable.values())))


def _unchanged(value: Any) -> Any:
    return value


def cache_directory() -> Path:
    """Where files are kept: $AUTOPAR_CACHE_DIR where that is set, else the user's cache directory."""
    return Path(os.environ.get("AUTOPAR_CACHE_DIR") or platformdirs.user_cache_dir("autopar"))


def default_cache_path() -> Path:
    """The file that keeps measurements."""
    return cache_directory() / f"measurements-v{CACHE_VERSION}.sqlite"


def max_age_seconds() -> float:
    """The age in seconds from which a measurement counts as missing (see `MAX_AGE_DAYS`)."""
    text = os.environ.get("AUTOPAR_CACHE_DAYS")
    try:
        days = MAX_AGE_DAYS if not text else float(text)
    except ValueError:
        days = math.nan
    if not days >= 0:
        warnings.warn(
            f"AUTOPAR_CACHE_DAYS must be a number of days >= 0 or inf, got {text!r}; using {MAX_AGE_DAYS:g}",
            stacklevel=2,
        )
        days = MAX_AGE_DAYS
    return days * 86400


def signature_key(*parts: Any) -> str:
    """A cache key for a measurement: SHA-256, as hex digits, of `parts`, of torch's build and settings
    (`torch_environment`) and of the cache's version.

    `parts` are JSON values (tuples count as lists, dictionaries in any order); equal parts give equal keys in every
    process with the same environment.

    Raises:
        TypeError: a part is not a JSON value; its text might differ between processes.
    """
    text = json.dumps([CACHE_VERSION, torch_environment(), parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class MeasurementCache:
    """A key-value store in one SQLite file: strings (without NUL characters) to JSON values.

    Safe with several threads (one connection behind a lock) and several processes (each call is a transaction; writers
    wait for each other). A forked child must open its own. The journal is SQLite's default, a rollback journal, which
    works on network file systems too; WAL does not.

    A measurement older than `max_age_seconds()` counts as missing.

    Measurements can be repeated, so trouble with the file never stops a job. Each case warns:
        a damaged file                   is moved to <name>.corrupt, and an empty one takes its place
        a file of another version        is emptied (without a warning)
        a place that cannot be written   leaves measurements in memory until the cache is closed
    """

    path: Path | None  # None: in memory

    def __init__(self, path: Path | None = None) -> None:
        """`path`: None for `default_cache_path()`, ":memory:" for a cache in memory."""
        self.path = default_cache_path() if path is None else Path(path)
        if self.path == Path(":memory:"):
            self.path = None
        self._lock = threading.Lock()
        self._counted_outside = _counted.get()
        self._unusable: _Unusable = {} if self._counted_outside is None else self._counted_outside
        try:
            self._connection = _connect(self.path)
        except (OSError, *_OF_SQLITE) as error:
            self._connection = self._recover(error)

    def get(self, key: str, parse: Callable[[Any], T] = _unchanged) -> T | None:
        """The value of `key` after `parse`; None if it is missing (see `get_many`)."""
        return self.get_many([key], parse).get(key)

    def get_many(self, keys: Iterable[str], parse: Callable[[Any], T] = _unchanged) -> dict[str, T]:
        """The values of `keys` after `parse`, in one query; keys whose value is missing or too old are left out.

        A value that `parse` refuses with an AttributeError, LookupError, TypeError or ValueError counts as missing, so
        that the caller measures again: a value in the wrong shape may come from a damaged file or another program.
        """
        wanted = json.dumps(list(keys))
        # One JSON parameter instead of one per key: SQLite limits the number of parameters.
        query = "SELECT key, value FROM measurements WHERE key IN (SELECT value FROM json_each(?)) AND created >= ?"
        oldest = time.time() - max_age_seconds()
        rows = self._run(lambda connection: connection.execute(query, [wanted, oldest]).fetchall())
        values = {}
        for key, text in rows:
            try:
                values[key] = parse(json.loads(text))
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                self._unusable[key] = error
        return values

    def put(self, key: str, value: Any) -> None:
        """Set the value of `key`; it replaces an older one."""
        self.put_many({key: value})

    def put_many(self, values: Mapping[str, Any]) -> None:
        """Set all of `values` in one transaction: all of them, or none if the process dies."""
        now = time.time()
        rows = [(key, json.dumps(value), now) for key, value in values.items()]
        self._write("INSERT OR REPLACE INTO measurements VALUES (?, ?, ?)", rows)

    def clear(self) -> None:
        """Delete every measurement."""
        self._write("DELETE FROM measurements", [()])

    def close(self) -> None:
        """Close the file, and say how many values could not be used; the cache cannot be used afterwards."""
        with self._lock:
            self._connection.close()
        if self._counted_outside is None:
            _say_unusable(self._unusable)
            self._unusable = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, statement: str, rows: list[Any]) -> None:
        def write(connection: sqlite3.Connection) -> None:
            with connection:
                connection.executemany(statement, rows)

        self._run(write)

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """`work` on the connection, and once more on its replacement if the file turns out to be unusable."""
        with self._lock:
            try:
                with using(self.path):
                    return work(self._connection)
            except _OF_SQLITE as error:
                broken, self._connection = self._connection, self._recover(error)
                broken.close()
                with using(self.path):
                    return work(self._connection)

    def _recover(self, error: Exception) -> sqlite3.Connection:
        """A usable connection in place of the one that raised `error`; raises `error` if the file is not the cause."""
        if self.path is not None and is_corrupt(error):
            try:
                aside = move_aside_if_damaged(self.path)
                if aside is not None:
                    warnings.warn(f"measurement cache {self.path} is damaged ({error}); moved to {aside}", stacklevel=3)
                return _connect(self.path)
            except (OSError, *_OF_SQLITE) as later:
                error = later
        if self.path is None or not isinstance(error, OSError | sqlite3.OperationalError):
            raise error
        warnings.warn(f"measurement cache {self.path} cannot be used ({error}); keeping it in memory", stacklevel=3)
        self.path = None
        return _connect(None)


def _connect(path: Path | None) -> sqlite3.Connection:
    """A connection to the file, or to memory, with a table of this version in it."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    with using(path):
        connection = sqlite3.connect(path or ":memory:", timeout=BUSY_SECONDS, check_same_thread=False)
        try:
            check_intact(connection)
            if not _has_table(connection):
                with connection:
                    connection.execute("BEGIN IMMEDIATE")
                    if not _has_table(connection):  # another process may have made it during the wait
                        _create_table(connection)
        except _OF_SQLITE:
            connection.close()
            raise
    return connection


def _create_table(connection: sqlite3.Connection) -> None:
    connection.execute("DROP TABLE IF EXISTS measurements")
    connection.execute(_TABLE)
    connection.execute(f"PRAGMA user_version = {CACHE_VERSION}")


def _has_table(connection: sqlite3.Connection) -> bool:
    """Whether the table of this version is there, with its columns."""
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    tables = connection.execute("SELECT sql FROM sqlite_master WHERE name = 'measurements'").fetchall()
    return version == CACHE_VERSION and tables == [(_TABLE,)]
