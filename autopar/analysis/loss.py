"""How the loss of a whole batch follows from the losses of its micro-batches.

`train_step` calls `loss_fn(output, target)` once for every micro-batch. That equals the loss of the whole batch only if
each result gets the right weight, and the right weight depends on what the loss averages over. The loss is captured as
a graph, like a model, and the proof of `batch_proof` is carried through it:

```
   loss of the whole batch                                     weight of micro-batch i
   a mean over samples                                         samples_i / samples
   a sum over samples                                          1
   a sum / count(targets): ignored targets, class weights,     count(targets_i) / count(targets),
     masks that come with the targets                            known before the pipeline starts
   anything else (Dice, contrastive losses, numpy code ...)    none: the loss runs once, on the whole batch
```
"""

from __future__ import annotations

import itertools
import logging
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx, nn

from autopar.analysis.batch_proof import propagate
from autopar.analysis.batching import Batching
from autopar.analysis.buffer_writes import written_buffer
from autopar.analysis.loss_count import Count, count_of, counted_targets
from autopar.analysis.loss_digest import digest_of_code, digest_of_graph
from autopar.analysis.loss_example import (
    OutputLeaf,
    UnknownOutput,
    candidate_dims,
    example_outputs,
    where_targets_are,
)
from autopar.analysis.loss_functions import check_arguments, title_of
from autopar.analysis.loss_objects import refers_to_objects, restored
from autopar.analysis.loss_sizes import takes_every_size, treats_one_sample_alike
from autopar.analysis.loss_split import LossSplit
from autopar.analysis.operators import is_random
from autopar.analysis.rules.table import rule_name
from autopar.analysis.sample_states import Mean, Mixed, Split, State, Sum, Unbatched, Unproven
from autopar.capture import torch_private
from autopar.capture.cleanup import cross_entropy_arguments
from autopar.capture.module_hooks import is_hook_point
from autopar.capture.module_state import torch_generators_restored
from autopar.capture.program import Program, capture
from autopar.capture.thread_state import neutral_state
from autopar.errors import CaptureError, InputError, first_line, is_users_own, users_line, without_frames
from cost_models.kernels.beside_meta import BesideMeta

log = logging.getLogger(__name__)

_MOST_EXCLUDED = 2  # target tensors that have the batch's size by chance and yet belong to no sample
_TARGET, _OUTPUT = "target", "output"


def study_loss(
    loss_fn: Callable[[Any, Any], Any],
    program: Program,
    batching: Batching,
    target: Any,
    target_dim: int | Sequence[int | None] | None = None,
    *,
    default_dims: Sequence[int] = (0,),
) -> LossSplit:
    """How `loss_fn(output, target)` may be split for outputs of `program`, proven on the captured loss.

    `target_dim`: the dimension of the targets that counts samples, or one entry per flat target leaf (None: the tensor
    belongs to no sample). Without it, a tensor is split on the first of `default_dims` that has the size of the batch;
    a tensor that has this size by chance, such as class weights, is recognised by the captured loss.
    """
    check_arguments(loss_fn)
    leaves, spec = torch_private.tree_flatten(target)
    dims = candidate_dims(leaves, target_dim, default_dims, program.batch_size)
    if program.batch_size < 2 or not batching.splittable:
        # One micro-batch: nothing is split.
        return LossSplit("mean", tuple(dims), digest=digest_of_code(loss_fn))
    if batching.tail is not None:
        return LossSplit("whole", why=batching.tail.why, digest=digest_of_code(loss_fn))
    try:
        outputs = example_outputs(program, batching)
    except UnknownOutput as error:
        return LossSplit("whole", why=str(error), digest=digest_of_code(loss_fn))
    outputs = where_targets_are(outputs, leaves)
    refused: list[LossSplit] = []
    free = [] if isinstance(target_dim, Sequence) else [i for i, dim in enumerate(dims) if dim is not None]
    for excluded in itertools.chain.from_iterable(
        itertools.combinations(free, n) for n in range(min(len(free), _MOST_EXCLUDED) + 1)
    ):
        chosen = [None if i in excluded else dim for i, dim in enumerate(dims)]
        split = _LossStudy(loss_fn, program, batching, outputs, leaves, spec, chosen).run()
        if split.combine != "whole":
            return split
        refused.append(split)
    return refused[0]


class _LossModule(nn.Module):
    """`loss_fn` over flat leaves: o000, o001, ... of the output and t000, t001, ... of the target."""

    def __init__(self, loss_fn: Any, program: Program, spec: torch_private.TreeSpec) -> None:
        super().__init__()
        self.loss_fn = loss_fn
        self._specs = (program.out_spec, spec)

    def forward(self, **leaves: Any) -> Any:
        output, target = (
            torch_private.tree_unflatten([leaves[key] for key in sorted(leaves) if key[0] == side[0]], spec)
            for side, spec in zip((_OUTPUT, _TARGET), self._specs, strict=True)
        )
        return self.loss_fn(output, target)


class _LossStudy:
    """One attempt: the loss with certain dimensions of the targets taken for the batch."""

    def __init__(
        self,
        loss_fn: Callable[[Any, Any], Any],
        program: Program,
        batching: Batching,
        outputs: Sequence[OutputLeaf],
        targets: Sequence[Any],
        spec: torch_private.TreeSpec,
        dims: Sequence[int | None],
    ) -> None:
        self._model, self._batching, self._outputs, self._targets = program, batching, outputs, targets
        self._module = _LossModule(loss_fn, program, spec)
        self._dims = tuple(dims)
        self._digest = ""  # of the captured loss

    def run(self) -> LossSplit:
        # A gradient scaler may keep how it was set up, which any call does alike: ranks without a loss use it, too.
        # Not so one that was set up without values.
        with restored(self._module.loss_fn, but=() if self._without_values else torch.amp.GradScaler):
            split = self._studied()
        # The graph of a loss that counts its calls has the count.
        computes = "" if split.counts_calls else self._digest
        return replace(split, digest=computes or digest_of_code(self._module.loss_fn))

    def _studied(self) -> LossSplit:
        leaves, batch_dims = self._example()
        if refers_to_objects(self._module.loss_fn):
            try:
                self._call_once(leaves)
            except Exception as error:
                log.debug("loss_fn fails on an example: %s", error)
                return self._whole("it fails on another number of samples", error)
        try:
            with (
                warnings.catch_warnings(),
                neutral_state(self._device_types()),
                restored(self._module.loss_fn) as changed_number,
            ):
                warnings.simplefilter("ignore")
                loss = capture(self._module, (), leaves, batch_dim=batch_dims, strict=True, device=self._home())
                changed = changed_number()
            self._digest = digest_of_graph(loss.graph_module)
        except (CaptureError, InputError) as error:
            log.debug("loss_fn cannot be captured: %s", error)
            failure = self._failure(leaves)
            return self._whole(
                "it fails" if failure is not None else "it cannot be captured as a graph", failure or error
            )
        try:
            return self._counting(f"it changes '{changed}'") if changed else self._follow(loss, leaves)
        finally:
            for node in loss.graph.nodes:
                node.meta.clear()  # the tracer's tensors: nodes may outlive the graph

    def _follow(self, loss: Program, leaves: Mapping[str, Any]) -> LossSplit:
        """Carry the proof through the captured loss. `leaves`: the example that it was captured on."""
        has_samples = any(place.batch_dim is not None for place in loss.inputs)  # not so for a loss of the model's own
        own = sorted(path.rpartition(".")[2] for path in loss.live)
        written = written_buffer(loss)
        if own or written:
            return self._counting(written or f"it changes '{own[0]}'")
        if has_samples and not loss.any_batch:
            return self._whole(
                "it is made for one batch size, or reads tensors of the batch from outside its arguments"
            )
        if loss.n_outputs != 1:
            raise InputError(
                f"{title_of(self._module.loss_fn)} must return one tensor with one element, got {loss.n_outputs} "
                "values; return the loss alone"
            )
        placeholders = [n for n in loss.graph.nodes if n.op == "placeholder"]
        if any("val" not in n.meta for n in placeholders):
            return self._whole("it cannot be captured by torch.export")
        if any(map(is_hook_point, loss.graph.nodes)):
            return self._whole("it has hooks, which may do anything")
        if any(is_random(n, loss.graph_module) for n in loss.graph.nodes):
            return self._whole("it draws random numbers")
        states = {n: self._state(n, path) for n, path in zip(placeholders, sorted(leaves), strict=True)}
        walk = propagate(loss, states)
        if walk is None:
            return self._whole("it is made for some batch sizes only")
        result = next(iter(loss.graph.output_node().args[0]))  # type: ignore[arg-type]
        state = walk.states[result] if isinstance(result, fx.Node) else Unbatched()
        split = self._split(loss, state)
        if split.combine != "whole" and has_samples:
            if not takes_every_size(loss, leaves, self._model.batch_size):
                return self._whole("it is made for some batch sizes only")
            if not self._treats_one_sample_alike(loss, leaves):
                return self._whole("with one sample it computes something else")
        return split

    def _treats_one_sample_alike(self, loss: Program, leaves: Mapping[str, Any]) -> bool:
        if self._without_values:
            return True
        outputs = {key for key in leaves if key[0] == _OUTPUT[0]}
        with restored(self._module.loss_fn), torch_generators_restored(), neutral_state(self._device_types()):
            return treats_one_sample_alike(loss, leaves, outputs, self._module)

    def _failure(self, leaves: Mapping[str, Any]) -> Exception | None:
        """What a function raises where it is called on an example. Objects may count their calls."""
        loss_fn = self._module.loss_fn
        if not isinstance(loss_fn, types.FunctionType) or refers_to_objects(loss_fn):
            return None
        try:
            with warnings.catch_warnings(), restored(loss_fn):
                warnings.simplefilter("ignore")
                self._call_once(leaves)
        except Exception as error:  # the user's code may raise anything
            return error
        return None

    def _call_once(self, leaves: Mapping[str, Any]) -> None:
        """Call the loss on tensors with values: an object that sets itself up at its first call, such as a gradient
        scaler, would else keep tensors of the tracer."""
        beside = BesideMeta() if self._without_values else nullcontext()
        with torch_generators_restored(), neutral_state(self._device_types()), beside:
            self._module(**leaves)

    def _place(self) -> torch.device | None:
        """Where the loss runs: with the outputs, wherever the targets and the function's own tensors are."""
        return next((leaf.device for leaf in self._outputs if leaf.device is not None), None)

    @property
    def _without_values(self) -> bool:
        place = self._place()
        return place is not None and place.type == "meta"

    def _home(self) -> torch.device | None:
        """Where the tracer takes all tensors to be: not on the meta device, where those are not that the loss makes."""
        return torch.device("cpu") if self._without_values else self._place()

    def _device_types(self) -> set[str]:
        return {leaf.device.type for leaf in self._outputs if leaf.device is not None} - {"meta"}

    def _split(self, loss: Program, state: Any) -> LossSplit:
        match state:
            case Unbatched() | Mean(None):
                return LossSplit("mean", self._dims)
            case Sum():
                return LossSplit("sum", self._dims)
            case Mean(counted) if counted is not None:
                count = self._count(loss, counted)
                if count is None:
                    return self._whole(f"{counted.target} divides by what depends on the model's output")
                return LossSplit("mean", self._dims, count)
            case Mixed(node, why) | Unproven(node, why):
                return self._whole(f"{node.target} {why}")
        raise InputError(
            f"{title_of(self._module.loss_fn)} must return one tensor with one element, got one value per sample; "
            "reduce it, for example by .mean()"
        )

    def _counting(self, why: str) -> LossSplit:
        return replace(self._whole(f"{why}, once for every batch"), counts_calls=True)

    def _whole(self, why: str, error: Exception | None = None) -> LossSplit:
        why = f"{title_of(self._module.loss_fn)}: {why}"
        if error is None:
            return LossSplit("whole", why=why)
        cause = error.__cause__ if isinstance(error, CaptureError) else error
        if not isinstance(cause, Exception) or not is_users_own(cause):
            return LossSplit("whole", why=why, error=first_line(cause if isinstance(cause, Exception) else error))
        text = f"({users_line(cause)}): {first_line(cause)}"
        return LossSplit("whole", why=why, error=text, failure=without_frames(cause))

    def _example(self) -> tuple[dict[str, Any], dict[str, int | None]]:
        """Arguments of `_LossModule` and their batch dimensions, for an unusual number of samples.

        A size that nothing else has: what fits the batch by chance then does not fit it here.
        """
        sizes = {s for leaf in self._outputs for s in leaf.shape or () if isinstance(s, int)}
        sizes |= {s for t in self._targets if isinstance(t, torch.Tensor) for s in t.shape}
        rows = next(n for n in itertools.count(5, 2) if n not in sizes)
        symbols = {
            s: rows
            for leaf in self._outputs
            for size in leaf.shape or ()
            if isinstance(size, sympy.Basic)
            for s in size.free_symbols
        }
        leaves: dict[str, Any] = {}
        dims: dict[str, int | None] = {}
        place = self._place()
        for i, leaf in enumerate(self._outputs):
            key = f"o{i:04}"
            leaves[key] = leaf.example(symbols)
            dims[key] = leaf.how.batch_dim if leaf.shape is not None and leaf.how.combine == "cat" else None
        for i, (value, dim) in enumerate(zip(self._targets, self._dims, strict=True)):
            key = f"t{i:04}"
            dims[key] = None if dim is None else dim % value.dim()
            if dim is not None:
                at = torch.arange(rows, device=value.device) % value.shape[dim]
                value = value.detach().index_select(dim, at)
            leaves[key] = value.to(place) if isinstance(value, torch.Tensor) and place is not None else value
        return leaves, dims

    def _state(self, placeholder: fx.Node, key: str) -> State:
        index = int(key[1:])
        if key[0] == _TARGET[0]:
            dim = self._dims[index]
            return Unbatched() if dim is None else Split(dim % self._targets[index].dim())
        leaf = self._outputs[index]
        match leaf.how.combine:
            case "cat" if leaf.shape is not None:
                return Split(leaf.how.batch_dim or 0)
            case "mean":
                return Mean(placeholder if leaf.how.weight is not None else None)
            case "sum":
                return Sum()
        return Unbatched()

    def _count(self, loss: Program, counted: fx.Node) -> Count | None:
        """What a mean divides by, as a graph of its own; None where it depends on more than inputs and targets."""
        if counted.op == "placeholder":  # the model itself returns the mean, and counts what it averages
            index = next(int(i.name[1:]) for i in loss.inputs if i.name == counted.name)
            weight = self._outputs[index].how.weight
            assert weight is not None
            node = list(self._model.graph.output_node().args[0])[weight]  # type: ignore[arg-type]
            names = {n.name: ("input", i) for i, n in enumerate(self._model.graph.find_nodes(op="placeholder"))}
            return count_of(self._model, node, names)
        names = {
            i.name: (_TARGET, int(key[1:]))
            for i, key in zip(loss.inputs, sorted(self._keys()), strict=True)
            if key[0] == _TARGET[0]
        }
        if rule_name(counted) in ("div", "divide", "true_divide"):
            denominator = counted.args[1]
            return count_of(loss, denominator, names) if isinstance(denominator, fx.Node) else None
        found = cross_entropy_arguments(counted)
        if found is None:
            return None
        return counted_targets(loss, found, names)

    def _keys(self) -> Iterator[str]:
        yield from (f"o{i:04}" for i in range(len(self._outputs)))
        yield from (f"t{i:04}" for i in range(len(self._targets)))
