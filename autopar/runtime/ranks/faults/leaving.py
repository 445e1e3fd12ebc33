"""What a rank does with its process groups when its script ends.

```
   the script ends .. the watcher says so in its last beat .. groups are destroyed .. gloo lets go .. Python ends
```
Groups that outlive Python's interpreter are freed in any order, threads of NCCL among them; torch warns of that. Where
autopar started torch's default group, that one is destroyed with all others. Where the user did, those that autopar
added are, and the user's stay as they are.

A rank destroys its groups only where no call has failed: a transfer that nobody waits for any more would be waited for
here. Over gloo, closing needs no other rank, so that one which has died stops nobody. Over NCCL it does: a rank then
waits a few seconds for all others to end, and leaves its groups as they are if one does not.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from autopar.runtime.ranks.faults.heartbeats import BEAT
from autopar.runtime.ranks.faults.watcher import Watcher

_PATIENCE = 5.0  # s to wait for the last beats of all ranks
_POLL = 0.05  # s
_LET_GO = 2.0  # s for gloo's threads
_LOOK = 0.005  # s between two looks at them
_GLOO_THREAD = "pt_gloo_runloop"  # as torch names them
_TASKS = Path("/proc/self/task")  # of Linux: the threads of this process

_started: list[Any] = []  # the default process group that autopar started, if it did
_added: list[tuple[Any, Any]] = []  # (default group of that time, a group of this process that autopar added)
_registered: list[Callable[[], None]] = []


def remember_started() -> None:
    """autopar has started torch's default process group."""
    _started[:] = [dist.group.WORLD]


def remember_added(group: Any) -> None:
    """autopar has added a process group."""
    default = dist.group.WORLD
    _added[:] = [(of, one) for of, one in _added if of is default]  # others have ended
    _added.append((default, group))


def at_exit(end: Callable[[], None]) -> None:
    """Call `end` when the interpreter ends, after the watcher has stopped: handlers run in the reverse order, and that
    of the watcher is registered later. Once a process."""
    if not _registered:
        _registered.append(end)
        atexit.register(end)


def destroy(watcher: Watcher, *, together: bool) -> bool:
    """Destroy the default process group if autopar started it, else the groups that autopar added to it. Returns
    whether it did. `together`: all ranks have to do so at one time."""
    default = dist.group.WORLD
    if not watcher.went_well() or (together and not all_ended(watcher)):
        return False
    if _started and _started[0] is default:
        _started.clear()
        dist.destroy_process_group()
        return True
    groups = {id(group): group for of, group in reversed(_added) if of is default}
    _added.clear()
    for group in groups.values():
        if group is not default:  # a mesh of all ranks may use that one
            dist.destroy_process_group(group)
    return True


def all_ended(watcher: Watcher, patience: float = _PATIENCE) -> bool:
    """Wait until the scripts of all ranks have ended in good order; whether they have within `patience` seconds."""
    end = time.monotonic() + patience
    while not watcher.heartbeats.all_ended():
        if time.monotonic() > end or not watcher.heartbeats.store_answers() or not watcher.went_well():
            return False
        time.sleep(_POLL)
    if watcher.has_store:
        time.sleep(BEAT)  # the others read it
    return True


def gloo_lets_go(patience: float = _LET_GO) -> bool:
    """Wait until gloo's threads have let go of what they carried; whether they have within `patience` seconds.

    A transfer counts as done shortly before its thread frees the tensors. Tensors that Python has seen need the
    interpreter's lock for that, and a thread that asks for it while the interpreter ends aborts the process
    ("terminate called without an active exception", github.com/pytorch/pytorch/issues/38228). Where cores are busy, a
    script that ends right after its last transfer may be ahead of the thread. Groups that are destroyed wait for their
    threads, but the user's are not, and others may still be referred to.
    """
    if not _TASKS.is_dir():
        time.sleep(10 * _LOOK)
        return True
    end, idle = time.monotonic() + patience, 0
    while idle < 2:  # a thread that waits for the lock looks idle, and gets it meanwhile
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK)
        idle = 0 if any(map(_is_busy, gloo_threads())) else idle + 1
    return True


def gloo_threads() -> list[Path]:
    """Where Linux tells of each."""
    return [task for task in _TASKS.iterdir() if _read(task / "comm").strip() == _GLOO_THREAD]


def _is_busy(task: Path) -> bool:
    """Whether a thread runs, or would if a core were free. Its state stands behind its name, which is in parentheses
    (proc(5))."""
    return _read(task / "stat").rpartition(")")[2].split()[:1] == ["R"]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the thread has ended
        return ""
