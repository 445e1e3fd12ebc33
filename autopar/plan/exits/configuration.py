"""The values that exits make: a tool's configuration, and the degrees that a configuration has."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from autopar.errors import PlanError
from autopar.plan.display import shown
from autopar.plan.files import file_to_write, write_whole


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
        """Write the text to a file, and the companions to the same folder. Raises InputError for a path where no file
        can be, and OSError."""
        path = file_to_write(path)
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


def words_in(tool: str, source: Any) -> list[str]:
    """The words of a command line: a text as a shell splits it, or the words themselves. Raises PlanError."""
    if isinstance(source, str):
        try:
            return shlex.split(source.replace("\\\n", " "), comments=True)
        except ValueError as error:
            refuse_reading(tool, [f"the text is no command line: {error}"])
    words = list(source) if isinstance(source, Sequence) else [source]
    wrong = [word for word in words if not isinstance(word, str)]
    refuse_reading(tool, [f"a command line has words, got {word!r}" for word in wrong[:1]])
    return words


def settings_by_name(tool: str, source: Any) -> Mapping[str, Any]:
    """The settings of a mapping, or of a text in JSON or, where PyYAML is installed, in YAML. Raises PlanError."""
    if isinstance(source, str):
        source = _parsed(tool, source)
    if not isinstance(source, Mapping):
        refuse_reading(tool, [f"settings by name are needed, got {type(source).__name__}"])
    found: Mapping[str, Any] = source
    return found


def section_of(tool: str, settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The settings of a section; empty if there is none. Raises PlanError."""
    section = settings.get(name)
    if section is not None and not isinstance(section, Mapping):
        refuse_reading(tool, [f"{name} must have settings by name, got {section!r}"])
    return section or {}


def _parsed(tool: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        why = f"the file is not JSON: {error}"
    try:
        import yaml
    except ImportError:
        refuse_reading(tool, [f'{why}; to read YAML, pip install "autopar[integrations]"'])
        return None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        first = str(error).partition("\n")[0]
        refuse_reading(tool, [f"{why}, nor YAML: {first}"])
    return None


def refuse(tool: str, problems: list[str]) -> None:
    """Raise PlanError that lists why `tool` cannot express a plan at all; nothing for no problems."""
    if problems:
        raise PlanError(f"{tool} cannot express this plan:\n  " + "\n  ".join(problems))


def refuse_reading(tool: str, problems: list[str]) -> None:
    """Raise PlanError that lists what of a configuration no plan by hand expresses; nothing for no problems."""
    if problems:
        raise PlanError(f"no plan by hand expresses this configuration of {tool}:\n  " + "\n  ".join(problems))
