"""Operators split over a mesh of devices: layouts, what changes one into another, and the strategies of an operator."""

from autopar.sharding.layouts import PARTIAL, REPLICATE, Layout, layouts, placements, slices
from autopar.sharding.mesh import Mesh
from autopar.sharding.redistribution import Move, Redistribution

__all__ = [
    "PARTIAL",
    "REPLICATE",
    "Layout",
    "Mesh",
    "Move",
    "Redistribution",
    "layouts",
    "placements",
    "slices",
]
