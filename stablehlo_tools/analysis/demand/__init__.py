"""Which devices need which values in which iterations, found backwards from what can be seen."""

from stablehlo_tools.analysis.demand.permutes import (
    Counter,
    PermuteDemand,
    Ranges,
    permute_demand,
)

__all__ = ["Counter", "PermuteDemand", "Ranges", "permute_demand"]
