"""SQLite files that several processes use at once, and that may be damaged: locking them and moving them aside.

A damaged file is replaced by renaming it. That is safe only if no process is inside a transaction: SQLite finds a
transaction's journal by the file's name, so a renamed file would leave its journal to the next file of that name. A
lock file of its own keeps the two apart:

    process A   |-shared-|  get        |-shared-|  put
    process B             |-shared-|  get: damaged!   |-exclusive-|  still damaged? then rename it and its journal
    process C                 |-shared-|  get: damaged!             |-exclusive-|  replaced meanwhile: nothing to do
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows, where an open file cannot be renamed anyway
    fcntl = None  # type: ignore[assignment]

BUSY_SECONDS = 30.0  # how long to wait for another process's write


@contextmanager
def using(path: Path | None) -> Iterator[None]:
    """Keep other processes from moving the file at `path` aside; around every transaction (None: in memory)."""
    with contextlib.ExitStack() as stack:
        if path is not None:
            with contextlib.suppress(OSError):  # in a directory that cannot be written, files cannot be moved either
                stack.enter_context(_locked(path, exclusive=False))
        yield


def move_aside_if_damaged(path: Path) -> Path | None:
    """Rename a damaged file and its journal, and return the new path; None if the file at `path` is not damaged (any
    more), because another process was faster.

    Raises:
        OSError: the directory cannot be written.
    """
    with _locked(path, exclusive=True):
        if not path.exists() or not _is_damaged(path):
            return None
        aside = path.with_name(path.name + ".corrupt")
        journal, its_journal = (p.with_name(p.name + "-journal") for p in (path, aside))
        its_journal.unlink(missing_ok=True)  # of an earlier damaged file
        if journal.exists():  # a crashed process left it; SQLite would apply it to the next file of that name
            journal.replace(its_journal)
        path.replace(aside)
        return aside


def check_intact(connection: sqlite3.Connection) -> None:
    """Raises DatabaseError (`is_corrupt`) where SQLite finds the file damaged, which queries may not notice."""
    found = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if found != ("ok",):
        error = sqlite3.DatabaseError(*found or ())
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error


def is_corrupt(error: Exception) -> bool:
    """Whether an error of SQLite says that the file is damaged, or is not a file of SQLite."""
    if isinstance(error, UnicodeDecodeError):  # sqlite3 reads its messages with names from the file
        return True
    primary = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF  # the low byte of an extended code
    return primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _is_damaged(path: Path) -> bool:
    try:
        with closing(sqlite3.connect(path, timeout=BUSY_SECONDS)) as connection:
            check_intact(connection)
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        return is_corrupt(error)
    return False


@contextmanager
def _locked(path: Path, exclusive: bool) -> Iterator[None]:
    """Hold the lock file of `path`; closing it releases the lock, also if the process is killed."""
    with open(path.with_name(path.name + ".lock"), "ab") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield
