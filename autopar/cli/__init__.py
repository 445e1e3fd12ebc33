"""The command line: commands.py and saved.py have one function a command."""

from autopar.cli.commands import app, main

__all__ = ["app", "main"]
