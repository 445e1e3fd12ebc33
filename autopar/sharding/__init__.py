"""Operators split over a mesh of devices: layouts, what changes one into another, and the strategies of an operator."""
