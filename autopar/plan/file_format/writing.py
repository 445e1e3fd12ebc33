"""Format 6 of a plan file: the fields of format 2 (`fields.py`), with equal layers and equal numbers written once.

field of format 2                                     here
operators                                             ranges of layers (`operators.py`)
strategies, parameters, redistributions, exchanges,   lines for several operators (`names.py`, `tables.py`); of layers,
repeated                                              "layers": "A" and definitions under "layers" (`definitions.py`)
numbers of stages                                     "every_stage" and "figures" (`figures.py`)
exchanges [{"collective": "all_reduce", ...}, ...]    "exchanges": [[operators, tensor, 3], ...]: collectives[3]
recompute, selective, layerwise, keeps_products       "recompute": "full", as `Plan.by_hand` calls it
mesh [2, 4], axes ["data", "tensor"]                  "mesh": {"data": 2, "tensor": 4}
devices, device_kinds, transfers                      ranges, and once where they are alike
runners_up [{"description": .., "step_time": ..}]     [[description, step_time], ...]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.plan.file_format.collectives import Collectives
from autopar.plan.file_format.definitions import in_modules
from autopar.plan.file_format.figures import take_figures
from autopar.plan.file_format.names import OPERATORS, Known
from autopar.plan.file_format.operators import folded_operators, keys_of
from autopar.plan.file_format.order import in_order, layers_as
from autopar.plan.file_format.shared_layers import ShardedStage, fold_shardings, paths_of
from autopar.plan.file_format.short_values import devices_in_rows, short_description
from autopar.plan.file_format.tables import EXCHANGES, ROWS, TABLES, compact
from autopar.plan.file_format.transfers import short_transfers
from autopar.plan.recompute import NAMES, RECOMPUTE, Recompute, recompute_flags
from autopar.schedule.builders import n_ranks
from autopar.sharding.stage_sharding import totals

_FIRST = ("n_microbatches", "schedule", "batch_size", "training", "predicted_step_time")  # in a file, before the stages
FLAGS = ("recompute", "selective", "layerwise", "keeps_products")


def layered(flat: dict[str, Any]) -> dict[str, Any]:
    """The fields of format 2 as format 6."""
    stages = [dict(stage) for stage in flat["stages"]]
    operators = [keys_of(stage.get("operators", ())) for stage in stages]
    for stage in stages:
        stage["devices"] = devices_in_rows(stage["devices"])
        mode = _mode(stage)
        for flag in FLAGS:
            stage.pop(flag, None)
        if mode is not Recompute.NONE:
            stage["recompute"] = NAMES[mode]
    layers: dict[str, dict[str, Any]] = {}
    lines, defined = folded_operators([stage.get("operators", ()) for stage in stages])
    for stage, mine in zip(stages, lines, strict=True):
        if "operators" in stage:
            stage["operators"] = mine
    for parent, definitions in defined.items():
        layers.setdefault(parent, {})["operators"] = definitions
    tables, collectives = _write_shardings(stages, operators)
    for parent, fields in tables.items():
        layers.setdefault(parent, {}).update(fields)
    shared = {**take_figures(stages), "layers": layers, "collectives": collectives}
    turns = n_ranks("interleaved-1f1b", [tuple(stage["devices"]) for stage in stages])
    for stage in stages[turns or len(stages) :]:
        del stage["devices"]  # in turn those of the first stages
    first = {name: flat[name] for name in _FIRST if name in flat and not (name == "training" and flat[name])}
    rest = {name: value for name, value in flat.items() if name not in (*_FIRST, "stages")}
    return {**first, "stages": stages, **{name: value for name, value in shared.items() if value}, **_short(rest)}


def _mode(stage: dict[str, Any]) -> Recompute:
    flags = {name: stage.get(name, False) for name in FLAGS}
    return RECOMPUTE[next(name for name in RECOMPUTE if recompute_flags(name) == flags)]


def _short(rest: dict[str, Any]) -> dict[str, Any]:
    """Other fields of a plan."""
    found = {name: value for name, value in rest.items() if name != "one_worker" or value}
    if "transfers" in rest:
        found["transfers"] = short_transfers(rest["transfers"])
    if "devices" in rest:
        found["devices"] = devices_in_rows(rest["devices"])
    if "runners_up" in rest:
        found["runners_up"] = [[short_description(one["description"]), one["step_time"]] for one in rest["runners_up"]]
    kinds = rest.get("device_kinds")
    if kinds and len(set(kinds)) == 1 and len(kinds) == len(rest.get("devices", ())):
        found["device_kinds"] = kinds[0]
    return found


# -- shardings --------------------------------------------------------------------------------------------------------


def _write_shardings(
    stages: Sequence[dict[str, Any]], operators: Sequence[list[str]]
) -> tuple[dict[str, dict[str, Any]], list[list[Any]]]:
    """Put shorter shardings into the stages, and return what is written of layers, by parent and table, and
    collectives."""
    collectives = Collectives()
    held = [number for number, stage in enumerate(stages) if "sharding" in stage]
    shardings = [_with_named_axes(stages[number]["sharding"]) for number in held]
    rows = [sharding for sharding in shardings if EXCHANGES in sharding]
    for sharding in rows:
        _leave_out_totals(sharding)
        sharding[EXCHANGES] = collectives.rows(sharding[EXCHANGES])
    collectives.joined([sharding[EXCHANGES] for sharding in rows])
    groups = collectives.groups([sharding[EXCHANGES] for sharding in rows])
    folded: list[ShardedStage] = []
    for number, sharding in zip(held, shardings, strict=True):
        mine = ShardedStage(operators[number], {})
        for table in TABLES:
            if table.name not in sharding:
                continue
            pairs = table.pairs(sharding[table.name])
            if in_order(table, pairs, operators[number]):
                mine.tables[table.name] = in_modules(table, dict(pairs))
            else:
                sharding[table.name] = {ROWS: table.write([([key], value) for key, value in pairs])}
        folded.append(mine)
    definitions = fold_shardings(folded, operators)
    for number, sharding, mine in zip(held, shardings, folded, strict=True):
        stages[number]["sharding"] = _sharding(sharding, mine, definitions)
    return definitions, groups


def _sharding(sharding: dict[str, Any], mine: ShardedStage, definitions: dict[str, Any]) -> dict[str, Any]:
    found = {"mesh": sharding["mesh"]}
    if mine.layers:
        found["layers"] = short_layers(mine, definitions)
    rest = {name: value for name, value in sharding.items() if name not in ("mesh", *mine.tables)}
    for table in TABLES:
        if table.name in rest:
            found[table.name] = rest[table.name]
        elif mine.own.get(table.name):
            found[table.name] = compact(table, mine.own[table.name], Known.of(mine.operators, OPERATORS))
    return {**found, **rest}


def short_layers(mine: ShardedStage, definitions: dict[str, Any]) -> Any:
    """ "A" if all layers are as A."""
    names = list(dict.fromkeys(mine.layers.values()))
    whole = dict.fromkeys(layers_as(names[0], mine.operators, definitions), names[0])
    return names[0] if whole == mine.layers else paths_of(mine.layers)


def _with_named_axes(sharding: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in sharding.items() if name not in ("mesh", "axes")}
    return {"mesh": dict(zip(sharding["axes"], sharding["mesh"], strict=True)), **rest}


def _leave_out_totals(sharding: dict[str, Any]) -> None:
    """Without sums that follow from other fields; `null` where there are none although there could be."""
    for name, value in sums(sharding).items():
        if sharding.get(name) == value:
            del sharding[name]
        else:
            sharding.setdefault(name, None)


def sums(sharding: dict[str, Any]) -> dict[str, Any]:
    """By field, what exchanges and repeated work of format 2 add up to."""
    each = ((one["nbytes"], one["seconds"]) for one in sharding[EXCHANGES] if not one.get("once"))
    repeated = (one["seconds"] for one in sharding.get("repeated", ()))
    return dict(zip(("collective_bytes", "collective_time", "repeated_time"), totals(each, repeated), strict=True))
