"""What the model itself is asked for on a rank that has a part of it: refused in words, where torch would fail on one
rank for a missing attribute, and on another for mixed tensors.

```
   pm(x)                            runs on all ranks ................. the guard lets it pass
   model(x), pm.unwrap()(x)         needs the whole model ............. refused
   load_state_dict(parts)           of this rank, with its meshes ..... torch copies them in place
   load_state_dict(whole tensors)   ................................... refused
```
The guard looks at what the modules have at that moment: where a user or a capture has put whole tensors in (as
torch.func.functional_call does), the model runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.capture import torch_private, torch_private_ranks
from autopar.errors import InputError
from autopar.runtime.call_checks import Pipelined

_LOAD = (
    "load whole tensors before the first call, or with autopar.load or torch.distributed.checkpoint, which give every "
    "rank its part"
)


class PartGuard:
    """Of the root of a model, once its parameters are placed. Copies of the model have it, too: they have as much."""

    def __init__(self, lacking: tuple[str, ...]) -> None:
        """`lacking`: the names of parameters and buffers that other ranks have."""
        self._lacking = lacking

    def lacks(self, names: Iterable[str]) -> None:
        """From now on other ranks alone have these, too."""
        self._lacking += tuple(names)

    def put_on(self, model: nn.Module) -> None:
        """The user's hooks stay in their order: the guard goes before them, and does nothing for `pm`."""
        model.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
        model.register_load_state_dict_pre_hook(self.before_load)

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise InputError where the module would run without some of its tensors, or mix parts with whole tensors."""
        if isinstance(module, Pipelined):  # it has the hooks of the model
            return
        lacking = self._lacking_now(module)
        if lacking:
            more = f" and {len(lacking) - 1} more" if lacking[1:] else ""
            problem = f"this rank has only its part of the model: '{lacking[0]}'{more} are on other ranks"
        else:
            part = next((name for name, tensor in _tensors(module) if isinstance(tensor, DTensor)), None)
            fits = torch_private_ranks.replicates_plain_tensors() or any(
                isinstance(leaf, DTensor) for leaf in torch_private.tree_leaves((args, kwargs))
            )
            if part is None or fits:
                return
            problem = f"on ranks the model's parameters are DTensors ('{part}' among them), which take no plain tensors"
        raise InputError(
            f"{problem}, so that the model itself cannot run here: call pm, the pipelined module, on all ranks (to "
            "evaluate: pm.eval(), with torch.no_grad()); or autopar.save(folder, pm) on all ranks, and "
            "autopar.load(folder, model) in one process"
        )

    def before_load(self, module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
        """Raise InputError for a state that torch would not copy into this rank's parts."""
        parts = {prefix + name: tensor for name, tensor in _tensors(module) if isinstance(tensor, DTensor)}
        other = next((name for name in self._lacking_now(module) if prefix + name in state), None)
        if other is not None:
            raise InputError(
                f"load_state_dict() got '{prefix}{other}', which other ranks have: each rank loads what its own "
                f"pm.state_dict() has; {_LOAD}"
            )
        for name, part in parts.items():
            value = state.get(name)
            if not isinstance(value, torch.Tensor):
                continue
            if not isinstance(value, DTensor):
                raise InputError(
                    f"load_state_dict() got a plain tensor for '{name}', of which this rank has a part, a DTensor as "
                    f"in pm.state_dict(); {_LOAD}"
                )
            if (value.device_mesh, value.placements) != (part.device_mesh, part.placements):
                raise InputError(
                    f"load_state_dict() got '{name}' as {value.placements} on {value.device_mesh}, and this rank has "
                    f"it as {part.placements} on {part.device_mesh}: load a state of the same plan; or {_LOAD}"
                )
        if parts and metadata.get("assign_to_params_buffers"):
            raise InputError(
                "load_state_dict(assign=True) would put other parameters in the place of those that the plan has "
                "placed on ranks: leave assign out, and the values are copied"
            )

    def _lacking_now(self, module: nn.Module) -> list[str]:
        has = {name for name, _ in _tensors(module)} if self._lacking else ()
        return [name for name in self._lacking if name not in has]


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Under all of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
