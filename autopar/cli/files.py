"""Files that commands write: what cannot be written is refused before a search, which may take minutes."""

from __future__ import annotations

import os
from pathlib import Path

from autopar.errors import InputError
from autopar.plan.files import PAGE, check_ending
from autopar.plan.plan import Plan


def check_page(path: Path) -> None:
    """Raise InputError if no page for a browser can be written there."""
    check_ending(path, PAGE)
    check_writable(path, "--html ")


def check_writable(path: Path, option: str = "--save ") -> None:
    """Raise InputError, which names the option, if no file can be written there."""
    folder = path.resolve().parent
    if path.is_dir():
        raise InputError(f"{option}{path}: this is a directory; give the name of a file")
    if not folder.is_dir():
        raise InputError(f"{option}{path}: there is no directory {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InputError(f"{option}{path}: it cannot be written; choose another path or change its permissions")


def save_plan(plan: Plan, path: Path) -> None:
    try:
        plan.save(path)
    except (OSError, ValueError) as error:
        raise InputError(f"--save {path}: the plan cannot be written: {error}") from error
