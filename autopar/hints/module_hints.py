"""The user's hints on modules: they fix some decisions of the plan, and the search takes all others.

    autopar.pipeline_stage(model.encoder, 0)             its operators run in stage 0
    autopar.recompute(model.decoder)                     its stages recompute their activations
    autopar.keep_together(model.embed, model.head)       their operators run in one stage, which the search chooses

A hint is a plain attribute of the module (`store`): deep copies and pickles of a model keep it, and it changes neither
what the module computes nor its state_dict. Hints become constraints in two steps:

    model --read_hints--> Hints (module paths) --resolve--> ResolvedHints (operators of one captured graph)
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from autopar.errors import InputError
from autopar.errors.names import with_checked_names
from autopar.hints.shard import unwrap_functions
from autopar.hints.store import add_hint, check_modules, has_hints, hints_of, remove_hints

_Module = TypeVar("_Module", bound=nn.Module)


@with_checked_names
def pipeline_stage(module: _Module, stage: int) -> _Module:
    """Pin the operators of `module` to pipeline stage `stage` (counted from 0). Returns the module.

    A pin of a module inside `module` takes precedence. The search may add stages between pinned ones.
    Raises InputError.
    """
    check_modules("pipeline_stage", [module])
    if type(stage) is not int or stage < 0:
        raise InputError(f"pipeline_stage: a stage is a whole number from 0, got {stage!r}")
    add_hint(module, stage=stage)
    return module


@with_checked_names
def recompute(module: _Module) -> _Module:
    """Let the stages that run `module` keep none of its activations: they run it again before its backward, layer by
    layer or with their whole forward, whichever is better.

    Returns the module. Raises InputError.
    """
    check_modules("recompute", [module])
    add_hint(module, recompute=True)
    return module


def keep_together(*modules: nn.Module) -> None:
    """Run all operators of `modules` in one stage. With a single module: no cut goes through it. Raises InputError."""
    if not modules:
        raise InputError("keep_together needs at least one module")
    check_modules("keep_together", modules)
    # A group is an empty set that its modules share. Copying or pickling a model keeps the set shared within the copy,
    # and gives the copy a set of its own: copies of a block become separate groups. An id or a number would merge them.
    group: set[object] = set()
    for module in dict.fromkeys(modules):
        add_hint(module, groups=(*hints_of(module).groups, group))


@with_checked_names
def clear_hints(model: nn.Module) -> None:
    """Remove all hints, including those of `shard`, from `model` and the modules inside it. Raises InputError."""
    check_modules("clear_hints", [model])
    for module in model.modules():
        remove_hints(module)
        unwrap_functions(module)


# -- hints of a model -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hints:
    """The hints of a model by module path. A module with several paths appears under each of them."""

    stages: tuple[tuple[str, int], ...] = ()  # (path, stage)
    recompute: tuple[str, ...] = ()  # paths
    together: tuple[tuple[str, ...], ...] = ()  # paths per group
    aliases: tuple[tuple[str, ...], ...] = ()  # the paths of one module, for modules with several paths

    def __bool__(self) -> bool:
        return bool(self.stages or self.recompute or self.together)


def read_hints(model: nn.Module) -> Hints:
    """All hints in `model`, in the order of `named_modules`."""
    stages, recomputed = [], []
    together: dict[int, list[str]] = defaultdict(list)
    paths: dict[int, list[str]] = defaultdict(list)
    for path, module in model.named_modules(remove_duplicate=False):
        hints = hints_of(module)
        if has_hints(module):
            paths[id(module)].append(path)
        if hints.stage is not None:
            stages.append((path, hints.stage))
        if hints.recompute:
            recomputed.append(path)
        for group in hints.groups:
            together[id(group)].append(path)
    aliases = tuple(tuple(names) for names in paths.values() if len(names) > 1)
    return Hints(tuple(stages), tuple(recomputed), tuple(map(tuple, together.values())), aliases)
