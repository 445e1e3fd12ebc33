"""Seconds that Python itself takes for an action and for an operator, whatever the operators compute.

An action is one forward or backward of one stage for one micro-batch. `python -m benchmarks overhead` shows both
quantities on a model whose operators compute almost nothing. Two readers need them, with two clocks:

    the planner    adds wall time to every predicted action: a message arrives, the worker wakes, runs, and sends
    the runtime    compares the workers' CPU time with that of empty actions, to see whether actions are so small that
                   one worker suffices; the time in which a worker waits for the interpreter is not part of it

        wall time   |-- wait for message and interpreter --|-- leaves, autograd, send --|
        CPU time                                           |-- leaves, autograd, send --|
"""

# s of wall time for one action, on top of the measured seconds of its operators.
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
