"""Which dimension of every tensor counts samples, and whether the batch may be split into micro-batches.

First the graph is asked (`proof`): where samples meet in it, the operator is named and the batch stays whole. Then it
is run on a few samples together and on two parts of them. A dimension whose size follows the number of samples is a
batch dimension. Splitting is safe where every output of the parts, put together again, equals the output of the whole;
where it does not, the first operator that differs is named. That backs the proof, and decides where the graph leaves it
open. Batch norm in training is left out of this: its policy is the caller's choice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from autopar.analysis.batch_proof import Proof, prove
from autopar.analysis.operators import is_random, operator_name, written_arguments
from autopar.analysis.probe import DROPOUT, changed_dims, close, observe, probe, storages_of
from autopar.capture.cleanup import aten
from autopar.capture.program import Program, describe, module_path
from cost_models.measuring.repeated_operators import TensorShape

Values = dict[fx.Node, Any]


@dataclass(frozen=True)
class Output:
    """How one flat output of the micro-batches becomes that of the whole batch."""

    combine: str  # "cat", "mean" (weighted by samples), "sum", "first" (the same for all), "constant"
    batch_dim: int | None = None
    weight: int | None = None  # of a "mean": the flat output that counts what it averages; None: samples


@dataclass(frozen=True)
class Batching:
    """What a few samples showed about a Program."""

    outputs: tuple[Output, ...]
    obstacle: str  # "" or why the batch cannot be split; names the operator
    batch_norms: tuple[str, ...]  # modules whose statistics are those of each micro-batch
    batch_dims: dict[str, int | None] = field(repr=False)  # node name -> batch dimension
    storages: dict[str, frozenset[int]] = field(repr=False)  # node name -> storages its tensors live in
    least_rows: int = 1  # a micro-batch has at least so many samples
    unproven: str = ""  # why a comparison of a few samples had to decide; "" where the graph alone told
    shapes: dict[str, TensorShape] = field(repr=False, default_factory=dict)  # node name -> sizes by samples

    @property
    def splittable(self) -> bool:
        return not self.obstacle


def is_training_batch_norm(node: fx.Node, module: fx.GraphModule) -> bool:
    """Whether `node` normalises by the statistics of the batch it gets."""
    if node.target is aten.batch_norm.default:
        return bool(node.args[5])
    if node.op == "call_module":
        child = module.get_submodule(str(node.target))
        return isinstance(child, nn.modules.batchnorm._BatchNorm) and (child.training or child.running_mean is None)
    return False


def study(program: Program, leaves: list[Any], *, verify: bool = True) -> Batching:
    """Look at the graph of `program`, then run it on a few of the samples in `leaves` (the flat inputs of a call) and
    compare whole with parts.

    `verify`: compare the outputs although the graph alone proves how they combine.
    """
    module = program.graph_module
    norms = tuple(module_path(n) or n.name for n in module.graph.nodes if is_training_batch_norm(n, module))
    size = program.batch_size
    flat = list(module.graph.output_node().args[0])  # type: ignore[arg-type]
    if size < 2:
        why = "the batch has one sample" if size else "no input has a batch dimension"
        return _whole_only(program, leaves, flat, norms, why)
    obstacle = "" if program.any_batch else f"the model is made for batches of {size} samples"
    proof = prove(program)
    if proof.verdict == "refuted":
        return _whole_only(program, leaves, flat, norms, obstacle or proof.why)
    if any(isinstance(x, torch.Tensor) and x.is_meta for x in leaves):
        return _without_values(program, leaves, flat, norms, proof, obstacle)
    # (samples in the smaller part, together); where a part of one sample fails, parts of two may do.
    attempts = [(1, min(size, 3))] + ([(2, min(size, 5))] if size >= 4 else [])
    told = [_told(program, index, output, proof, verify) for index, output in enumerate(flat)]
    for least_rows, rows in attempts:
        try:
            findings = [
                _look(program, flat, probe(program, leaves, rows, reverse=reverse), rows, rows - least_rows, told)
                for reverse in (False, True)
            ]
        except Exception as error:  # whatever the model raises at another batch size is the answer
            node = getattr(error, "autopar_node", None)
            where = describe(node) if node is not None else "the model"
            obstacle = obstacle or f"{where} works only for {size} samples ({str(error).splitlines()[0][:200]})"
            continue
        found = _agreed(program, flat, findings, norms, least_rows)
        if found.splittable and not obstacle:
            return replace(found, unproven="" if proof.verdict == "proven" else proof.why)
        obstacle = obstacle or found.obstacle
    return _whole_only(program, leaves, flat, norms, obstacle)


def _without_values(
    program: Program, leaves: list[Any], flat: list[Any], norms: tuple[str, ...], proof: Proof, obstacle: str
) -> Batching:
    """What sizes alone show, of tensors on the meta device. Where the proof is open nothing can be compared: the batch
    is taken for one that may be split, which the model's values will decide where there are some."""
    rows = min(program.batch_size, 3)
    whole, part = (observe(program.graph_module, _rows(program, leaves, 0, n)) for n in (rows, rows - 1))
    dims: dict[str, int | None] = {}
    for node, value in whole.items():
        changed = changed_dims(value, part[node])
        dims[node.name] = changed[0] if len(changed) == 1 else None
    outputs = []
    for index, output in enumerate(flat):
        found = _told(program, index, output, proof, verify=False)
        if found is None and isinstance(output, fx.Node) and isinstance(whole[output], torch.Tensor):
            dim = dims[output.name]
            found = Output("cat", dim) if dim is not None else Output("mean", weight=program.weights.get(index))
        kept = Output("first") if isinstance(output, fx.Node) else Output("constant")
        outputs.append(Output("sum") if index >= program.n_outputs else found or kept)
    storages = {node.name: storages_of(value) for node, value in whole.items()}
    why = obstacle or _written_buffer(program)
    unproven = "" if proof.verdict == "proven" else f"{proof.why}, and there are no values to compare"
    return Batching(tuple(outputs), why, norms, dims, storages, unproven=unproven)


def _rows(program: Program, leaves: list[Any], start: int, stop: int) -> list[Any]:
    """The flat inputs of some samples."""
    return [
        x if i.batch_dim is None else x.narrow(i.batch_dim, start, stop - start)
        for x, i in zip(leaves, program.inputs, strict=True)
    ]


def _whole_only(program: Program, leaves: list[Any], flat: list[Any], norms: tuple[str, ...], why: str) -> Batching:
    """What is known when the batch stays whole."""
    seen = observe(program.graph_module, leaves)
    kinds = tuple(Output("first") if isinstance(o, fx.Node) else Output("constant") for o in flat)
    storages = {node.name: storages_of(value) for node, value in seen.items()}
    return Batching(kinds, why, norms, dict.fromkeys(storages), storages)


@dataclass(frozen=True)
class _Finding:
    """What one probe showed."""

    whole: Values
    parts: list[Values]
    dims: dict[str, int | None]
    kinds: list[Output]
    obstacle: str
    rows: tuple[int, int]  # together, in the first part


def _look(
    program: Program, flat: list[Any], samples: list[Any], rows: int, first: int, told: list[Output | None]
) -> _Finding:
    """Run on all `rows` samples and on the `first` of them and the rest; outputs that are not `told` are compared."""
    module = program.graph_module
    whole = observe(module, samples)
    parts = [observe(module, _rows(program, samples, *ends)) for ends in ((0, first), (first, rows))]
    dims: dict[str, int | None] = {}
    obstacle = ""
    for node, value in whole.items():
        changed = changed_dims(value, parts[0][node])
        dims[node.name] = changed[0] if len(changed) == 1 else None
        if len(changed) > 1 and not obstacle:
            obstacle = f"{describe(node)} relates samples to each other: its output has {len(changed)} batch dimensions"
    kinds = []
    for index, output in enumerate(flat):
        weights = (float(first), float(rows - first))
        if index in program.weights:
            counted = flat[program.weights[index]]
            weights = (float(parts[0][counted]), float(parts[1][counted]))
        own = index >= program.n_outputs  # a count that the capture added: a sum, whatever it is for these samples
        known = Output("sum") if own else told[index]
        kinds.append(known if known is not None else _classify(output, whole, parts, dims, weights))
    return _Finding(whole, parts, dims, kinds, obstacle, (rows, first))


def _agreed(
    program: Program, flat: list[Any], findings: list[_Finding], norms: tuple[str, ...], least_rows: int
) -> Batching:
    """One answer from all probes."""
    one = findings[0]
    obstacle = next((f.obstacle for f in findings if f.obstacle), "") or _written_buffer(program)
    kinds = []
    for index, output in enumerate(flat):
        kind = one.kinds[index]
        if any(f.kinds[index] != kind for f in findings) or kind.combine == "mixed":
            kind = Output("mixed")
        elif kind.combine == "mean":
            kind = replace(kind, weight=program.weights.get(index))
            divided = None if kind.weight is not None else _divides_by_values(output, one.dims)
            if divided is not None:
                why = "divides by what depends on the values of the whole batch"
                obstacle = obstacle or f"{describe(divided)} {why}"
        if kind.combine == "mixed":
            finding = next((f for f in findings if f.kinds[index].combine == "mixed"), one)
            culprit = _first_difference(finding.whole, finding.parts, finding.dims) or output
            obstacle = (
                obstacle or f"{describe(culprit)} mixes samples: the output depends on which samples share a batch"
            )
        kinds.append(kind)
    shapes = {
        node.name: TensorShape.fit(one.rows, (value, one.parts[0][node]))
        for node, value in one.whole.items()
        if isinstance(value, torch.Tensor) and value.dim() == one.parts[0][node].dim()
    }
    storages = {node.name: storages_of(value) for node, value in one.whole.items()}
    return Batching(tuple(kinds), obstacle, norms, one.dims, storages, least_rows, shapes=shapes)


def _told(program: Program, index: int, output: Any, proof: Proof, verify: bool) -> Output | None:
    """How a flat output combines by the proof, where that is not to be compared, or cannot be: random numbers of the
    parts are others than those of the whole."""
    if proof.verdict != "proven" or not isinstance(output, fx.Node) or (verify and not _draws(program, output)):
        return None
    found = proof.outputs[index]
    if found is None or not isinstance(output.meta.get("val"), torch.Tensor):
        return None  # sizes are counted
    return Output(found.combine, found.dim, program.weights.get(index) if found.combine == "mean" else None)


def _draws(program: Program, output: fx.Node) -> bool:
    """Whether random numbers that a look at the graph does not turn off are on the way to an output."""
    return any(
        node.op == "call_function" and node.target not in DROPOUT and is_random(node, program.graph_module)
        for node in _ancestors(output)
    )


def _written_buffer(program: Program) -> str:
    """An obstacle if the model writes a buffer that is not batch norm's: it would be written once a micro-batch."""
    for node in program.graph.nodes:
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        if stack and "BatchNorm" in str(stack[-1][1]):
            continue
        for source in written_arguments(node):
            if source.op == "get_attr" and node.target is not aten.batch_norm.default:
                return f"{describe(node)} writes buffer '{source.target}', once for every batch"
    return ""


def _divides_by_values(output: fx.Node, dims: dict[str, int | None]) -> fx.Node | None:
    """The operator on the way to `output` whose divisor is computed from the values of all samples (their sizes do
    not count): a mean over those that count, say, which is no mean of means."""
    for node in _ancestors(output):
        if operator_name(node) not in ("div", "div_", "true_divide") or len(node.args) < 2:
            continue
        divisor = node.args[1]
        if isinstance(divisor, fx.Node) and dims.get(divisor.name) is None and _depends_on_batch(divisor, dims):
            return node
    return None


def _ancestors(node: fx.Node) -> list[fx.Node]:
    """`node` and all that it is computed from, sizes of tensors left out."""
    seen: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in seen and current.target is not aten.sym_size.int:
            seen[current] = None
            stack += current.all_input_nodes
    return list(seen)


def _depends_on_batch(node: fx.Node, dims: dict[str, int | None]) -> bool:
    return any(dims.get(n.name) is not None for n in _ancestors(node))


def _classify(
    output: Any, whole: Values, parts: list[Values], dims: dict[str, int | None], weights: tuple[float, float]
) -> Output:
    """How `output` combines; `weights`: what each part counts in a mean."""
    if not isinstance(output, fx.Node):
        return Output("constant")
    if _counts_values(output):
        return Output("mixed")
    full, pieces = whole[output], [p[output] for p in parts]
    if not isinstance(full, torch.Tensor):
        if all(p == full for p in pieces):
            return Output("first")
        return Output("sum" if type(full) is int and full == sum(pieces) else "mixed")
    dim = dims[output.name]
    if dim is not None:
        joined = torch.cat(pieces, dim)
        return Output("cat", dim) if close(full, joined) else Output("mixed")
    if any(p.shape != full.shape for p in pieces):
        return Output("mixed")
    if not _depends_on_batch(output, dims):
        return Output("first" if all(close(full, p) for p in pieces) else "mixed")
    if not full.is_floating_point():
        summed = close(full, pieces[0] + pieces[1]) if full.dtype != torch.bool else False
        return Output("sum" if summed and bool(full.any()) else "mixed")
    total = sum(weights) or 1.0
    mean = sum(p * (w / total) for p, w in zip(pieces, weights, strict=True) if w)
    if not isinstance(mean, torch.Tensor) or close(full, mean):
        return Output("mean")
    return Output("sum") if close(full, pieces[0] + pieces[1]) else Output("mixed")


def _counts_values(node: fx.Node) -> bool:
    """Whether a size of the result depends on values (export names such sizes u0, u1, ...)."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and any(re.search(r"\bu\d+", str(size)) for size in value.shape)


def _first_difference(whole: Values, parts: list[Values], dims: dict[str, int | None]) -> fx.Node | None:
    for node, value in whole.items():
        dim = dims[node.name]
        if dim is None or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        joined = torch.cat([p[node] for p in parts], dim)
        if joined.shape != value.shape or not close(value, joined):
            return node
    return None
