"""Memory of a training step: what is predicted without running it is what a real step allocates."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import astuple, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from models import ragged_mask
from torch import fx, nn

from autopar.capture.program import Program, capture
from benchmarks.memory import MOMENTS, allocated, checkpointed, nbytes, steps
from cost_models.graphs import on_meta
from cost_models.memory.optimizer_step import optimizer_step_temporaries
from cost_models.memory.recomputation import nodes_inside
from cost_models.memory.step_memory import StepMemory, step_memory
from cost_models.memory.training_memory import FULL, MIXED, training_memory

pytestmark = pytest.mark.slow

TOLERANCE = 0.05
MOMENT_TOLERANCE = 0.1  # oneDNN's copies of weights, and what Python's variables hold though nobody needs it
MAKERS: dict[str, Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
}
VOCABULARY, BATCH, LENGTH = 1000, 4, 64
LAYERS = 3


# -- the models -------------------------------------------------------------------------------------------------------


def resnet50() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=10))
    return model, {"pixel_values": torch.randn(4, 3, 64, 64), "labels": torch.randint(10, (4,))}


def gpt2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = transformers.GPT2Config(
        n_layer=LAYERS, n_embd=128, n_head=4, n_positions=LENGTH, vocab_size=VOCABULARY, use_cache=False
    )
    tokens = text()
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


def bert(batch: int = BATCH) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Without dropout, so that attention is one kernel."""
    config = transformers.BertConfig(
        num_hidden_layers=LAYERS,
        hidden_size=128,
        num_attention_heads=4,
        intermediate_size=512,
        vocab_size=VOCABULARY,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    tokens = text(batch)
    inputs = {"input_ids": tokens, "attention_mask": ragged_mask(batch, LENGTH), "labels": tokens}
    return transformers.BertForMaskedLM(config), inputs


def t5() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = transformers.T5Config(
        num_layers=2, d_model=128, d_ff=512, num_heads=4, d_kv=32, vocab_size=VOCABULARY, decoder_start_token_id=0
    )
    tokens = text()
    return transformers.T5ForConditionalGeneration(config), {"input_ids": tokens, "labels": tokens}


def text(batch: int = BATCH) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, LENGTH))


MODELS = {"GPT-2": gpt2, "ResNet-50": resnet50, "BERT": bert, "T5": t5}


@cache
def captured(name: str) -> tuple[Program, list[Any]]:
    model, inputs = MODELS[name]()
    program = capture(model.train(), (), inputs)
    bound = program.bind((), inputs)
    assert bound is not None
    return program, bound[0]


# -- real steps -------------------------------------------------------------------------------------------------------


def measured(model: nn.Module, inputs: dict[str, Any], optimizer: str, count: int = 2) -> list[dict[str, int]]:
    """The bytes of real steps, after one of a copy: what libraries allocate once in a process does not count."""
    copy.deepcopy(model).train()(**inputs).loss.backward()
    return steps(model.train(), inputs, MAKERS[optimizer](model.parameters()), count)


def predicted(found: StepMemory) -> dict[str, int]:
    return {moment: getattr(found, moment).total for moment in MOMENTS}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("name", MODELS)
def test_every_moment_of_the_first_and_later_steps_is_as_predicted(name: str, optimizer: str) -> None:
    model, inputs = MODELS[name]()
    program, leaves = captured(name)
    for real, first in zip(measured(model, inputs, optimizer), (True, False), strict=True):
        counted = step_memory(program.graph_module, leaves, optimizer=optimizer, first=first)
        assert predicted(counted) == pytest.approx(real, rel=MOMENT_TOLERANCE)
        assert counted.peak.total == pytest.approx(max(real.values()), rel=TOLERANCE)
        assert counted.peak.total == max(predicted(counted).values())


@pytest.mark.parametrize(("name", "layers"), [("GPT-2", "transformer.h"), ("BERT", "bert.encoder.layer")])
def test_layers_that_run_again_need_what_real_ones_do(name: str, layers: str) -> None:
    model, inputs = MODELS[name]()
    program, leaves = captured(name)
    groups = [nodes_inside(program.graph, f"{layers}.{index}") for index in range(LAYERS)]
    again = step_memory(program.graph_module, leaves, optimizer="sgd", recompute=groups)
    for layer in model.get_submodule(layers):
        checkpointed(layer)
    real = measured(model, inputs, "sgd", count=1)[0]
    assert predicted(again) == pytest.approx(real, rel=MOMENT_TOLERANCE)
    assert again.peak.total == pytest.approx(max(real.values()), rel=TOLERANCE)
    assert again.peak.activations < step_memory(program.graph_module, leaves, optimizer="sgd").peak.activations / 2


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adafactor"])
@pytest.mark.slow
def test_the_step_of_other_optimizers_is_as_predicted(optimizer: str) -> None:
    model, inputs = MODELS["BERT"]()
    program, leaves = captured("BERT")
    for real, first in zip(measured(model, inputs, optimizer), (True, False), strict=True):
        counted = step_memory(program.graph_module, leaves, optimizer=optimizer, first=first)
        assert predicted(counted) == pytest.approx(real, rel=MOMENT_TOLERANCE)


def test_garbage_of_earlier_work_does_not_count_as_freed_by_a_step() -> None:
    def earlier() -> None:
        circle: list[Any] = [torch.zeros(1000, 1000)]
        circle.append(circle)

    allocated(earlier)

    def action() -> torch.Tensor:
        gc.collect()  # as Python does by itself, at any time
        return torch.zeros(500, 1000)

    most, _ = allocated(action)
    assert most == 500 * 1000 * 4


@pytest.mark.slow
def test_gradients_of_an_earlier_micro_batch_are_counted_from_the_start() -> None:
    model, inputs = MODELS["T5"]()
    program, leaves = captured("T5")
    model.train()(**inputs).loss.backward()
    model.zero_grad(set_to_none=False)
    base = 2 * nbytes(model.parameters()) + nbytes(inputs.values())
    most, _ = allocated(lambda: model(**inputs).loss.backward())
    counted = step_memory(program.graph_module, leaves, optimizer="none", accumulate=True)
    assert counted.peak.total == pytest.approx(base + most, rel=TOLERANCE)
    assert counted.forward.gradients == counted.peak.gradients == nbytes(model.parameters())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells the most resident memory")
def test_the_peak_is_also_what_the_system_counts_as_resident() -> None:
    """An oracle that shares nothing with PyTorch: pages of a process that gives freed memory back at once."""
    folder = Path(__file__).parents[1]
    here, support = Path(__file__).parent, folder / "support"
    paths = os.pathsep.join([str(folder.parent), str(support), str(here), os.environ.get("PYTHONPATH", "")])
    prompt = {"MALLOC_MMAP_THRESHOLD_": "4096", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}
    environment = {**os.environ, **prompt, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(support / "resident_memory.py")]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    more, counted = map(int, found[-2:])
    assert more == pytest.approx(counted, rel=TOLERANCE)


# -- what is counted as what ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [*MAKERS, "none"])
def test_states_are_those_of_the_formula(optimizer: str) -> None:
    program, leaves = captured("BERT")
    parameters = list(program.graph_module.parameters())
    formula = training_memory([p.shape for p in parameters], optimizer=optimizer)
    counted = step_memory(program.graph_module, leaves, optimizer=optimizer)
    for name in ("parameters", "gradients", "optimizer"):
        assert getattr(counted.step, name) == getattr(formula, name)
    assert counted.forward.optimizer == formula.optimizer
    assert counted.forward.gradients == 0
    first = step_memory(program.graph_module, leaves, optimizer=optimizer, first=True)
    assert first.backward.optimizer == 0
    assert first.step.optimizer == formula.optimizer


@pytest.mark.parametrize("name", MODELS)
def test_a_gpu_keeps_no_more_activations_than_a_cpu(name: str) -> None:
    """Its kernels of attention and dropout keep less, and its blocks are of 512 bytes. On a CPU, copies in convolutions
    may put the peak of a forward shortly before its end."""
    program, leaves = captured(name)
    cpu, gpu = (
        step_memory(program.graph_module, leaves, optimizer="sgd", device_type=kind).forward for kind in ("cpu", "cuda")
    )
    assert gpu.activations <= cpu.activations * 1.02
    assert gpu.parameters == pytest.approx(cpu.parameters, rel=0.01)
    if name in ("GPT-2", "T5"):  # with dropout
        assert gpu.activations < cpu.activations * 0.9


def test_a_gpus_optimizer_needs_room_for_all_parameters_at_once() -> None:
    program, leaves = captured("BERT")
    shapes = [p.shape for p in program.graph_module.parameters()]
    counted = step_memory(program.graph_module, leaves, optimizer="adam", device_type="cuda")
    assert counted.step.transient == pytest.approx(optimizer_step_temporaries("adam", shapes), rel=0.01)
    assert counted.step.reserve > 0


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", [FULL, MIXED], ids=["full", "mixed"])
def test_zero_and_precision_are_those_of_the_formula(precision: Any, stage: int, optimizer: str) -> None:
    program, leaves = captured("BERT")
    shapes = [p.shape for p in program.graph_module.parameters()]
    formula = training_memory(shapes, optimizer=optimizer, precision=precision, zero=stage, replicas=4)
    counted = step_memory(
        program.graph_module, leaves, optimizer=optimizer, precision=precision, zero=stage, replicas=4
    )
    for name in ("parameters", "gradients", "optimizer"):
        assert getattr(counted.step, name) == pytest.approx(getattr(formula, name), abs=2)
    whole = step_memory(program.graph_module, leaves, optimizer=optimizer, precision=precision)
    assert counted.forward.activations == whole.forward.activations
    biggest = precision.parameter * max(map(torch.Size.numel, shapes))
    more = counted.forward.transient - whole.forward.transient
    assert 0.75 * biggest <= more <= 1.5 * biggest if stage == 3 else more == 0


def test_a_chain_of_operators_needs_what_its_closed_form_says() -> None:
    """n tanh of S bytes: the forward ends with input and n results; the backward begins with all of them and two
    gradients; w is one number."""

    @settings(deadline=None, max_examples=examples(8))
    @given(st.integers(1, 12), st.integers(1, 50))
    def check(depth: int, width: int) -> None:
        class Chain(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w = nn.Parameter(torch.ones(()))

            def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
                x = x * self.w
                for _ in range(depth):
                    x = torch.tanh(x)
                return (x,)

        size = 4 * width
        counted = step_memory(fx.symbolic_trace(Chain()), [torch.empty(width)], optimizer="none")
        assert counted.forward.total == 4 + size + max(depth * size, 2 * size)
        assert counted.backward.total >= 4 + size + (depth + 2) * size
        assert counted.step.total == 4 + 4 + size + size  # w, its gradient, input and output

    check()


def test_the_peak_is_the_largest_moment_and_prints() -> None:
    program, leaves = captured("BERT")
    counted = step_memory(program.graph_module, leaves)
    for moment in MOMENTS:
        largest = replace(counted, **{moment: replace(counted.peak, activations=10**10)})
        assert largest.moment == moment
        assert largest.peak.activations == 10**10
    text = str(counted)
    assert text.splitlines()[0].split() == ["MB", *MOMENTS]
    assert f"{counted.backward.total / 1e6:.1f}" in text.splitlines()[-1]
    assert sum(astuple(counted.peak)) == counted.peak.total


@pytest.mark.slow
def test_meta_inputs_and_parameters_do_as_well_as_real_ones() -> None:
    program, leaves = captured("T5")
    assert step_memory(on_meta(program.graph_module), leaves) == step_memory(
        program.graph_module, [on_meta(x) for x in leaves]
    )


def test_nothing_of_the_model_is_changed() -> None:
    program, leaves = captured("GPT-2")
    before = {name: p.clone() for name, p in program.graph_module.named_parameters()}
    children = [name for name, _ in program.graph_module.named_children()]
    step_memory(program.graph_module, leaves, recompute=[nodes_inside(program.graph, "transformer.h.0")])
    assert all(p.grad is None and torch.equal(p, before[name]) for name, p in program.graph_module.named_parameters())
    assert [name for name, _ in program.graph_module.named_children()] == children


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"zero": 4}, "stages 0 to 3"),
        ({"replicas": 0}, "one or more replicas"),
        ({"device_type": "abacus"}, "'abacus'.*cpu, cuda"),
        ({"optimizer": "lion"}, "'lion'"),
        ({"recompute": [["nothing"]]}, "'nothing' is no operator"),
    ],
)
def test_what_does_not_exist_is_refused(wrong: dict[str, Any], message: str) -> None:
    program, leaves = captured("BERT")
    with pytest.raises(ValueError, match=message):
        step_memory(program.graph_module, leaves, **wrong)


def test_where_nothing_is_trained_there_is_no_step() -> None:
    module = fx.symbolic_trace(nn.Sequential(nn.Tanh()))
    with pytest.raises(ValueError, match="nothing to train"):
        step_memory(module, [torch.ones(2)])


def test_operators_are_found_by_their_module() -> None:
    program, _ = captured("BERT")
    layers = [set(nodes_inside(program.graph, f"bert.encoder.layer.{index}")) for index in range(LAYERS)]
    whole = set(nodes_inside(program.graph, "bert.encoder"))
    assert set.union(*layers) <= whole
    assert sum(map(len, layers)) == len(set.union(*layers))
    with pytest.raises(ValueError, match=r"'bert\.nothing'"):
        nodes_inside(program.graph, "bert.nothing")


# -- a GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_on_a_gpu_is_that_of_its_allocator(name: str, optimizer: str) -> None:
    model, inputs = MODELS[name]()
    model = model.train().cuda()
    inputs = {key: x.repeat(64, *[1] * (x.dim() - 1)).cuda() for key, x in inputs.items()}
    program = capture(model, (), inputs)
    bound = program.bind((), inputs)
    assert bound is not None
    counted = step_memory(program.graph_module, bound[0], optimizer=optimizer, device_type="cuda")
    del program
    updates = MAKERS[optimizer](model.parameters())
    for _ in range(3):  # libraries allocate their workspaces in the first
        updates.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        output = model(**inputs)
        output.loss.backward()
        updates.step()
        del output
    states = [value for state in updates.state.values() for value in state.values() if torch.is_tensor(value)]
    own = nbytes([*model.parameters(), *model.buffers(), *inputs.values(), *[s for s in states if s.is_cuda]])
    most = torch.cuda.max_memory_allocated() - (before - own)  # what libraries keep is not of the step
    assert counted.peak.total - counted.peak.reserve == pytest.approx(most, rel=0.05)
