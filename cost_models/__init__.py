"""What hardware is there and what work costs on it: devices, links, memory and a cache of measurements.

Seconds and bytes throughout. The package stands alone: it knows nothing of stages or plans.
"""

from cost_models.cache import MeasurementCache, signature_key
from cost_models.device import Device, parse_devices
from cost_models.errors import DeviceError
from cost_models.links import Link, fit_link, measure_link, measure_links
from cost_models.memory import OPTIMIZER_STATE, available_memory, optimizer_state_bytes

__all__ = [
    "OPTIMIZER_STATE",
    "Device",
    "DeviceError",
    "Link",
    "MeasurementCache",
    "available_memory",
    "fit_link",
    "measure_link",
    "measure_links",
    "optimizer_state_bytes",
    "parse_devices",
    "signature_key",
]
