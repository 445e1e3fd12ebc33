"""Parameters that several commands have."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from autopar import Cluster
from autopar.options import COMMAND_LINE_TYPES, HELP, PlanOptions

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
Html = Annotated[Path | None, typer.Option("--html", help="Write the report to this file, for a browser.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, in seconds and bytes.")]


def takes_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add options of PlanOptions to a command, which gets those that the user gave or their defaults as `options`."""
    types = get_type_hints(PlanOptions)
    defaults = {field.name: field.default for field in dataclasses.fields(PlanOptions)}

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        def run(**arguments: Any) -> None:
            options = {name: arguments.pop(name) for name in names}
            if options.get("tune", "").isdigit():
                options["tune"] = int(options["tune"])
            command(**arguments, options=options)

        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "options"]
        added = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults[name],
                annotation=Annotated[COMMAND_LINE_TYPES.get(name, types[name]), typer.Option(help=HELP[name])],
            )
            for name in names
        ]
        # Typer reads a command's options from these attributes.
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in [*own, *added]}
        return run

    return with_options


def devices_or_cluster(devices: str | None, cluster: str | None, nodes: int) -> str | Cluster | None:
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
