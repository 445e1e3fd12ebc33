"""Factorizations of matrices, and operators made of them. Neither FLOPs at a peak nor bytes say how long they take.

Estimates count their bytes alone, and say so.
"""

from __future__ import annotations

from torch import fx

# Those of torch.linalg that are made of products, norms and copies.
_NORMS = ("matrix_norm", "norm", "vector_norm")
_OTHERS = (*_NORMS, "cross", "diagonal", "matmul", "matrix_power", "multi_dot", "vander", "vecdot")
_ELSEWHERE = ("cholesky", "geqrf", "logdet", "lu_solve", "matrix_exp", "ormqr", "slogdet", "svd", "triangular_solve")


def factorizations(graph: fx.Graph) -> tuple[str, ...]:
    """The names of such operators of ATen in a graph, each once."""
    names = (str(node.target).split(".")[1] for node in graph.nodes if str(node.target).startswith("aten."))
    return tuple(dict.fromkeys(name for name in names if _factorizes(name.lstrip("_"))))


def _factorizes(name: str) -> bool:
    inner = name.removeprefix("linalg_")
    return inner not in _OTHERS if inner != name else name.startswith(_ELSEWHERE)
