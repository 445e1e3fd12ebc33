"""Writing a file as a whole: a crash leaves the old file or the new one, never a part of it."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path`. Raises OSError, and then an existing file is unchanged."""
    path = path.resolve()  # a link keeps pointing to the file
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")  # a pipe or a device such as /dev/stdout cannot be replaced
        return
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such directory", str(path.parent))
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
