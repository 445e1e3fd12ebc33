"""Whether the process of another rank on this machine lives, as Linux says in /proc."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def own_process() -> str:
    """This process: the start of the machine, its space of process numbers, its number, when it began; "" elsewhere
    than on Linux."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {_space()} {os.getpid()} {_stat(os.getpid())[1]}"
    return ""


def has_gone(process: str) -> bool:
    """Whether that `own_process` has ended, if only a moment ago. False where this cannot be known: on another
    machine, or for ""."""
    own = own_process()
    if not process or not own or process.split()[:2] != own.split()[:2]:
        return False
    _, _, number, began = process.split()
    try:
        state, now_began = _stat(int(number))
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return state in "ZX" or now_began != began


def _space() -> str:
    return os.readlink("/proc/self/ns/pid")


def _stat(number: int) -> tuple[str, str]:
    """(state, when it began) of a process. Raises OSError."""
    # proc_pid_stat(5): the name is in parentheses, and may have spaces; state is field 3, starttime field 22.
    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]
