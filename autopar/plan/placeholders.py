"""Devices at hand in place of those that a plan was made for without them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cost_models.hardware.device_specs import describes

_PLACEHOLDER = re.compile(r"\d+\.\d+:.+")  # node.index:kind, as `Cluster` calls devices that are not at hand


def stand_ins(
    used: Sequence[str], kinds: dict[str, str], offered: Sequence[str], offered_kinds: Sequence[str] | None
) -> tuple[dict[str, str], str]:
    """For each device that a plan uses and that is not at hand one of `offered`, in order; and what is lacking, or "".

    `kinds`: of the devices that the plan was made for. `offered_kinds`: where not given, any device will do.
    """
    wanted = [name for name in used if _PLACEHOLDER.fullmatch(name) and name not in offered]
    free = list(zip(offered, offered_kinds or [""] * len(offered), strict=True))
    found: dict[str, str] = {}
    lacking: list[str] = []
    for name in wanted:
        spec = kinds.get(name, "")
        fitting = next((pair for pair in free if not pair[1] or describes(spec, pair[1])), None)
        if fitting is None:
            lacking.append(spec)
        else:
            found[name] = fitting[0]
            free.remove(fitting)
    if not lacking:
        return found, ""
    here = ", ".join(f"{name} = '{kind}'" if kind else name for name, kind in free) or "none is left"
    return (
        found,
        f"the plan uses {len(lacking)} more devices of kind {', '.join(sorted(set(lacking)))}; of those given {here}",
    )
