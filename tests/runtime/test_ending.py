"""Modules and programs may end at any time, whether or not a module was closed."""

from __future__ import annotations

import gc
import re
import signal
import textwrap
from collections.abc import Callable, Iterator

import pytest
from faults import batch, comes_true, mean_square, pipelined, workers
from launched import Ended, Program, launched
from models import assert_same_gradients, gradients

from autopar import PipelinedModule

pytestmark = pytest.mark.timeout(90)  # s, for a program that hangs


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


@pytest.mark.slow
def test_a_backward_after_its_module_was_closed_says_so() -> None:
    pm = pipelined("1f1b", ["cpu:0", "cpu:1"])
    output = pm(*batch(2))
    pm.close()
    with pytest.raises(RuntimeError, match="has been closed"):
        output.square().mean().backward()
    assert all(p.grad is None for p in pm.parameters())
    assert_right(pm)


@pytest.mark.slow
def test_the_threads_of_a_dropped_module_end() -> None:
    others = workers()
    pm = pipelined("1f1b", ["cpu:0", "cpu:1"])
    assert_right(pm)
    mine = workers() - others
    assert len(mine) == 2
    del pm
    gc.collect()
    assert comes_true(lambda: not mine & workers())


# -- the interpreter's end ------------------------------------------------------------------------------------------

_FIRST = """
import signal, sys, threading, time
import torch
import autopar

net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
plan = autopar.Plan.from_split({"0": 0, "2": 1}, n_microbatches=2)
pm = autopar.parallelize(net, ["cpu", "cpu"], plan=plan)
x = torch.randn(4, 4)

def loss_fn(output, target):
    return (output - target).square().mean()

pm.train_step(x, target=x, loss_fn=loss_fn)
loss_fn(pm(x), x).backward()
"""
# What each program does last, its exit status, and its whole output.
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
def programs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Ended]]:
    """What became of a program in `_ENDS`. Those that are selected run together."""
    cases = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    selected = [how for how in _ENDS if any(case.get("how") == how for case in cases)]
    sources = [Program(_FIRST + textwrap.dedent(_ENDS[how][0])) for how in selected]
    with launched(tmp_path_factory.mktemp("ends"), sources) as running:
        yield lambda how: running.ended(selected.index(how), within=80)


@pytest.mark.slow
@pytest.mark.parametrize("how", _ENDS)
def test_a_program_that_never_closes_its_module_ends(how: str, programs: Callable[[str], Ended]) -> None:
    _, wanted_status, wanted_output = _ENDS[how]
    ended = programs(how)
    assert wanted_status is None or ended.returncode == wanted_status, ended.output
    assert re.fullmatch(wanted_output, ended.output, re.DOTALL), ended.output
