"""The operators of a compiled program: seconds of each as its share of the kernel that it becomes part of.

    operators    add 3 ms   layer_norm 4 ms          alone, each reads and writes memory
    kernel       |------- 3.5 ms -------|            what enters and leaves the group
    shares       1.5 ms     2 ms                     in proportion; a stage takes those of its own operators

So the shares of a group add up to its kernel, wherever stages are cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from autopar.analysis.node_values import observe
from autopar.analysis.operators import compute_nodes
from autopar.capture.repeated_layers.fold import Folded
from cost_models import Efficiency, HostCosts, Rates
from cost_models.graphs import get_attribute, private_copy
from cost_models.kernels.fusion import FusedWork, fused_groups, fused_work
from cost_models.kernels.kernel import COMPUTE_KINDS, Kernel
from cost_models.kernels.launches import LIBRARY_CALL
from cost_models.kernels.operator_work import OperatorWork
from cost_models.kernels.roofline import kernel_seconds

_Group = tuple[fx.Node, ...]


class Fusion:
    """The groups of one program, with their kernels at one size of the micro-batch after the other."""

    def __init__(self, module: fx.GraphModule, folded: Folded, graded: set[str]) -> None:
        """`graded`: operators to whose results a gradient flows; none in inference."""
        self._module, self._folded, self._graded = module, folded, graded
        self._nodes = compute_nodes(module.graph)
        self._place = {node: place for place, node in enumerate(self._nodes)}
        self._on_meta = private_copy(folded.module, torch.device("meta"))  # constants may lie elsewhere
        self._groups: list[_Group] | None = None

    def look_at(self, work: Mapping[str, OperatorWork], inputs: Sequence[Any]) -> None:
        """Turn to a size: the work of every node of the folded graph for these inputs."""
        values = {node.name: value for node, value in observe(self._on_meta, list(inputs)).items()}
        known: dict[tuple[str, ...], FusedWork] = {}  # equal layers have equal groups

        def work_of(node: fx.Node) -> OperatorWork:
            return work[self._folded.kept(node.name)]

        def value_of(node: fx.Node) -> Any:
            return values[self._folded.kept(node.name)]

        if self._groups is None:
            self._groups = fused_groups(self._nodes, work_of, value_of)
        self._work_of = work_of
        self._kernels: dict[_Group, FusedWork] = {}
        for group in self._groups:
            names = tuple(self._folded.kept(node.name) for node in group)
            if names not in known:
                known[names] = fused_work(group, work_of, value_of, self._is_trained)
            self._kernels[group] = known[names]

    def shares(self, rates: Rates, efficiency: Efficiency, forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
        """[2, nodes] the fractions of their seconds alone (`forward`, `backward`, [nodes]) that operators take."""

        def seconds(kernels: Sequence[Kernel]) -> float:
            return sum(kernel_seconds(kernel, rates, efficiency) for kernel in kernels)

        found = np.ones((2, len(self._nodes)))
        for group, fused in self._kernels.items():
            places = [self._place[node] for node in group]
            behind = () if fused.backward is None else (fused.backward, *fused.accumulated)
            for row, alone, kernels in ((0, forward, (fused.forward,)), (1, backward, behind)):
                own = float(alone[places].sum())
                found[row, places] = min(1.0, seconds(kernels) / own) if own > 0 else 1.0
        return found

    def launches(self, host: HostCosts) -> tuple[np.ndarray, np.ndarray]:
        """[nodes] seconds of the host, forward and backward."""
        forward, backward = (
            np.array([_launched(getattr(self._work_of(node), one), host) for node in self._nodes])
            for one in ("forward", "backward")
        )
        for group, fused in self._kernels.items():
            places = [self._place[node] for node in group]
            forward[places] = host.kernel / len(group)
            behind = 0.0 if fused.backward is None else host.kernel + len(fused.accumulated) * LIBRARY_CALL
            backward[places] = behind / len(group)
        return forward, backward

    def _is_trained(self, node: fx.Node) -> bool:
        if node.op == "get_attr":
            value = get_attribute(self._module, str(node.target))
            return bool(self._graded) and isinstance(value, torch.Tensor) and value.requires_grad
        return node.name in self._graded


def _launched(kernels: Sequence[Kernel], host: HostCosts) -> float:
    """Of an operator that is part of no group: autograd and libraries add and multiply, the compiler does the rest."""
    called = sum(kernel.kind in COMPUTE_KINDS or kernel.operator == "add_" for kernel in kernels)
    return called * LIBRARY_CALL + (len(kernels) - called) * host.kernel
