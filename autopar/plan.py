"""The decision as data: which operators run in which stage on which devices, in how many micro-batches, by which
schedule, and what that was predicted to cost. Prints, saves and loads; knows neither how it was found nor how it runs.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx

from autopar.capture import Program, describe
from autopar.errors import PlanError
from autopar.operators import compute_nodes, operator_keys, replicable_nodes
from autopar.schedule import SCHEDULES

VERSION = 1


@dataclass(frozen=True)
class Stage:
    """One stage. Costs are predictions for one micro-batch on one of its devices; None in a plan made by hand."""

    devices: tuple[str, ...]  # names; several are replicas: micro-batch i runs on devices[i mod r]
    operators: tuple[str, ...] = ()  # `module.path/operator#k`, in program order
    forward_time: float | None = None  # s
    backward_time: float | None = None  # s
    parameter_bytes: int | None = None
    activation_bytes: int | None = None  # kept for backward, per micro-batch in flight
    peak_memory: int | None = None  # bytes on each device
    sync_time: float | None = None  # s once a step: gradients of the replicas reduced


@dataclass(frozen=True)
class Link:
    """What one stage sends another for every micro-batch."""

    source: int
    target: int
    forward_bytes: int
    backward_bytes: int
    seconds: float  # both ways


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
    transfers: tuple[Link, ...] = ()
    split: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()  # why it is as it is

    def __post_init__(self) -> None:
        problems = []
        if not self.stages:
            problems.append("a plan needs at least one stage")
        if self.n_microbatches < 1:
            problems.append(f"n_microbatches must be at least 1, got {self.n_microbatches}")
        if self.schedule not in SCHEDULES:
            problems.append(f"schedule must be one of {', '.join(SCHEDULES)}, got {self.schedule!r}")
        used = [d for stage in self.stages for d in stage.devices]
        twice = sorted({d for d in used if used.count(d) > 1})
        if twice:
            problems.append(f"devices {', '.join(twice)} serve more than one stage; each device serves one")
        if any(not stage.devices for stage in self.stages):
            problems.append("every stage needs at least one device")
        problems += [
            f"'{path}' is put on stage {stage}, but there are stages 0..{len(self.stages) - 1}"
            for path, stage in self.split
            if not 0 <= stage < len(self.stages)
        ]
        if problems:
            raise PlanError("; ".join(problems))

    @property
    def used_devices(self) -> tuple[str, ...]:
        return tuple(d for stage in self.stages for d in stage.devices)

    @classmethod
    def from_split(
        cls,
        split: Mapping[str, int],
        *,
        n_microbatches: int,
        schedule: str = "1f1b",
        devices: Sequence[Sequence[str] | str] | None = None,
    ) -> Plan:
        """A plan made by hand: `split` puts modules (by path, as in `named_modules()`) on stages.

        A module that is not named follows its inputs: it runs on the latest stage that any of them comes from. The
        most specific path counts. `devices`: for each stage its device or its replicas' devices (default: stage s on
        the s-th device offered, `"cpu:0"`, `"cpu:1"` ... where they are CPU workers).
        """
        if not split:
            raise PlanError("split is empty; give at least one module path and its stage")
        wrong = {path: stage for path, stage in split.items() if not isinstance(stage, int) or stage < 0}
        if wrong:
            raise PlanError(f"stages are numbered from 0, got {wrong}")
        n_stages = max(split.values()) + 1
        missing = sorted(set(range(n_stages)) - set(split.values()))
        if missing:
            raise PlanError(f"no module is put on stage {', '.join(map(str, missing))}; number the stages 0, 1, 2, ...")
        if devices is None:
            devices = [f"#{s}" for s in range(n_stages)]
        if len(devices) != n_stages:
            raise PlanError(f"the split has {n_stages} stages, but devices names {len(devices)}")
        stages = tuple(Stage((d,) if isinstance(d, str) else tuple(d)) for d in devices)
        return cls(stages, n_microbatches, schedule, split=tuple(split.items()))

    def on(self, offered: Sequence[str]) -> Plan:
        """The plan with the devices called "#0", "#1" ... replaced by the offered ones; checks that all exist."""
        wanted = [d for d in self.used_devices if d.startswith("#")]
        if len(self.used_devices) > len(offered):
            raise PlanError(
                f"the plan uses {len(self.used_devices)} devices, but {len(offered)} are given: {', '.join(offered)}"
            )
        unknown = [d for d in self.used_devices if d not in offered and d not in wanted]
        if unknown:
            raise PlanError(f"the plan uses {', '.join(unknown)}, but the devices are {', '.join(offered)}")
        named = {f"#{i}": name for i, name in enumerate(offered)}
        stages = tuple(dataclasses.replace(s, devices=tuple(named.get(d, d) for d in s.devices)) for s in self.stages)
        return dataclasses.replace(self, stages=stages, devices=tuple(offered))

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
            raise PlanError("the plan names no operator of this model: it was made for another one")
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
            path = keys[node].rpartition("/")[0]
            while path and path not in named:
                path = path.rpartition(".")[0]
            inputs = [n for n in node.all_input_nodes if n in result and n not in free]
            if path in named:
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
        """Readable JSON; runs of operators in one module are one line: `module.path: conv2d#0 relu#0`."""
        data = {"autopar_plan": VERSION, **dataclasses.asdict(self)}
        for stage in data["stages"]:
            split = (key.rpartition("/") for key in stage["operators"])
            runs = itertools.groupby(split, key=lambda parts: parts[0])
            stage["operators"] = [f"{path}: {' '.join(parts[2] for parts in run)}" for path, run in runs]
        data["split"] = dict(self.split)
        return json.dumps(data, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote. Raises PlanError for anything else."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"not a plan: {error}") from error
        version = data.pop("autopar_plan", None) if isinstance(data, dict) else None
        if version != VERSION:
            raise PlanError(f"not a plan of version {VERSION}: 'autopar_plan' is {version!r}")
        problems: list[str] = []
        _check_fields(cls, data, "", problems)
        for name, kind in (("stages", Stage), ("transfers", Link)):
            for index, item in enumerate(data[name] if isinstance(data.get(name), list) else []):
                _check_fields(kind, item, f"{name}[{index}].", problems)
        if problems:
            raise PlanError(f"not a valid plan: {'; '.join(problems)}")
        stages = tuple(Stage(**_stage_fields(stage)) for stage in data.pop("stages"))
        links = tuple(Link(**link) for link in data.pop("transfers", ()))
        split = tuple(data.pop("split", {}).items())
        for name in ("devices", "notes"):
            data[name] = tuple(data.get(name, ()))
        return cls(stages=stages, transfers=links, split=split, **data)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        return cls.from_json(Path(path).read_text())

    def __str__(self) -> str:
        from autopar.report.text import plan_text  # showing is the report room's work; print(plan) is the user's word

        return plan_text(self)


def _stage_fields(stage: dict[str, Any]) -> dict[str, Any]:
    fields = dict(stage)
    lines = [line.partition(": ") for line in fields.get("operators", ())]
    fields["operators"] = tuple(f"{path}/{name}" for path, _, names in lines for name in names.split())
    fields["devices"] = tuple(fields["devices"])
    return fields


def _check_fields(cls: Any, data: Any, where: str, problems: list[str]) -> None:
    """Note every field of `data` that is missing, unknown or of the wrong type for dataclass `cls`."""
    if not isinstance(data, dict):
        problems.append(f"{where or 'the plan'} must be an object, got {data!r}")
        return
    fields = {field.name: field for field in dataclasses.fields(cls)}
    problems += [f"{where}{name} is unknown" for name in sorted(set(data) - set(fields))]
    for name, field in fields.items():
        if name not in data:
            if field.default is dataclasses.MISSING:
                problems.append(f"{where}{name} is missing")
        elif not _fits(data[name], str(field.type), name):
            problems.append(f"{where}{name} must be {_TYPES.get(name) or field.type}, got {data[name]!r}")


_TYPES = {  # of fields whose JSON differs from their Python type
    "stages": "a list of stages",
    "transfers": "a list of transfers",
    "split": "an object from module paths to stages",
    "devices": "a list of names",
    "notes": "a list of texts",
    "operators": "a list of 'module.path: operator#0 operator#1'",
}


def _fits(value: Any, annotation: str, name: str) -> bool:
    if name == "split":
        return isinstance(value, dict) and all(type(stage) is int for stage in value.values())
    if name in _TYPES:
        texts = name in ("devices", "notes", "operators")
        valid = isinstance(value, list) and (not texts or all(isinstance(item, str) for item in value))
        return valid and (name != "operators" or all(": " in line for line in value))
    kinds = [kind.strip() for kind in annotation.split("|")]
    if value is None:
        return "None" in kinds
    allowed = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
    return any(
        isinstance(value, allowed[k]) and (k == "bool") == isinstance(value, bool) for k in kinds if k in allowed
    )
