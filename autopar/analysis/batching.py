"""Whether the batch may be split into micro-batches, and which dimension of every tensor counts samples.

1. Prove it from the graph alone (`batch_proof`). If an operator combines samples, the batch stays whole and the
   operator is named.
2. Run the graph on a few samples together, and on the same samples in two parts. A dimension whose size follows the
   number of samples is a batch dimension.
3. Where the proof is open: if every output of the whole equals the combined outputs of the parts, for the example's
   values and for variations of them, the batch may be split; otherwise the first operator with a different value is
   named. A proof is believed, unless the caller wants it verified in the same way.

Float32 products are exact to float32 in these runs (`full_float32`): rounded to TF32, results for a batch and for its
parts may differ, as the algorithm depends on the size. Batch norm in training uses its running statistics there: how
its statistics are computed is the caller's choice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from autopar.analysis.batch_proof import OutputCombination, Proof, prove
from autopar.analysis.buffer_writes import written_buffer
from autopar.analysis.compared_outputs import Values, ancestors, classify, divides_by_values
from autopar.analysis.mixing_operator import mixing_operator
from autopar.analysis.node_values import (
    DROPOUT,
    Look,
    changed_dims,
    floats_differ,
    look,
    observe,
    probe,
    samples_of,
    storages_of,
)
from autopar.analysis.operators import is_random
from autopar.analysis.sample_states import DIVIDES
from autopar.analysis.training_norms import TrainingNorm, least_samples, training_norms
from autopar.analysis.uncaptured_samples import relates_samples
from autopar.analysis.varied_samples import varied
from autopar.capture.node_names import describe, described_with_code
from autopar.capture.program import Program
from autopar.capture.repeated_layers.measure_once import TensorShape
from autopar.capture.uncaptured import uncaptured
from cost_models.measuring.environment import full_float32

if TYPE_CHECKING:
    from autopar.analysis.batch_tail import Tail

VARIATIONS = 3  # of the samples that are compared where the proof is open
_OWN_SAMPLES = 8  # of the example that are compared as they are


@dataclass(frozen=True)
class Batching:
    """How the batch of a Program may be split."""

    outputs: tuple[OutputCombination, ...]
    obstacle: str  # why the batch cannot be split, with the operator; "" if it can
    batch_norms: tuple[TrainingNorm, ...]  # that normalise by the statistics of each micro-batch
    batch_dims: dict[str, int | None] = field(repr=False)  # node name -> batch dimension
    storages: dict[str, frozenset[int]] = field(repr=False)  # node name -> storages its tensors live in
    least_rows: int = 1  # smallest possible number of samples in a micro-batch
    fixed: str = ""  # why no other number of samples runs; "" if one does, or if none was tried
    unproven: str = ""  # why the proof was open, so that a comparison on a few samples decided; "" if proven
    shapes: dict[str, TensorShape] = field(repr=False, default_factory=dict)  # node name -> shape by number of samples
    tail: Tail | None = field(repr=False, default=None)  # the end of the model, which runs once on the whole batch

    @property
    def splittable(self) -> bool:
        return not self.obstacle

    def whole_because(self, batch_norm: str) -> str:
        """Why the batch must be one micro-batch; "" if it may be split. `batch_norm`: as `parallelize` has it."""
        if self.obstacle:
            return self.obstacle
        if batch_norm == "exact" and self.batch_norms:
            return f"batch_norm='exact' and {self.batch_norms[0]} normalises by the whole batch's statistics"
        nested = next((norm for norm in self.batch_norms if norm.nested), None)
        if batch_norm == "deferred" and nested is not None:
            return f"batch_norm='deferred' and {nested} runs under an autocast or no_grad of forward"
        return ""


@full_float32()
def study(program: Program, leaves: list[Any], *, verify: bool = False, proof: Proof | None = None) -> Batching:
    """Prove from the graph whether the batch may be split, then run it on a few samples and compare what is not proven.

    `leaves`: the flat inputs of a call, from which the samples are taken. `verify`: compare outputs that are proven,
    too. `proof`: of the program, where it is known.
    """
    module = program.graph_module
    norm_of = dict(training_norms(module))
    norms = tuple(norm_of.values())
    size = program.batch_size
    flat = list(module.graph.output_node().args[0])  # type: ignore[arg-type]
    if size < 2:
        why = "the batch has one sample" if size else "no input has a batch dimension"
        return _whole_only(program, leaves, flat, norms, why)
    obstacle = "" if program.any_batch else f"the captured model takes batches of {size} samples only"
    proof = proof or prove(program)
    if proof.verdict == "refuted":
        return _whole_only(program, leaves, flat, norms, obstacle or proof.why)
    least = least_samples(norm_of)
    if size < 2 * least:
        return _whole_only(program, leaves, flat, norms, f"{norms[0].path} has one value per channel in a sample")
    if any(isinstance(x, torch.Tensor) and x.is_meta for x in leaves):
        try:
            return replace(_without_values(program, leaves, flat, norms, proof, obstacle), least_rows=least)
        except Exception as error:  # as below
            fixed = _works_only_for(size, error)
            return replace(_whole_only(program, leaves, flat, norms, obstacle or fixed), fixed=fixed)
    # (samples in the smaller part, samples in both). If a part of one sample fails, one of two samples may succeed.
    attempts = [(n, min(size, 2 * n + 1)) for n in (1, 2) if least <= n <= size // 2]
    proven = [_proven(program, index, output, proof, verify) for index, output in enumerate(flat)]
    # Samples in reverse order are for comparisons: of two orders, a model that sorts them changes at least one.
    orders = (False,) if all(proven) and not program.uncaptured else (False, True)
    failures = []
    for least_rows, rows in attempts:
        try:
            samples, findings = _compared(program, flat, leaves, orders, rows, rows - least_rows, proven)
            for seed in range(VARIATIONS if proof.verdict == "open" or verify else 0):
                other = varied(program, samples, seed)
                with contextlib.suppress(Exception):  # values that the model does not take
                    finding = _look(program, flat, other, rows, rows - least_rows, proven, findings[0].combinations)
                    findings.append(finding)
            own, cuts = _parts_of_example(program, proof)
            shown = samples_of(program, leaves, 0, own)
            wanted = [cut for cut in cuts if least_rows <= cut <= own - least_rows]
            findings += [_look(program, flat, shown, own, cut, proven) for cut in wanted]
        except Exception as error:  # the model may raise anything at a batch size that it does not support
            failures.append(_works_only_for(size, error))
            obstacle = obstacle or failures[0]
            continue
        batching = _agreed(program, flat, findings, norms, least_rows)
        if batching.splittable and not obstacle:
            return replace(batching, unproven="" if proof.verdict == "proven" else proof.why)
        obstacle = obstacle or batching.obstacle
    fixed = failures[0] if failures and len(failures) == len(attempts) else ""
    return replace(_whole_only(program, leaves, flat, norms, obstacle), fixed=fixed)


def _parts_of_example(program: Program, proof: Proof) -> tuple[int, Sequence[int]]:
    """How many samples of the example to compare as they are, and where to cut them.

    Nothing is known of uncaptured code; and made-up samples may lie alike under a mask that an operator without a rule
    computes with.
    """
    size = program.batch_size
    if program.uncaptured:
        return size, sorted({1, size // 4, size // 2, size - 1})
    own = min(size, _OWN_SAMPLES)
    return own, sorted({1, own // 2}) if proof.verdict == "open" else ()


def _compared(
    program: Program,
    flat: list[Any],
    leaves: list[Any],
    orders: Sequence[bool],
    rows: int,
    first: int,
    proven: list[OutputCombination | None],
) -> tuple[list[Any], list[_Finding]]:
    """What samples show that differ from each other, made up or, where the model does not take those, of the example.
    Returns samples that the model takes, too. `orders`: True for reversed. Raises what the model raises."""
    made = [probe(program, leaves, rows, reverse=reverse) for reverse in orders]
    try:
        return made[0], [_look(program, flat, samples, rows, first, proven) for samples in made]
    except Exception:
        own = [probe(program, leaves, rows, reverse=reverse, own_floats=True) for reverse in orders]
        if not all(proven) and not floats_differ(program, own[0]):
            raise  # equal samples would hide that they meet
        return own[0], [_look(program, flat, samples, rows, first, proven) for samples in own]


def _works_only_for(size: int, error: Exception) -> str:
    """What an error says that a run on fewer samples raised."""
    node = getattr(error, "autopar_node", None)
    where = describe(node) if node is not None else "the model"
    reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return f"{where} works only for {size} samples ({reason})"


def study_again(program: Program, other: Batching) -> Batching | None:
    """The Batching of `program`, which differs from the one that `other` is of in sizes alone; None without a proof.

    The nodes have the same names. If both are proven from the graph to combine in the same way, nothing needs to run:
    this takes milliseconds. `shapes`, which only measuring needs, are left out.
    """
    if not other.splittable or other.unproven or not program.any_batch:
        return None
    proof = prove(program)
    flat = program.graph.output_node().args[0]
    same = proof.verdict == "proven" and all(
        new == old
        for node, new, old in zip(flat, proof.outputs, other.outputs, strict=True)  # type: ignore[arg-type]
        if isinstance(node, fx.Node)
    )
    return replace(other, shapes={}) if same else None


def _without_values(
    program: Program, leaves: list[Any], flat: list[Any], norms: tuple[TrainingNorm, ...], proof: Proof, obstacle: str
) -> Batching:
    """What sizes alone show, for tensors on the meta device.

    Without values nothing can be compared: if the proof is open, assume that the batch may be split. A run on real
    devices studies the model again, with values.
    """
    rows = min(program.batch_size, 3)
    whole, part = (
        observe(program.graph_module, samples_of(program, leaves, 0, n), program.device) for n in (rows, rows - 1)
    )
    dims: dict[str, int | None] = {}
    for node, value in whole.items():
        changed = changed_dims(value, part[node])
        dims[node.name] = changed[0] if len(changed) == 1 else None
    outputs = []
    for index, output in enumerate(flat):
        combination = _proven(program, index, output, proof, verify=False)
        if combination is None and isinstance(output, fx.Node) and isinstance(whole[output], torch.Tensor):
            dim = dims[output.name]
            weight = program.weights.get(index)
            combination = OutputCombination("mean", weight=weight) if dim is None else OutputCombination("cat", dim)
        kept = OutputCombination("first") if isinstance(output, fx.Node) else OutputCombination("constant")
        outputs.append(OutputCombination("sum") if index >= program.n_outputs else combination or kept)
    storages = {node.name: storages_of(value) for node, value in whole.items()}
    why = obstacle or written_buffer(program)
    unproven = "" if proof.verdict == "proven" else f"{proof.why}, and without values nothing can be compared"
    return Batching(tuple(outputs), why, norms, dims, storages, unproven=unproven)


def _whole_only(
    program: Program, leaves: list[Any], flat: list[Any], norms: tuple[TrainingNorm, ...], why: str
) -> Batching:
    """The Batching of a batch that must stay whole. An error that the model raises on these inputs says where."""
    try:
        storages = look(program.graph_module, leaves, device=program.device).storages
    except Exception as error:
        node = getattr(error, "autopar_node", None)
        if node is not None:
            error.add_note(f"the model itself raises this on the inputs of this call, at {described_with_code(node)}")
        raise
    combinations = tuple(OutputCombination("first" if isinstance(o, fx.Node) else "constant") for o in flat)
    return Batching(combinations, why, norms, dict.fromkeys(storages), storages)


@dataclass(frozen=True)
class _Finding:
    """What one run on a few samples showed."""

    calls: tuple[list[Any], ...]  # the flat inputs: all samples, and both parts
    whole: Look
    part: Look  # the first
    dims: dict[str, int | None]
    combinations: list[OutputCombination]
    obstacle: str
    rows: tuple[int, int]  # number of samples together, and in the first part


def _look(
    program: Program,
    flat: list[Any],
    samples: list[Any],
    rows: int,
    first: int,
    proven: list[OutputCombination | None],
    expected: Sequence[OutputCombination] = (),
) -> _Finding:
    """Run on all `rows` samples, on the first `first` of them and on the rest; compare outputs that are not proven.

    expected: how other samples showed that the outputs are combined.
    """
    module = program.graph_module
    calls = (samples, *(samples_of(program, samples, *ends) for ends in ((0, first), (first, rows))))
    outputs = [output for output in flat if isinstance(output, fx.Node)]
    operands = [a for node in module.graph.nodes if uncaptured(node) is not None for a in node.all_input_nodes]
    kept = (outputs + operands, outputs, outputs)
    whole, *parts = (look(module, call, keep, program.device) for call, keep in zip(calls, kept, strict=True))
    dims: dict[str, int | None] = {}
    obstacle = ""
    for node, value in whole.values.items():
        changed = changed_dims(value, parts[0].values[node])
        dims[node.name] = changed[0] if len(changed) == 1 else None
        if len(changed) > 1 and not obstacle:
            obstacle = f"{describe(node)} relates samples to each other: its output has {len(changed)} batch dimensions"
    combinations = []
    of_parts = [part.kept for part in parts]
    for index, output in enumerate(flat):
        weights = (float(first), float(rows - first))
        if index in program.weights:
            counted = flat[program.weights[index]]
            weights = (float(of_parts[0][counted]), float(of_parts[1][counted]))
        # The capture added counts of targets as outputs. They are sums, even if these samples suggest otherwise.
        known = OutputCombination("sum") if index >= program.n_outputs else proven[index]
        is_sum = bool(expected) and expected[index].combine == "sum"
        found = known or classify(output, whole.kept, of_parts, dims, weights, is_sum=is_sum)
        combinations.append(found)
    whole, part = replace(whole, kept={n: whole.kept[n] for n in operands}), replace(parts[0], kept={})
    return _Finding(calls, whole, part, dims, combinations, obstacle, (rows, first))


def _agreed(
    program: Program, flat: list[Any], findings: list[_Finding], norms: tuple[TrainingNorm, ...], least_rows: int
) -> Batching:
    """The Batching that all runs agree on."""
    one = findings[0]
    obstacle = next((f.obstacle for f in findings if f.obstacle), "") or written_buffer(program)
    obstacle = obstacle or _opaque_relation(program, findings[-1].whole.kept)
    combinations = []
    for index, output in enumerate(flat):
        combination = one.combinations[index]
        if any(f.combinations[index] != combination for f in findings) or combination.combine == "mixed":
            combination = OutputCombination("mixed")
        elif combination.combine == "mean":
            combination = replace(combination, weight=program.weights.get(index))
            divided = None if combination.weight is not None else divides_by_values(output, one.dims)
            if divided is not None:
                obstacle = obstacle or f"{describe(divided)} {DIVIDES}"
        if combination.combine == "mixed":
            finding = next((f for f in findings if f.combinations[index].combine == "mixed"), one)
            culprit = mixing_operator(program, output, finding.calls, finding.dims, finding.rows)
            obstacle = (
                obstacle or f"{describe(culprit)} mixes samples: the output depends on which samples share a batch"
            )
        combinations.append(combination)
    shapes = {
        node.name: TensorShape.fit(one.rows, (value, one.part.values[node]))
        for node, value in one.whole.values.items()
        if isinstance(value, torch.Tensor) and value.dim() == one.part.values[node].dim()
    }
    return Batching(tuple(combinations), obstacle, norms, one.dims, one.whole.storages, least_rows, shapes=shapes)


def _proven(program: Program, index: int, output: Any, proof: Proof, verify: bool) -> OutputCombination | None:
    """How a flat output is combined by the proof, unless it is to be verified and can be; else None.

    Outputs that depend on random numbers cannot be compared: the parts draw other numbers than the whole.
    """
    if proof.verdict != "proven" or not isinstance(output, fx.Node) or (verify and not _draws(program, output)):
        return None
    # Numbers (sizes) are always compared.
    return proof.outputs[index] if isinstance(output.meta.get("val"), torch.Tensor) else None


def _draws(program: Program, output: fx.Node) -> bool:
    """Whether an output depends on random numbers that `observe` does not turn off."""
    return any(
        node.op == "call_function" and node.target not in DROPOUT and is_random(node, program.graph_module)
        for node in ancestors(output)
    )


def _opaque_relation(program: Program, values: Values) -> str:
    """The obstacle if an opaque operator relates samples to each other. `values`: of its operands, for some samples."""
    for node in program.graph.nodes:
        opaque = uncaptured(node)
        if opaque is not None and relates_samples(opaque, fx.map_arg(node.args, values.__getitem__)):
            return f"{describe(node)} mixes samples: which samples share a batch changes results or gradients"
    return ""
