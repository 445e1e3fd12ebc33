"""What a stage runs again for its backward, in place of keeping it."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from autopar.errors import PlanError


class Recompute(enum.IntEnum):
    """`bool(mode)` says whether anything runs again.

    NONE        every activation is kept
    SELECTIVE   all but what attention makes between its products is kept (`analysis.attention`), which runs again
                within the backward, one attention after the other
    FULL        what flows between layers is kept (`analysis.blocks`), and what lies outside of layers; every layer runs
                again right before its own backward
    OPERATORS   the same, but layers also keep what every second product and every attention in one operator make
                (`analysis.kept_products`), and run the rest again
    STAGE       the stage's inputs are kept; its whole forward runs again before its backward
    """

    NONE = 0
    STAGE = 1
    SELECTIVE = 2
    FULL = 3
    OPERATORS = 4

    @property
    def by_layer(self) -> bool:
        """Whether layers run again, each right before its own backward."""
        return self in (Recompute.FULL, Recompute.OPERATORS)


RECOMPUTE = {
    "none": Recompute.NONE,
    "selective": Recompute.SELECTIVE,
    "full": Recompute.FULL,
    "selective-op": Recompute.OPERATORS,
    "stage": Recompute.STAGE,
}
"""By what users call them."""

PARTLY = frozenset({Recompute.SELECTIVE, Recompute.FULL, Recompute.OPERATORS})
"""Groups of operators run again inside of the backward, not the stage's forward as a whole."""

NAMES = {mode: name for name, mode in RECOMPUTE.items()}

DESCRIBED = {
    Recompute.STAGE: ("recompute", "recomputing "),
    Recompute.FULL: ("recompute by layer", "recomputing the layers of "),
    Recompute.OPERATORS: ("recompute by operator", "recomputing cheap operators of "),
    Recompute.SELECTIVE: ("recompute attention", "recomputing attention of "),
}
"""How reports speak of stages with a mode: what they do, and what precedes their numbers."""


WHAT_RUNS_AGAIN = {
    Recompute.STAGE: "its whole forward",
    Recompute.FULL: "every layer",
    Recompute.OPERATORS: "the cheap operators of every layer",
    Recompute.SELECTIVE: "attention",
}


def recompute_flags(name: str) -> dict[str, bool]:
    """The fields of a `Stage` that say what users call `name`."""
    mode = RECOMPUTE[name]
    return {
        "recompute": mode == Recompute.STAGE,
        "selective": mode == Recompute.SELECTIVE,
        "layerwise": mode.by_layer,
        "keeps_products": mode == Recompute.OPERATORS,
    }


def recompute_by_stage(wanted: str | Mapping[int, str], n_stages: int) -> dict[int, str]:
    """What users call the mode of each stage that they name; a text is for all stages. Raises PlanError."""
    if not isinstance(wanted, (str, Mapping)):
        raise PlanError(f"recompute must be one of {', '.join(RECOMPUTE)}, or by stage {{0: 'full'}}, got {wanted!r}")
    names = dict.fromkeys(range(n_stages), wanted) if isinstance(wanted, str) else dict(wanted)
    unknown = [number for number in names if type(number) is not int or number not in range(n_stages)]
    if unknown:
        raise PlanError(f"recompute names {', '.join(map(repr, unknown))}, but there are stages 0..{n_stages - 1}")
    for name in names.values():
        if not isinstance(name, str) or name not in RECOMPUTE:
            raise PlanError(f"recompute must be one of {', '.join(RECOMPUTE)}, got {name!r}")
    return names
