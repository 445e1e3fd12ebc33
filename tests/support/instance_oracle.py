"""The public partitioning graphs by the definition of a load: which nodes stay together, and the least largest load."""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import Any

import networkx as nx
from order_oracle import orders, prefix_sets
from partition_oracle import closed_sets

Instance = dict[str, Any]
Groups = list[frozenset[Any]]  # ids of nodes that stay together


def load(instance: Instance, inside: frozenset[Any], on_cpu: bool) -> float:
    """Seconds of the nodes `inside` on one device."""
    nodes = {node["id"]: node for node in instance["nodes"]}
    if on_cpu:
        return float(sum(nodes[i]["cpuLatency"] for i in inside))
    if sum(nodes[i]["size"] for i in inside) > instance["maxSizePerFPGA"]:
        return math.inf
    seconds = float(sum(nodes[i]["fpgaLatency"] for i in inside))
    crossing = {
        e["sourceId"]: e["cost"] for e in instance["edges"] if (e["sourceId"] in inside) != (e["destId"] in inside)
    }
    return seconds + float(sum(crossing.values()))


def contracted(instance: Instance, together: bool = False) -> tuple[Groups, set[tuple[int, int]]]:
    """Groups in the order of their first nodes, and which of them comes before which.

    Forward edges count as they are, backward edges the other way round where a node has no forward one of its colour.
    `together`: what takes no time goes with the only one that it is linked with, unless memory could be short.
    """
    backward = {node["id"]: bool(node["isBackwardNode"]) for node in instance["nodes"]}
    colour = {
        node["id"]: f"colour {node['colorClass']}" if node.get("colorClass") is not None else node["id"]
        for node in instance["nodes"]
    }
    forward_colours = {colour[i] for i in backward if not backward[i]}
    graph = nx.DiGraph()
    graph.add_nodes_from(colour.values())
    for edge in instance["edges"]:
        source, target = edge["sourceId"], edge["destId"]
        if not backward[source] and not backward[target]:
            graph.add_edge(colour[source], colour[target])
        if backward[source] and backward[target] and not {colour[source], colour[target]} <= forward_colours:
            graph.add_edge(colour[target], colour[source])
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    if together and sum(node["size"] for node in instance["nodes"]) <= instance["maxSizePerFPGA"]:
        links = nx.Graph(graph)
        links.add_edges_from((colour[e["sourceId"]], colour[e["destId"]]) for e in instance["edges"])
        links.remove_edges_from(list(nx.selfloop_edges(links)))
        busy = {colour[n["id"]] for n in instance["nodes"] if n["fpgaLatency"] or n["cpuLatency"]}
        for group in set(links) - busy:
            if links.degree(group) == 1:
                other = next(iter(links[group]))
                graph.add_edges_from([(group, other), (other, group)])
    merged = nx.condensation(graph)
    place = {i: at for at, i in enumerate(backward)}
    members = {g: frozenset(i for i in backward if colour[i] in merged.nodes[g]["members"]) for g in merged}
    by_first = sorted(members, key=lambda g: min(place[i] for i in members[g]))
    number = {g: at for at, g in enumerate(by_first)}
    return [members[g] for g in by_first], {(number[a], number[b]) for a, b in merged.edges}


def least_load(instance: Instance) -> float:
    """Over all chains of cuts and all choices of devices."""
    groups, edges = contracted(instance)
    return _least(instance, groups, closed_sets(len(groups), edges))


def least_along_orders(instance: Instance) -> float:
    """Over all chains of prefixes of one topological order."""
    groups, edges = contracted(instance, together=True)
    found = [_least(instance, groups, prefix_sets(order)) for order in orders(len(groups), edges).values()]
    return min(found)


def _least(instance: Instance, groups: Groups, cuts: list[frozenset[int]]) -> float:
    whole = frozenset(range(len(groups)))

    @cache
    def stage(inside: frozenset[int], on_cpu: bool) -> float:
        return load(instance, frozenset(itertools.chain.from_iterable(groups[g] for g in inside)), on_cpu)

    @cache
    def best(done: frozenset[int], accelerators: int, cpus: int) -> float:
        if done == whole:
            return 0.0
        found = math.inf
        for cut in cuts:
            if done < cut:
                if accelerators:
                    found = min(found, max(stage(cut - done, False), best(cut, accelerators - 1, cpus)))
                if cpus:
                    found = min(found, max(stage(cut - done, True), best(cut, accelerators, cpus - 1)))
        return found

    return best(frozenset(), instance["maxFPGAs"], instance["maxCPUs"])
