"""Edits of plan files say what they say, and what contradicts itself is refused with its place and value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from layered_plans import Data, edited, layered_plan, put

from autopar import Plan, PlanError
from autopar.sharding.stage_sharding import strategy_text

SHARDING = ("stages", 1, "sharding")
STRATEGIES = ("layers", "model.layers", "strategies", "A")


def texts(plan: Plan, stage: int) -> dict[str, str]:
    """The strategies of a stage."""
    sharding = plan.stages[stage].sharding
    assert sharding is not None
    return {key: strategy_text(strategy) for key, strategy in sharding.strategies}


def test_a_range_of_layers_that_is_edited_moves_layers() -> None:
    def edit(data: Data) -> None:
        data["stages"][0]["operators"] = ["model.layers.0-4"]
        data["stages"][1]["operators"] = ["model.layers.5-7"]

    found = edited(layered_plan(), edit)
    assert {key.split(".")[2].split("/")[0] for key in found.stages[0].operators} == set("01234")
    assert len(found.stages[1].operators) == 3 * 8
    assert found.stages[0].forward_time is None, "its price was another plan's"


def test_an_exception_by_operator_is_added_by_hand() -> None:
    for line in ("model.layers.5.mlp.up/linear#0", "model.layers.5.mlp.up: linear", "model.layers.5.mlp.up: linear#0"):
        own = {"mesh": {"tensor": 2}, "layers": "A", "strategies": {"R S1 -> P": line}}
        found = edited(layered_plan(), put("stages", 1, "sharding", own))
        assert found.stages[1].sharding == layered_plan(other=5).stages[1].sharding


def test_layers_that_move_take_their_strategies_and_parameters_along() -> None:
    def edit(data: Data) -> None:
        data["stages"][0]["operators"] = ["model.layers.0-4 before mlp.up/linear#0"]
        data["stages"][1]["operators"] = ["model.layers.4-7 from mlp.up/linear#0"]

    found = edited(layered_plan(), edit)
    assert [key for key in texts(found, 0) if "layers.4" in key] == ["model.layers.4.mlp.gate/linear#0"]
    assert list(texts(found, 1))[:2] == ["model.layers.4.mlp.up/linear#0", "model.layers.4.mlp.down/linear#0"]
    for stage in found.stages:
        assert stage.sharding is not None
        modules = [key.rpartition("/")[0] for key in stage.operators if "linear" in key]
        assert [name for name, _ in stage.sharding.parameters] == [f"{module}.weight" for module in modules]


def test_a_strategy_of_all_layers_changes_in_one_place() -> None:
    new = {"R S0 -> S1": "mlp.gate,up: linear", "S0 R -> S0": "mlp.down: linear"}
    found = edited(layered_plan(), put(*STRATEGIES, new))
    for stage in range(4):
        assert {text for key, text in texts(found, stage).items() if "down" in key} == {"S0 R -> S0"}
        assert {text for key, text in texts(found, stage).items() if "down" not in key} == {"R S0 -> S1"}
    by_name = {"S0 R -> S0": "mlp.*: linear", "R S0 -> S1": ["mlp.gate: linear#0", "mlp.up/linear#0"]}
    assert edited(layered_plan(), put(*STRATEGIES, by_name)) == found, "a name with its number wins over one without"


def test_the_mesh_of_every_stage_changes_in_one_place() -> None:
    found = edited(layered_plan(), put("every_stage", "sharding", "mesh", {"model": 2}))
    shardings = [stage.sharding for stage in found.stages]
    assert [sharding.axes for sharding in shardings if sharding is not None] == [("model",)] * 4
    assert found.stages[0].forward_time is None, "its price was another mesh's"


def test_one_layer_gets_a_definition_of_its_own() -> None:
    def edit(data: Data) -> None:
        data["layers"]["model.layers"]["strategies"]["B"] = {"S0 R -> S0": "mlp.*: linear"}
        data["layers"]["model.layers"]["parameters"]["B"] = "those of A"
        own = {"model.layers.0": "B", "model.layers.1-3": "A"}
        data["stages"][0]["sharding"] = {"mesh": {"tensor": 2}, "layers": own}

    found = edited(layered_plan(), edit)
    assert {text for key, text in texts(found, 0).items() if "layers.0." in key} == {"S0 R -> S0"}
    assert {text for key, text in texts(found, 0).items() if "layers.0." not in key} == {"R S0 -> S1"}
    before = layered_plan().stages[0].sharding
    after = found.stages[0].sharding
    assert before is not None
    assert after is not None
    assert after.parameters == before.parameters


def test_an_operator_or_a_parameter_of_a_layer_may_have_nothing() -> None:
    own = {
        "mesh": {"tensor": 2},
        "layers": "A",
        "strategies": {"none": "model.layers.5.mlp.up: linear"},
        "parameters": {"none": "model.layers.5.mlp.up: weight"},
    }
    found = edited(layered_plan(), put("stages", 1, "sharding", own))
    assert "model.layers.5.mlp.up/linear#0" not in texts(found, 1)
    sharding = found.stages[1].sharding
    assert sharding is not None
    assert len(sharding.parameters) == len(sharding.strategies) == 4 * 3 - 1


def apart() -> Plan:
    """Layers on stages with shardings of their own: one differs in a layer."""
    return layered_plan(other=5)


@pytest.mark.parametrize(
    ("corrupt", "said"),
    [
        (put("stages", 0, "operators", ["model.layers.3-0"]), "stages[0].operators: 'model.layers.3-0': a range of"),
        (
            put("stages", 0, "operators", ["model.layer.0-3"]),
            "no operators of layers of 'model.layer'; did you mean 'model",
        ),
        (
            put("stages", 0, "operators", ["model.layers.0-3 as B"]),
            "defines no operators 'B' of 'model.layers'; it has A",
        ),
        (
            put("stages", 0, "operators", ["model.layers.0 before mlp/mull#0"]),
            "has no 'mlp/mull#0'; did you mean 'mlp/mul#0'",
        ),
        (
            put("stages", 0, "operators", ["model.layers.0 from mlp/mul#0 before norm/mul#0"]),
            "'norm/mul#0' does not come behind 'mlp/mul#0'",
        ),
        (put("stages", 0, "operators", ["model.layers"]), "stages[0].operators[0] must be like 'module.path: linear#0"),
        (put("stages", 0, "operators", [7]), "stages[0].operators[0] must be like 'module.path: linear#0"),
        (put("stages", 0, "operators", ["model.layers.0-999999999"]), "at most 100000"),
        (
            put("stages", 0, "operators", ["model.layers.0-4"]),
            "8 operators, 'model.layers.4.norm/pow#0' to 'model.layers.4/",
        ),
        (put("layers", 5), "layers must be an object"),
        (put("layers", "model.layers", "strategeis", {}), "strategeis is unknown; did you mean 'strategies'"),
        (put("layers", "model.layers", "operators", 3), "layers['model.layers'].operators must be an object"),
        (put("layers", "model.layers", "operators", "A", ["x"]), "layers['model.layers'].operators.A[0] must be like"),
        (put("layers", "model.layers", "operators", "A", 5), "['model.layers'].operators.A must be a list, got 5"),
        (
            put(*STRATEGIES, ["S0"]),
            "['model.layers'].strategies.A must be an object from placements to names, got ['S0']",
        ),
        (
            put(*STRATEGIES, {"R S0 -> S1": ["mlp.gate: linear", 3]}),
            "['model.layers'].strategies.A must be an object from placements such as 'S0R' to names, got 3 for 'R S0",
        ),
        (
            put(*STRATEGIES, {"mlp.gate: linear": "R S0 -> S1"}),
            "['model.layers'].strategies.A has names before placements; write 'R S0 -> S1': 'mlp.gate: linear'",
        ),
        (
            put(*STRATEGIES, {"R S0 -> S1": "mlp.gate,upp,down: linear"}),
            "'mlp.gate,upp,down: linear': these layers have no operator 'mlp.upp/linear'; did you mean 'mlp.up/",
        ),
        (
            put(*STRATEGIES, {"R S0 -> S1": "mlp.*_up: linear"}),
            "strategies.A: 'mlp.*_up: linear': these layers have no operator 'mlp.*_up: linear'",
        ),
        (
            put(*STRATEGIES, {"R S0 -> S1": "mlp.*: linear", "R S1 -> P": "mlp.up: linear"}),
            "strategies.A: 'mlp.up/linear#0' has two values; give one",
        ),
        (
            put(*STRATEGIES, "those of B"),
            "strategies.A must be a definition, or 'those of A' for that of an earlier one",
        ),
        (put(*SHARDING, "mesh", [2]), "stages[1].sharding.mesh must be an object from axes to numbers of devices"),
        (
            put(*SHARDING, "strategies", {"Q": "model.layers.5.mlp.up: linear"}),
            "stages[1].sharding.strategies: model.layers.5.mlp.up/linear#0: 'Q' is no strategy",
        ),
        (
            put(*SHARDING, "strategies", {"R S1 -> P": "model.layers.9.mlp.up: linear"}),
            "stages[1].sharding.strategies: 'model.layers.9.mlp.up: linear': the stage has no operator",
        ),
        (
            put(*SHARDING, "exchanges", [["model.layers.5: add#0", "b", 3]]),
            "has collective 3, but there are 0 collectives",
        ),
        (
            put(*SHARDING, "exchanges", [["a", "b"]]),
            "stages[1].sharding.exchanges[0] must be [operators, tensor, numbers ..], got ['a', 'b']",
        ),
        (put(*SHARDING, "redistributions", [["a", "R", "R", 1]]), "redistributions[0] has a value of a wrong type, 1"),
        (put(*SHARDING, "layers", 3), "stages[1].sharding.layers must be like 'A' or {'model.layers.0-7': 'A'}, got 3"),
        (
            put(*SHARDING, "layers", "C"),
            "stages[1].sharding.layers: 'layers' defines nothing 'C' of this stage's layers; it has A of 'model.",
        ),
        (
            put(*SHARDING, "layers", {"model.layers.4-7": "C"}),
            "'layers' defines nothing 'C' of layers of 'model.layers'",
        ),
        (
            put(*SHARDING, "layers", {"model.layers.4-8": "A"}),
            "stages[1].sharding.layers: 'model.layers.4-8': the stage has no operators of 'model.layers.8'",
        ),
        (put(*SHARDING, "lairs", "A"), "stages[1].sharding.lairs is unknown"),
        (
            put("transfers", [{"source": "0-2", "target": "1-2", "forward_bytes": 1, "seconds": 1.0}]),
            "transfers[0] must have stages as source and target, or equally long ranges of stages such as '0-6' and",
        ),
        (
            put("transfers", [{"source": "0-9", "target": 1, "forward_bytes": 1, "seconds": 1.0}]),
            "'0-6' and '1-7', got '0-9' and 1",
        ),
        (
            put(*SHARDING, "repeated", [["fast", "a: x#0"]]),
            "repeated[0] has a value of a wrong type, 'fast', in ['fast'",
        ),
        (put("every_stage", 3), "every_stage must be an object of fields that all stages have, got 3"),
        (put("every_stage", {"speed": 3}), "stages[0].speed is unknown"),
        (
            put("collectives", [[1]]),
            "collectives[0] must be like [number, 'all_reduce data backward', nbytes, seconds, ",
        ),
        (put("collectives", [[1, "all_reduce data", 8, 0.5]]), "has number 1, but there are 0 before it"),
        (put("figures", 3), "figures must be an object with the names of 'fields' and rows of numbers, got 3"),
        (
            put("figures", {"fields": ["peak_memory"], "A": []}),
            "figures.A must be a list of 1 numbers, one for each of",
        ),
        (put("stages", 0, "figures", "B"), "stages[0].figures must name a row of 'figures', got 'B'"),
    ],
)
def test_what_contradicts_itself_is_refused_with_its_place_and_value(
    corrupt: Callable[[Data], None], said: str
) -> None:
    with pytest.raises(PlanError) as caught:
        edited(apart(), corrupt)
    assert said in str(caught.value)
