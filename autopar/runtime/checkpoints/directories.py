"""Checkpoints on disk: one directory a step, complete once its manifest is there.

```
   runs/
     step-00000050/            complete: every file is in the manifest, with its length and checksum
       __0_0.distcp            what rank 0 wrote (torch.distributed.checkpoint)
       __1_0.distcp            what rank 1 wrote
       .metadata               where each part of each tensor is; written last
       manifest.json           written last, by renaming
     step-00000100.partial/    being written, or left by a process that ended while it saved
```
A directory gets its name without `.partial` when it is complete. A checkpoint that takes the place of a complete one
of the same step leaves that under `.replaced` for the moment between two renames.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autopar.errors import CheckpointError
from autopar.version import __version__

MANIFEST = "manifest.json"
FORMAT = 1  # of the manifest
_NAME = re.compile(r"step-(\d{8,})(\.partial|\.replaced)?")
_PREFERRED = {None: 2, ".partial": 1, ".replaced": 0}  # of several directories of one step


@dataclass(frozen=True)
class File:
    """One file of a checkpoint, as it was written."""

    name: str
    n_bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> File:
        """What is on disk. Raises OSError."""
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return cls(path.name, path.stat().st_size, digest)

    def problem(self, folder: Path) -> str:
        """Why the file in `folder` is not this one; "" if it is."""
        path = folder / self.name
        try:
            size = path.stat().st_size
            if size != self.n_bytes:
                return f"{self.name} has {size} bytes instead of {self.n_bytes}"
            return "" if File.of(path) == self else f"the content of {self.name} has changed since it was written"
        except FileNotFoundError:
            return f"{self.name} is missing"
        except OSError as error:
            return f"{self.name} cannot be read ({error.strerror})"


def folder_of(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def partial_of(folder: Path) -> Path:
    """Where a checkpoint is written before it is complete."""
    return folder.with_name(folder.name + ".partial")


def _replaced_of(folder: Path) -> Path:
    """Where the complete checkpoint is that another one takes the place of."""
    return folder.with_name(folder.name + ".replaced")


def step_of(folder: Path) -> int | None:
    """By the name of one checkpoint, complete or not; None: it has another name."""
    found = _NAME.fullmatch(folder.name)
    return None if found is None else int(found[1])


def step_inside(folder: Path) -> int | None:
    """Of a complete checkpoint in a directory of any name, as a copy or a link has; None: it is none."""
    try:
        return _read_manifest(folder).step
    except ValueError:
        return None


def candidates(directory: Path) -> list[Path]:
    """All directories of checkpoints, complete or not, newest step first. Raises OSError."""
    found = [(match, path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    found.sort(key=lambda one: (int(one[0][1]), _PREFERRED[one[0][2]]), reverse=True)
    return [path for _, path in found]


def start(folder: Path) -> Path:
    """An empty directory in which a checkpoint can be written.

    Raises CheckpointError for what would be in the way at the end, OSError for what is at once.
    """
    partial = partial_of(folder)
    for path in (folder, partial, _replaced_of(folder)):
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise CheckpointError(
                f"{folder} cannot be saved: {path} is a file or a link, where saving makes a directory; move it away"
            )
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial


def complete(folder: Path, files: Iterable[File], n_ranks: int) -> None:
    """Declare what lies in the partial directory of `folder` complete, and give it its name. Raises OSError."""
    partial = partial_of(folder)
    manifest = {
        "format": FORMAT,
        "step": step_of(folder),
        "ranks": n_ranks,
        "torch": torch.__version__,
        "autopar": __version__,
        "files": {file.name: {"bytes": file.n_bytes, "sha256": file.sha256} for file in files},
    }
    temporary = partial / (MANIFEST + ".new")
    with temporary.open("w") as stream:
        json.dump(manifest, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(partial / MANIFEST)
    _sync(partial)
    replaced = _replaced_of(folder)
    if folder.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        folder.rename(replaced)
    partial.rename(folder)
    _sync(folder.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def _sync(folder: Path) -> None:
    """Have the names in a directory reach the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def manifest_of(folder: Path) -> tuple[File, ...]:
    """The files of a complete checkpoint. Raises ValueError, which says why it is none."""
    found = _read_manifest(folder)
    if found.format != FORMAT:
        raise ValueError(f"{MANIFEST} has format {found.format}; this version of autopar reads {FORMAT}")
    if step_of(folder) not in (None, found.step):
        raise ValueError(f"{MANIFEST} is of step {found.step}")
    return found.files


class _Manifest(NamedTuple):
    format: int
    step: int
    files: tuple[File, ...]  # of another format: none


def _read_manifest(folder: Path) -> _Manifest:
    """Raises ValueError, which says why there is none."""
    try:
        found = json.loads((folder / MANIFEST).read_text())
        written, step = found["format"], int(found["step"])
        return _Manifest(written, step, tuple(_files(found["files"])) if written == FORMAT else ())
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST}, which is written last, is missing: saving did not end") from None
    except OSError as error:
        raise ValueError(f"{MANIFEST} cannot be read ({error.strerror})") from error
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise ValueError(f"{MANIFEST} is damaged") from error


def check_unchanged(folder: Path, files: tuple[File, ...]) -> None:
    """Raise CheckpointError unless a directory still is the complete checkpoint with these files."""
    try:
        problem = "another checkpoint has replaced it" if manifest_of(folder) != files else ""
    except ValueError as error:
        problem = str(error)
    if problem:
        raise CheckpointError(
            f"{folder} is no longer the checkpoint that was loaded ({problem}), and some of its values have not been "
            "read: call autopar.load again; keep a checkpoint that was loaded before the model's first call until that "
            "call has been made"
        )


def _files(entries: dict[str, Any]) -> Iterator[File]:
    for name, entry in entries.items():
        if Path(name).name != name:
            raise TypeError(name)
        yield File(name, int(entry["bytes"]), str(entry["sha256"]))
