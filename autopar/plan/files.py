"""Writing a file as a whole: a crash leaves the old file or the new one, never a part of it. Names of files say what
they are."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from autopar.errors import InputError

PAGE = "a report is a page in HTML", (".html", ".htm")
TRACE = "a trace is JSON, compressed where the name ends in .gz", (".json", ".json.gz", ".gz")
SNAPSHOT = "a snapshot of memory is a pickle", (".pickle", ".pkl")


def file_name(path: object) -> Path:
    """The path. Raises InputError for what is none."""
    if not isinstance(path, (str, os.PathLike)):
        raise InputError(f"path must be the name of a file, got {path!r}")
    return Path(path)


def file_to_write(path: str | Path, kind: tuple[str, tuple[str, ...]] | None = None) -> Path:
    """The path. Raises InputError for what is none, for a directory, for one in a directory that there is not, and for
    a name whose ending says that the file is something else than `kind`."""
    path = file_name(path) if kind is None else check_ending(path, kind)
    if path.is_dir():
        raise InputError(f"{path}: this is a directory; give the name of a file")
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no directory {path.parent}")
    return path


def check_ending(path: str | Path, kind: tuple[str, tuple[str, ...]]) -> Path:
    """The path. Raises InputError for what is none, and for a name whose ending says that the file is something else
    than `kind`."""
    path, (what, endings) = file_name(path), kind
    if path.suffix and not path.name.lower().endswith(endings):
        *others, last = endings
        raise InputError(f"{path}: {what}; give a name that ends in {', '.join(others)} or {last}")
    return path


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path`. Raises OSError, and then an existing file is unchanged."""
    path = path.resolve()  # a link keeps pointing to the file
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")  # a pipe or a device such as /dev/stdout cannot be replaced
        return
    # In the same folder, since a file can only be renamed within its file system.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp", text=True)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # without it a power failure could leave the new name with no content
        if path.exists():
            shutil.copymode(path, name)
        else:
            os.chmod(name, 0o666 & ~_umask())  # mkstemp makes files that only their owner can read
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0)  # the only way to read it is to set it
    os.umask(mask)
    return mask
