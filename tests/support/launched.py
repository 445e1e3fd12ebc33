"""Programs forked from a process that has imported torch, which takes most of the time of a short program.

Unlike a process of multiprocessing (forked.py), each ends by running off its end, with all that Python does then.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Program:
    source: str
    arguments: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)  # added to the environment


@dataclass(frozen=True)
class Ended:
    returncode: int
    output: str  # and errors


class Launched:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def ended(self, number: int, within: float) -> Ended:
        """What became of a program. Raises TimeoutError after `within` seconds."""
        path, end = self._folder / f"{number}.status", time.monotonic() + within
        while not path.exists():
            if time.monotonic() > end:
                raise TimeoutError(f"program {number} still runs")
            time.sleep(0.02)
        return Ended(int(path.read_text()), path.with_suffix(".output").read_text())


@contextlib.contextmanager
def launched(folder: Path, programs: Sequence[Program]) -> Iterator[Launched]:
    """Programs that run at the same time; what still runs of them is killed in the end."""
    (folder / "programs.json").write_text(json.dumps([asdict(program) for program in programs]))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    launcher = subprocess.Popen([sys.executable, __file__, folder], start_new_session=True, env=environment)
    try:
        yield Launched(folder)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()


def _own(folder: Path) -> str:
    """The source of one program, in a process of its own. In the first process it never returns."""
    children = {}
    for number, program in enumerate(json.loads((folder / "programs.json").read_text())):
        child = os.fork()
        if child == 0:
            output = os.open(folder / f"{number}.output", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
            os.environ.update(program["env"])
            sys.argv[1:] = program["arguments"]
            source: str = program["source"]
            return source
        children[child] = number
    for _ in children:
        child, status = os.wait()
        path = folder / f"{children[child]}.ended"
        path.write_text(str(os.waitstatus_to_exitcode(status)))
        path.rename(path.with_suffix(".status"))  # complete when it appears
    os._exit(0)


if __name__ == "__main__":
    import preloaded_by_programs  # noqa: F401

    exec(_own(Path(sys.argv[1])))
