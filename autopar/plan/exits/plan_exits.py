"""What a plan offers for other tools; `Plan` has these methods."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from autopar.errors import InputError
from autopar.errors.names import with_checked_names
from autopar.plan.display import snapshotted, traced
from autopar.plan.exits import accelerate, deepspeed, megatron, schedule_csv, torchtitan
from autopar.plan.exits.configuration import ToolConfiguration
from autopar.plan.exits.tools import degrees_for
from autopar.plan.files import SNAPSHOT, TRACE, file_to_write
from cost_models import Cluster

if TYPE_CHECKING:
    from torch import nn

    from autopar.plan.plan import Plan


class PlanExits:
    """Plans to and from the configurations of other tools.

    A `ToolConfiguration` prints, saves (`save(path)`) and lists by name what the tool cannot express. What a tool
    cannot express at all, such as stages of different widths, is refused: PlanError lists why.
    """

    def to_torchtitan(self) -> ToolConfiguration:
        """The plan as arguments of torchtitan, with a schedule file beside them where torch has no such schedule."""
        return torchtitan.configuration_of(cast("Plan", self))

    def to_megatron_args(self) -> ToolConfiguration:
        """The plan as arguments of Megatron-LM's training scripts."""
        return megatron.configuration_of(cast("Plan", self))

    def to_accelerate(self) -> ToolConfiguration:
        """The plan as Accelerate's ParallelismConfig (`settings["ParallelismConfig"]`) and its configuration file."""
        return accelerate.configuration_of(cast("Plan", self))

    def to_deepspeed(self) -> ToolConfiguration:
        """The plan as DeepSpeed's configuration file."""
        return deepspeed.configuration_of(cast("Plan", self))

    def schedule_csv(self) -> ToolConfiguration:
        """The plan's schedule as the CSV that torch.distributed.pipelining reads."""
        return schedule_csv.configuration_of(cast("Plan", self))

    @with_checked_names
    def trace(self, path: str | Path, rank: int | None = None) -> None:
        """Write the predicted step as a Chrome trace, which Perfetto shows (compressed, if the name ends in .gz).

        Args:
            rank: only the events of the slot that this rank drives, as Holistic Trace Analysis reads one file a rank.

        Raises:
            InputError: the plan has no predictions, the rank drives no slot, the name ends in neither .json nor .gz, or
            no file can be there.
            OSError: the file cannot be written.
        """
        traced(self, file_to_write(path, TRACE), rank)

    @with_checked_names
    def memory_snapshot(self, path: str | Path) -> None:
        """Write the predicted memory over one step as a snapshot that PyTorch's memory_viz opens.

        Drop the file on https://pytorch.org/memory_viz, or run `python -m torch.cuda._memory_viz trace_plot FILE`.
        Each device has its weights, gradients, state of the optimizer, activations of every micro-batch, and workspace,
        as `report/memory_snapshot.py` describes. Its highest sum is the plan's peak. Of devices that share a stage's
        micro-batches as a mesh, the first one is shown.

        Raises:
            InputError: the plan has no predictions, the name ends in neither .pickle nor .pkl, or no file can be there.
            OSError: the file cannot be written.
        """
        snapshotted(self, file_to_write(path, SNAPSHOT))

    @classmethod
    @with_checked_names
    def from_configuration(cls, model: nn.Module, devices: Any, tool: str, source: Any, **call: Any) -> Plan:
        """The plan by hand that a configuration of another tool describes, and its price.

        Args:
            tool: "torchtitan", "megatron", "accelerate", "deepspeed" or "schedule-csv".
            source: the `Path` of its file, its text (of a command line also its words), a ToolConfiguration, a mapping
                of settings, or accelerate's ParallelismConfig.
            call: the other arguments of `Plan.by_hand`: the example call, how a step is run, and degrees that
                configurations of this tool do not have. A degree that is given twice has to be the same.

        Raises:
            PlanError: settings that no plan by hand has, all by name; degrees that contradict each other, the devices
            or the model. InputError: an unknown tool, a file that cannot be read.
        """
        from autopar.plan.plan import Plan, with_notes

        read = degrees_for(tool, source)
        twice = [
            f"{name}={call[name]!r}, but the configuration has {name}={value!r}"
            for name, value in read.degrees.items()
            if name in call and call[name] != value
        ]
        if twice:
            raise InputError("; ".join(twice))
        wanted = {**call, **read.degrees}
        notes = list(read.notes)
        if wanted.get("zero") and _data(wanted, devices) == 1:
            notes.append(f"zero={wanted.pop('zero')} of the configuration cuts nothing, as there is one replica")
        plan = Plan.by_hand(model, devices, **wanted)
        read.check_batch(plan.batch_size)
        return with_notes(plan, notes)


def _data(degrees: Mapping[str, Any], devices: Any) -> int | None:
    """Replicas of these degrees; None where the number of devices is not known here."""
    if degrees.get("data") is not None:
        return int(degrees["data"])
    listed = devices.devices if isinstance(devices, Cluster) else devices
    if isinstance(listed, str):
        listed = listed.split(",")
    parallel = int(degrees.get("tensor", 1)) * int(degrees.get("pipeline", 1))
    return len(listed) // max(1, parallel) if isinstance(listed, (list, tuple)) else None
