"""The values that exits make: a tool's configuration, and the degrees that a configuration has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from autopar.errors import PlanError
from autopar.plan.display import shown
from autopar.plan.files import write_whole


class NotExpressed(NamedTuple):
    """A decision of a plan that a tool's configuration does not have."""

    name: str  # "zero", "schedule", "recompute", "layers", "strategies" ...
    why: str  # the plan's value, and what the tool does in its place


@dataclass(frozen=True)
class ToolConfiguration:
    """A plan as another tool writes it; `print` shows it with all that the tool cannot express."""

    tool: str  # a name of `tools.TOOLS`
    version: str  # of the tool whose documented names are used
    settings: Mapping[str, Any]  # by name, as the tool calls them
    text: str  # of the tool's file, or of its command line
    n_devices: int  # processes to start: one for each device that the plan uses
    not_expressed: tuple[NotExpressed, ...] = ()
    companions: Mapping[str, str] = field(default_factory=dict)  # file name -> text, named in `settings`

    def save(self, path: str | Path) -> None:
        """Write the text to a file, and the companions beside it. Raises OSError."""
        path = Path(path)
        for name, text in self.companions.items():
            write_whole(path.with_name(name), text)
        write_whole(path, self.text)

    def __str__(self) -> str:
        return shown(self)


@dataclass(frozen=True)
class ToolDegrees:
    """What a tool's configuration says of a plan."""

    degrees: Mapping[str, Any]  # arguments of `Plan.by_hand`
    batch_size: int | None = None  # samples of a step on all devices; None: not written down
    notes: tuple[str, ...] = ()  # where the plan by hand differs from what the tool would do

    def check_batch(self, batch_size: int | None) -> None:
        """Raise PlanError if a call has another number of samples than the configuration's step."""
        if self.batch_size is not None and batch_size is not None and self.batch_size != batch_size:
            raise PlanError(
                f"the configuration has {self.batch_size} samples in a step, but the example call has {batch_size}; "
                f"give an example call of {self.batch_size} samples"
            )


def refuse(tool: str, problems: list[str]) -> None:
    """Raise PlanError that lists why `tool` cannot express a plan at all; nothing for no problems."""
    if problems:
        raise PlanError(f"{tool} cannot express this plan:\n  " + "\n  ".join(problems))


def refuse_reading(tool: str, problems: list[str]) -> None:
    """Raise PlanError that lists what of a configuration no plan by hand expresses; nothing for no problems."""
    if problems:
        raise PlanError(f"no plan by hand expresses this configuration of {tool}:\n  " + "\n  ".join(problems))
