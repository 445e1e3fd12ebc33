"""The version, for every room to read."""

__version__ = "0.1.0"
