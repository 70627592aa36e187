"""Finds the devices that need a value, and in which iterations, backwards from the outputs."""

from stablehlo_tools.analysis.demand.permutes import (
    DemandCounter,
    PermuteDemand,
    Ranges,
    permute_demand,
)

__all__ = ["DemandCounter", "PermuteDemand", "Ranges", "permute_demand"]
