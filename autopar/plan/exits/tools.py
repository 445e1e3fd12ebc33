"""The tools that plans become configurations of, by name, and how configurations are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from autopar.errors import InputError
from autopar.plan.exits import accelerate, deepspeed, megatron, schedule_csv, torchtitan
from autopar.plan.exits.configuration import ToolConfiguration, ToolDegrees

if TYPE_CHECKING:
    from autopar.plan.plan import Plan


class Tool(NamedTuple):
    """Both ways."""

    configuration_of: Callable[[Plan], ToolConfiguration]
    degrees_from: Callable[[Any], ToolDegrees]


TOOLS = {
    module.NAME: Tool(module.configuration_of, module.degrees_from)
    for module in (torchtitan, megatron, accelerate, deepspeed, schedule_csv)
}


def configuration_for(plan: Plan, tool: str) -> ToolConfiguration:
    """The configuration of `tool`. Raises InputError for an unknown one, PlanError if it cannot express the plan."""
    return _tool(tool).configuration_of(plan)


def degrees_for(tool: str, source: Any) -> ToolDegrees:
    """The degrees in a configuration of `tool`: a `Path` of its file, its text, or an object of the tool.

    Raises InputError for an unknown tool or a file that cannot be read, PlanError if no plan by hand expresses it.
    """
    read = _tool(tool).degrees_from
    if isinstance(source, ToolConfiguration) and source.tool != tool:
        raise InputError(f"a configuration of {source.tool} is no configuration of {tool}")
    if isinstance(source, Path):
        try:
            source = source.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{source}: it cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return read(source)


def _tool(name: str) -> Tool:
    if name not in TOOLS:
        raise InputError(f"unknown tool {name!r}; known are {', '.join(TOOLS)}")
    return TOOLS[name]
