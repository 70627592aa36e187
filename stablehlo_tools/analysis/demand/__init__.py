"""Finds the devices that need a value, and in which iterations, backwards from the outputs."""

from stablehlo_tools.analysis.demand.permutes import Counter, PermuteDemand, Ranges, permute_demand

__all__ = ["Counter", "PermuteDemand", "Ranges", "permute_demand"]
