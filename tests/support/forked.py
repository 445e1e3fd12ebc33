"""Processes forked from one that has imported torch, autopar and transformers: to start one anew takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext


def context() -> ForkServerContext:
    """As `multiprocessing.get_context` returns it. The process that the others are forked from runs already."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["preloaded"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # it knows no other way
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return found
