"""Other systems by name: what each needs, what it refuses, and how it gets ready."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from torch import nn

from autopar.analysis.example import Example
from autopar.costs.cost_table import Progress
from autopar.errors import InputError
from autopar.errors.names import similar
from autopar.runtime.comparing.contestants import timed_step, whole_step
from autopar.runtime.other_systems.blocks import (
    balanced,
    block_seconds,
    need_blocks,
    refuse_shared_parameters,
    sizes_in_words,
)
from autopar.runtime.other_systems.gpipe import gpipe_step
from autopar.runtime.other_systems.independent import CEILING, serving
from autopar.runtime.other_systems.pipelining import PER_RANK
from autopar.runtime.other_systems.processes import Processes
from autopar.runtime.other_systems.rank import SystemRank
from autopar.runtime.other_systems.training_step import Refusal, TrainingStep
from cost_models import Device
from cost_models.hardware.devices import operator_threads

PLAIN, DATA_PARALLEL, DDP, GPIPE, PIPELINING = "plain", "DataParallel", "DDP", "torchgpipe", "pipelining"
SYSTEMS = (CEILING, PLAIN, DATA_PARALLEL, DDP, GPIPE, PIPELINING, *(f"{PIPELINING}:{name}" for name in PER_RANK))
_EXTRAS = {GPIPE: ("torchgpipe", "peers")}  # system -> package and the extra that has it
_BLOCK_ROUNDS = 3
_TOLERANCE = 1e-3  # of a loss, relative: single precision, summed in another order
_MICROBATCHES = 2  # for each device, where nothing says how many


@dataclass(frozen=True)
class OtherSystem:
    """A system that is ready to run the step."""

    name: str
    how: str  # in words
    step: Callable[[], object]  # returns the loss, if it knows it
    clear: Callable[[], None]  # no gradients are left

    def timed(self, devices: Sequence[Device]) -> float:
        return timed_step(self.step, self.clear, devices)


@dataclass(frozen=True)
class OtherSystems:
    """Those that are ready, and the others with the reason why not."""

    ready: tuple[OtherSystem, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)


def check_systems(names: Sequence[str]) -> tuple[str, ...]:
    """The names as `SYSTEMS` has them, each once; they may be given in capital or small letters.

    Raises InputError for a name that is none, or a package that is not installed.
    """
    if isinstance(names, str):
        raise InputError(f"systems must be a list of names, got the text {names!r}; give [{names!r}]")
    if not isinstance(names, Iterable):
        raise InputError(f"systems must be a list of names, such as ['DDP'], got {names!r}")
    known = {name.lower(): name for name in SYSTEMS}
    found = []
    for given in names:
        name = known.get(str(given).lower())
        if name is None:
            hint = similar(str(given), SYSTEMS, most=1, alike=0.5) or f"known are {', '.join(SYSTEMS)}"
            raise InputError(f"systems: there is no system {given!r}; {hint}")
        package, extra = _EXTRAS.get(name, ("torch", ""))
        if importlib.util.find_spec(package) is None:
            raise InputError(f'system {name!r} needs the package {package}: pip install "autopar[{extra}]"')
        found.append(name)
    return tuple(dict.fromkeys(found))


@contextmanager
def other_systems(
    names: Sequence[str],
    example: Example,
    devices: Sequence[Device],
    n_microbatches: int | None,
    copy: Callable[[], nn.Module],
    threads: int,
    progress: Progress,
) -> Iterator[OtherSystems]:
    """Get systems ready for the example's training step on as many workers as there are `devices`.

    Args:
        names: as `check_systems` returns them.
        n_microbatches: of the systems that pipeline.
        copy: makes a copy of the model for a system.
        threads: of operators of the plain model.
    """
    if not names:
        yield OtherSystems()
        return
    ready: list[OtherSystem] = []
    refused: dict[str, str] = {}
    with ExitStack() as stack:
        preparing = _Preparing(example, devices, n_microbatches, copy, threads, stack)
        for name in names:
            progress(f"preparing {name}", 0.0)
            try:
                system = preparing.system(name)
                preparing.check(system)
                ready.append(system)
            except Refusal as error:
                refused[name] = str(error)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                said = str(error).strip().splitlines()  # of a process, the traceback
                refused[name] = f"it failed: {said[-1] if said else type(error).__name__}"
        yield OtherSystems(tuple(ready), refused)


class _Preparing:
    """Makes systems ready, one after another; those that run in processes share these."""

    def __init__(
        self,
        example: Example,
        devices: Sequence[Device],
        n_microbatches: int | None,
        copy: Callable[[], nn.Module],
        threads: int,
        stack: ExitStack,
    ) -> None:
        self._example, self._devices, self._copy, self._stack = example, devices, copy, stack
        self._threads = threads  # of operators in the caller's thread
        self._wanted = n_microbatches
        self._processes: Processes | None = None
        self._seconds: list[float] | None = None  # of blocks

    def system(self, name: str) -> OtherSystem:
        """Raises Refusal, or what the system itself raises."""
        kind, _, schedule = name.partition(":")
        if kind == PLAIN:
            return self._plain()
        step = TrainingStep.of(replace(self._example, model=self._copy()))
        if kind == DATA_PARALLEL:
            return self._data_parallel(step)
        if any(device.torch_device.type != "cpu" for device in self._devices):
            raise Refusal("autopar runs it on CPU workers only")
        if len(self._devices) < 2:
            raise Refusal("it needs two devices or more")
        if kind != CEILING and not step.training:
            raise Refusal("it runs training steps, and this model is not in training mode")
        if kind in (GPIPE, PIPELINING) and (self._example.loss is None or step.target is None):
            raise Refusal("it runs training steps with a loss: give target= and loss_fn=")
        if kind == GPIPE:
            return self._gpipe(step)
        if kind == PIPELINING:
            return self._pipelining(name, step, schedule or "1F1B")
        step.part(0, len(self._devices))  # refuses a batch without equal parts
        method, how = (SystemRank.ddp, "") if kind == DDP else (SystemRank.independent, ", no communication")
        self._ranks().call(method, name)
        n = len(self._devices)
        return self._on_ranks(name, f"{n} processes, each with 1/{n} of the batch{how}")

    def check(self, system: OtherSystem) -> None:
        """Raises Refusal for a system with another loss than the model's, where that is one number."""
        if system.name in (PLAIN, CEILING, DATA_PARALLEL) or self._expected is None:
            return
        system.clear()
        got = system.step()
        system.clear()
        if isinstance(got, float) and not abs(got - self._expected) <= _TOLERANCE * abs(self._expected):
            raise Refusal(f"its loss is {got:.6g}, and the model's is {self._expected:.6g}")

    @cached_property
    def _expected(self) -> float | None:
        """The model's loss; None where micro-batches have others (batch norm), or no two calls have the same."""
        step = TrainingStep.of(replace(self._example, model=self._copy()))
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in step.model.modules()):
            return None
        if not step.training:
            return None
        first, second = (step.run() for _ in range(2))
        step.clear()
        return first if first == second else None

    def _plain(self) -> OtherSystem:
        """The model with as many threads as the caller has set."""
        model = self._copy()

        def step() -> None:
            with operator_threads(self._threads):
                whole_step(model, self._example)

        how = f"the model itself, {self._threads} thread{'s' if self._threads > 1 else ''}"
        return OtherSystem(PLAIN, how, step, partial(model.zero_grad, set_to_none=True))

    def _data_parallel(self, step: TrainingStep) -> OtherSystem:
        places = list(dict.fromkeys(d.torch_device for d in self._devices))
        if any(place.type != "cuda" for place in places) or len(places) < 2:
            raise Refusal("nn.DataParallel needs two GPUs; on anything else it runs the model itself")
        inner = step.model.to(places[0])
        wrapped = replace(step, model=nn.DataParallel(inner, device_ids=[place.index for place in places]))
        return OtherSystem(DATA_PARALLEL, f"{len(places)} GPUs", wrapped.run, wrapped.clear)

    def _gpipe(self, step: TrainingStep) -> OtherSystem:
        m, n = self._microbatches(), len(self._devices)
        run, balance = gpipe_step(step, n, m)
        how = f"blocks {' | '.join(map(str, balance))}, {m} micro-batches"
        return OtherSystem(GPIPE, how, run, step.clear)

    def _pipelining(self, name: str, step: TrainingStep, schedule: str) -> OtherSystem:
        m, n_stages = self._microbatches(), len(self._devices) * PER_RANK[schedule]
        blocks = need_blocks(step, n_stages)
        if self._seconds is None:
            with operator_threads(1):
                self._seconds = block_seconds(step, m, _BLOCK_ROUNDS)
        cuts = balanced(self._seconds, n_stages)
        refuse_shared_parameters(step, cuts)
        self._ranks().call(SystemRank.pipelining, name, schedule, m, cuts)
        return self._on_ranks(name, f"{sizes_in_words(cuts, len(blocks))}, {schedule}, {m} micro-batches")

    def _microbatches(self) -> int:
        """Those wanted, or as many as split the batch evenly, up to two for each device."""
        if self._wanted is not None:
            return self._wanted
        return math.gcd(self._example.program.batch_size, _MICROBATCHES * len(self._devices)) or 1

    def _ranks(self) -> Processes:
        if self._processes is None:
            step = TrainingStep.of(replace(self._example, model=self._copy()))
            self._processes = self._stack.enter_context(serving(step, len(self._devices)))
        return self._processes

    def _on_ranks(self, name: str, how: str) -> OtherSystem:
        ranks = self._ranks()

        def step() -> float:
            losses = [loss for loss in ranks.call(SystemRank.step, name) if loss is not None]
            return losses[-1]

        return OtherSystem(name, how, step, lambda: _clear(ranks))


def _clear(ranks: Processes) -> None:
    ranks.call(SystemRank.clear)
