"""What hardware there is or could be, and what work costs on it: devices, clusters, links, collectives, memory.

Seconds and bytes throughout. The package stands alone: it knows nothing of stages or plans.
"""

from cost_models.clusters.cluster import Cluster
from cost_models.collectives.formulas import COLLECTIVES, Collective, Group, collective_seconds
from cost_models.collectives.measured import MeasuredCollectives, measure_collectives
from cost_models.errors import DeviceError
from cost_models.hardware.device_specs import DeviceSpec, efficiency_of, known_devices, rates_of
from cost_models.hardware.devices import Device, available_memory, parse_devices
from cost_models.hardware.links import Link, fit_link, measure_link, measure_links
from cost_models.hardware.networks import Network, known_networks
from cost_models.kernels.efficiency_curves import Efficiency
from cost_models.kernels.launches import HostCosts, host_costs, pass_seconds
from cost_models.kernels.roofline import OperatorEstimate, Rates, estimate
from cost_models.measuring.cache import MeasurementCache, signature_key
from cost_models.measuring.calibration import Calibration, calibrate
from cost_models.memory.byte_sizes import bytes_text, parse_bytes
from cost_models.memory.optimizer_state import OPTIMIZERS, optimizer_name, optimizer_state_bytes
from cost_models.memory.optimizer_step import optimizer_step_seconds, optimizer_step_temporaries
from cost_models.memory.training_memory import PRECISIONS, Precision, precision_named

__all__ = [
    "COLLECTIVES",
    "OPTIMIZERS",
    "PRECISIONS",
    "Calibration",
    "Cluster",
    "Collective",
    "Device",
    "DeviceError",
    "DeviceSpec",
    "Efficiency",
    "Group",
    "HostCosts",
    "Link",
    "MeasuredCollectives",
    "MeasurementCache",
    "Network",
    "OperatorEstimate",
    "Precision",
    "Rates",
    "available_memory",
    "bytes_text",
    "calibrate",
    "collective_seconds",
    "efficiency_of",
    "estimate",
    "fit_link",
    "host_costs",
    "known_devices",
    "known_networks",
    "measure_collectives",
    "measure_link",
    "measure_links",
    "optimizer_name",
    "optimizer_state_bytes",
    "optimizer_step_seconds",
    "optimizer_step_temporaries",
    "parse_bytes",
    "parse_devices",
    "pass_seconds",
    "precision_named",
    "rates_of",
    "signature_key",
]
