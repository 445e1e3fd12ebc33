"""The error this package raises about hardware, and the base class that it shares with autopar's errors."""


class AutoparError(Exception):
    """Base class of the errors of autopar and its cost models."""

    __module__ = "autopar.errors"  # where users find it, and what tracebacks show


class DeviceError(AutoparError, ValueError):
    """A device that cannot be used: the message names it and says what would be right."""
