"""The decision as data: which operators run in which stage on which devices, in how many micro-batches, by which
schedule, and what that was predicted to cost. Prints, saves and loads; knows neither how it was found nor how it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import fx, nn

from autopar.analysis.operators import compute_nodes, operator_keys, replicable_nodes
from autopar.capture.program import Program, describe
from autopar.errors import PlanError
from autopar.hints.module_paths import ancestors, few, nearest
from autopar.plan import serialization
from autopar.plan.diff import PlanDiff, diff_plans
from autopar.plan.display import explained, inside_explained, shown
from autopar.plan.fingerprint import differences
from autopar.plan.placeholders import stand_ins
from autopar.plan.validation import INTERLEAVED, places, rounds, violations
from autopar.sharding.stage_sharding import StageSharding


@dataclass(frozen=True)
class Stage:
    """One stage. Costs are predictions for one micro-batch on one of its devices; None in a plan made by hand."""

    devices: tuple[str, ...]  # names; several are replicas (or meshes): micro-batch i runs on devices[i mod r]
    operators: tuple[str, ...] = ()  # `module.path/operator#k`, in program order
    forward_time: float | None = None  # s
    backward_time: float | None = None  # s, without recomputation
    weight_time: float | None = None  # s, of the backward time for gradients of parameters
    parameter_bytes: int | None = None
    activation_bytes: int | None = None  # kept for backward, per micro-batch in flight
    peak_memory: int | None = None  # bytes on each device
    sync_time: float | None = None  # s once a step: gradients of the replicas reduced
    recompute: bool = False  # keeps only its inputs for the backward and runs its forward again before it
    sharding: StageSharding | None = None  # operators are split over meshes of its devices

    @property
    def shards(self) -> int:
        """Devices that work on one micro-batch together."""
        return self.sharding.size if self.sharding is not None else 1

    @property
    def replicas(self) -> int:
        """Micro-batches that it works on at once."""
        return len(self.devices) // self.shards


@dataclass(frozen=True)
class StageTransfer:
    """What one stage sends another for every micro-batch."""

    source: int
    target: int
    forward_bytes: int
    backward_bytes: int
    seconds: float  # both ways


@dataclass(frozen=True)
class RunnerUp:
    """A plan that was not chosen."""

    description: str
    step_time: float  # s, predicted


@dataclass(frozen=True)
class Plan:
    """How a model is to run. `split` (module path -> stage) takes the place of `operators` in a plan made by hand."""

    stages: tuple[Stage, ...]
    n_microbatches: int
    schedule: str = "1f1b"
    batch_size: int | None = None  # samples of the call it was made for
    devices: tuple[str, ...] = ()  # all that were offered
    training: bool = True
    predicted_step_time: float | None = None  # s
    single_device_time: float | None = None  # s, predicted, the whole batch on the first device
    bubble: float | None = None  # idle fraction of the used devices' time
    transfers: tuple[StageTransfer, ...] = ()
    split: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()  # why it is as it is
    objective: float | None = None  # s, of the search
    bound: float | None = None  # s: no plan that was searched has a smaller objective
    optimality: str = ""  # how far the plan is proven best
    runners_up: tuple[RunnerUp, ...] = ()
    measured_step_time: float | None = None  # s, where it was tuned
    model: str | None = None  # fingerprint of the model that it was made for
    device_kinds: tuple[str, ...] = ()  # of `devices`
    # What can explain it as a whole, and the operators at a path; not saved.
    explainer: Callable[[Plan], Any] | None = field(default=None, repr=False, compare=False)
    inside_explainer: Callable[[Plan, str], Any] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        problems = violations(self)
        if problems:
            raise PlanError("; ".join(problems))

    @property
    def used_devices(self) -> tuple[str, ...]:
        return tuple(d for stage in self.stages[: self.ranks] for d in stage.devices)

    @property
    def ranks(self) -> int:
        """Places in the pipeline: stage s is on the devices of stage s mod ranks."""
        turns = rounds([stage.devices for stage in self.stages]) if self.schedule == INTERLEAVED else None
        return len(self.stages) if turns is None else turns

    @property
    def chunks(self) -> int:
        """Stages of each device."""
        return len(self.stages) // self.ranks

    @property
    def places(self) -> str:
        """`cpu:0 | cpu:1+cpu:2`: stages apart, replicas together; `(cpu:0 | cpu:1) x 2` for two stages on each."""
        return places([stage.devices for stage in self.stages[: self.ranks]], self.chunks)

    def explain(self, path: str | None = None) -> Any:
        """Why this plan: what bounds it, its rivals, what limits cost and what would help (`search.explain`).

        `path`: of a module, or the key of an operator (`encoder.layer.3/linear#0`): why the operators there are split
        as they are, what else they could do and what that would cost (`search.sharding_explain`). Raises PlanError for
        a path that the plan does not know.

        A plan that was loaded tells what its own numbers tell; one that was just made searches again for the rest.
        """
        if path is not None:
            return inside_explained(self, path) if self.inside_explainer is None else self.inside_explainer(self, path)
        return explained(self) if self.explainer is None else self.explainer(self)

    def explained_by(
        self, explainer: Callable[[Plan], Any] | None = None, inside: Callable[[Plan, str], Any] | None = None
    ) -> Plan:
        """The same plan with what can explain it, and the operators inside of its modules."""
        return replace(self, explainer=explainer or self.explainer, inside_explainer=inside or self.inside_explainer)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "explainer": None, "inside_explainer": None}  # they hold a whole search

    @classmethod
    def from_split(
        cls,
        split: Mapping[str, int],
        *,
        n_microbatches: int,
        schedule: str = "1f1b",
        devices: Sequence[Sequence[str] | str] | None = None,
        recompute: Collection[int] = (),
    ) -> Plan:
        """A plan made by hand: `split` puts modules (by path, as in `named_modules()`) on stages.

        A module that is not named follows its inputs: it runs on the latest stage that any of them comes from. The
        most specific path counts. `devices`: for each stage its device or its replicas' devices (default: stage s on
        the s-th device offered, `"cpu:0"`, `"cpu:1"` ... where they are CPU workers; under interleaved-1f1b the stages
        go round the devices offered). `recompute`: the stages that recompute.
        """
        if not split:
            raise PlanError("split is empty; give at least one module path and its stage")
        wrong = {path: stage for path, stage in split.items() if not isinstance(stage, int) or stage < 0}
        if wrong:
            raise PlanError(f"stages are numbered from 0, got {wrong}")
        n_stages = max(split.values()) + 1
        if devices is None:
            devices = [f"#{s}" for s in range(n_stages)]
        if len(devices) != n_stages:
            raise PlanError(f"the split has {n_stages} stages, but devices names {len(devices)}")
        strange = [stage for stage in recompute if stage not in range(n_stages)]
        if strange:
            raise PlanError(f"recompute names {', '.join(map(repr, strange))}, but there are stages 0..{n_stages - 1}")
        names = [(d,) if isinstance(d, str) else tuple(d) for d in devices]
        stages = tuple(Stage(d, recompute=s in recompute) for s, d in enumerate(names))
        return cls(stages, n_microbatches, schedule, split=tuple(split.items()))

    def on(self, offered: Sequence[str], kinds: Sequence[str] | None = None) -> Plan:
        """The plan for the devices `offered`: those that it calls "#0", "#1" ... get their names, and those of a
        cluster that was planned for ahead get the names of devices of the same kind.

        `kinds`: of the devices offered (`Device.kind`); the plan's predictions hold for those that it was made for.
        Raises PlanError if there are too few devices, names that the plan uses are not among them, or their kinds are
        others; lists all of it.
        """
        here, lacking = stand_ins(
            self.used_devices, dict(zip(self.devices, self.device_kinds, strict=False)), offered, kinds
        )
        if lacking:
            raise PlanError(lacking)
        if here:
            stages = tuple(replace(s, devices=tuple(here.get(d, d) for d in s.devices)) for s in self.stages)
            return replace(self, stages=stages, devices=tuple(offered), device_kinds=()).on(offered, kinds)
        used, n_stages = self.used_devices, len(self.stages)
        free = all(stage.devices == (f"#{s}",) for s, stage in enumerate(self.stages))
        turns = self.schedule == INTERLEAVED and free and len(offered) < n_stages
        short = len(used) > len(offered)
        problems = []
        if turns and (not offered or n_stages % len(offered)):
            problems.append(f"{n_stages} stages cannot go round {len(offered)} devices evenly: {', '.join(offered)}")
        elif short and not turns:
            problems.append(f"the plan uses {len(used)} devices, but {len(offered)} are given: {', '.join(offered)}")
        named = {f"#{s}": offered[s % len(offered)] for s in range(n_stages if turns else len(offered)) if offered}
        unknown = [n for n in used if n not in offered and n not in named and not (short and n.startswith("#"))]
        if unknown:
            problems.append(f"the plan uses {', '.join(unknown)}, but the devices are {', '.join(offered)}")
        made_for = dict(zip(self.devices, self.device_kinds, strict=False))
        given = made_for if kinds is None else dict(zip(offered, kinds, strict=True))
        other = [n for n in used if n in made_for and n in given and made_for[n] != given[n]]
        if other:
            told = ", ".join(f"{n} = '{made_for[n]}', which here is '{given[n]}'" for n in other)
            problems.append(f"the plan was made for {told}; plan again, or take device_kinds out of the plan")
        if problems:
            raise PlanError("; ".join(problems))
        stages = tuple(replace(s, devices=tuple(named.get(d, d) for d in s.devices)) for s in self.stages)
        device_kinds = tuple(given[n] for n in offered) if all(n in given for n in offered) else ()
        return replace(self, stages=stages, devices=tuple(offered), device_kinds=device_kinds)

    def check_model(self, model: nn.Module) -> None:
        """Raise PlanError if the plan was made for a model with other parameters, or names modules that it has not.

        The message names some of what differs. Lazy modules must have run before.
        """
        problems = differences(self.model, model) if self.model is not None else []
        modules = dict(model.named_modules(remove_duplicate=False))
        listed = {key.rpartition("/")[0] for stage in self.stages for key in stage.operators}
        named = [*(path for path, _ in self.split), *sorted(listed)]
        lost = [path for path in named if path not in modules]
        if lost:
            problems.append(f"it has no modules {few(lost)}")
        if not problems:
            return
        known = set(named) - {""}
        above = {ancestor for path in known for ancestor in ancestors(path)}
        own = [path for path, module in modules.items() if list(module.parameters(recurse=False))]
        bare = [path for path in own if path not in above and nearest(path, known) is None]
        if known and bare:
            problems.append(f"the plan says nothing about its modules {few(bare)}")
        raise PlanError(f"the plan was made for another model than this {type(model).__name__}: {'; '.join(problems)}")

    def assign(self, program: Program) -> dict[fx.Node, int]:
        """The stage of every operator of `program`.

        Operators that the plan does not name (another capture of the model has others) follow their inputs. Raises
        PlanError for a path that no module has.
        """
        return self._by_split(program) if self.split else self._by_operator(program)

    def _by_operator(self, program: Program) -> dict[fx.Node, int]:
        known = {key: index for index, stage in enumerate(self.stages) for key in stage.operators}
        keys = operator_keys(program)
        if len(self.stages) > 1 and not any(key in known for key in keys.values()):
            raise PlanError(
                f"the plan names no operator of this model: it was made for another one, with {few(list(known))}; "
                f"here are {few(list(keys.values()))}"
            )
        # Replicable nodes (positions, masks) are computed where they are needed: they hold no reader back.
        free = replicable_nodes(program)
        result: dict[fx.Node, int] = {}
        for node in compute_nodes(program.graph):
            after = max((result[n] for n in node.all_input_nodes if n in result and n not in free), default=0)
            result[node] = max(after, known.get(keys[node], 0))
        return result

    def _by_split(self, program: Program) -> dict[fx.Node, int]:
        named = dict(self.split)
        free = replicable_nodes(program)
        keys = operator_keys(program)
        found: set[str] = set()
        result: dict[fx.Node, int] = {}
        for node in compute_nodes(program.graph):
            path = nearest(keys[node].rpartition("/")[0], named)
            inputs = [n for n in node.all_input_nodes if n in result and n not in free]
            if path is not None:
                found.add(path)
                result[node] = named[path]
                late = [n for n in inputs if result[n] > named[path]]
                if late and node not in free:
                    raise PlanError(
                        f"'{path}' is on stage {named[path]}, but it reads {describe(late[0])} on stage "
                        f"{result[late[0]]}; values only flow to later stages"
                    )
            else:
                result[node] = max((result[n] for n in inputs), default=0)
        unknown = sorted(set(named) - found)
        paths = sorted({key.rpartition("/")[0] for key in keys.values()})
        unknown = [u for u in unknown if not any(p == u or p.startswith(u + ".") for p in paths)]
        if unknown:
            raise PlanError(
                f"no operator of the model runs in {', '.join(map(repr, unknown))}; modules are {', '.join(paths[:8])}"
                + (" ..." if len(paths) > 8 else "")
            )
        return result

    # -- text and files ---------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Readable JSON, to be edited by hand (`planfile`)."""
        return serialization.write(self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote, perhaps edited. Raises PlanError that lists everything wrong with it."""
        try:
            fields, problems = serialization.read(text, cls)
        except ValueError as error:
            raise PlanError(f"not a plan: {error}") from error
        unchecked = object.__new__(cls)  # some of its fields may be None that must not
        unchecked.__dict__.update(fields)
        problems += violations(unchecked)
        stages = fields["stages"] or ()
        if len(stages) > 1 and fields["split"] == () and all(stage.operators == () for stage in stages):
            problems.append("no stage has operators; list them, or give a split of the modules")
        if problems:
            raise PlanError("not a valid plan:\n  " + "\n  ".join(problems))
        return cls(**fields)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """The plan in a file. Raises PlanError, with the file's name, if it cannot be read or holds no valid plan."""
        try:
            return cls.from_json(Path(path).read_text())
        except (OSError, UnicodeDecodeError, PlanError) as error:
            raise PlanError(f"{path}: {error}") from error

    def diff(self, other: Plan) -> PlanDiff:
        """What `other` does otherwise, and how its predictions differ; `print(plan.diff(other))` shows it."""
        return diff_plans(self, other)

    def __str__(self) -> str:
        return shown(self)
