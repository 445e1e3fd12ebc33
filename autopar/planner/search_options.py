"""What one search needs: what the user fixed, what the model allows, and what is known from other searches."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autopar.analysis.example import Example
from autopar.costs.recipe import Recipe, default_launch
from autopar.hints.module_hints import read_hints
from autopar.options import PlanOptions
from autopar.planner.arrangement import Conditions
from autopar.planner.hint_constraints.stage_hints import resolve
from autopar.planner.inter_op.constraints import NO_CONSTRAINTS, Constraints


@dataclass(frozen=True)
class SearchOptions:
    """What limits a search. Where the first four are None, the search chooses."""

    n_microbatches: int | None = None
    schedule: str | None = None
    max_replicas: int | None = None
    memory_limit: float | None = None  # bytes on each device
    optimizer: str = "adamw"
    # facts about the model
    one_microbatch_because: str = ""  # why the batch may not be split
    unproven: str = ""  # why it may be split only because a few samples say so
    least_rows: int = 1  # samples in the smallest micro-batch
    loss_inside: bool = False  # the loss runs in the last stage (train_step): backwards need not wait for all forwards
    constraints: Constraints = NO_CONSTRAINTS  # hints, by node of the cost graph
    recipe: Recipe | None = None  # how a step is run on devices that are not at hand
    # facts from other searches
    rival: float = math.inf  # s of the step of a known plan: look only for faster ones
    one_of_several: bool = False  # the search is one of several for the same plan: look less closely

    @property
    def conditions(self) -> Conditions:
        return Conditions(self.optimizer, self.loss_inside)


def search_options(example: Example, options: PlanOptions, n_devices: int) -> tuple[Example, SearchOptions]:
    """The user's options together with what the model allows: the example with every reason not to split its batch,
    and the options of the search. Raises PlanError for hints that contradict each other or the model."""
    batching = example.batching
    why = batching.obstacle
    if not why and options.batch_norm == "exact" and batching.batch_norms:
        why = f"batch_norm='exact' and '{batching.batch_norms[0]}' normalises by the whole batch's statistics"
    n_microbatches = options.n_microbatches
    if why and (n_microbatches or 1) > 1:
        n_microbatches = 1  # a note in the plan gives the reason, and so does a warning where the plan runs
    hints = resolve(read_hints(example.model), example.program, n_devices, batching.storages)
    search = SearchOptions(
        n_microbatches,
        options.schedule,
        options.max_replicas,
        options.memory_bytes,
        options.optimizer_name,
        one_microbatch_because=why,
        unproven=batching.unproven,
        least_rows=batching.least_rows,
        loss_inside=example.stage_loss is not None,
        constraints=Constraints(hints.stage_of, hints.recompute, hints.together),
    )
    return replace(example, batching=replace(batching, obstacle=why)), search


def recipe_of(example: Example, options: PlanOptions) -> Recipe:
    """How a step is run on devices that are not at hand, as the options say.

    Raises InputError for a precision that the model does not have.
    """
    launch = options.launch or default_launch(options.compile)
    recipe = Recipe(launch, options.precision, options.optimizer_step)
    recipe.check(example.model.parameters())
    return recipe
