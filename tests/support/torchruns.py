"""Scripts under torchrun, in processes forked from one that has imported torch, autopar and transformers (forked.py).

torchrun itself runs, by its own `--run-path --start-method fork`: rendezvous, environment and ends are real. Only the
imports of three Python processes, which take longer than what such a test is about, are done once. The errors of ranks
are printed by torchrun instead of the ranks: tests of what users see then start torchrun as users do.
"""

from __future__ import annotations

import importlib
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from forked import context

ROOT = Path(__file__).parents[2]
TIMEOUT = 250.0  # s


def run(
    *command: str, ranks: int | None = 2, imports: Sequence[str] = (), timeout: float = TIMEOUT
) -> subprocess.CompletedProcess[str]:
    """The script `command` on ranks of torchrun; `ranks=None`: in one process, without torchrun.

    `imports`: further modules that the script needs; the ranks are forked after they are imported.
    Raises subprocess.TimeoutExpired.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = context().Process(target=_run, args=(command, ranks, tuple(imports), str(out), str(err)))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            subprocess.run(["pkill", "-KILL", "-g", str(process.pid)], check=False)
            process.join()
            raise subprocess.TimeoutExpired(command, timeout, out.read_text(), err.read_text())
        return subprocess.CompletedProcess(command, process.exitcode, out.read_text(), err.read_text())


def _run(command: Sequence[str], ranks: int | None, imports: Sequence[str], out: str, err: str) -> None:
    os.setpgid(0, 0)
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ |= {"OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    for name in imports:
        importlib.import_module(name)
    if ranks is None:
        sys.argv = list(command)
        runpy.run_path(command[0], run_name="__main__")
        return
    from torch.distributed.run import main

    main(["--standalone", "--nproc-per-node", str(ranks), "--run-path", "--start-method", "fork", *command])
