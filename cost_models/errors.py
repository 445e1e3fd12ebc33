"""The error this package raises about hardware."""


class DeviceError(ValueError):
    """A device that cannot be used: the message names it and says what would be right."""
