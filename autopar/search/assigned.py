"""What was chosen for one graph as the sharding of a plan's stage: by names that survive another capture."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.search.sharding import Sharding
from autopar.sharding.assignment import StageSharding, Stored, stored_text, strategy_text
from autopar.sharding.layouts import REPLICATE
from autopar.sharding.strategies import REPEATED


def assignment(found: Sharding, keys: Mapping[str, str]) -> StageSharding:
    """`keys`: node name -> operator key, as of `operators.operator_keys`.

    Operators that every device does and parameters that every device has are left out: they are so without a word.
    Bytes and seconds are those of the collectives of every micro-batch; what happens once a step is not among them.
    """
    often = [collective for collective in found.collectives if not collective.once]
    nbytes = sum(
        collective.times * move.nbytes
        for collective in often
        for move in collective.moves
        if move.collective is not None
    )
    whole = (REPLICATE,) * len(found.mesh.shape)
    return StageSharding(
        found.mesh.shape,
        found.mesh.names,
        tuple(
            (keys[name], strategy_text(strategy))
            for name, strategy in found.strategies.items()
            if name in keys and any(axis != REPEATED for axis in strategy.axes)
        ),
        tuple(
            (name, stored_text(stored))
            for name, stored in found.stored.items()
            if name not in keys and stored != Stored(whole, whole)
        ),
        collective_bytes=round(nbytes),
        collective_time=sum(collective.seconds for collective in often),
    )
