"""How a training step is run where nothing is measured: how kernels are launched, in which precision parameters are
kept, which kernels the optimizer's step has, and which communication runs behind computing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from autopar.errors import InputError
from cost_models import Cluster, HostCosts, Precision, precision_named
from cost_models.collectives.overlap import OVERLAP_AT_HAND, Overlap
from cost_models.hardware.device_specs import DeviceSpec, host_of
from cost_models.kernels.launches import FREE_HOST
from cost_models.memory.optimizer_step import Implementation, OptimizerRates, fewest_kernels

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # by the first part of a precision


@dataclass(frozen=True)
class Recipe:
    """What the user fixes of it; the options `launch`, `precision`, `optimizer_step` and `overlap`."""

    launch: str = "eager"  # a mode of `cost_models.kernels.launches`
    precision: str | None = None  # a name of `cost_models.PRECISIONS`; None: every tensor in the parameter's own dtype
    optimizer_step: Implementation | None = None  # None: torch's default for the type of device
    overlap: Overlap = OVERLAP_AT_HAND  # as autopar's own runtime does

    def host(self, spec: DeviceSpec) -> HostCosts | None:
        """What the host takes to launch kernels on a device kind; None where that is no time of its own."""
        return host_of(spec, self.launch)

    def loss_host(self, spec: DeviceSpec) -> HostCosts | None:
        """The same for a loss outside of the model, which is not compiled with the stages."""
        return host_of(spec, "eager" if self.fuses else self.launch)

    @property
    def fuses(self) -> bool:
        """Whether a compiler joins operators into kernels."""
        return self.launch == "compiled"

    def precision_of(self, dtype: torch.dtype) -> Precision | None:
        """Of a trained parameter; None where all its tensors have its own dtype.

        A named precision is for parameters of its dtype. Others, such as norms in float32, stay as they are.
        """
        if self.precision is None or _DTYPES[self.precision.partition("-")[0]] != dtype:
            return None
        return precision_named(self.precision)

    def check(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Raise InputError if no parameter that is trained has the dtype of the precision."""
        dtypes = {parameter.dtype for parameter in parameters if parameter.requires_grad}
        if self.precision is not None and dtypes and not any(map(self.precision_of, dtypes)):
            wanted = _DTYPES[self.precision.partition("-")[0]]
            found = ", ".join(sorted(map(str, dtypes)))
            raise InputError(
                f"precision={self.precision!r} is for parameters in {wanted}, but the model's are in {found}; convert "
                f"the model first (model.to({wanted})), so that its operators are priced in that dtype, too"
            )

    def implementation(self, cluster: Cluster) -> Implementation:
        """Of the optimizer's step: what is fixed, or what torch.optim chooses on the first device."""
        return self.optimizer_step or ("for-loop" if cluster.node[0].device_type == "cpu" else "foreach")

    def optimizer_rates(self, cluster: Cluster, kind: str, optimizer: str) -> OptimizerRates:
        """How fast a device kind steps `optimizer`. torch.compile of stages leaves the optimizer as it is."""
        spec = cluster.specs[kind]
        host = self.loss_host(spec)
        if host is None:
            host = replace(FREE_HOST, gap=spec.launch)
        fewest = fewest_kernels(optimizer, self.implementation(cluster))
        return OptimizerRates(spec.bandwidth * spec.bandwidth_efficiency, host, fewest)


USUAL = Recipe()
"""What torch and the runtime do by themselves: eager, all in the dtypes of the model, sends behind computing."""
