"""Published tables of training runs as jobs and plans. A table is known by its columns, whatever its file is called.

    megatron    heads hidden layers tp pp gpus batch micro_batch [vlayers] tflops_per_gpu
    torchtitan  model gpus fsdp tp pp cp seq local_batch recompute variant tokens_per_s_gpu [mem_gib]
    alpa        params_b gpus megatron [intra_only] [inter_only]        the best of plans that are not told

Where they have more columns, those count: gpu, seq, vocab, dtype, recompute, sequence_parallel, flash, zero.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from benchmarks.hybrid_layers import Arithmetic, Transformer, gpt
from benchmarks.hybrid_plan import Job, Recompute, Split, System
from benchmarks.hybrid_search import Space
from cost_models import Cluster, DeviceError
from cost_models.hardware.device_specs import DeviceSpec, device_spec
from cost_models.hardware.networks import network
from cost_models.memory.training_memory import FULL, MIXED

NODE = 8  # devices

DTYPES = {"fp16": torch.float16, "float16": torch.float16, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}

MEGATRON_OPTIMIZER = 62
"""Bytes for each parameter: gradients to float32 (2 + 4), searched for infinities and scaled (4 + 4), their norm (4),
clipping (4 + 4), Adam (16 read, 12 written), parameters to 16 bits (4 + 2), gradients zeroed (2). Megatron-LM 2.5,
megatron/optimizer/optimizer.py, with apex' FusedAdam."""

FSDP_OPTIMIZER = 40
"""The same for float32 parameters: norm (4), clipping (4 + 4), Adam (28)."""

LLAMA3 = {
    "8B": Transformer(32, 4096, 32, 8192, 128256, 8, 14336, gated=True),
    "70B": Transformer(80, 8192, 64, 8192, 128256, 8, 28672, gated=True),
    "405B": Transformer(126, 16384, 128, 8192, 128256, 8, 53248, gated=True),
}
"""Grattafiori et al., The Llama 3 Herd of Models, 2024, table 3."""

ALPA_GPT = {  # billion parameters: layers, hidden, heads
    0.355: (24, 1024, 16),
    0.76: (24, 1536, 16),
    1.3: (24, 2048, 32),
    2.6: (32, 2560, 32),
    6.7: (32, 4096, 32),
    15: (48, 5120, 40),
    39: (48, 8192, 64),
}
"""benchmark/alpa/paper_manual_gpt_suite.py of github.com/alpa-projects/alpa, which trains 1024 samples of 1024 tokens a
step and always recomputes."""

ALPA_SPACES = {
    "megatron": Space(recompute=("full",), zero=(0,), chunks=1),
    "intra_only": Space(recompute=("full",), pipeline=1),
    "inter_only": Space(recompute=("full",), data=1, tensor=1, whole_layers=False, chunks=1),
}
"""What each column chose from. Without pipelines Alpa shards operators over any devices; without sharding it cuts
between any operators."""


GRAND_TETON = dataclasses.replace(
    device_spec("H100"),
    name="H100 of 96 GB, 500 W",
    memory=96e9,
    bandwidth=2.4e12,
    peak_flops={"float32": 67e12, "float16": 912e12, "bfloat16": 912e12},
)
"""The devices of torchtitan's report, which says of their peak no more than that it lies between SXM (989 TFLOP/s) and
NVL (835, NVIDIA H100 data sheet): taken for the mean."""


RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


class TableError(ValueError):
    """A table that cannot be read: file, line and column, and what would be right."""


@dataclass(frozen=True)
class Row:
    """One line of a table, by column."""

    path: Path
    line: int
    cells: dict[str, str]

    def wrong(self, column: str, why: str) -> NoReturn:
        raise TableError(f"{self.path}, line {self.line}, column {column!r}: {why}")

    def text(self, column: str, default: str = "") -> str:
        return self.cells.get(column, "").strip() or default

    def number(self, column: str) -> float:
        try:
            value = float(self.text(column))
        except ValueError:
            self.wrong(column, f"needs a number, got {self.text(column)!r}")
        return value if 0 < value < float("inf") else self.wrong(column, f"needs a number > 0, got {value:g}")

    def count(self, column: str, default: int | None = None) -> int:
        if default is not None and not self.text(column):
            return default
        value = self.number(column)
        return int(value) if value == int(value) else self.wrong(column, f"needs a whole number, got {value:g}")

    def flag(self, column: str, default: bool) -> bool:
        known = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        text = self.text(column, str(default)).lower()
        return known[text] if text in known else self.wrong(column, f"needs true or false, got {text!r}")

    def recompute(self, default: Recompute) -> Recompute:
        text, known = self.text("recompute", default), {str(one): one for one in RECOMPUTE}
        return known[text] if text in known else self.wrong("recompute", f"needs {', '.join(known)}, got {text!r}")

    def dtype(self, default: str) -> torch.dtype | None:
        """None: a dtype that is not modelled."""
        return DTYPES.get(self.text("dtype", default))


@dataclass(frozen=True)
class Case:
    """A published figure."""

    name: str
    column: str  # that the figure is from
    published: float
    unit: str  # of the figure
    work: float  # in units x s: over a step's seconds it gives the figure
    job: Job
    split: Split | None  # the plan that was run; None: the best of `space`
    space: Space  # of the plans that the search may find
    memory: float | None = None  # bytes, the published peak


def read_cases(path: Path, tell: Callable[[str], None]) -> list[Case] | None:
    """The figures of a table; None if its columns are those of no form. `tell` hears of rows that are left out.

    Raises:
        TableError: a row that is incomplete or makes no sense.
    """
    rows = list(_rows(path))
    columns = set(rows[0].cells) if rows else set()
    for needed, read in FORMS:
        if needed <= columns:
            return [case for row in rows for case in read(row, tell)]
    return None


def _rows(path: Path) -> Iterator[Row]:
    header: list[str] | None = None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        cells = [cell.strip() for cell in next(csv.reader([line]))]
        if header is None:
            header = cells
        elif len(cells) > len(header):
            raise TableError(f"{path}, line {number}, column {len(header) + 1}: there are {len(header)} columns")
        else:
            yield Row(path, number, dict(zip(header, cells + [""] * (len(header) - len(cells)), strict=True)))


def _cluster(row: Row, spec: DeviceSpec, inter_node: str | None = None) -> Cluster:
    gpus = row.count("gpus")
    if gpus > NODE and gpus % NODE:
        row.wrong("gpus", f"needs whole nodes of {NODE}, got {gpus}")
    node = (spec,) * min(gpus, NODE)
    return Cluster(node, -(-gpus // NODE), network(spec.intra_node), network(inter_node or spec.inter_node))


def _spec(row: Row, default: DeviceSpec) -> DeviceSpec:
    name = row.text("gpu")
    if not name:
        return default
    try:
        return device_spec("A100-80" if name.upper() == "A100" else name)
    except DeviceError as error:
        row.wrong("gpu", str(error))


def _megatron(row: Row, tell: Callable[[str], None]) -> Iterator[Case]:
    """Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, 2021."""
    dtype = row.dtype("fp16")
    if dtype is None:
        tell(f"{row.path.name}, line {row.line}: left out, {row.text('dtype')} is not modelled")
        return
    layers, hidden, heads = (row.count(column) for column in ("layers", "hidden", "heads"))
    model = gpt(layers, hidden, heads, row.count("seq", 2048), row.count("vocab", 51200))
    batch, gpus, tensor, pipeline = (row.count(c) for c in ("batch", "gpus", "tp", "pp"))
    of_stage = row.count("vlayers", max(1, layers // pipeline))
    if layers % (pipeline * of_stage):
        column = "vlayers" if row.text("vlayers") else "pp"
        row.wrong(column, f"{layers} layers are no multiple of {pipeline} stages x {of_stage}")
    recompute = row.recompute("full")
    split = Split(
        tensor=tensor,
        pipeline=pipeline,
        data=gpus // (tensor * pipeline),
        samples=row.count("micro_batch"),
        chunks=layers // (pipeline * of_stage),
        recompute=recompute,
        zero=row.count("zero") if row.text("zero", "0") != "0" else 0,
    )
    how = Arithmetic(dtype, row.flag("flash", False), True, row.flag("sequence_parallel", False))
    cluster = _cluster(row, _spec(row, device_spec("A100-80")))
    job = Job(model, System(how, MIXED, MEGATRON_OPTIMIZER, True, True), batch, cluster)
    _check(row, job, split)
    work = gpt_flops(model, batch, recompute == "full") / gpus / 1e12
    name = f"{row.text('params_b', str(model.hidden))}B on {gpus}"
    yield Case(name, "tflops_per_gpu", row.number("tflops_per_gpu"), "TFLOP/s", work, job, split, Space())


def _torchtitan(row: Row, tell: Callable[[str], None]) -> Iterator[Case]:
    """benchmarks/llama3_h100_202412_torchtitan.md of github.com/pytorch/torchtitan: FSDP2 with float32 parameters."""
    size, variant = row.text("model"), row.text("variant")
    if size not in LLAMA3:
        row.wrong("model", f"needs one of {', '.join(LLAMA3)}, got {size!r}")
    dtype = row.dtype("float8" if size == "405B" else "bf16")
    if dtype is None or row.count("cp") > 1:
        why = "float8 is not modelled" if dtype is None else "context parallelism is not modelled"
        tell(f"{row.path.name}, line {row.line}: left out, {why}")
        return
    seq, tensor, pipeline, data = row.count("seq"), row.count("tp"), row.count("pp"), row.count("fsdp")
    model = dataclasses.replace(LLAMA3[size], seq=seq, vocab=row.count("vocab", LLAMA3[size].vocab))
    batch = data * row.count("local_batch")
    samples = row.count("micro_batch", 1 if pipeline > 1 else batch // data)
    split = Split(tensor, pipeline, data, samples, 1, row.recompute("full"), 3 if pipeline == 1 else 1)
    how = Arithmetic(dtype, row.flag("flash", True), variant != "eager", row.flag("sequence_parallel", tensor > 1))
    cluster = _cluster(row, _spec(row, GRAND_TETON))
    job = Job(model, System(how, FULL, FSDP_OPTIMIZER, False, False), batch, cluster)
    _check(row, job, split)
    gpus = row.count("gpus")
    memory = row.number("mem_gib") * 2**30 if row.text("mem_gib") else None
    published = row.number("tokens_per_s_gpu")
    name = f"{size} on {gpus}, {variant}"
    yield Case(name, "tokens_per_s_gpu", published, "tokens/s", batch * seq / gpus, job, split, Space(), memory)


def _alpa(row: Row, tell: Callable[[str], None]) -> Iterator[Case]:
    """Zheng et al., Alpa, 2022, on p3.16xlarge: V100 with 25 Gbit/s between nodes."""
    del tell
    size, gpus = row.number("params_b"), row.count("gpus")
    if size not in ALPA_GPT:
        row.wrong("params_b", f"needs one of {', '.join(map(str, ALPA_GPT))}, got {size:g}")
    model = gpt(*ALPA_GPT[size], row.count("seq", 1024), row.count("vocab", 51200))
    how = Arithmetic(row.dtype("fp16") or torch.float16, row.flag("flash", False), True, False)
    cluster = _cluster(row, _spec(row, device_spec("V100")), "Ethernet25")
    batch = row.count("batch", 1024)
    job = Job(model, System(how, MIXED, MEGATRON_OPTIMIZER, True, True), batch, cluster)
    work = gpt_flops(model, batch, True) / gpus / 1e12
    for column, space in ALPA_SPACES.items():
        if row.text(column):
            wide = dataclasses.replace(space, tensor=gpus if column == "intra_only" else space.tensor)
            wide = dataclasses.replace(wide, pipeline=gpus if column == "inter_only" else space.pipeline)
            yield Case(f"{size:g}B on {gpus}", column, row.number(column), "TFLOP/s", work, job, None, wide)


MEGATRON = "heads hidden layers tp pp gpus batch micro_batch tflops_per_gpu"
TORCHTITAN = "model gpus fsdp tp pp cp seq local_batch recompute variant tokens_per_s_gpu"
ALPA = "params_b gpus megatron"

FORMS: tuple[tuple[set[str], Callable[[Row, Callable[[str], None]], Iterator[Case]]], ...] = (
    (set(MEGATRON.split()), _megatron),
    (set(TORCHTITAN.split()), _torchtitan),
    (set(ALPA.split()), _alpa),
)
"""What columns a form needs, and how its rows are read."""


def gpt_flops(model: Transformer, batch: int, recomputed: bool) -> float:
    """FLOPs that reports count for a step: 4 passes of the layers if one is `recomputed`, else 3 (Narayanan et al.,
    2021, equation 3; alpa/util.py, compute_gpt_tflops, counts the same), and 3 of the logits."""
    b, s, h = batch, model.seq, model.hidden
    layers = (96 if recomputed else 72) * b * s * model.layers * h * h * (1 + s / (6 * h))
    return layers + 6 * b * s * h * model.vocab


def _check(row: Row, job: Job, split: Split) -> None:
    """Tell a plan that cannot be by the column that a field is from."""
    for field, why in split.problems(job):
        columns = [name for name in COLUMNS[field] if name in row.cells]
        row.wrong(columns[0] if columns else field, why)


COLUMNS = {
    "tensor": ("tp",),
    "data": ("gpus",),
    "samples": ("micro_batch", "local_batch"),
    "chunks": ("vlayers",),
    "zero": ("zero",),
}
"""Where the fields of a split come from."""
