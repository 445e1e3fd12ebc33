"""Scripts under torchrun, in processes forked from one that has imported torch, autopar and transformers (forked.py).

torchrun itself runs, by its own `--run-path --start-method fork`: rendezvous, environment and ends are real. Only the
imports of three Python processes, which take longer than what such a test is about, are done once.
"""

from __future__ import annotations

import atexit
import importlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from forked import context
from torch.distributed.run import main

TIMEOUT = 250.0  # s


def run(
    *command: str,
    ranks: int | None = 2,
    imports: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
) -> subprocess.CompletedProcess[str]:
    """The script `command` on ranks of torchrun; `ranks=None`: in one process, without torchrun.

    `imports`: further modules that the script needs; the ranks are forked after they are imported. `env`: added to the
    environment. Raises subprocess.TimeoutExpired.
    """
    return Started(*command, ranks=ranks, imports=imports, env=env).ended(timeout)


class Started:
    """A script that runs, as `run` starts it."""

    def __init__(
        self,
        *command: str,
        ranks: int | None,
        imports: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._command, self._folder = command, tempfile.TemporaryDirectory()
        self._files = [Path(self._folder.name) / name for name in ("out", "err")]
        given = (command, ranks, tuple(imports), {**os.environ, **(env or {})}, tuple(map(str, self._files)))
        self._process = context().Process(target=_run, args=given)
        self._process.start()

    def ended(self, timeout: float = TIMEOUT) -> subprocess.CompletedProcess[str]:
        """Wait for it. Raises subprocess.TimeoutExpired."""
        with self._folder:
            self._process.join(timeout)
            late = self._process.exitcode is None
            if late:
                os.killpg(self._process.pid or 0, signal.SIGKILL)
                self._process.join()
            printed = [path.read_text() for path in self._files]
        if late:
            raise subprocess.TimeoutExpired(self._command, timeout, *printed)
        return subprocess.CompletedProcess(self._command, self._process.exitcode or 0, *printed)


def _run(
    command: Sequence[str], ranks: int | None, imports: Sequence[str], env: Mapping[str, str], files: Sequence[str]
) -> None:
    os.setpgid(0, 0)
    for number, path in enumerate(files, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(env, OMP_NUM_THREADS="1")
    torch.set_num_threads(1)  # what OMP_NUM_THREADS does where torch is imported later
    for name in imports:
        importlib.import_module(name)
    if ranks is None:
        as_main(command)
    else:
        torchrun(["--standalone", "--nproc-per-node", str(ranks), *command])


def torchrun(arguments: Sequence[str]) -> None:
    """torchrun, with ranks that are forked from this process."""
    script = next(i for i, argument in enumerate(arguments) if argument.endswith(".py"))
    main(["--run-path", "--start-method", "fork", *arguments[:script], __file__, *arguments[script:]])


def as_main(command: Sequence[str]) -> None:
    """The script as `python script` runs it, errors and exit functions included."""
    sys.argv = list(command)
    sys.path.insert(0, str(Path(command[0]).parent))
    try:
        runpy.run_path(command[0], run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]  # it was just raised
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # a process of multiprocessing ends without


if __name__ == "__main__":
    if "RANK" in os.environ:
        as_main(sys.argv[1:])
    else:
        import preloaded_by_programs  # noqa: F401

        torchrun(sys.argv[1:])
