"""Uses of torch's private API for ranks, their DTensors and their gradients; see `torch_private.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef


def default_store() -> Any:
    """The store through which the ranks of the default process group found each other (torch has no public query)."""
    return torch.distributed.distributed_c10d._get_default_store()


def mesh_of_host(mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks in the same places, for DTensors on the CPU that no collective uses.

    `DTensor.from_local` moves a tensor to the mesh's type of device. The public constructor makes process groups, which
    all ranks have to do together.
    """
    if mesh.device_type == "cpu":
        return mesh
    return DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)


def part_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """`local` as this rank's part of a DTensor with the mesh, placements, shape and dtype of `like`, without history.

    The public `DTensor.from_local` derives the layout again, within a node of autograd: 40 us, where this takes 5.
    """
    return DTensor(local, like._spec, requires_grad=False)


def part_of(tensor: DTensor) -> torch.Tensor:
    """This rank's part, without history; it shares the memory. The public `to_local` is a node of autograd."""
    return tensor._local_tensor.detach()


def memory_of(tensor: DTensor) -> tuple[StorageWeakRef, StorageWeakRef]:
    """What a DTensor shows as its memory (it has no bytes), and the memory of the part with its values.

    `tensor.data = values` changes the first alone, and torch then goes on with the part as it was: the values are lost
    without a word. `Module.to` changes both or none.
    """
    return StorageWeakRef(tensor.untyped_storage()), StorageWeakRef(tensor._local_tensor.untyped_storage())


def replicates_plain_tensors() -> bool:
    """Whether operators take plain tensors beside DTensors, as inside of torch's `implicit_replication()`."""
    return bool(DTensor._op_dispatcher._allow_implicit_replication)


def inside_ddp() -> bool:
    """Whether DistributedDataParallel runs a forward in this process (it tells no module that it wraps it)."""
    return torch.nn.parallel.DistributedDataParallel._active_ddp_module is not None


class AgreeingGradScaler(torch.amp.GradScaler):
    """torch's scaler, whose findings `agreed` may change before anything depends on them.

    What a scaler has found in an optimizer's gradients has no public place. torch's own ShardedGradScaler overrides the
    same method.
    """

    def agreed(self, found: dict[torch.device, torch.Tensor]) -> dict[torch.device, torch.Tensor]:
        """For every device with gradients, 1 if one of them is inf or NaN, else 0; from the same of this process."""
        return found

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        return self.agreed(super()._unscale_grads_(*args, **kwargs))
