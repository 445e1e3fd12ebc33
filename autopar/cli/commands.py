"""The command line: `autopar demo`, `profile`, `plan`, `compare`, `convert`, `diff`, `accuracy`, `export` and
`doctor`.

Results go to stdout, as text or with --json as JSON; progress, warnings and errors go to stderr. Exit status: 0 for
success; 2 for what the user wrote (options, files, the factory), in one line with the file and line where there is one;
1 for what went wrong inside (no plan fits, the model cannot be captured, a failure of autopar).
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

import autopar
from autopar import Plan
from autopar.analysis.user_factory import load_call
from autopar.cli.entries import (
    check_names_differ,
    named_configuration,
    named_degrees,
    named_plan,
    named_split,
    plan_of_split,
    plans_by_hand,
)
from autopar.cli.errors import ErrorGroup
from autopar.cli.files import check_page, check_writable, save_plan
from autopar.cli.parameters import (
    AsJson,
    ClusterName,
    Devices,
    Factory,
    Html,
    Nodes,
    devices_or_cluster,
    takes_options,
)
from autopar.cli.report import save_report, typed_command
from autopar.cli.saved import accuracy, convert, diff, export
from autopar.demo import DEMOS, run_demo
from autopar.doctor.command import doctor
from autopar.options import AHEAD_ONLY, HELP, CompareKeywords, PlanOptions
from autopar.plan.exits.tools import TOOLS
from autopar.report.comparison_figure import check_figure
from autopar.report.plan_report.subject import ReportOptions
from autopar.runtime.other_systems.catalogue import SYSTEMS, check_systems

app = typer.Typer(
    cls=ErrorGroup,
    rich_markup_mode=None,
    help="Run PyTorch models on several devices. autopar measures the model, and searches for the fastest plan.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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
    html: Annotated[Path, typer.Option("--html", help="Write the report to this file, for a browser.")] = Path(
        "autopar-demo.html"
    ),
    json: AsJson = False,
) -> None:
    """Plan and run a transformers model with random weights, compare the plan with one device, and write a report."""
    if model not in DEMOS:
        raise typer.BadParameter(f"{model!r} is not one of {', '.join(DEMOS)}", param_hint="--model")
    check_page(html)
    shown = run_demo(model, devices, lambda text: typer.echo(text, err=json))
    if json:
        typer.echo(shown.comparison.to_json())
    save_report(shown.report, html, quiet=json)


app.command()(doctor)


@app.command()
@takes_options("strict", "cache")
def profile(
    factory: Factory,
    devices: Devices = None,
    cluster: ClusterName = None,
    nodes: Nodes = 1,
    optimizer: Annotated[
        str | None, typer.Option(help="Show the memory of a training step with this optimizer, too.")
    ] = None,
    html: Html = None,
    json: AsJson = False,
    *,
    options: dict[str, Any],
) -> None:
    """Show seconds and bytes of every module and operator on every device type, and the links between the devices."""
    if html is not None:
        check_page(html)
    place = devices_or_cluster(devices, cluster, nodes)
    result = autopar.profile(devices=place, optimizer=optimizer, **options, **load_call(factory))
    typer.echo(result.to_json() if json else result)
    if html is not None:
        save_report(result.report(command=typed_command()), html, quiet=json)


@app.command()
@takes_options(*HELP)
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
    html: Html = None,
    samples_per_epoch: Annotated[
        float | None,
        typer.Option(help="Samples of the data set: the report of --html then shows the time of an epoch."),
    ] = None,
    price_per_device_hour: Annotated[
        float | None,
        typer.Option(help="In dollars: the report of --html then shows the price of an epoch, or of 1T tokens."),
    ] = None,
    json: AsJson = False,
    *,
    options: dict[str, Any],
) -> None:
    """Find the fastest plan for a model, on the devices here or on a cluster that is elsewhere."""
    if save is not None:
        check_writable(save)  # before the search, which may take minutes
    if html is not None:
        check_page(html)
    for_report = {"--samples-per-epoch": samples_per_epoch, "--price-per-device-hour": price_per_device_hour}
    for name, value in for_report.items():
        if value is not None and html is None:
            raise typer.BadParameter("it is for the report: give --html as well", param_hint=name)
    ReportOptions(samples_per_epoch=samples_per_epoch, price_per_device_hour=price_per_device_hour)  # checks both
    place, given_plan = devices_or_cluster(devices, cluster, nodes), None if given is None else Plan.load(given)
    best = autopar.plan(devices=place, plan=given_plan, **options, **load_call(factory))
    if save is not None:
        save_plan(best, save)
    typer.echo(best.to_json() if json else best)
    if explain:
        typer.echo(f"\n{best.explain()}", err=json)  # stdout holds the JSON alone
    if explain_inside is not None:
        typer.echo(f"\n{best.explain(explain_inside)}", err=json)
    if html is not None:
        made = best.report(
            samples_per_epoch=samples_per_epoch,
            price_per_device_hour=price_per_device_hour,
            search=explain,
            command=typed_command(),
        )
        save_report(made, html, quiet=json)


@app.command()
@takes_options(*(name for name in HELP if name in get_type_hints(CompareKeywords)))
def compare(
    factory: Factory,
    devices: Devices = None,
    cluster: ClusterName = None,
    nodes: Nodes = 1,
    plan: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FILE", help="A saved plan to compare; may be repeated.")
    ] = None,
    by_hand: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=DEGREES",
            help="A plan by hand, such as megatron=tensor=8,pipeline=4,micro_batch=1; may be repeated. The degrees are "
            f"those of Plan.by_hand, and so are {', '.join(AHEAD_ONLY)} with --cluster.",
        ),
    ] = None,
    configuration: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOOL=FILE",
            help=f"The plan of another tool's configuration ({', '.join(TOOLS)}), named as the tool; may be repeated.",
        ),
    ] = None,
    split: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=MODULE:STAGE,...",
            help="A split by hand, such as half=h.0:0,h.6:1; may be repeated. Modules that are not named run in the "
            "stage of their inputs.",
        ),
    ] = None,
    system: Annotated[
        list[str] | None,
        typer.Option(metavar="SYSTEM", help=f"Another system ({', '.join(SYSTEMS[:6])}:SCHEDULE); may be repeated."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Number of measured steps per plan; a winner needs five or more.")] = 7,
    figure: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the comparison into this file.")] = None,
    html: Html = None,
    json: AsJson = False,
    *,
    options: dict[str, Any],
) -> None:
    """Compare the automatic plan ("auto") with saved plans, plans by hand and other systems: steps measured beside one
    device, or predicted for a cluster that is not here."""
    if figure is not None:
        check_writable(figure, "--figure ")
        check_figure(figure)
    if html is not None:
        check_page(html)
    # All that the user wrote is read before plans are made, which takes its time.
    systems = check_systems(system or ())
    PlanOptions(**options)
    named = {"--plan": plan, "--by-hand": by_hand, "--split": split, "--configuration": configuration}
    check_names_differ({option: entries or () for option, entries in named.items()}, systems)
    splits, files = list(map(named_split, split or ())), list(map(named_configuration, configuration or ()))
    degrees = named_degrees(by_hand or ())
    plans: dict[str, Plan | None] = {"auto": None, **dict(map(named_plan, plan or ()))}
    place, call = devices_or_cluster(devices, cluster, nodes), load_call(factory)
    n_microbatches, schedule = options.get("n_microbatches") or 1, options.get("schedule") or "1f1b"
    how = {name: options[name] for name in AHEAD_ONLY if options[name] is not None}
    plans |= dict(plans_by_hand(degrees, place, call, how))
    plans |= {name: plan_of_split(name, stages, n_microbatches, schedule) for name, stages in splits}
    for tool, file in files:
        plans[tool] = Plan.from_configuration(devices=place, tool=tool, source=file, **call)
    result = autopar.compare(devices=place, plans=plans, repeats=repeats, systems=systems, **options, **call)
    typer.echo(result.to_json() if json else result)
    if figure is not None:
        result.figure(figure)
    if html is not None:
        save_report(result.report(command=typed_command()), html, quiet=json)


for _command in (accuracy, diff, convert, export):
    app.command()(_command)
