"""The user's hints on modules, the semi-automatic mode: some of the plan is asked for, the search finds the rest.

    autopar.pipeline_stage(model.encoder, 0)             its operators run in stage 0
    autopar.recompute(model.decoder)                     their stages keep no activations of it
    autopar.keep_together(model.embed, model.head)       their operators run in one stage, whichever

A hint is a plain attribute of the module, so that deep copies and pickles of a model keep it; neither what the module
computes nor its state_dict knows of it. Hints go two steps:

    model --read_hints--> Hints (module paths) --resolve--> ResolvedHints (operators of one captured graph)
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from autopar.errors import InputError
from autopar.hints.shard import unwrap_functions
from autopar.hints.store import check_modules, hints_of, mark, unmark

_Module = TypeVar("_Module", bound=nn.Module)

# A group of keep_together is an empty set that its members share: copying and pickling keep what is shared within the
# copy shared, while the copies of one block are groups of their own. (Not a list: torch.export puts copies of those in
# their place.)


def pipeline_stage(module: _Module, stage: int) -> _Module:
    """Pin `module` to pipeline stage `stage` (from 0); returns it. The pin of a module inside it comes before its own.

    Stages in between that nobody is pinned to are the search's. Raises InputError.
    """
    check_modules("pipeline_stage", [module])
    if type(stage) is not int or stage < 0:
        raise InputError(f"pipeline_stage: a stage is a whole number from 0, got {stage!r}")
    mark(module, "stage", stage)
    return module


def recompute(module: _Module) -> _Module:
    """Ask that the stages of `module` run their forward again for the backward instead of keeping activations.

    Returns the module. Raises InputError.
    """
    check_modules("recompute", [module])
    mark(module, "recompute", True)
    return module


def keep_together(*modules: nn.Module) -> None:
    """Ask that all operators of `modules` run in one stage; of one module, that no cut goes through it.

    Raises InputError.
    """
    if not modules:
        raise InputError("keep_together needs at least one module")
    check_modules("keep_together", modules)
    group: set[object] = set()
    for module in dict.fromkeys(modules):
        mark(module, "together", (*hints_of(module).get("together", ()), group))


def clear_hints(model: nn.Module) -> None:
    """Take all hints off `model` and the modules inside it, those of `shard` included."""
    check_modules("clear_hints", [model])
    for module in model.modules():
        unmark(module)
        unwrap_functions(module)


# -- hints of a model -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hints:
    """The hints of a model by module path. A module that is reached by several paths is listed with each of them."""

    stages: tuple[tuple[str, int], ...] = ()
    recompute: tuple[str, ...] = ()
    together: tuple[tuple[str, ...], ...] = ()
    aliases: tuple[tuple[str, ...], ...] = ()  # paths of one and the same hinted module

    def __bool__(self) -> bool:
        return bool(self.stages or self.recompute or self.together)


def read_hints(model: nn.Module) -> Hints:
    """All hints in `model`, in the order of `named_modules`."""
    stages, recomputed = [], []
    together: dict[int, list[str]] = defaultdict(list)
    paths: dict[int, list[str]] = defaultdict(list)
    for path, module in model.named_modules(remove_duplicate=False):
        found = hints_of(module)
        if found:
            paths[id(module)].append(path)
        if "stage" in found:
            stages.append((path, found["stage"]))
        if "recompute" in found:
            recomputed.append(path)
        for group in found.get("together", ()):
            together[id(group)].append(path)
    aliases = tuple(tuple(names) for names in paths.values() if len(names) > 1)
    return Hints(tuple(stages), tuple(recomputed), tuple(map(tuple, together.values())), aliases)
