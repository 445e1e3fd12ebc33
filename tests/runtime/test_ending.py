"""Modules and programs end whenever they like, without being asked to close anything."""

from __future__ import annotations

import gc
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
from faults import batch, comes_true, mean_square, pipelined, workers
from models import assert_same_gradients, gradients

from autopar import PipelinedModule

pytestmark = pytest.mark.timeout(90)  # s: what hangs is stopped


def assert_right(pm: PipelinedModule) -> None:
    one = batch(2)
    mean_square(pm.unwrap()(*one), one[0]).backward()
    wanted = gradients(pm)
    pm.train_step(*one, target=one[0], loss_fn=mean_square)
    assert_same_gradients(gradients(pm), wanted)
    mean_square(pm(*one), one[0]).backward()
    assert_same_gradients(gradients(pm), wanted)


def test_a_module_may_be_closed_at_any_time_and_used_afterwards() -> None:
    pm = pipelined("1f1b", ["cpu:0", "cpu:1"])
    pm.close()  # nothing has run
    for _ in range(2):
        others = workers()
        assert_right(pm)
        mine = workers() - others
        assert sorted(thread.name for thread in mine) == ["autopar-cpu:0", "autopar-cpu:1"]
        pm.close()
        pm.close()
        assert comes_true(lambda mine=mine: not mine & workers())  # type: ignore[misc]


def test_a_backward_after_its_module_was_closed_says_so() -> None:
    pm = pipelined("1f1b", ["cpu:0", "cpu:1"])
    output = pm(*batch(2))
    pm.close()
    with pytest.raises(RuntimeError, match="has been closed"):
        output.square().mean().backward()
    assert all(p.grad is None for p in pm.parameters())
    assert_right(pm)


def test_a_module_that_is_dropped_takes_its_threads_along() -> None:
    others = workers()
    pm = pipelined("1f1b", ["cpu:0", "cpu:1"])
    assert_right(pm)
    mine = workers() - others
    assert len(mine) == 2
    del pm
    gc.collect()
    assert comes_true(lambda: not mine & workers())


# -- the interpreter's end ------------------------------------------------------------------------------------------

_SCRIPT = """
import signal, sys, threading, time
import torch
import autopar

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
plan = autopar.Plan.from_split({"0": 0, "2": 1}, n_microbatches=2)
pm = autopar.parallelize(net, ["cpu", "cpu"], plan=plan)
x = torch.randn(4, 4)

def loss_fn(output, target):
    return (output - target).square().mean()

pm.train_step(x, target=x, loss_fn=loss_fn)
loss_fn(pm(x), x).backward()
"""
# What the program does last, its exit status, and all that it says.
_ENDS: dict[str, tuple[str, int | None, str]] = {
    "with a module that works, and a backward to come": ("output = pm(x)\nprint('end')", 0, "end\n"),
    "in a worker's loss": ("pm.train_step(x, target=x, loss_fn=lambda *_: sys.exit(7))", 7, ""),
    "by an error": ("raise ValueError('top level')", 1, ".*ValueError: top level\n"),
    "in the middle of a daemon thread's step": (
        """
        started = threading.Event()
        def slow(output, target):
            started.set()
            time.sleep(300)
        step = lambda: pm.train_step(x, target=x, loss_fn=slow)
        threading.Thread(target=step, daemon=True).start()
        started.wait()
        print('end')
        """,
        0,
        "end\n",
    ),
    "while a daemon thread does step after step": (
        """
        def steps():
            while True:
                pm.train_step(x, target=x, loss_fn=loss_fn)
        threading.Thread(target=steps, daemon=True).start()
        time.sleep(0.2)
        print('end')
        """,
        None,  # torch itself aborts when Python stops a thread inside its autograd
        "end\n.*",
    ),
    "by Ctrl-C while a worker is in a long operator": (
        """
        def slow(output, target):
            signal.raise_signal(signal.SIGINT)
            time.sleep(300)
        pm.train_step(x, target=x, loss_fn=slow)
        """,
        -signal.SIGINT,
        ".*KeyboardInterrupt\n",
    ),
}


@pytest.fixture(scope="module")
def programs() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All of `_ENDS`, started together: most of their time is that of imports."""
    running = {
        name: subprocess.Popen(
            [sys.executable, "-c", _SCRIPT + textwrap.dedent(last)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, (last, _, _) in _ENDS.items()
    }
    yield running
    for program in running.values():
        program.kill()
        program.wait()


@pytest.mark.parametrize("how", _ENDS)
def test_a_program_that_never_closes_its_module_ends(how: str, programs: dict[str, subprocess.Popen[str]]) -> None:
    _, status, says = _ENDS[how]
    output, _ = programs[how].communicate(timeout=60)
    assert status is None or programs[how].returncode == status, output
    assert re.fullmatch(says, output, re.DOTALL), output
