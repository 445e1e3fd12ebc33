"""The plan as data: the operators and devices of every stage, the number of micro-batches, the schedule, predictions.

A plan prints, saves and loads. It knows neither the search that chose it nor the runtime that follows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from autopar.capture.program import Program
from autopar.errors import InputError, PlanError
from autopar.errors.names import few, similar, with_checked_names
from autopar.hints.module_paths import ancestors, nearest
from autopar.plan import serialization
from autopar.plan.assignment import Storages, by_modules, by_operators, check_listed, operators_of_stages
from autopar.plan.assumptions import Assumptions
from autopar.plan.changes import PlanChanges
from autopar.plan.display import (
    compared,
    explained,
    inside_explained,
    priced_for,
    printable,
    shown,
)
from autopar.plan.exits.plan_exits import PlanExits
from autopar.plan.files import file_name, file_to_write, write_whole
from autopar.plan.fingerprint import differences
from autopar.plan.made_by_hand import PlanByHand
from autopar.plan.placement import placed_on
from autopar.plan.plan_report import PlanReport
from autopar.plan.stage import RunnerUp, Stage, StageTransfer
from autopar.plan.step_work import StepWork
from autopar.plan.validation import places, violations, wrong_types
from autopar.schedule.builders import n_ranks, ranks_of_stages

if TYPE_CHECKING:
    from autopar.plan.diff import PlanDiff


_UNKNOWN: Storages = {}
ONE_DEVICE = "one device with enough memory"  # what `Plan.single_device_time` is of: it counts no memory
DROPPED = ", so its predictions were dropped"  # ends a note of a plan without predictions
ONE_MICROBATCH = "one micro-batch: "  # and why
_UNPROVEN = "the batch is split because a few samples say so, without a proof: "


@dataclass(frozen=True)
class Plan(PlanByHand, PlanChanges, PlanExits, PlanReport):
    """How to run a model. A plan made by hand has `split` (module path -> stage) instead of operators in its stages."""

    stages: tuple[Stage, ...]
    n_microbatches: int
    schedule: str = "1f1b"
    batch_size: int | None = None  # samples of the example call
    devices: tuple[str, ...] = ()  # all that were offered, used or not
    training: bool = True
    predicted_step_time: float | None = None  # s
    single_device_time: float | None = None  # s, predicted, the whole batch on the first device: see ONE_DEVICE
    bubble: float | None = None  # idle fraction of the used devices' time
    transfers: tuple[StageTransfer, ...] = ()
    split: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()  # reasons for its decisions
    objective: float | None = None  # s, of the search
    bound: float | None = None  # s: no plan, searched or not, has a smaller objective; on a cluster: a shorter step
    searched_bound: float | None = None  # s: no plan of those that were searched has a smaller objective
    optimality: str = ""  # how far the plan is proven to be the best
    runners_up: tuple[RunnerUp, ...] = ()
    measured_step_time: float | None = None  # s, of a tuned plan
    measured_threads: int | None = None  # of operators in those steps, where predictions are for another number
    time_scale: float | None = None  # by which measured steps multiplied all predicted seconds
    action_time: float | None = None  # s of Python for every action; None: not measured
    message_time: float | None = None  # s of each end of a message between processes; None: in one, or not measured
    one_worker: bool = False  # does all actions, by the prediction: operators are too small for several
    barrier: bool = False  # predicted for a loss that the caller computes: all forwards come before the first backward
    whole_batch_time: float | None = None  # s once a step: the end of the model, or the loss, on the whole batch
    model: str | None = None  # fingerprint of its model
    device_kinds: tuple[str, ...] = ()  # of `devices`
    assumed: Assumptions | None = None  # of its prices; None: measured, or made by hand without prices
    work: StepWork | None = None  # what a step does, whatever the plan; None: made by hand without prices

    def __post_init__(self) -> None:
        problems = wrong_types(self) or violations(self)
        if problems:
            raise PlanError("; ".join(problems))

    @property
    def used_devices(self) -> tuple[str, ...]:
        return tuple(d for stage in self.first_stages for d in stage.devices)

    @property
    def ranks(self) -> int:
        """Number of device groups in the pipeline, each with `chunks` stages."""
        found = n_ranks(self.schedule, [stage.devices for stage in self.stages])
        return len(self.stages) if found is None else found

    @property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of each stage: the number of its group of devices."""
        return ranks_of_stages(self.schedule, self.ranks, self.chunks)

    @property
    def first_stages(self) -> tuple[Stage, ...]:
        """Of every rank its first stage."""
        return self.stages[: self.ranks]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank."""
        return tuple(stage for stage, own in enumerate(self.rank_of) if own == rank)

    @property
    def priced_step_time(self) -> float | None:
        """s, as predicted before the plan ran: where `tune` ran it, its own steps scale `predicted_step_time`."""
        ran = self.measured_step_time is not None and self.measured_threads is None
        if self.predicted_step_time is None or self.time_scale is None or not ran:
            return self.predicted_step_time
        return self.predicted_step_time / self.time_scale

    @property
    def chunks(self) -> int:
        """Number of stages per device."""
        return len(self.stages) // self.ranks

    @property
    def places(self) -> str:
        """`cpu:0 | cpu:1+cpu:2` for two stages, the second with two replicas; `(cpu:0 | cpu:1) x 2` for two chunks,
        `(cpu:0 | cpu:1) and back` under zb-v."""
        return places([stage.devices for stage in self.first_stages], self.schedule, self.chunks)

    @with_checked_names
    def explain(self, path: str | None = None) -> Any:
        """Why this plan was chosen: its bottleneck, its rivals, what each limit costs and what would help.

        `path`: of a module, or the key of an operator (`encoder.layer.3/linear#0`): why the operators there are split
        as they are, what else they could do and what that would cost. Raises InputError for what is no text, and
        PlanError for a path that the plan does not contain.

        A plan that was chosen in this process is explained by further searches, a loaded plan by its own numbers.
        """
        if path is None:
            return explained(self)
        if not isinstance(path, str):
            raise InputError(f"path must be the path of a module or the key of an operator, got {path!r}")
        return inside_explained(self, path)

    @with_checked_names
    def on(self, offered: Sequence[str], kinds: Sequence[str] | None = None) -> Plan:
        """The plan for the devices `offered`, which replace its placeholders (see `plan/placeholders.py`).

        `kinds`: the types of the devices offered (`Device.kind`). Raises PlanError that lists all problems: too few
        devices, names that are not among them, or other types than those that the plan was made for.
        """
        return placed_on(self, offered, kinds)

    def check_model(self, model: nn.Module) -> None:
        """Raise PlanError if the plan was made for a model with other parameters or modules.

        The message names some of the differences. Lazy modules must have run before.
        """
        problems = differences(self.model, model) if self.model is not None else []
        made_for_another = bool(problems)
        modules = dict(model.named_modules(remove_duplicate=False))
        listed = {key.rpartition("/")[0] for stage in self.stages for key in stage.operators}
        named = [*(path for path, _ in self.split), *sorted(listed)]
        lost = [path for path in named if path not in modules]
        if lost:
            problems.append(f"it has no modules {_with_similar(lost, modules)}")
        stored = [name for stage in self.stages if stage.sharding for name, _ in stage.sharding.parameters]
        absent = [name for name in dict.fromkeys(stored) if "." in name and name.rpartition(".")[0] not in modules]
        if absent and not lost:
            there = [name for name, _ in model.named_parameters(remove_duplicate=False)]
            problems.append(f"it has no parameters {_with_similar(absent, there)}")
        if not problems:
            return
        known = set(named) - {""}
        above = {ancestor for path in known for ancestor in ancestors(path)}
        with_parameters = [path for path, module in modules.items() if list(module.parameters(recurse=False))]
        bare = [path for path in with_parameters if path not in above and nearest(path, known) is None]
        # A split may leave modules out, so they say nothing where nothing else says that the model is another one.
        if known and bare and (listed or made_for_another):
            problems.append(f"the plan says nothing about its modules {few(bare)}")
        raise PlanError(f"the plan was made for another model than this {type(model).__name__}: {'; '.join(problems)}")

    def assign(self, program: Program, storages: Storages = _UNKNOWN) -> dict[fx.Node, int]:
        """The stage of every operator of `program`.

        Operators that the plan does not list follow their inputs, and so do those that it lists before their inputs:
        captures in another mode or for other sizes may number their operators differently. `storages` (of
        `batching.study`): the memory of every value; without it, writes into shared memory hold no operator back.
        Raises PlanError for a path that no module has.
        """
        if self.split:
            return by_modules(dict(self.split), program, storages)
        return by_operators([stage.operators for stage in self.stages], program, storages, strict=False)

    def listing(self, program: Program, storages: Storages = _UNKNOWN) -> Plan:
        """The plan with the operators that its stages have in `program`, where it lists others or not all of them.

        Raises PlanError for an operator that the plan lists before one of its inputs, or not where its split puts it.
        """
        listed = [stage.operators for stage in self.stages]
        if not any(listed) or program.training != self.training:
            return self
        if self.split:
            stage_of = by_modules(dict(self.split), program, storages)
            check_listed(listed, stage_of, program)
        else:
            stage_of = by_operators(listed, program, storages, strict=True)
        operators = operators_of_stages(stage_of, program, len(self.stages))
        if not all(operators):
            return self  # a stage without operators is refused where the plan is lowered
        if [set(stage.operators) for stage in self.stages] == [set(mine) for mine in operators]:
            return self
        stages = tuple(replace(stage, operators=mine) for stage, mine in zip(self.stages, operators, strict=True))
        return replace(self, stages=stages)

    def with_decision(self, why: str, **changes: Any) -> Plan:
        """The plan with other decisions, such as `n_microbatches=4`, and without the predictions for the old ones.

        `why`: says in a note where the predictions went. The plan itself, if nothing changes.
        """
        if all(getattr(self, name) == value for name, value in changes.items()):
            return self
        return replace(self, **changes).without_predictions(why)

    def without_predictions(self, why: str) -> Plan:
        """The decision alone, with what prices assume: no times, bytes, bounds or reasons. `why`: says in a note where
        they went.

        The plan itself, if it has no predictions; less a note about how it splits the batch, as that may change, too.
        """
        if self.predicted_step_time is None and all(stage.forward_time is None for stage in self.stages):
            notes = tuple(note for note in self.notes if not note.startswith((_UNPROVEN, ONE_MICROBATCH)))
            return self if notes == self.notes else replace(self, notes=notes)
        return replace(self.decision, notes=(f"{why}{DROPPED}",), assumed=self.assumed)

    @property
    def decision(self) -> Plan:
        """Without what it predicts, and what it assumes for that."""
        stages = tuple(
            Stage(
                s.devices,
                s.operators,
                recompute=s.recompute,
                selective=s.selective,
                sharding=None if s.sharding is None else s.sharding.decision,
                layerwise=s.layerwise,
                keeps_products=s.keeps_products,
            )
            for s in self.stages
        )
        return Plan(
            stages,
            self.n_microbatches,
            self.schedule,
            self.batch_size,
            self.devices,
            self.training,
            split=self.split,
            model=self.model,
            device_kinds=self.device_kinds,
        )

    # -- text and files ---------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Readable JSON that can be edited by hand; `plan/serialization.py` describes the format.

        The predictions in it belong to the plan as it is written: `from_json` drops them from an edited plan.
        """
        return serialization.write(self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote, perhaps edited since.

        Raises PlanError that lists everything wrong with it, and InputError for what is no text.
        """
        if not isinstance(text, str):
            raise InputError(f"text must be the JSON of a plan, got {text!r}")
        try:
            found = serialization.read(text, cls)
        except ValueError as error:
            raise PlanError(f"not a plan, which is JSON: {error}") from error
        values, problems = found.values, found.problems
        problems += violations(SimpleNamespace(**values))  # no Plan yet: fields that cannot be read are None
        stages = values["stages"] or ()
        if len(stages) > 1 and values["split"] == () and all(stage.operators == () for stage in stages):
            problems.append("no stage has operators; list them, or give a split of the modules")
        if problems:
            raise PlanError("not a valid plan:\n  " + "\n  ".join(map(printable, problems)))
        loaded = cls(**values)
        if found.left_out:
            later = f"a later autopar wrote this plan, with {few(found.left_out)}, which this one leaves out"
            return with_notes(loaded.without_predictions(later), [later])
        if found.checksum == serialization.checksum(loaded):
            return loaded
        return loaded.without_predictions("this plan was edited after autopar wrote it")

    def save(self, path: str | Path) -> None:
        """Write the plan to a file. An interrupted save leaves an existing file as it was.

        Raises InputError for a directory, and for a file in one that there is not; OSError.
        """
        write_whole(file_to_write(path), self.to_json() + "\n")

    @classmethod
    @with_checked_names
    def load(cls, path: str | Path, model: nn.Module | None = None, devices: Any = None, **call: Any) -> Plan:
        """The plan in a file, with the predictions that it had when it was saved; without them if it was edited since.

        Args:
            model, devices, call: price what the file says now, as `autopar.plan(model, devices, plan=..., **call)`.

        Raises:
            PlanError: with the file's name, if it cannot be read or holds no valid plan. InputError: no name of a file.
        """
        try:
            plan = cls.from_json(file_name(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise PlanError(f"{path}: it cannot be read: {error.strerror or error}") from error
        except (UnicodeDecodeError, PlanError) as error:
            raise PlanError(f"{path}: {error}") from error
        if model is None:
            return plan
        priced: Plan = priced_for(model, devices, plan, **call)
        return priced

    @with_checked_names
    def diff(self, other: Plan) -> PlanDiff:
        """What `other` decides and predicts differently; `print(plan.diff(other))` shows it."""
        difference: PlanDiff = compared(self, other)
        return difference

    def __str__(self) -> str:
        return shown(self)


def _with_similar(names: Sequence[str], known: Iterable[str]) -> str:
    """The names, with known names that are similar to the first one."""
    meant = similar(names[0], known)
    return f"{few(names)} ({meant})" if meant else few(names)


def with_notes(plan: Plan, notes: Sequence[str]) -> Plan:
    """`plan` with those of `notes` that it lacks; the same object if it lacks none."""
    missing = tuple(note for note in notes if note not in plan.notes)
    return replace(plan, notes=(*missing, *plan.notes)) if missing else plan


def with_whole_batch(plan: Plan, why: str) -> Plan:
    """`plan` with one micro-batch and a note that says why; the same object if it has one, or if `why` is ""."""
    if not why or plan.n_microbatches == 1:
        return plan
    whole = plan.with_decision("the batch of this model cannot be split", n_microbatches=1)
    return with_notes(whole, [f"{ONE_MICROBATCH}{why}"])


def with_unproven_split(plan: Plan, why: str) -> Plan:
    """`plan` with a note that only a few samples show that the batch may be split, and `why` (`Batching.unproven`).

    The same object if it does not split the batch, if that is proven, or if it says so already, of whatever capture.
    """
    if not why or plan.n_microbatches == 1 or any(note.startswith(_UNPROVEN) for note in plan.notes):
        return plan
    return with_notes(plan, [f"{_UNPROVEN}{why}"])
