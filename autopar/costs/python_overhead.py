"""Seconds that Python itself takes for an action and for an operator, whatever the operators compute.

An action is one forward or backward of one stage for one micro-batch. `runtime/planning/action_overhead.py` measures
its overhead on the machine at hand. Where nothing can be measured, the constants here are the price. Two readers need
these seconds, with two clocks:

    the planner    adds wall time to every predicted action: a message arrives, the worker wakes, runs, and sends
    the runtime    compares the workers' CPU time with that of empty actions, to see whether actions are so small that
                   one worker suffices; the time in which a worker waits for the interpreter is not part of it

        wall time   |-- wait for message and interpreter --|-- leaves, autograd, send --|
        CPU time                                           |-- leaves, autograd, send --|
"""

from __future__ import annotations

from dataclasses import dataclass

# s of wall time for one action of one of several busy workers, on top of the measured seconds of its operators.
ACTION_OVERHEAD = 6e-5

# The part of `ACTION_OVERHEAD` in which the worker computes: 40 of 60 us on one core of a server.
_COMPUTING = 2 / 3

# s of CPU time for one action.
ACTION_CPU_OVERHEAD = ACTION_OVERHEAD * _COMPUTING

# s that a backward in two parts (zero-bubble schedules) takes longer than a whole one, for every operator that has a
# backward: Python walks the autograd graph, and autograd starts anew for every operator with parameters. Backwards of
# stages of 24 operators differ by 21 to 27 us an operator on one core of a server.
SPLIT_OVERHEAD = 2.2e-5

# s of CPU time for one operator: torch's dispatch and autograd's bookkeeping. Measured seconds of operators contain it.
OPERATOR_CPU_OVERHEAD = 1e-5

# Where an action takes less than this multiple of Python's own overhead for it, worker threads gain nothing: only one
# of them can run Python at a time.
TINY = 2.0


@dataclass(frozen=True)
class PythonOverhead:
    """What Python takes on a machine, beyond the measured seconds of operators."""

    busy: float = ACTION_OVERHEAD  # s for one action of one of several workers
    alone: float = ACTION_OVERHEAD  # the same where one worker does all actions
    splitting: float = SPLIT_OVERHEAD  # s for every operator whose backward comes in two parts


NOT_MEASURED = PythonOverhead()


def one_worker_suffices(seconds: float, n_actions: int, n_operators: int) -> bool:
    """Whether the operators of a step are so small that one worker of a CPU does all actions as fast as several.

    `seconds`: CPU time of all actions. `n_operators`: passes of operators in these; a backward counts twice.
    """
    return seconds < TINY * (n_actions * ACTION_CPU_OVERHEAD + n_operators * OPERATOR_CPU_OVERHEAD)
