"""The command line: `autopar demo`, `profile`, `plan`, `compare`, `diff` and `accuracy`.

Results go to stdout, as text or with --json as JSON; progress, warnings and errors go to stderr. Exit status: 0 for
success, 1 for an error of autopar (the message gives the reason), 2 for wrong usage.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import operator
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from torch import nn
from typer.core import TyperGroup

import autopar
from autopar import AutoparError, Cluster, DeviceError, InputError, Plan
from autopar.demo import DEMOS, run_demo
from autopar.options import HELP, CompareKeywords, PlanOptions


class _Group(TyperGroup):
    """Prints the messages of autopar's own errors without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (AutoparError, DeviceError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=_Group,
    help="Pipeline PyTorch models over several devices by a plan that measurement and search choose.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Factory = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FACTORY",
        help="A callable in a module that can be imported from the current directory. It returns (model, args), "
        "(model, kwargs), (model, args, kwargs) or a dict with model, example_args, example_kwargs, target, loss_fn.",
    ),
]
Devices = Annotated[
    str | None,
    typer.Option(help="For example cpu,cpu or cuda:0,cuda:1. Default: every GPU, or CPU workers."),
]
ClusterName = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="Plan from data sheets for devices that are not here: one node such as 8xH100, or a TOML file.",
    ),
]
Nodes = Annotated[int, typer.Option("--nodes", min=1, help="Number of nodes of the cluster.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, in seconds and bytes.")]


def _takes_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add options of PlanOptions to a command, which gets those that the user gave or their defaults as `options`."""
    types = get_type_hints(PlanOptions)
    defaults = {field.name: field.default for field in dataclasses.fields(PlanOptions)}

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        def run(**arguments: Any) -> None:
            options = {name: arguments.pop(name) for name in names}
            command(**arguments, options=options)

        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "options"]
        added = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults[name],
                annotation=Annotated[types[name], typer.Option(help=HELP[name])],
            )
            for name in names
        ]
        # Typer reads a command's options from these attributes.
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in [*own, *added]}
        return run

    return with_options


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
    """Plan and run a transformers model with random weights, and compare the plan with one device."""
    if model not in DEMOS:
        raise typer.BadParameter(f"{model!r} is not one of {', '.join(DEMOS)}", param_hint="--model")
    comparison = run_demo(model, devices, lambda text: typer.echo(text, err=json))
    if json:
        typer.echo(comparison.to_json())


@app.command()
@_takes_options("strict", "cache")
def profile(
    factory: Factory,
    devices: Devices = None,
    cluster: ClusterName = None,
    nodes: Nodes = 1,
    optimizer: Annotated[
        str | None, typer.Option(help="Show the memory of a training step with this optimizer, too.")
    ] = None,
    json: AsJson = False,
    *,
    options: dict[str, Any],
) -> None:
    """Show seconds and bytes of every module and operator on every device type, and the links between the devices."""
    place = _devices(devices, cluster, nodes)
    result = autopar.profile(devices=place, optimizer=optimizer, **options, **_load(factory))
    typer.echo(result.to_json() if json else result)


@app.command()
@_takes_options(*HELP)
def plan(
    factory: Factory,
    devices: Devices = None,
    cluster: ClusterName = None,
    nodes: Nodes = 1,
    explain: Annotated[bool, typer.Option(help="Explain the plan: bottleneck, rivals, what would help.")] = False,
    explain_inside: Annotated[
        str | None, typer.Option(metavar="MODULE", help="Explain the strategies of the operators in this module.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write the plan to this file.")] = None,
    given: Annotated[
        Path | None, typer.Option("--plan", help="Predict this saved plan, perhaps edited, instead of searching.")
    ] = None,
    json: AsJson = False,
    *,
    options: dict[str, Any],
) -> None:
    """Find the fastest plan for a model, on the devices here or on a cluster that is elsewhere."""
    place, given_plan = _devices(devices, cluster, nodes), None if given is None else Plan.load(given)
    best = autopar.plan(devices=place, plan=given_plan, **options, **_load(factory))
    if save is not None:
        best.save(save)
    typer.echo(best.to_json() if json else best)
    if explain:
        typer.echo(f"\n{best.explain()}", err=json)  # stdout holds the JSON alone
    if explain_inside is not None:
        typer.echo(f"\n{best.explain(explain_inside)}", err=json)


@app.command()
@_takes_options(*(name for name in HELP if name in get_type_hints(CompareKeywords)))
def compare(
    factory: Factory,
    devices: Devices = None,
    plan: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FILE", help="A saved plan to compare; may be repeated.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Number of measured steps per plan.")] = 5,
    json: AsJson = False,
    *,
    options: dict[str, Any],
) -> None:
    """Compare predicted and measured steps of the automatic plan ("auto"), saved plans and one device."""
    plans: dict[str, Plan | None] = {"auto": None}
    plans |= dict(_named_plan(entry) for entry in plan or ())
    result = autopar.compare(devices=devices, plans=plans, repeats=repeats, **options, **_load(factory))
    typer.echo(result.to_json() if json else result)


@app.command()
def accuracy(
    kind: Annotated[
        str | None, typer.Option(help="Only device types whose name contains this text, such as H200.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Show how far predicted step times were from measured ones, over all recorded steps."""
    result = autopar.accuracy(kind=kind)
    typer.echo(result.to_json() if json else result)


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(help="A saved plan.", metavar="BEFORE.json")],
    after: Annotated[Path, typer.Argument(help="Another saved plan.", metavar="AFTER.json")],
    json: AsJson = False,
) -> None:
    """Show the differences between two saved plans. Exit status: 0 with or without differences, 1 for invalid files."""
    result = Plan.load(before).diff(Plan.load(after))
    typer.echo(result.to_json() if json else result)


def _devices(devices: str | None, cluster: str | None, nodes: int) -> str | Cluster | None:
    """The devices at hand, or the cluster with this name or file."""
    if cluster is None:
        if nodes > 1:
            raise typer.BadParameter("--nodes needs --cluster", param_hint="--nodes")
        return devices
    if devices is not None:
        raise typer.BadParameter("give either --devices or --cluster", param_hint="--cluster")
    if not cluster.endswith(".toml"):
        return Cluster.preset(cluster, nodes)
    if not Path(cluster).is_file():
        raise typer.BadParameter(f"there is no file {cluster!r}", param_hint="--cluster")
    loaded = Cluster.from_toml(cluster)
    return dataclasses.replace(loaded, nodes=nodes) if nodes > 1 else loaded


def _named_plan(entry: str) -> tuple[str, Plan]:
    name, equals, path = entry.partition("=")
    if not (name and equals):
        raise typer.BadParameter(f"{entry!r} is not NAME=FILE", param_hint="--plan")
    if not Path(path).is_file():
        raise typer.BadParameter(f"there is no file {path!r}", param_hint="--plan")
    return name, Plan.load(path)


def _load(factory: str) -> dict[str, Any]:
    """The model and the example call that the factory returns, as keyword arguments of the public calls."""
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
        name = type(function).__name__
        raise typer.BadParameter(f"{factory!r} is a {name}, not a callable", param_hint="MODULE:FACTORY")
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
