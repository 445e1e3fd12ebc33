"""The command line: `autopar demo`, `profile`, `plan`, `compare`, `diff` and `accuracy`.

Results go to stdout, as text or with --json as JSON; progress, warnings and errors to stderr. Exit status: 0, 1 where
autopar cannot do it (the message says why), 2 for a command that is not understood.
"""

from __future__ import annotations

import importlib
import operator
import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn
from typer.core import TyperGroup

import autopar
from autopar import AutoparError, Cluster, DeviceError, InputError, Plan
from autopar.demo import DEMOS, run_demo
from autopar.schedule.builders import SCHEDULES


class _Group(TyperGroup):
    """Says what autopar's own errors say, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (AutoparError, DeviceError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=_Group,
    help="Pipelines PyTorch models over the devices at hand, with the plan chosen by measurement and search.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Factory = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FACTORY",
        help="A callable in a module of the current directory or the environment. It returns (model, args), "
        "(model, kwargs), (model, args, kwargs) or a dict with model, example_args, example_kwargs, target, loss_fn.",
    ),
]
Devices = Annotated[
    str | None, typer.Option(help="For example cpu,cpu or cuda:0,cuda:1. Default: every GPU, else two CPU workers.")
]
ClusterName = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="In place of devices at hand: a node of known ones, such as 8xH100, by their data sheets; or a TOML file.",
    ),
]
Nodes = Annotated[int, typer.Option("--nodes", min=1, help="Nodes of the cluster.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, in seconds and bytes.")]
Cache = Annotated[bool, typer.Option(help="Keep measurements on disk and take them from there.")]
MicroBatches = Annotated[int | None, typer.Option("--n-microbatches", help="Micro-batches a batch.")]
ScheduleName = Annotated[str | None, typer.Option("--schedule", help=f"One of {', '.join(SCHEDULES)}.")]
Replicas = Annotated[
    int | None, typer.Option("--max-replicas", help="Most devices of one stage; 1 for a pure pipeline.")
]
MemoryLimit = Annotated[float | None, typer.Option("--memory-limit", help="Usable bytes of each device, such as 8e9.")]


def main() -> None:
    """The console script."""
    warnings.formatwarning = _one_line
    app(prog_name="autopar")


def _one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"warning: {message}\n"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"autopar {autopar.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options before the command."""


@app.command()
def demo(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(DEMOS)}.")] = "resnet",
    devices: Devices = "cpu,cpu",
    json: AsJson = False,
) -> None:
    """Plan a transformers model with random weights, run it, and compare it with one device."""
    if model not in DEMOS:
        raise typer.BadParameter(f"{model!r} is none of {', '.join(DEMOS)}", param_hint="--model")
    comparison = run_demo(model, devices, lambda text: typer.echo(text, err=json))
    if json:
        typer.echo(comparison.to_json())


@app.command()
def profile(
    factory: Factory,
    devices: Devices = None,
    cluster: ClusterName = None,
    nodes: Nodes = 1,
    optimizer: Annotated[str | None, typer.Option(help="Also what a training step with it has in memory.")] = None,
    json: AsJson = False,
    cache: Cache = True,
) -> None:
    """What every module and operator costs on every kind of device, and the links between the devices."""
    place = _devices(devices, cluster, nodes)
    found = autopar.profile(devices=place, optimizer=optimizer, cache=cache, **_load(factory))
    typer.echo(found.to_json() if json else found)


@app.command()
def plan(
    factory: Factory,
    devices: Devices = None,
    cluster: ClusterName = None,
    nodes: Nodes = 1,
    n_microbatches: MicroBatches = None,
    schedule: ScheduleName = None,
    max_replicas: Replicas = None,
    memory_limit: MemoryLimit = None,
    max_shards: Annotated[
        int | None, typer.Option(help="On a cluster: most devices that split the operators of a stage; 1 for none.")
    ] = None,
    tune: Annotated[int, typer.Option(help="Run so many of the best plans and take the fastest.")] = 0,
    explain: Annotated[bool, typer.Option(help="Say why this plan, what others lose and what would help.")] = False,
    explain_inside: Annotated[
        str | None, typer.Option(metavar="MODULE", help="Say why the operators in this module are split as they are.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write the plan to this file.")] = None,
    json: AsJson = False,
    cache: Cache = True,
) -> None:
    """The fastest plan for a model, on devices at hand or on a cluster that is not."""
    options: dict[str, Any] = {"tune": tune} if tune else {}
    options |= {} if max_shards is None else {"max_shards": max_shards}
    found = autopar.plan(
        devices=_devices(devices, cluster, nodes),
        n_microbatches=n_microbatches,
        schedule=schedule,
        max_replicas=max_replicas,
        memory_limit=memory_limit,
        cache=cache,
        **options,
        **_load(factory),
    )
    if save is not None:
        found.save(save)
    typer.echo(found.to_json() if json else found)
    if explain:
        typer.echo(f"\n{found.explain()}", err=json)  # JSON stays alone on stdout
    if explain_inside is not None:
        typer.echo(f"\n{found.explain(explain_inside)}", err=json)


@app.command()
def compare(
    factory: Factory,
    devices: Devices = None,
    plan: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FILE", help="A saved plan to compare; may be repeated.")
    ] = None,
    n_microbatches: MicroBatches = None,
    schedule: ScheduleName = None,
    max_replicas: Replicas = None,
    memory_limit: MemoryLimit = None,
    repeats: Annotated[int, typer.Option(help="Steps of each plan that count.")] = 5,
    json: AsJson = False,
    cache: Cache = True,
) -> None:
    """Predicted and measured steps of the automatic plan ("auto"), saved plans, and one device."""
    plans: dict[str, Plan | None] = {"auto": None}
    plans |= dict(_named_plan(entry) for entry in plan or ())
    found = autopar.compare(
        devices=devices,
        plans=plans,
        n_microbatches=n_microbatches,
        schedule=schedule,
        max_replicas=max_replicas,
        memory_limit=memory_limit,
        repeats=repeats,
        cache=cache,
        **_load(factory),
    )
    typer.echo(found.to_json() if json else found)


@app.command()
def accuracy(
    kind: Annotated[str | None, typer.Option(help="Only devices whose kind contains this, such as H200.")] = None,
    json: AsJson = False,
) -> None:
    """How far predicted steps were from measured ones, over all that compare, tune and profiled steps recorded."""
    found = autopar.accuracy(kind=kind)
    typer.echo(found.to_json() if json else found)


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(help="A saved plan.", metavar="BEFORE.json")],
    after: Annotated[Path, typer.Argument(help="Another.", metavar="AFTER.json")],
    json: AsJson = False,
) -> None:
    """What one saved plan does otherwise than another. Exit status: 0, the same or not; 1 if a file holds no plan."""
    found = Plan.load(before).diff(Plan.load(after))
    typer.echo(found.to_json() if json else found)


def _devices(devices: str | None, cluster: str | None, nodes: int) -> str | Cluster | None:
    """Devices at hand, or the cluster that was named: by its file, or by the devices of a node."""
    if cluster is None:
        if nodes > 1:
            raise typer.BadParameter("nodes are those of a cluster; give --cluster, too", param_hint="--nodes")
        return devices
    if devices is not None:
        raise typer.BadParameter("give either devices at hand or a cluster", param_hint="--cluster")
    if not cluster.endswith(".toml"):
        return Cluster.preset(cluster, nodes)
    if not Path(cluster).is_file():
        raise typer.BadParameter(f"there is no file {cluster!r}", param_hint="--cluster")
    found = Cluster.from_toml(cluster)
    return replace(found, nodes=nodes) if nodes > 1 else found


def _named_plan(entry: str) -> tuple[str, Plan]:
    name, equals, path = entry.partition("=")
    if not (name and equals):
        raise typer.BadParameter(f"{entry!r} is not NAME=FILE", param_hint="--plan")
    if not Path(path).is_file():
        raise typer.BadParameter(f"there is no file {path!r}", param_hint="--plan")
    return name, Plan.load(path)


def _load(factory: str) -> dict[str, Any]:
    """What the factory returns, as keyword arguments of the public calls."""
    module_name, colon, path = factory.partition(":")
    if not (module_name and colon and path):
        raise typer.BadParameter(f"{factory!r} is not MODULE:FACTORY", param_hint="MODULE:FACTORY")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # something that the user's module imports
        raise typer.BadParameter(f"there is no module {error.name!r}", param_hint="MODULE:FACTORY") from error
    try:
        function = operator.attrgetter(path)(module)
    except AttributeError as error:
        raise typer.BadParameter(f"{module_name} has no {path!r}", param_hint="MODULE:FACTORY") from error
    if not callable(function):
        kind = type(function).__name__
        raise typer.BadParameter(f"{factory!r} is a {kind}, not a callable", param_hint="MODULE:FACTORY")
    return _as_call(factory, function())


def _as_call(factory: str, result: Any) -> dict[str, Any]:
    match result:
        case {"model": nn.Module()}:
            known = ("model", "example_args", "example_kwargs", "target", "loss_fn")
            unknown = set(result) - set(known)
            if unknown:
                raise InputError(f"{factory} returned {sorted(unknown)}; give only {', '.join(known)}")
            return dict(result)
        case (nn.Module() as model, tuple() as args, dict() as kwargs):
            return {"model": model, "example_args": args, "example_kwargs": kwargs}
        case (nn.Module() as model, tuple() as args):
            return {"model": model, "example_args": args}
        case (nn.Module() as model, dict() as kwargs):
            return {"model": model, "example_kwargs": kwargs}
    raise InputError(
        f"{factory} must return (model, args), (model, kwargs), (model, args, kwargs) or a dict with 'model', "
        f"where args is a tuple and kwargs a dict; got {type(result).__name__}"
    )
