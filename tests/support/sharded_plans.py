"""Models whose strategies were chosen over a mesh, as plans that can be explained."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from autopar import Plan
from autopar.analysis.operators import on_device, operator_keys
from autopar.capture.program import capture
from autopar.plan.stage import Stage
from autopar.planner.explainers import Explainer, with_explainer
from autopar.planner.intra_op.explain import Solved, operator_explainer
from autopar.planner.intra_op.sharding_task import ShardingTask
from autopar.planner.intra_op.solution import whole_graph_sharding
from autopar.planner.intra_op.strategy_search import Sharding, ShardingProblem
from autopar.sharding.mesh import make_mesh
from autopar.sharding.stage_sharding import StageSharding
from cost_models import Cluster

META = torch.device("meta")
M = 4  # micro-batches
INF = float("inf")


class Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(ids, labels=ids).loss
        return loss


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096), nn.Linear(4096, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x))).square().mean()


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=1024, n_head=16, vocab_size=8192))


def llama(layers: int = 4) -> nn.Module:
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "vocab_size": 8192}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes))


def problem_of(name: str) -> tuple[ShardingProblem, dict[str, str]]:
    """A training step over a mesh data 2 x model 2, and the keys of its operators by node."""
    with META:
        model = {
            "mlp": Mlp,
            "gpt2": lambda: Loss(gpt2()),
            "llama": lambda: Loss(llama()),
            "llama 6": lambda: Loss(llama(6)),
        }[name]().train()
        x = torch.empty(8, 512, 1024) if name == "mlp" else torch.zeros(8, 512, dtype=torch.long)
    program = capture(model, (x,), {}, trace_equal_layers_once=True)
    module = on_device(program.graph_module, program.device, META)
    cluster = Cluster.preset("4xH100")
    mesh = make_mesh((2, 2), [device.name for device in cluster.devices], ("data", "model"))
    keys = {node.name: key for node, key in operator_keys(program).items()}
    return ShardingProblem(ShardingTask(module, [x], 8, cluster, M), mesh), keys


@cache
def chosen(name: str, room: float = 1.0) -> tuple[Plan, ShardingProblem, Sharding, dict[str, str], float]:
    """`room`: of the bytes that the fastest strategies take."""
    problem, keys = problem_of(name)
    found, memory = problem.solve(INF, {}), INF
    if room < 1:
        memory = room * found.nbytes
        found = problem.solve(memory, {})
    stage = Stage(problem.mesh.devices, tuple(keys.values()), sharding=whole_graph_sharding(problem, found, keys))
    plan = Plan((stage,), M, batch_size=8 * M, predicted_step_time=M * found.seconds)
    solved = Solved(problem, found, {key: node for node, key in keys.items()}, memory)
    explainer = Explainer(operators=operator_explainer(lambda _: solved))
    return with_explainer(plan, explainer), problem, found, keys, memory


def sharding_in(plan: Plan, stage: int = 0) -> StageSharding:
    found = plan.stages[stage].sharding
    assert found is not None
    return found
