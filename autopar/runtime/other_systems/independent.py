"""The ceiling of a machine: processes that exchange nothing, each with an equal part of the batch.

    process 0   samples 0-7  ============|
    process 1   samples 8-15 ==========  |
                                         '- the step: when the last one is done

No plan on as many devices is faster, but for what it gains by smaller micro-batches. Where something else uses the
cores, these processes are slower, too, in the same rounds: the ceiling says what the machine had to give.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from autopar.runtime.other_systems.processes import Processes
from autopar.runtime.other_systems.rank import SystemRank
from autopar.runtime.other_systems.training_step import TrainingStep, load_step

CEILING = "ceiling"


@dataclass(frozen=True)
class Ceiling:
    """Processes that are ready."""

    step: Callable[[], object]
    clear: Callable[[], object]  # no gradients are left


@contextmanager
def serving(step: TrainingStep, n: int) -> Iterator[Processes]:
    """`n` processes that have the step. Raises Refusal where it cannot be sent there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.pt"
        step.save(path)
        with Processes(SystemRank, n) as processes:
            processes.call(SystemRank.load, partial(load_step, path))
            yield processes


@contextmanager
def ceiling(step: TrainingStep, n: int) -> Iterator[Ceiling]:
    """Independent processes, for rounds with other systems. Raises Refusal for a batch without `n` equal parts."""
    step.part(0, n)
    with serving(step, n) as processes:
        processes.call(SystemRank.independent, CEILING)
        yield Ceiling(partial(processes.call, SystemRank.step, CEILING), partial(processes.call, SystemRank.clear))
