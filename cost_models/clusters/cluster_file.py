"""Cluster files in toml: reading and writing them, and the notation of a node ("8xH100", "4xA100-80+4xT4").

node = "8xmine"             # devices defined here or known
nodes = 2                   # default 1
intra_node = "NVLink4"      # a network defined here or known; default as for a preset
inter_node = "ours"
[devices.mine]              # the fields of DeviceSpec
peak_flops = { float32 = 50e12, bfloat16 = 400e12 }
...
[networks.ours]             # the fields of Network
latency = 20e-6
...
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from cost_models.errors import DeviceError
from cost_models.hardware.device_specs import DeviceSpec, device_spec, known_devices, read_devices
from cost_models.hardware.networks import Network, network, read_networks
from cost_models.hardware.toml_tables import fields_of

MOST_DEVICES = 100_000  # of a cluster; planning lists them one by one
_MOST_DIGITS = 9
_NETWORKS: tuple[Literal["intra_node"], Literal["inter_node"]] = ("intra_node", "inter_node")
_KEYS = ("node", "nodes", "intra_node", "inter_node", "devices", "networks")


@dataclass(frozen=True)
class ClusterFile:
    """What a cluster file defines: `nodes` equal nodes, and the networks within and between them."""

    node: tuple[DeviceSpec, ...]  # the devices of a node, in order
    nodes: int
    intra_node: Network
    inter_node: Network


def read_cluster_file(path: str | Path) -> ClusterFile:
    """The contents of a cluster file.

    Raises:
        DeviceError: the file cannot be read, or the message lists all its problems.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise DeviceError(f"path must be the name of a toml file, got {path!r}")
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise DeviceError(f"{path}: it cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DeviceError(f"{path} is no toml file: {error}") from error
    own_devices, wrong_devices = read_devices(values.get("devices", {}), "devices")
    own_networks, wrong_networks = read_networks(values.get("networks", {}), "networks")
    problems = [*_top_level_problems(values), *wrong_devices, *wrong_networks]
    found: list[Network] = []
    try:
        node = parse_node(values["node"], own_devices) if isinstance(values.get("node"), str) else ()
    except DeviceError as error:
        node = ()
        problems.append(str(error))
    for key in _NETWORKS if node else ():
        if isinstance(values.get(key, ""), str):
            try:
                found.append(choose_network(node, key, values.get(key), own_networks))
            except DeviceError as error:
                problems.append(str(error))
    if problems:
        raise DeviceError(f"{path}: " + "; ".join(problems))
    return ClusterFile(node, values.get("nodes", 1), *found)


def _top_level_problems(values: Mapping[str, Any]) -> list[str]:
    """One message per unknown key and per invalid value outside the tables."""
    problems = [f"{key} is no field; there are {', '.join(_KEYS)}" for key in values if key not in _KEYS]
    if not isinstance(values.get("node"), str):
        problems.append(f'node must be a string such as "8xH100", got {values.get("node")!r}')
    nodes = values.get("nodes", 1)
    if type(nodes) is not int or nodes < 1:
        problems.append(f"nodes must be an integer >= 1, got {nodes!r}")
    for key in _NETWORKS:
        if not isinstance(values.get(key, ""), str):
            problems.append(f"{key} must be the name of a network, got {values[key]!r}")
    return problems


def format_cluster_file(contents: ClusterFile) -> str:
    """The text of a file that `read_cluster_file` reads back as equal contents.

    Raises:
        DeviceError: two different networks have one name, or the name of a device contains "+".
    """
    inside, across = contents.intra_node, contents.inter_node
    networks = {n.name: n for n in (across, inside)}
    if networks[across.name] != across:
        raise DeviceError(f"two networks are both called {across.name!r}; name them differently")
    specs = {spec.name: spec for spec in contents.node}
    if plus := [name for name in specs if "+" in name]:
        raise DeviceError(f"a cluster file cannot name the device {plus[0]!r}; remove the '+' from its name")
    lines = [f"node = {_toml(node_text(contents.node))}", f"nodes = {contents.nodes}"]
    lines += [f"intra_node = {_toml(inside.name)}", f"inter_node = {_toml(across.name)}"]
    tables: list[tuple[str, DeviceSpec | Network]] = [("devices", spec) for spec in specs.values()]
    tables += [("networks", n) for n in networks.values()]
    for section, value in tables:
        lines += ["", f"[{section}.{_toml(value.name)}]"]
        lines += [f"{key} = {_toml(item)}" for key, item in fields_of(value).items()]
    return "\n".join(lines) + "\n"


def parse_node(text: str, own: Mapping[str, DeviceSpec]) -> tuple[DeviceSpec, ...]:
    """The devices of a node written as "8xH100" or "4xA100-80+4xT4".

    Raises:
        DeviceError: no devices, or an unknown device kind; the message lists the known ones.
    """
    if not isinstance(text, str) or not all(part.strip() for part in text.split("+")):
        raise DeviceError(f'a node is written as "8xH100" or "4xA100-80+4xT4", got {text!r}')
    specs: list[DeviceSpec] = []
    for part in text.split("+"):
        match = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?(.*?)\s*", part, re.DOTALL)
        assert match is not None  # the pattern matches any text
        digits, name = match.groups()
        if not name:
            raise DeviceError(f'{text!r} names no device behind its count; write it as "8xH100"')
        if digits and not digits.strip("0"):
            where, instead = (f" in {part.strip()!r}", ", or leave it out") if "+" in text else ("", "")
            raise DeviceError(f"{text!r} has no devices{where}; give a count of 1 or more{instead}")
        count = int((digits or "1")[-_MOST_DIGITS:]) if len((digits or "").lstrip("0")) <= _MOST_DIGITS else math.inf
        if len(specs) + count > MOST_DEVICES:
            raise DeviceError(f"{text!r} has more than {MOST_DEVICES} devices; give fewer")
        try:
            spec = device_spec(name, own)
        except DeviceError as error:
            meant = _meant(part, own)
            raise DeviceError(f"{error}; did you mean {meant!r}?" if meant else str(error)) from None
        specs += [spec] * int(count)
    return tuple(specs)


def _meant(part: str, own: Mapping[str, DeviceSpec]) -> str | None:
    """The right notation of "H100x8", "8*H100", "8 H100" or a misspelt name; None if it is not clear."""
    count, name = "", part.strip()
    for pattern in (r"(?P<name>.+?)\s*[x*:]\s*(?P<count>\d{1,5})", r"(?P<count>\d{1,5})\s*[x*:]?\s*(?P<name>.+)"):
        match = re.fullmatch(pattern, name, re.IGNORECASE)
        if match:
            count, name = f"{match['count']}x", match["name"]
            break
    known = {device.lower(): device for device in {**known_devices(), **own}}
    close = difflib.get_close_matches(name.lower(), known, 1)
    return f"{count}{known[close[0]]}" if close else None


def node_text(node: Sequence[DeviceSpec]) -> str:
    """The notation that `parse_node` reads: "4xA100-80+4xT4"."""
    runs = [(name, len(list(run))) for name, run in groupby(spec.name for spec in node)]
    return "+".join(f"{count}x{name}" for name, count in runs)


def choose_network(
    specs: Sequence[DeviceSpec],
    level: Literal["intra_node", "inter_node"],
    chosen: str | Network | None,
    own: Mapping[str, Network] | None = None,
) -> Network:
    """The chosen network (a value or a name); if None, the slowest of the devices' usual networks."""
    if isinstance(chosen, Network):
        return chosen
    if chosen is not None and not isinstance(chosen, str):
        raise DeviceError(f"{level} must be a Network or the name of one, got {chosen!r}")
    if chosen is not None:
        return network(chosen, own)
    return min((network(getattr(spec, level), own) for spec in specs), key=lambda n: n.bandwidth)


def _toml(value: Any) -> str:
    """A string, number, truth value or flat table as toml."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml(str(key))} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value) if isinstance(value, bool) else repr(value)
