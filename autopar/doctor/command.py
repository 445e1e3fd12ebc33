"""The command `autopar doctor`: its text, its JSON and its exit status."""

from __future__ import annotations

import json as to_json
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from autopar.doctor.checks import Finding, findings, missing_extras
from autopar.doctor.links import DeviceFact, LinkFact, devices_and_links
from autopar.doctor.machine import Machine, this_machine
from autopar.version import __version__

WIDTH = 80
_MOST_LINKS = 6  # lines of links
_DEVICE = re.compile(r"(cpu|cuda)(:\d+)?")


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor found; `print` shows it."""

    machine: Machine
    devices: Sequence[DeviceFact]
    links: Sequence[LinkFact]
    findings: Sequence[Finding]  # problems first

    @property
    def works(self) -> bool:
        """Whether nothing keeps autopar from working here."""
        return all(finding.severity != "problem" for finding in self.findings)

    def to_json(self) -> str:
        """All facts but environment variables, which may hold secrets; seconds and bytes."""
        machine, torch, cache = self.machine, self.machine.torch, self.machine.cache
        facts = {
            "autopar": __version__,
            "python": machine.python,
            "torch": None if torch is None else asdict(torch),
            "torch_supported": _supported(machine),
            "cores": machine.cores,
            "devices": [asdict(device) for device in self.devices],
            "links": [asdict(link) for link in self.links],
            "cache": None if cache is None else asdict(cache),
            "missing_extras": missing_extras(machine),
            "findings": [asdict(finding) for finding in self.findings],
            "works": self.works,
        }
        return to_json.dumps(facts, indent=2)

    def __str__(self) -> str:
        lines = [f"autopar {__version__}, Python {self.machine.python}, {_torch_text(self.machine)}"]
        lines += [f"{d.name}: {d.kind}, {d.memory / 1e9:.1f} GB free" for d in self.devices]
        lines += _link_texts(self.links)
        lines += _cache_text(self.machine)
        for extra, names in missing_extras(self.machine).items():
            lines.append(f'not installed: {", ".join(names)} (pip install "autopar[{extra}]")')
        text = "\n".join(_wrapped(line, "") for line in lines)
        for finding in self.findings:
            text += f"\n\n{_wrapped(f'{finding.severity}: {finding.what}.', '  ')}\n"
            text += _wrapped(f"  What helps: {finding.help}.", "  ")
        if not self.findings:
            text += "\n\nNothing is wrong."
        return text


def diagnose(devices: str | None = None) -> Diagnosis:
    """Look at this machine and measure its links. `devices`: such as "cpu,cpu"; None: the default ones.

    A GPU that is not there is a problem among the others, which may say why.

    Raises:
        DeviceError: a name that no device has.
    """
    machine = this_machine()
    n_workers = None if devices is None else sum(name.strip().startswith("cpu") for name in devices.split(","))
    found = findings(machine, n_workers)
    there: tuple[list[DeviceFact], list[LinkFact]] = ([], [])
    if machine.torch is not None and not any(finding.subject == "torch" for finding in found):
        from cost_models.errors import DeviceError  # imports torch, which may not be there

        try:
            there = devices_and_links(devices)
        except DeviceError as error:
            if devices is None or not all(_DEVICE.fullmatch(name.strip()) for name in devices.split(",")):
                raise
            absent = Finding("problem", "devices", f"{error}", "autopar doctor without --devices shows what is there")
            found = [absent, *found]
    return Diagnosis(machine, *there, found)


def doctor(
    devices: Annotated[
        str | None, typer.Option(help="The devices that you want to use, for example cpu,cpu or cuda:0,cuda:1.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, in seconds and bytes.")] = False,
) -> None:
    """Show devices, links, versions and the cache, and what of this machine may make autopar slow or fail.

    Exit status: 1 if something keeps autopar from working here, else 0.
    """
    diagnosis = diagnose(devices)
    typer.echo(diagnosis.to_json() if json else diagnosis)
    raise typer.Exit(0 if diagnosis.works else 1)


def _supported(machine: Machine) -> str | None:
    requirement = machine.torch_requirement
    return None if requirement is None else str(requirement.specifier)


def _torch_text(machine: Machine) -> str:
    version = "no torch" if machine.torch is None else f"torch {machine.torch.version}"
    supported = _supported(machine)
    return version if supported is None else f"{version} (supported: {supported})"


def _link_texts(links: Sequence[LinkFact]) -> list[str]:
    """A line for links that are alike; of many different ones, the slowest."""
    alike: dict[tuple[float, float | None], list[LinkFact]] = {}
    for link in links:
        alike.setdefault((link.latency, link.bandwidth), []).append(link)
    kinds = sorted(alike.items(), key=lambda kind: (kind[0][1] or math.inf, -kind[0][0]))
    lines = []
    for (latency, bandwidth), same in kinds[:_MOST_LINKS]:
        more = f" and {len(same) - 1} more" if len(same) > 1 else ""
        speed = "by reference" if bandwidth is None else f"{bandwidth / 1e9:.3g} GB/s"
        lines.append(f"{same[0].source} -> {same[0].target}{more}: {latency * 1e6:.3g} us, {speed}")
    left = sum(len(same) for _, same in kinds[_MOST_LINKS:])
    return [*lines, f"{left} faster links"] if left else lines


def _cache_text(machine: Machine) -> list[str]:
    cache = machine.cache
    if cache is None:
        return []
    if cache.n_measurements is None:
        held = "no measurements yet"
    else:
        held = f"{cache.n_measurements} measurements, {cache.n_bytes / 1e6:.1f} MB"
    return [f"cache {cache.path}: {held}, {'writable' if cache.writable else 'not writable'}"]


def _wrapped(text: str, indent: str) -> str:
    """Lines of at most 80 characters; paths and commands are not broken."""
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
