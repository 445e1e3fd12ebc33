"""PipelinedModule on one rank of several: the same plan and the same calls on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autopar.analysis.example import Example
from autopar.errors import InputError
from autopar.options import Data, PlanOptions
from autopar.plan.plan import Plan
from autopar.runtime.call_checks import IN_ONE_PROCESS
from autopar.runtime.module import PipelinedModule
from autopar.runtime.ranks.agreement import compare, digest
from autopar.runtime.ranks.calls import RankCalls
from autopar.runtime.ranks.parameters.own import RankParameters
from autopar.runtime.ranks.planning import DecideTogether, plan_together
from autopar.runtime.ranks.same_plan import compare_plans
from autopar.runtime.ranks.signatures import RankSignatures
from autopar.runtime.ranks.step_records import profile_of_ranks
from autopar.runtime.ranks.world import World
from autopar.runtime.signatures.bound_signature import RunSettings
from autopar.runtime.signatures.captures import CallArguments
from autopar.runtime.signatures.known import Decide
from autopar.runtime.step_profile import StepProfile
from autopar.runtime.step_recorder import StepRecorder
from autopar.version import __version__
from cost_models.hardware.devices import Device


class RankedModule(PipelinedModule):
    """This rank's part of the model. After the first call `parameters()` and `state_dict()` have what this rank holds:
    DTensors under the original names."""

    _instead = IN_ONE_PROCESS

    _world: World
    _takes_shares: bool
    _on_rank: RankSignatures
    _calls: RankCalls

    def __init__(
        self,
        world: World,
        model: nn.Module,
        devices: Sequence[Device],
        decide: DecideTogether,
        *,
        plan: Plan | None = None,
        settings: RunSettings | None = None,
        data: Data = "whole",
    ) -> None:
        """`devices`: one a rank. `decide(example, measurements)` plans on rank 0, and all ranks measure. `data`: what
        every rank passes to a call."""
        agreed = _one_plan(world, devices, decide)
        super().__init__(model, devices, agreed, plan=plan, settings=settings)
        used = RunSettings() if settings is None else settings
        self._world = world
        self._takes_shares = data == "per-rank"
        self._on_rank = RankSignatures(world, model, devices, agreed, plan, used)
        self._signatures = self._on_rank
        self._calls = RankCalls(world, model, devices, self._on_rank, per_rank=self._takes_shares)

    def agree(self, options: PlanOptions, plan: Plan | None) -> None:
        """Raise InputError on all ranks where they were made with other `options`, or were given another `plan`.
        Collective."""
        same, script = "give the same on every rank", "run the same script on every rank"
        chosen = {"data": "per-rank" if self._takes_shares else "whole"}
        chosen |= {field.name: getattr(options, field.name) for field in fields(options)}
        chosen["candidates"] = repr({name: digest(plan.to_json()) for name, plan in (options.candidates or {}).items()})
        facts = {
            "the version of torch": (torch.__version__, "install the same everywhere"),
            "the version of autopar": (__version__, "install the same everywhere"),
            "the model": (type(self.unwrap()).__name__, script),
            **{f"the options of parallelize: {name}": (repr(value), same) for name, value in chosen.items()},
            **{f"the model's tensors: {name}": (_described(t), script) for name, t in _tensors(self.unwrap())},
        }
        compare(self._world, facts)
        compare_plans(self._world, plan)

    @property
    def placed_parameters(self) -> RankParameters | None:
        """What this rank holds; None before the first call."""
        return self._on_rank.parameters if self._on_rank.parameters.placed else None

    def accumulate(self) -> AbstractContextManager[None]:
        return self._calls.accumulating()

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelinedModule:
        raise InputError(
            "a module whose parameters are spread over ranks cannot be copied, as by AveragedModel: copy the model "
            "before parallelize, or average what this rank has: after the first call, mean = [p.detach().clone() for p "
            "in pm.parameters()], and after each step, m.lerp_(p.detach(), 0.01) for m, p in zip(mean, pm.parameters())"
        )

    @property
    def world(self) -> World:
        return self._world

    @property
    def takes_shares(self) -> bool:
        """Whether every rank passes samples of its own."""
        return self._takes_shares

    def names(self) -> dict[str, str]:
        """Those of `state_dict()` of the whole model, in the order of one process, each with the first name of the same
        tensor."""
        with self._on_rank.parameters.whole():
            whole = self.unwrap().state_dict(keep_vars=True)
        first: dict[int, str] = {}  # by id of a tensor
        return {
            name: first.setdefault(id(value), name) if isinstance(value, torch.Tensor) else name
            for name, value in whole.items()
        }

    @property
    def placed(self) -> bool:
        """Whether a plan has placed the parameters: they are this rank's parts then."""
        return self._on_rank.parameters.placed

    @property
    def lacks_values(self) -> bool:
        """Whether the model was built without some of its values, and has not got them yet."""
        return bool(self._on_rank.to_be_filled) and not self.placed

    def fill_when_placed(self, names: Iterable[str], fill: Callable[[nn.Module], None]) -> None:
        """Call `fill` on every rank as soon as the parameters are placed: it gives values to those named."""
        self._on_rank.to_be_filled = frozenset(names)
        self.when_placed(lambda: fill(self))

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer from before the placing this rank's parameters. Raises InputError if it has made steps."""
        self._on_rank.parameters.adopt(optimizer)

    def when_placed(self, do: Callable[[], None], *, of: object = None) -> None:
        """Call `do` on every rank: now, or once the parameters are placed. For the same object `of`, a later one takes
        the place of an earlier one that waits."""
        waiting, key = self._on_rank.after_placing, id(do if of is None else of)
        if self.placed:
            do()
            waiting.pop(key, None)
        else:
            waiting[key] = do

    def still_waits(self, of: object) -> bool:
        """Whether what `when_placed` was given for the object `of` has not been called, or has failed."""
        return id(of) in self._on_rank.after_placing

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> RankedModule:
        """As `to()` and `double()` call it. Before and after it, values that are assigned to `.data` can be noticed;
        of one change that follows the other, they could not."""
        self._on_rank.parameters.check_data()
        super()._apply(fn, recurse)
        self._on_rank.parameters.check_data()
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._on_rank.parameters.check_data()
        return super().state_dict(*args, **kwargs)

    def _profiled(self, call: CallArguments) -> tuple[torch.Tensor, Any]:
        with self._calls.profiling():
            return super()._profiled(call)

    def _profile_of(self, recorder: StepRecorder, plan: Plan, seconds: float, batch_size: int) -> StepProfile:
        """Of all ranks, the same on each. Collective."""
        with self._world.watcher.call("train_step"):
            return profile_of_ranks(self._world, recorder.record(), plan, seconds, batch_size)


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _described(tensor: torch.Tensor) -> str:
    """`(8, 12) torch.float32, trained`; sizes that are not known yet have none."""
    shape = "no sizes yet" if is_lazy(tensor) else str(tuple(tensor.shape))
    return f"{shape} {tensor.dtype}{', trained' if tensor.requires_grad else ''}"


def check_options(options: PlanOptions) -> PlanOptions:
    """The options with which ranks plan. Raises InputError for one that ranks do not follow so far, with what to do
    instead."""
    if isinstance(options.dynamic, Mapping):
        raise InputError(
            "not with one process a device so far: dynamic with sizes: give dynamic=True, or None: other sizes are "
            "captured when they come"
        )
    return options


def _one_plan(world: World, devices: Sequence[Device], decide: DecideTogether) -> Decide:
    """A plan made on rank 0 and sent to all. Once made, it stays: the parameters lie as it says."""
    known: list[Plan] = []

    def agreed(example: Example) -> Plan:
        if not known:
            known.append(plan_together(world, devices, example, decide))
        return known[0]

    return agreed
