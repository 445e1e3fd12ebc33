"""What users change of a placed model between calls: all ranks follow it, or all refuse it.

What a rank sees of changes travels with the numbers that ranks compare for every call (agreement.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import InputError
from autopar.runtime.ranks.one_message import on_all_ranks
from autopar.runtime.ranks.parameters.frozen_parameters import FrozenParameters
from autopar.runtime.ranks.parameters.model_tables import ModelTables
from autopar.runtime.ranks.parameters.step_agreement import StepAgreement
from autopar.runtime.ranks.world import World


class ModelChanges:
    """Of one model on one rank."""

    def __init__(self, world: World, tables: ModelTables) -> None:
        self._world, self._tables = world, tables
        self._problem = ""
        self._n_frozen = 0  # numbers that describe frozen parameters
        self._frozen: FrozenParameters | None = None
        self.steps: StepAgreement | None = None  # once the parameters are placed

    @property
    def frozen(self) -> FrozenParameters:
        """Once the parameters are placed."""
        assert self._frozen is not None
        return self._frozen

    def placed(self, frozen: FrozenParameters, steps: StepAgreement) -> None:
        """From now on, ranks agree on what changes."""
        self._frozen, self.steps = frozen, steps

    def numbers(self) -> list[int]:
        """Take over what was assigned since the last call, and describe it; as many numbers on all ranks."""
        if self._frozen is None or self.steps is None:
            return []
        self._problem = self._tables.follow()
        frozen = self._frozen.numbers()
        self._n_frozen = len(frozen)
        return [int(self._problem != ""), *frozen, *self.steps.numbers()]

    def agree(self, everyone: Sequence[Sequence[int]]) -> None:
        """Raise InputError on all ranks for a change that one of them refuses, or that they did not all make.

        `everyone`: what `numbers` gave, by rank. Collective where it raises.
        """
        if self._frozen is None or self.steps is None:
            return
        if not any(theirs[0] for theirs in everyone):
            rest = 1 + self._n_frozen
            if difference := self._frozen.agree([theirs[1:rest] for theirs in everyone]):
                raise on_all_ranks(InputError(difference))
            self.steps.agree([theirs[rest:] for theirs in everyone])
            return
        problems = self._world.gathered(self._problem)
        refusing = [rank for rank, problem in enumerate(problems) if problem]
        where = "" if len(refusing) == len(problems) else f"; seen on rank {', '.join(map(str, refusing))}"
        raise on_all_ranks(InputError(problems[refusing[0]] + where))
