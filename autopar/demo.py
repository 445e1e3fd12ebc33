"""A demonstration: plan, run and compare a transformers model with random weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.api import compare, parallelize, plan
from autopar.errors import AutoparError
from autopar.report.document import Report
from autopar.report.measured_rounds import ROUNDS
from autopar.report.plan_report.module import compared_report
from autopar.runtime.comparing.comparison import Comparison
from autopar.runtime.other_systems.catalogue import CEILING


@dataclass(frozen=True)
class Demo:
    """A model and its training step."""

    title: str
    model: nn.Module
    inputs: dict[str, torch.Tensor]
    target: torch.Tensor
    loss: Callable[[Any, torch.Tensor], torch.Tensor]


def _resnet() -> Demo:
    """ResNet-50 on small images."""
    import transformers

    config = transformers.ResNetConfig()
    config.num_labels = 100
    images, labels = torch.randn(16, 3, 96, 96), torch.randint(100, (16,))

    model = transformers.ResNetForImageClassification(config)
    return Demo("ResNet-50, 16 images of 96 x 96", model, {"pixel_values": images}, labels, _class_loss)


def _gpt2() -> Demo:
    """GPT-2's architecture, smaller and without dropout."""
    import transformers

    config = transformers.GPT2Config(
        n_layer=8,
        n_embd=256,
        n_head=8,
        vocab_size=4096,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    tokens = torch.randint(config.vocab_size, (16, 64))

    title = "GPT-2 with 8 layers of width 256, 16 texts of 64 tokens"
    return Demo(title, transformers.GPT2LMHeadModel(config), {"input_ids": tokens}, tokens, _next_token_loss)


# At the top level, so that processes of their own get them.
def _class_loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.logits, labels)


def _next_token_loss(output: Any, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


SYSTEMS = (CEILING,)  # run in turn with the plans
DEMOS: dict[str, Callable[[], Demo]] = {"resnet": _resnet, "gpt2": _gpt2}


@dataclass(frozen=True)
class Shown:
    """What a demonstration ends with."""

    comparison: Comparison
    report: Report  # of the automatic plan; its step time is the median of the comparison's rounds


def run_demo(name: str, devices: str | None, say: Callable[[str], None]) -> Shown:
    """Plan, print, run and compare the model; `say` prints one paragraph. Raises AutoparError without transformers."""
    try:
        torch.manual_seed(0)
        chosen = DEMOS[name]()
    except ImportError as error:
        raise AutoparError('the demo needs transformers: pip install "autopar[demo]"') from error
    model, inputs, target, loss_fn = chosen.model.train(), chosen.inputs, chosen.target, chosen.loss
    parameters = sum(p.numel() for p in model.parameters())
    say(f"{chosen.title}: {parameters / 1e6:.1f} million parameters, random weights\n")
    say(">>> pm = autopar.parallelize(model, devices, tune=0, ...)     # capture, profile, search\n")
    start = time.perf_counter()
    module = parallelize(model, devices, tune=0, example_kwargs=inputs, target=target, loss_fn=loss_fn)
    say(f"planned in {time.perf_counter() - start:.1f} s\n\n{module.plan}\n")
    say(">>> pm.train_step(..., target=y, loss_fn=loss)                # then once more, with profile=True\n")
    loss = module.train_step(**inputs, target=target, loss_fn=loss_fn)
    module.train_step(**inputs, target=target, loss_fn=loss_fn, profile=True)
    module.close()  # its workers are not in the way of what is compared
    say(f"loss {loss.item():.4f}\n")
    say('>>> autopar.compare(model, devices, plans, systems=["ceiling"])')
    say("# one device, the plan, the best one without replicas; and what independent processes make of this machine\n")
    call: dict[str, Any] = {"example_kwargs": inputs, "target": target, "loss_fn": loss_fn}
    pipeline = plan(model, devices, max_replicas=1, tune=0, **call)
    plans = {"auto": module.plan, "max_replicas=1": pipeline}
    comparison = compare(model, devices, plans, **call, systems=SYSTEMS, repeats=5)
    assert isinstance(comparison, Comparison), "the devices are at hand"
    report = compared_report(module, comparison, "auto", f"autopar demo --model {name}")
    say(f"{report.only('At a glance', ROUNDS, 'Timeline of one step')}")
    return Shown(comparison, report)
