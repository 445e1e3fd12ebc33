"""What one search needs: what the user fixed, and what the model allows."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import cast

from autopar.analysis.example import Example
from autopar.costs.recipe import Recipe
from autopar.errors import InputError
from autopar.hints.module_hints import read_hints
from autopar.options import PlanOptions
from autopar.plan.assumptions import Assumptions
from autopar.plan.plan import Plan
from autopar.planner.arrangement import Conditions
from autopar.planner.hint_constraints.stage_hints import resolve
from autopar.planner.inter_op.constraints import NO_CONSTRAINTS, Constraints
from cost_models import Cluster
from cost_models.collectives.overlap import OVERLAP_AT_HAND, overlap_named
from cost_models.memory.optimizer_step import Implementation


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
    bytes_factor: float = 1.0  # by which rehearsed plans need more memory than the search's formula says
    # Limits by name, and "pipeline_stage hints", that are not the user's own: explanations leave them out.
    narrowed: frozenset[str] = frozenset()

    @property
    def conditions(self) -> Conditions:
        return Conditions(self.optimizer, self.loss_inside)


def search_options(example: Example, options: PlanOptions, n_devices: int) -> tuple[Example, SearchOptions]:
    """The user's options together with what the model allows: the example with every reason not to split its batch,
    and the options of the search. Raises PlanError for hints that contradict each other or the model, and InputError
    for more micro-batches than the model allows."""
    batching = example.batching
    why = batching.whole_because(options.batch_norm)
    n_microbatches = options.n_microbatches
    if why and (n_microbatches or 1) > 1:
        n_microbatches = 1  # a note in the plan gives the reason, and so does a warning where the plan runs
    batch, least = example.program.batch_size, batching.least_rows
    if not why and batch // least < (n_microbatches or 1) <= batch:
        norms = f" ({batching.batch_norms[0]} normalises over a micro-batch)" if batching.batch_norms else ""
        raise InputError(
            f"n_microbatches={n_microbatches}, but the batch has {batch} samples and the model needs at least {least} "
            f"in a micro-batch{norms}; give at most {batch // least}"
        )
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
    overlap = OVERLAP_AT_HAND if options.overlap is None else overlap_named(options.overlap)
    recipe = Recipe(options.launches, options.precision, options.optimizer_step, overlap)
    recipe.check(example.model.parameters())
    return recipe


OTHER = "priced with"
ESTIMATED = "estimated from the data sheets of "


def estimated_note(cluster: Cluster) -> str:
    """What plans for a cluster that is not at hand say of their prices."""
    return f"{ESTIMATED}{cluster.title}, not measured"


def assumptions_of(recipe: Recipe, optimizer: str) -> Assumptions:
    """What prices under `recipe` assume, as a plan records it."""
    return Assumptions(recipe.launch, recipe.precision, recipe.optimizer_step, str(recipe.overlap), optimizer)


def as_assumed(plan: Plan, options: PlanOptions) -> PlanOptions:
    """`options` with what `plan` records of its prices, where they leave it open."""
    assumed = plan.assumed
    if assumed is None:
        return options
    open_launch = options.launch is None and not options.compile
    return replace(
        options,
        launch=assumed.launch if open_launch else options.launch,
        precision=assumed.precision if options.precision is None else options.precision,
        optimizer_step=options.optimizer_step or cast(Implementation | None, assumed.optimizer_step),
        overlap=assumed.overlap if options.overlap is None else options.overlap,
    )


def other_assumptions(plan: Plan, now: Assumptions) -> tuple[str, ...]:
    """A note that says which assumptions of a plan's prices are others now."""
    before = plan.assumed
    if before is None:
        return ()
    other = [f.name for f in fields(now) if getattr(before, f.name) != getattr(now, f.name)]
    if not other:
        return ()
    as_given, as_made = (", ".join(f"{name}={getattr(one, name)}" for name in other) for one in (now, before))
    return (f"{OTHER} {as_given} as the call says; the plan was made with {as_made}",)
