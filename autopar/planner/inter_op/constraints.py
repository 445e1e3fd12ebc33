"""What hints demand of a partition, by node of the cost graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Constraints:
    """The hints of a model, resolved to operators."""

    stage_of: Mapping[str, int]  # node -> the stage that it is pinned to
    recompute: frozenset[str]  # nodes whose stage recomputes
    together: tuple[frozenset[str], ...]  # nodes of one stage

    def in_one_stage(self, nodes: Iterable[str]) -> Constraints:
        """These constraints, and all of `nodes` in the same stage."""
        return replace(self, together=(*self.together, frozenset(nodes)))


NO_CONSTRAINTS = Constraints({}, frozenset(), ())
