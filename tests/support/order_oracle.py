"""Topological orders by their definitions."""

from __future__ import annotations

import networkx as nx


def orders(n: int, edges: set[tuple[int, int]]) -> dict[str, list[int]]:
    """Three topological orders of nodes 0 to n - 1, by name."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(n))
    graph.add_edges_from(edges)
    return {
        "by number": list(nx.lexicographical_topological_sort(graph)),
        "depth first": _walk(graph, newest_first=True),
        "breadth first": _walk(graph, newest_first=False),
    }


def prefix_sets(order: list[int]) -> list[frozenset[int]]:
    return [frozenset(order[:count]) for count in range(len(order) + 1)]


def _walk(graph: nx.DiGraph, newest_first: bool) -> list[int]:
    """Of the nodes that may run next, the one that became ready last, or first; ties by number."""
    done: list[int] = []
    ready_since = {node: 0 for node in graph if not graph.in_degree(node)}
    while ready_since:
        node = min(ready_since, key=lambda x: (-ready_since[x] if newest_first else ready_since[x], x))
        del ready_since[node]
        done.append(node)
        for later in graph.successors(node):
            if set(graph.predecessors(later)) <= set(done):
                ready_since[later] = len(done)
    return done
