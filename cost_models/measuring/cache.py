"""Measurements kept on disk, shared by threads and processes."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import platformdirs
import torch

CACHE_VERSION = 1
"""Of the file's layout and of what the values mean: a file of another version is emptied, its keys never match."""

BUSY_SECONDS = 30.0  # how long to wait for another process's write

T = TypeVar("T")


def cache_directory() -> Path:
    """Where files are kept: $AUTOPAR_CACHE_DIR where that is set, else the user's cache directory."""
    return Path(os.environ.get("AUTOPAR_CACHE_DIR") or platformdirs.user_cache_dir("autopar"))


def default_cache_path() -> Path:
    """The file that keeps measurements."""
    return cache_directory() / f"measurements-v{CACHE_VERSION}.sqlite"


def signature_key(*parts: Any) -> str:
    """A cache key for what was measured: SHA-256 of `parts`, PyTorch's version and the cache's version, as hex digits.

    `parts` are JSON values (tuples count as lists, dictionaries in any order); equal parts give equal keys in every
    process.

    Raises:
        TypeError: a part is no JSON value, whose text might differ between processes.
    """
    text = json.dumps([CACHE_VERSION, torch.__version__, parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class MeasurementCache:
    """A key-value store in one SQLite file: strings (without NUL characters) to JSON values.

    Safe with several threads (one connection behind a lock) and several processes (each call is a transaction; writers
    wait for each other). A forked child must open its own. The journal is SQLite's default, a rollback journal, which
    works on network file systems too; WAL does not.

    Measurements can be made again, so trouble with the file never stops a job; each is warned about:
        a damaged file                  is moved to <name>.corrupt, and an empty one takes its place
        a file of another version       is emptied (without a warning)
        a place that can't be written   leaves measurements in memory until the cache is closed
    """

    path: Path | None  # None: in memory

    def __init__(self, path: Path | None = None) -> None:
        self.path = default_cache_path() if path is None else Path(path)
        self._lock = threading.Lock()
        try:
            self._connection = _connect(self.path)
        except (OSError, sqlite3.Error) as error:
            self._connection = self._recover(error)

    def get(self, key: str) -> Any | None:
        """The value of `key`, None where it has none."""
        return self.get_many([key]).get(key)

    def get_many(self, keys: Iterable[str]) -> dict[str, Any]:
        """The values of those of `keys` that have one; one query for all."""
        wanted = json.dumps(list(keys))
        # One JSON parameter rather than one a key: SQLite limits the number of parameters.
        query = "SELECT key, value FROM measurements WHERE key IN (SELECT value FROM json_each(?))"
        rows = self._run(lambda connection: connection.execute(query, [wanted]).fetchall())
        return {key: json.loads(value) for key, value in rows}

    def put(self, key: str, value: Any) -> None:
        """Set the value of `key`, in place of an older one."""
        self.put_many({key: value})

    def put_many(self, values: Mapping[str, Any]) -> None:
        """Set all of `values` in one transaction: all of them, or none if the process dies."""
        rows = [(key, json.dumps(value)) for key, value in values.items()]
        self._write("INSERT OR REPLACE INTO measurements VALUES (?, ?)", rows)

    def clear(self) -> None:
        """Forget every measurement."""
        self._write("DELETE FROM measurements", [()])

    def close(self) -> None:
        """Close the file; the cache cannot be used afterwards."""
        with self._lock:
            self._connection.close()

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
                return work(self._connection)
            except sqlite3.Error as error:
                broken, self._connection = self._connection, self._recover(error)
                broken.close()
                return work(self._connection)

    def _recover(self, error: Exception) -> sqlite3.Connection:
        """A connection that works in place of the one that met `error`; raises `error` if the file is not to blame."""
        if self.path is not None and is_corrupt(error):
            try:
                aside = move_aside(self.path)
                warnings.warn(f"measurement cache {self.path} is damaged ({error}); moved to {aside}", stacklevel=3)
                return _connect(self.path)
            except (OSError, sqlite3.Error) as still:
                error = still
        if self.path is None or not isinstance(error, OSError | sqlite3.OperationalError):
            raise error
        warnings.warn(f"measurement cache {self.path} cannot be used ({error}); keeping it in memory", stacklevel=3)
        self.path = None
        return _connect(None)


def _connect(path: Path | None) -> sqlite3.Connection:
    """A connection to the file, or to memory, with an up-to-date table in it."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path or ":memory:", timeout=BUSY_SECONDS, check_same_thread=False)
    try:
        if _version(connection) != CACHE_VERSION:
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                if _version(connection) != CACHE_VERSION:  # nobody else did it while this process waited
                    connection.execute("DROP TABLE IF EXISTS measurements")
                    connection.execute("CREATE TABLE measurements (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
                    connection.execute(f"PRAGMA user_version = {CACHE_VERSION}")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _version(connection: sqlite3.Connection) -> int:
    return connection.execute("PRAGMA user_version").fetchone()[0]


def is_corrupt(error: Exception) -> bool:
    """Whether a file that SQLite could not read is damaged, or none of SQLite's."""
    primary = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF  # the low byte of an extended code
    return primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def move_aside(path: Path) -> Path:
    """Rename the file; its journal goes, or SQLite would roll it back into the next file of that name."""
    aside = path.with_name(path.name + ".corrupt")
    path.replace(aside)
    path.with_name(path.name + "-journal").unlink(missing_ok=True)
    return aside
