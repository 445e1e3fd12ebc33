"""A strategy of Lightning: the network inside a LightningModule runs as a pipeline.

    trainer = lightning.Trainer(strategy=AutoparStrategy(["cuda:0", "cuda:1"]), devices=1)
    trainer.fit(lightning_module, loader)         # training_step, logging and checkpoints stay as they are

While a trainer runs, one submodule of the LightningModule is its pipelined module, with the same parameters under the
same names. Afterwards it is the submodule itself again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

from autopar.api import parallelize
from autopar.errors import InputError
from autopar.runtime.arguments import Devices
from autopar.runtime.module import PipelinedModule
from cost_models import Cluster, parse_devices

if TYPE_CHECKING:
    import lightning.pytorch as pl


class AutoparStrategy(SingleDeviceStrategy):
    """Runs a submodule of the LightningModule as a pipeline over `devices`, in this process.

    Data and everything else of the LightningModule are on the first device.
    """

    strategy_name = "autopar"

    def __init__(self, devices: Devices = None, *, module: str | None = None, **options: Any) -> None:
        """`module`: the path of the submodule, such as "net". By default the only child with parameters.

        `devices` and `options` are those of `autopar.parallelize`.
        """
        parsed = devices.at_hand if isinstance(devices, Cluster) else parse_devices(devices)
        if not parsed:
            raise InputError("AutoparStrategy needs devices that are at hand")
        super().__init__(device=parsed[0].torch_device)
        self._devices, self._path, self._options = devices, module, options
        self._pipelined: PipelinedModule | None = None
        self._placed: set[int] = set()  # ids of the optimizers whose states lie where their parameters are

    def model_to_device(self) -> None:
        """Pipeline the submodule. It is placed by its plan, the rest of the LightningModule on the first device."""
        owner = self._lightning_module_here()
        path = self._path or only_child_with_parameters(owner)
        module = _submodule(owner, path)
        if isinstance(module, PipelinedModule):
            raise InputError(f"'{path}' is pipelined already; AutoparStrategy pipelines the model itself")
        if self._pipelined is None or self._pipelined.unwrap() is not module:
            self._pipelined = parallelize(module, self._devices, **self._options)
        self._placed.clear()
        _replace(owner, path, nn.Identity())
        try:
            owner.to(self.root_device)
        finally:
            _replace(owner, path, self._pipelined)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """A step of the optimizer. States loaded from a checkpoint follow their parameters to the stages' devices."""

        def first() -> Any:  # the first forward places the parameters
            result = closure()
            _states_to_parameters(optimizer)
            self._placed.add(id(optimizer))
            return result

        known = id(optimizer) in self._placed
        return super().optimizer_step(optimizer, closure if known else first, model, **kwargs)

    def teardown(self) -> None:
        """Give the LightningModule its own submodule back, and end the workers."""
        if self._pipelined is not None and self.lightning_module is not None:
            owner = self._lightning_module_here()
            path = self._path or only_child_with_parameters(owner)
            if owner.get_submodule(path) is self._pipelined:
                _replace(owner, path, self._pipelined.unwrap())
            self._pipelined.close()
        super().teardown()

    def _lightning_module_here(self) -> pl.LightningModule:
        assert self.lightning_module is not None, "Lightning connects the strategy to a module first"
        return self.lightning_module


def only_child_with_parameters(owner: nn.Module) -> str:
    """The name of the child that has all parameters. Raises InputError where there are several, or none."""
    names = [name for name, child in owner.named_children() if any(True for _ in child.parameters())]
    own = [name for name, _ in owner.named_parameters(recurse=False)]
    if len(names) == 1:
        return names[0]
    what = f"the children {names}" if names else f"the parameters {own} and no child" if own else "no parameters"
    raise InputError(
        f"{type(owner).__name__} has {what}: AutoparStrategy(module=...) needs the path of the submodule to pipeline; "
        "put layers that run one after another into one submodule"
    )


def _submodule(owner: nn.Module, path: str) -> nn.Module:
    try:
        return owner.get_submodule(path)
    except AttributeError:
        children = [name for name, _ in owner.named_children()]
        raise InputError(f"{type(owner).__name__} has no submodule '{path}'; its children are {children}") from None


def _replace(owner: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    owner.get_submodule(parent)._modules[name] = module


def _states_to_parameters(optimizer: Any) -> None:
    """Move what an optimizer keeps of a parameter to the parameter's device. (Counters of steps stay on the CPU.)"""
    for parameter, state in getattr(optimizer, "optimizer", optimizer).state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.device != parameter.device:
                state[key] = value.to(parameter.device)
