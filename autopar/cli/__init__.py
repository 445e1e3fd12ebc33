"""The command line: commands.py has one function a command."""

from autopar.cli.commands import app, main

__all__ = ["app", "main"]
