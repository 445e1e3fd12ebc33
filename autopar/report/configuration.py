"""A plan as another tool's configuration, as text."""

from __future__ import annotations

from autopar.plan.display import shown
from autopar.plan.exits.configuration import ToolConfiguration
from autopar.report.tables import bullet, paragraph


@shown.register
def _configuration(configuration: ToolConfiguration) -> str:
    """What `print(plan.to_megatron_args())` shows: the text, then what it does not say."""
    n = configuration.n_devices
    head = paragraph(f"{configuration.tool} ({configuration.version}), for {n} process{'es' if n > 1 else ''}")
    parts = [head, configuration.text.rstrip("\n")]
    parts += [f"{name}:\n{text.rstrip()}" for name, text in configuration.companions.items()]
    if configuration.not_expressed:
        lines = [bullet(f"{one.name}: {one.why}") for one in configuration.not_expressed]
        parts.append("\n".join(["not expressed:", *lines]))
    return "\n\n".join(parts)
