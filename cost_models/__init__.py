"""What hardware there is or could be, and what work costs on it: devices, clusters, links, collectives, memory.

Seconds and bytes throughout. The package stands alone: it knows nothing of stages or plans.
"""

from cost_models.cache import MeasurementCache, signature_key
from cost_models.calibration import Calibration, calibrate
from cost_models.cluster import Cluster
from cost_models.collectives import COLLECTIVES, Collective, Group, collective_seconds
from cost_models.device import Device, parse_devices
from cost_models.efficiency import Efficiency
from cost_models.errors import DeviceError
from cost_models.links import Link, fit_link, measure_link, measure_links
from cost_models.measured_collectives import MeasuredCollectives, measure_collectives
from cost_models.memory import OPTIMIZERS, available_memory, optimizer_state_bytes
from cost_models.roofline import OperatorEstimate, Rates, efficiency_of, estimate, rates_of
from cost_models.specs import DeviceSpec, Network, known_devices, known_networks

__all__ = [
    "COLLECTIVES",
    "OPTIMIZERS",
    "Calibration",
    "Cluster",
    "Collective",
    "Device",
    "DeviceError",
    "DeviceSpec",
    "Efficiency",
    "Group",
    "Link",
    "MeasuredCollectives",
    "MeasurementCache",
    "Network",
    "OperatorEstimate",
    "Rates",
    "available_memory",
    "calibrate",
    "collective_seconds",
    "efficiency_of",
    "estimate",
    "fit_link",
    "known_devices",
    "known_networks",
    "measure_collectives",
    "measure_link",
    "measure_links",
    "optimizer_state_bytes",
    "parse_devices",
    "rates_of",
    "signature_key",
]
