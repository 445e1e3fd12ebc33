"""Program x Plan -> one fx.GraphModule a stage. Knows neither threads nor processes."""

from autopar.lower.stages import Constant, Lowered, StageProgram, lower, replica

__all__ = ["Constant", "Lowered", "StageProgram", "lower", "replica"]
