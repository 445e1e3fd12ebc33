"""Published tables as cases. A table is known by its columns, whatever its file is called.

    megatron    heads hidden layers tp pp gpus batch micro_batch vlayers tflops_per_gpu
    vtrain      system gpus global_batch micro_batch hidden heads layers seq tensor data pipeline iteration_ms
    b200        model layers tensor pipeline data context expert seq microbatches step_ms peak_allocated_gib
    torchtitan  model gpus fsdp tp pp cp seq local_batch recompute variant tokens_per_s_gpu mem_gib
    alpa        params_b gpus megatron intra_only inter_only alpa        the best of several plans, not named

What the headers of the tables say about all of their rows is written here, with its source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.published_runs.alpa import ALPA_GPT, ALPA_PLANS
from benchmarks.published_runs.b200 import B200, NVLINK, library_bytes
from benchmarks.published_runs.cases import Case, Degrees, Options
from benchmarks.published_runs.machines import NODE, cluster_of, device_named
from benchmarks.published_runs.models import GPTSizes, LlamaSizes, Sizes, has_fused_softmax
from benchmarks.published_runs.tables import Row, RowError, read_rows
from benchmarks.published_runs.vtrain import HDR, TRACED_A100
from benchmarks.published_runs.vtrain import NVLINK as VTRAIN_NVLINK
from cost_models.clusters.cluster_file import MOST_DEVICES
from cost_models.collectives.overlap import SERIAL
from cost_models.hardware.device_specs import device_spec

VOCABULARY_MULTIPLE = 1024
"""Megatron-LM pads the vocabulary to a multiple of 128 x the tensor degree (megatron/tokenizer, make-vocab-size-
divisible-by). All are taken for 8 devices here, so that they share one model."""

MEGATRON = Options(launch="eager-functions", precision="fp16-mixed")
"""Megatron-LM of 2021 to 2023: every kernel launched by Python, fp16 with float32 copies, apex' fused Adam."""

MEGATRON_CORE = Options(launch="compiled", precision="bf16-mixed", overlap="gathers")
"""Megatron-LM of 2025 with Transformer Engine: chains of pointwise operators are single kernels, as a compiler makes
them; bf16 with gradients summed in float32. With sequence parallelism the input of a column-parallel product is
gathered again behind the product for that input's gradient (LinearWithGradAccumulationAndAsyncCommunication of
megatron/core/tensor_parallel/layers.py)."""

_LLAMA3: dict[str, dict[str, Any]] = {
    "8b": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "inner": 14336},
    "70b": {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "inner": 28672},
    "405b": {"layers": 126, "hidden": 16384, "heads": 128, "kv_heads": 8, "inner": 53248},
}
"""Grattafiori et al., The Llama 3 Herd of Models, 2024, table 3."""

_B200_KV_HEADS = {"405b": 16}
"""As the measured runs had them, by the header of their table."""

GRAND_TETON = dataclasses.replace(
    device_spec("H100"),
    name="H100 of 96 GB, 500 W",
    memory=96e9,
    bandwidth=2.4e12,
    peak_flops={"float32": 67e12, "float16": 912e12, "bfloat16": 912e12},
    flops_efficiency=755e12 * 500 / 700 / 912e12,
    attention_efficiency=0.35 * 989e12 * 500 / 700 / 912e12,
)
"""The devices of torchtitan's report, which says of their peak no more than that it lies between SXM (989 TFLOP/s) and
NVL (835, NVIDIA H100 data sheet): taken for the mean. Large products and attention: what an H200 sustains with 700 W
(755 TFLOP/s: stas00/ml-engineering, MSMF) and an H100 does (0.35 of 989: FlashAttention-3), in proportion to the power.

That rates fall as the power does, not as its cube root, is taken from the rows themselves: with the cube root all five
that a plan can say come out 17 to 25 % too fast, alike on 8 and 128 devices, compiled or not. So these rows are
calibration, of this one number."""


@dataclass(frozen=True)
class Form:
    """A kind of table."""

    columns: frozenset[str]  # that it needs
    figures: tuple[str, ...]  # its columns of figures
    read: Callable[[Row], Iterator[Case | RowError]]  # an error for one figure leaves the others


@dataclass(frozen=True)
class Unread:
    """A row that makes no sense, or that no case can say."""

    name: str
    column: str  # of the form's figures
    why: str


@dataclass(frozen=True)
class PublishedTable:
    """The figures of a table."""

    cases: tuple[Case, ...]
    unread: tuple[Unread, ...] = ()


def read_cases(path: Path) -> PublishedTable | None:
    """The figures of a table; None if its columns are those of no form.

    Raises:
        TableError: the file is no table.
    """
    header, rows = read_rows(path)
    columns = set(header)
    form = next((form for form in FORMS if form.columns <= columns), None)
    if form is None:
        return None
    cases, unread = list[Case](), list[Unread]()
    for row in rows:
        try:
            row.check_width()
            found = list(form.read(row))
        except RowError as error:
            found = [error]
        cases += [one for one in found if isinstance(one, Case)]
        for wrong in (one for one in found if isinstance(one, RowError)):
            column = wrong.column if wrong.column in form.figures else form.figures[0]
            unread.append(Unread(f"line {row.line}", column, wrong.in_words))
    return PublishedTable(tuple(cases), tuple(unread))


def _checked_gpus(row: Row) -> int:
    return _whole_nodes(row, "gpus", row.count("gpus"))


def _whole_nodes(row: Row, column: str, gpus: int) -> int:
    if gpus > NODE and gpus % NODE:
        row.wrong(column, f"needs whole nodes of {NODE} devices, got {gpus} devices")
    if gpus > MOST_DEVICES:
        row.wrong(column, f"a cluster has at most {MOST_DEVICES} devices, got {gpus}")
    return gpus


def _whole(row: Row, column: str, number: int, of: int, what: str) -> int:
    """How often `of` goes into `number`."""
    if not of or number % of or number < of:
        row.wrong(column, f"{number} {what} are no multiple of {of}")
    return number // of


def _padded(vocab: int) -> int:
    return -(-vocab // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def _divided(row: Row, column: str, model: Sizes, tensor: int) -> None:
    if isinstance(model, GPTSizes) and model.hidden % model.heads:
        row.wrong("hidden", f"{model.hidden} is no multiple of {model.heads} heads")
    if model.divided % tensor:
        row.wrong(column, f"{model.divided} heads are no multiple of {tensor}")


def _megatron(row: Row) -> Iterator[Case]:
    """Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, 2021, table 1.

    Their FLOP/s count four passes of the layers, one of them recomputed, and three of the logits (equation 3).
    """
    heads, hidden, layers, tensor, pipeline = row.counts("heads", "hidden", "layers", "tp", "pp")
    model = GPTSizes(layers, hidden, heads, row.count("seq", 2048), _padded(row.count("vocab", 51200)))
    gpus, batch, micro_batch = _checked_gpus(row), row.count("batch"), row.count("micro_batch")
    data = _whole(row, "tp", gpus, tensor * pipeline, "devices")
    _divided(row, "tp", model, tensor)
    _whole(row, "micro_batch", batch, data * micro_batch, "samples")
    chunks = 1
    if row.text("vlayers"):
        chunks = _whole(row, "vlayers", layers, pipeline * row.count("vlayers"), "layers")
    plan = {**_plan(tensor, pipeline, data, micro_batch), "chunks": chunks}
    work = gpt_flops(model, batch, recomputed=True) / gpus / 1e12
    name = f"{row.text('params_b')}B on {gpus}"
    cluster = cluster_of(device_named(row.comments, "A100-80"), gpus)
    figure = row.number("tflops_per_gpu")
    yield Case(name, "tflops_per_gpu", figure, "TFLOP/s", model, batch, cluster, MEGATRON, (plan,), work)


def _plan(tensor: int, pipeline: int, data: int, micro_batch: int) -> dict[str, Any]:
    """Of Megatron-LM in 2021 to 2023, with full recomputation."""
    degrees = {"tensor": tensor, "pipeline": pipeline, "data": data, "micro_batch": micro_batch}
    return {**degrees, "recompute": "full"}


def _vtrain(row: Row) -> Iterator[Case]:
    """Bang et al., vTrain, 2024: Megatron-LM on A100, 8 in each node. See vtrain.py for how the rows came about.

    The vocabulary has 50257 words and is not padded: each of n tensor devices has 50257 // n of them (src/model/
    gpt_model.py and src/predictor.py of github.com/VIA-Research/vTrain).
    """
    hidden, heads, layers, seq = row.counts("hidden", "heads", "layers", "seq")
    tensor, data, pipeline = row.counts("tensor", "data", "pipeline")
    family = GPTSizes(layers, hidden, heads, seq, row.count("vocab", 50257))
    gpus, batch, micro_batch = _checked_gpus(row), row.count("global_batch"), row.count("micro_batch")
    fused = has_fused_softmax(heads // tensor, micro_batch, seq)
    model = dataclasses.replace(family, vocab=family.vocab // tensor * tensor, fused_softmax=fused)
    if tensor * data * pipeline != gpus:
        row.wrong("gpus", f"{tensor} x {data} x {pipeline} devices are not {gpus}")
    _divided(row, "tensor", model, tensor)
    _whole(row, "micro_batch", batch, data * micro_batch, "samples")
    plan = _plan(tensor, pipeline, data, micro_batch)
    device = device_named(row.comments, "A100-80")
    cluster, how = cluster_of(device, gpus), MEGATRON
    if device == "A100-80":
        cluster = dataclasses.replace(cluster, inter_node=HDR)
    if device == "A100-80" and row.text("system") == "single-node":
        how = dataclasses.replace(how, overlap=SERIAL)
        cluster = dataclasses.replace(cluster, node=(TRACED_A100,) * len(cluster.node), intra_node=VTRAIN_NVLINK)
        plan["recompute"] = "none"
    name = f"{hidden} x {layers} on {gpus}, batch {batch}: {tensor} x {pipeline} x {data}, {micro_batch} at a time"
    ms = row.number("iteration_ms")
    unit: dict[str, Any] = {"per_second": 1e3, "family": family}
    yield Case(name, "iteration_ms", ms, "ms", model, batch, cluster, how, (plan,), **unit)


def _b200(row: Row) -> Iterator[Case]:
    """SimuMax, docs/b200, release v1.2, 2025: what the header of the table says."""
    size = row.text("model").lower().removeprefix("llama3-")
    if size not in _LLAMA3:
        row.wrong("model", f"needs one of {', '.join(f'llama3-{one}' for one in _LLAMA3)}, got {row.text('model')!r}")
    sizes = {**_LLAMA3[size], "kv_heads": _B200_KV_HEADS.get(size, _LLAMA3[size]["kv_heads"])}
    model = LlamaSizes(**{**sizes, "layers": row.count("layers")}, seq=row.count("seq"), wide_loss=False)
    tensor, pipeline, data = row.counts("tensor", "pipeline", "data")
    context, expert = row.count("context", 1), row.count("expert", 1)
    gpus = _whole_nodes(row, "data", tensor * pipeline * data * context)
    micro_batch, m = row.count("micro_batch", 1), row.count("microbatches")
    _divided(row, "tensor", model, tensor)
    plan = {**_plan(tensor, pipeline, data, micro_batch), "recompute": "none", "zero": int(data > 1)}
    plan["sequence_parallel"] = tensor > 1
    cluster = cluster_of(device_named(row.comments, "B200"), gpus)
    if cluster.node[0].name == "B200":
        cluster = dataclasses.replace(cluster, node=(B200,) * len(cluster.node), intra_node=NVLINK)
    yield Case(
        f"{size} of {model.layers} layers on {gpus}: {tensor} x {pipeline} x {data}, {m} micro-batches",
        "step_ms",
        row.number("step_ms"),
        "ms",
        model,
        data * m * micro_batch,
        cluster,
        MEGATRON_CORE,
        (plan,),
        per_second=1e3,
        memory=row.gib("peak_allocated_gib"),
        library_memory=library_bytes(model, tensor),
        not_expressed="context parallelism" if context > 1 else "expert parallelism" if expert > 1 else "",
    )


def _torchtitan(row: Row) -> Iterator[Case]:
    """benchmarks/llama3_h100_202412_torchtitan.md of github.com/pytorch/torchtitan: FSDP2 with float32 parameters, of
    which bfloat16 copies are gathered. Its memory is `max_reserved_gib`, what the allocator had reserved (train.py); a
    compiler leaves the products of SwiGLU apart."""
    size, variant = row.text("model").lower(), row.text("variant").lower()
    recompute = row.text("recompute", "full").lower()
    if size not in _LLAMA3:
        row.wrong("model", f"needs one of {', '.join(_LLAMA3)}, got {row.text('model')!r}")
    gpus, data, tensor, pipeline, context = row.counts("gpus", "fsdp", "tp", "pp", "cp")
    if data * tensor * pipeline * context != gpus:
        row.wrong("gpus", f"{data} x {tensor} x {pipeline} x {context} devices are not {_checked_gpus(row)}")
    model = LlamaSizes(**_LLAMA3[size], seq=row.count("seq"), fused=variant != "eager", one_product=False)
    local = row.count("local_batch")
    batch, micro_batch = data * local, row.count("micro_batch", 1 if pipeline > 1 else local)
    plan = _plan(tensor, pipeline, data, micro_batch) | {"zero": 3 if data > 1 else 0}
    plan["recompute"] = "selective-op" if recompute == "selective" else recompute  # its default of `selective`
    plan |= {"sequence_parallel": tensor > 1, "chunks": 2 if variant.startswith("interleaved") and pipeline > 1 else 1}
    launch = "eager" if variant == "eager" else "compiled"
    cluster = cluster_of(device_named(row.comments, "H100"), _checked_gpus(row))
    if cluster.node[0].name == "H100":
        cluster = dataclasses.replace(cluster, node=(GRAND_TETON,) * len(cluster.node))
    yield Case(
        f"{size} on {gpus}, {row.text('variant')}",
        "tokens_per_s_gpu",
        row.number("tokens_per_s_gpu"),
        "tokens/s",
        model,
        batch,
        cluster,
        Options("adamw", launch, "bf16-mixed", overlap="all"),
        (plan,),
        work=batch * model.seq / gpus,
        memory=row.gib("mem_gib"),
        reserved=True,
        not_expressed=_beyond_torchtitans_plan(size, variant, context),
    )


def _beyond_torchtitans_plan(size: str, variant: str, context: int) -> str:
    """What a row does that no plan can say, "" for nothing; float8 and asynchronous tensor parallelism in all rows of
    405B, by the header of the table."""
    beyond = {
        "context parallelism": context > 1,
        "float8": size == "405b" or "float8" in variant or "fp8" in variant,
        "asynchronous tensor parallelism": size == "405b" or "async" in variant,
    }
    return " and ".join(name for name, used in beyond.items() if used)


def _alpa(row: Row) -> Iterator[Case | RowError]:
    """Zheng et al., Alpa, 2022, on p3.16xlarge: V100 with 25 Gbit/s between nodes; recomputes always."""
    size, gpus = row.number("params_b"), _checked_gpus(row)
    if size not in ALPA_GPT:
        row.wrong("params_b", f"needs one of {', '.join(map(str, ALPA_GPT))}, got {size:g}")
    if not any(map(row.has, ALPA_PLANS)):
        row.wrong(next(iter(ALPA_PLANS)), "the row has no figure")
    model = GPTSizes(*ALPA_GPT[size], row.count("seq", 1024), _padded(row.count("vocab", 51200)))
    device = device_named(row.comments, "V100")
    batch, cluster = row.count("batch", 1024), cluster_of(device, gpus, "Ethernet25" if device == "V100" else None)
    work = gpt_flops(model, batch, recomputed=True) / gpus / 1e12
    for column in filter(row.has, ALPA_PLANS):
        try:
            figure = row.number(column)
        except RowError as error:
            yield error
            continue
        every: tuple[Degrees, ...] = tuple(ALPA_PLANS[column](gpus, model, batch))
        yield Case(f"{size:g}B on {gpus}", column, figure, "TFLOP/s", model, batch, cluster, MEGATRON, every, work)


def gpt_flops(model: GPTSizes, batch: int, recomputed: bool) -> float:
    """FLOPs that reports count for a step: 4 passes of the layers if one is `recomputed`, else 3 (Narayanan et al.,
    2021, equation 3; alpa/util.py, compute_gpt_tflops, counts the same), and 3 of the logits."""
    b, s, h = batch, model.seq, model.hidden
    layers = (96 if recomputed else 72) * b * s * model.layers * h * h * (1 + s / (6 * h))
    return layers + 6 * b * s * h * model.vocab


def _form(columns: str, read: Callable[[Row], Iterator[Case | RowError]], more: tuple[str, ...] = ()) -> Form:
    """`columns`: needed, a figure last. `more`: further figures."""
    names = columns.split()
    return Form(frozenset(names), (names[-1], *more), read)


FORMS = (
    _form("heads hidden layers tp pp gpus batch micro_batch tflops_per_gpu", _megatron),
    _form("gpus global_batch micro_batch hidden heads layers seq tensor data pipeline iteration_ms", _vtrain),
    _form("model layers tensor pipeline data seq microbatches step_ms", _b200),
    _form("model gpus fsdp tp pp cp seq local_batch recompute variant tokens_per_s_gpu", _torchtitan),
    _form("params_b gpus megatron", _alpa, tuple(ALPA_PLANS)[1:]),
)
