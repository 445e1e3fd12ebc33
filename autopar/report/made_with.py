"""What a report was made with: software, and the command to make it again."""

from __future__ import annotations

import platform

from autopar.report.document import Code
from autopar.version import __version__


def software() -> str:
    """Of this process, which may not be the one that measured."""
    import torch

    return (
        f"autopar {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}"
    )


def command_block(command: str | None, otherwise: str) -> Code:
    """The user's command, or else a program to make the same again."""
    return Code("The command that made it:", command) if command is not None else Code("To make it again:", otherwise)
