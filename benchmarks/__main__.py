"""`python -m benchmarks NAME [--quick] [--json OUT] [--figure OUT.png] [--results DIR]`.

`gpu` also takes `--device cuda:0|cpu` and `--models resnet,gpt2,llama,t5`.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from autopar import AutoparWarning, DeviceError, keep_freed_memory
from benchmarks import (
    accuracy,
    automatic,
    distributed,
    estimates,
    gpu,
    inference,
    memory,
    models,
    network,
    overhead,
    partition_instances,
    peers,
    planning,
    planning_time,
    published,
    scale,
    training,
    zoo,
)
from benchmarks.machine import machine_header
from benchmarks.output import Report, show, to_json, to_markdown
from benchmarks.published_runs.tables import TableError

RESULTS = Path(__file__).parent / "results"

# What each shows, and how it runs: quickly or not, with the folder of --instances or --tables.
BENCHMARKS: dict[str, tuple[str, Callable[[bool, Path | None], Report | None]]] = {
    "tutorial": (
        "ResNet-50 on two CPU devices: the split-size curve of PyTorch's model-parallel tutorial",
        lambda quick, _: training.run_training(models.resnet(quick), training.QUICK if quick else training.FULL),
    ),
    "gpt": (
        "a GPT-2-like model with tied embeddings on two CPU devices, the same comparison",
        lambda quick, _: training.run_training(models.gpt(quick), training.QUICK if quick else training.FULL),
    ),
    "overhead": (
        "microseconds per micro-batch on tiny stages and per call on one device",
        lambda quick, _: overhead.run_overhead(overhead.QUICK if quick else overhead.FULL),
    ),
    "automatic": (
        "ten models of 1 ms to 1.3 s a step: the automatic plan for two CPU devices against the plain model",
        lambda quick, _: automatic.run_automatic(quick),
    ),
    "inference": (
        "samples per second of classification and scoring by ResNet-50, ViT, BERT and GPT-2 on two CPU devices",
        lambda quick, _: inference.run_inference(quick),
    ),
    "peers": (
        "tiny stages, ResNet-50, GPT-2 and BERT by torchgpipe and torch.distributed.pipelining; steps against a bound",
        lambda quick, _: peers.run_peers(quick),
    ),
    "models": (
        "ResNet-50, GPT-2, BERT, T5, ViT, Llama and Mixtral: stages, times and errors against the plain model",
        lambda quick, _: zoo.run_zoo(quick),
    ),
    "estimates": (
        "ResNet-50, GPT-2, BERT, T5 and ViT estimated from kernel curves, and profiled, against their steps",
        lambda quick, _: estimates.run_estimates(quick),
    ),
    "memory": (
        "training steps of ResNet-50, GPT-2, BERT and T5: bytes predicted without running them, and measured",
        lambda quick, _: memory.run_memory(quick),
    ),
    "accuracy": (
        "automatic plans that lost, and predicted against measured steps: ResNet-50, GPT-2 and T5 under constraints",
        lambda quick, _: accuracy.run_accuracy(quick),
    ),
    "partition_instances": (
        "the public pipeline-partitioning graphs of NeurIPS 2020 (--instances DIR) against their published optima",
        lambda _, folder: partition_instances.run_partition_instances(folder),
    ),
    "planning_time": (
        "seconds and memory of choosing sharding strategies for Llamas on meshes of 64 devices",
        lambda quick, _: planning_time.run_planning_time(quick),
    ),
    "planning": (
        "seconds and memory of planning: 10,000 operators, 1,024 devices, Llama 3 70B on 128 H100",
        lambda quick, _: planning.run_planning(quick),
    ),
    "gpu": (
        "ResNet-50, GPT-2 medium, a Llama of 1.1 billion parameters and T5 on GPUs: every promise, met or missed",
        lambda quick, _: gpu.run_gpu(quick),
    ),
    "distributed": (
        "BERT and GPT-2 on two processes: autopar, its threads, pipelining, DDP, FSDP2 and tensor parallelism by hand",
        lambda quick, _: distributed.run_distributed(quick),
    ),
    "network": (
        "two hosts as network namespaces, one rank each: plans made for two bandwidths, measured at both",
        lambda quick, _: network.run_network(quick),
    ),
    "scale": (
        "GPT-3, Llama 3 405B and a mixture of experts on 64 to 16,384 H100: plans, simulated steps, utilisation, cost",
        lambda quick, folder: scale.run_scale(quick, folder or RESULTS),
    ),
    "published": (
        "published training runs (--tables DIR): plans by hand, predicted and measured steps and memory",
        lambda quick, folder: published.run_published(folder, quick),
    ),
}


# These measure the process itself, or run no steps.
_WITHOUT_KEPT_MEMORY = ("partition_instances", "planning", "planning_time", "published", "scale")


def main(arguments: Sequence[str] | None = None, *, own_process: bool = False) -> int:
    """The exit status: 0 (also where there is nothing to run), 1 for a missing package or device, 2 for a name
    that is none or a table that cannot be read. `own_process`: settings of the whole process may change."""
    options = _parser().parse_args(arguments)
    if options.list:
        print(_listing())
        return 0
    if options.name not in BENCHMARKS:
        what = f"no benchmark {options.name!r}" if options.name else "give the name of a benchmark"
        print(f"{what}; there are\n{_listing()}", file=sys.stderr)
        return 2
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("benchmarks").setLevel(logging.INFO)
    warnings.simplefilter("ignore", AutoparWarning)  # batch norm of micro-batches is what is measured here
    header = machine_header()
    if own_process and options.name not in _WITHOUT_KEPT_MEMORY:
        header["freed memory"] = "kept by the process" if keep_freed_memory() else "given back"
    try:
        report = _run(options)
    except TableError as error:
        print(error, file=sys.stderr)
        return 2
    except DeviceError as error:
        print(error, file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(f"{error}; the benchmarks need it: pip install transformers matplotlib", file=sys.stderr)
        return 1
    if report is None:
        print(_nothing_to_run(options))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 160)
    show(report, header, console)
    _write(report, header, options, console)
    return 0


def _run(options: argparse.Namespace) -> Report | None:
    if options.name == "gpu" and (options.device or options.models):
        return gpu.run_gpu(options.quick, options.device, [name for name in options.models.split(",") if name])
    if options.name == "scale":
        return scale.run_scale(options.quick, options.results)
    return BENCHMARKS[options.name][1](options.quick, options.instances or options.tables)


def _nothing_to_run(options: argparse.Namespace) -> str:
    if options.name == "published":
        return f"skipped: no tables in {options.tables}; give --tables DIR, a folder of csv files of published runs"
    return (
        f"skipped: no instances in {options.instances}; give --instances DIR, the folder with LayerGraphs/ and "
        "OperatorGraphs/ of github.com/msr-fiddle/dnn-partitioning"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Benchmarks of autopar.")
    parser.add_argument("name", nargs="?", help="see --list")
    parser.add_argument("--list", action="store_true", help="show the benchmarks")
    parser.add_argument("--quick", action="store_true", help="tiny models and few steps: shows that it runs, no more")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--instances", type=Path, metavar="DIR", help="of partition_instances")
    parser.add_argument("--tables", type=Path, metavar="DIR", help="of published")
    parser.add_argument("--device", metavar="DEVICE", help="of gpu: default cuda; cpu runs what makes sense there")
    parser.add_argument("--models", default="", metavar="A,B", help=f"of gpu: some of {', '.join(gpu.MODELS)}")
    parser.add_argument("--json", type=Path, metavar="OUT", help="default: NAME.json in the results directory")
    parser.add_argument("--figure", type=Path, metavar="OUT.png", help="default: NAME.png in the results directory")
    return parser


def _listing() -> str:
    width = max(map(len, BENCHMARKS))
    return "\n".join(f"  {name:{width}}  {what}" for name, (what, _) in BENCHMARKS.items())


def _write(report: Report, header: dict[str, str], options: argparse.Namespace, console: Console) -> None:
    """JSON, Markdown and the figure; quick results under names of their own, so that they replace no full ones."""
    stem = options.results / (f"{options.name}-quick" if options.quick else options.name)
    page = stem.with_suffix(".md")
    data = options.json or stem.with_suffix(".json")
    figure: Path | None = options.figure or stem.with_suffix(".png")
    assert figure is not None
    for path in (page, data, figure):
        path.parent.mkdir(parents=True, exist_ok=True)
    if report.draw is None:
        figure = None
    else:
        try:
            report.draw(figure)
        except ImportError as error:
            console.print(f"no figure: {error}; pip install matplotlib", markup=False)
            figure = None
    data.write_text(to_json(report, header))
    link = os.path.relpath(figure, page.parent) if figure else None
    page.write_text(to_markdown(report, header, link))
    written = [str(path) for path in (data, page, figure) if path]
    console.print(f"written: {', '.join(written)}", markup=False)


if __name__ == "__main__":
    sys.exit(main(own_process=True))
