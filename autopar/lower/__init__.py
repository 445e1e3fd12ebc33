"""Program x Plan -> one fx.GraphModule a stage. Knows neither threads nor processes."""

from autopar.lower.batchnorm import Statistics, collecting
from autopar.lower.stages import Constant, Lowered, StageProgram, lower, replica

__all__ = ["Constant", "Lowered", "StageProgram", "Statistics", "collecting", "lower", "replica"]
