"""A save that a thread writes, and what waits for its end: it uses the process group of all checkpoints."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from autopar.errors import AutoparError, CheckpointError
from autopar.runtime.ranks.faults.failure import described
from autopar.runtime.ranks.faults.watcher import lost


class Saving:
    """A checkpoint that is being saved, or has been. `path`: where it is once complete."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step
        self._thread: threading.Thread | None = None
        self._error: AutoparError | None = None
        self._is_seen = False  # by whoever waited

    @property
    def done(self) -> bool:
        """Whether saving has ended, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """The complete checkpoint. Raises CheckpointError if it could not be written."""
        if self._thread is not None:
            self._thread.join()
        self._is_seen = True
        if self._error is not None:
            raise self._error
        return self.path

    @property
    def unseen_error(self) -> AutoparError | None:
        """Why it failed, unless `wait` has said so."""
        return None if self._is_seen else self._error


_last: list[Saving] = []  # the asynchronous save that was started last


def write_in_thread(saving: Saving, write: Callable[[], None]) -> None:
    """Begin to `write` a checkpoint; `saving` gets to know how that ends."""

    def written() -> None:
        try:
            write()
        except AutoparError as error:
            saving._error = error
        except BaseException as error:  # nobody else would notice
            saving._error = CheckpointError(f"{saving.path} cannot be saved: {described(lost(error))}")
            saving._error.__cause__ = error

    saving._thread = threading.Thread(target=written, name=f"autopar saves step {saving.step}")  # joined at exit
    saving._thread.start()
    _last[:] = [saving]


def wait_for_saving() -> None:
    """Wait until an asynchronous save has ended. Raises CheckpointError if it failed and nobody has seen that."""
    if _last:
        saving = _last.pop()
        if saving._thread is not None:
            saving._thread.join()
        if saving.unseen_error is not None:
            saving.wait()


@atexit.register  # after the thread has ended: Python joins threads before
def _report_failure() -> None:
    if _last and _last[0].unseen_error is not None:
        print(f"autopar: {_last[0].unseen_error}", file=sys.stderr)
