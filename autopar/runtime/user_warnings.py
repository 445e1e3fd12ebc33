"""What a user is told once of how a call runs: what changes the numbers or the speed."""

from __future__ import annotations

from autopar.analysis.batching import Batching
from autopar.errors import warn
from autopar.lower.stages import Lowered
from autopar.plan.plan import Plan


class OneTimeWarnings:
    """Warnings of one module; each is given once."""

    def __init__(self, said: frozenset[str] = frozenset()) -> None:
        self.said = said

    def batch_stays_whole(self, batching: Batching) -> None:
        if batching.obstacle and batching.obstacle != "the batch has one sample":
            self._once(f"the batch is not split into micro-batches: {batching.obstacle}")

    def statistics_are_of_microbatches(self, plan: Plan, batching: Batching) -> None:
        if batching.batch_norms and plan.n_microbatches > 1:
            self._once(
                f"batch norm uses the statistics of each micro-batch (1/{plan.n_microbatches} of the batch), first in "
                f"'{batching.batch_norms[0]}'; batch_norm='deferred' keeps the running statistics those of the batch, "
                "batch_norm='exact' keeps the batch whole"
            )

    def undivided(self, lowered: Lowered) -> None:
        """The plan was made for other lengths or images."""
        found = [key for stage in lowered.stages for key in stage.undivided]
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            self._once(
                f"every device does all of {found[0]}{more}: the plan splits them, but their sizes in this call do not "
                "come apart evenly"
            )

    def without_shards(self, batch: int, multiple: int) -> None:
        self._once(
            f"a batch of {batch} samples runs without shards, as do all whose number of samples is no multiple of "
            f"{multiple}: they do not come apart evenly"
        )

    def _once(self, message: str) -> None:
        if message not in self.said:
            self.said |= {message}
            warn(message)
