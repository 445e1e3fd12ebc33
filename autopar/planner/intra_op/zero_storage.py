"""How far parameters lie as a stage of ZeRO says (Rajbhandari et al., 2020).

zero=0  parameters and optimizer's state whole      zero=1  state cut      zero=3  both cut
zero=2  as zero=1, and each micro-batch's gradients are scattered to where the state lies
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from autopar.sharding.stage_sharding import Stored


def zero_offences(options: Sequence[Stored], axes: Collection[int], zero: int) -> np.ndarray:
    """[options] in how many respects each way to store a parameter is not what ZeRO says along the axes of replicas.

    Along other axes, ZeRO leaves the state where the parameter lies. Respects in which no option is, because sizes do
    not divide, are not counted.
    """
    wanted = (zero == 3, zero >= 1)  # whether parameter and state are cut
    found = [
        sum((x[axis] >= 0) != w for axis in axes for x, w in zip((one.layout, one.state), wanted, strict=True))
        + sum(a != b for axis, (a, b) in enumerate(zip(one.layout, one.state, strict=True)) if axis not in axes)
        + (one.scattered != (zero == 2))
        for one in options
    ]
    return np.array(found) - min(found)
