"""How modules say by GSPMD's shardings, or in XLA's frontend attributes, what is divided how."""

from __future__ import annotations

import re

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.frontend_attributes import FRONTEND_ATTRIBUTES

GSPMD = "mhlo.sharding"
_CALLS = re.compile(r"Sharding|SPMDFullToShardShape|SPMDShardToFullShape")
# On modules that were HLO.
_OF_MODULES = ("mhlo.spmd_output_sharding", "mhlo.spmd_parameters_shardings")
_FULL_TO_SHARD = "SPMDFullToShardShape"  # where a shard_map begins
# What Shardy's attributes and ops are called on their way through HLO.
_ROUND_TRIP = "xla.sdy."


def is_gspmd(op: ir.Operation) -> bool:
    """Whether an op, a function or a module says by GSPMD's shardings how values are divided."""
    attributes = op.attributes
    if GSPMD in attributes or any(name in attributes for name in _OF_MODULES):
        return True
    if any(GSPMD in str(attributes.get(name, "")) for name in ("arg_attrs", "res_attrs")):
        return True
    return is_gspmd_call(op)


def is_gspmd_call(op: ir.Operation) -> bool:
    """Whether an op is a custom call that marks a sharding, or the border of a shard_map."""
    return _CALLS.fullmatch(_target(op)) is not None


def begins_shard_map(op: ir.Operation) -> bool:
    """Whether the results of an op are what each device sees, in a program for all."""
    return _target(op) == _FULL_TO_SHARD


def is_round_trip(op: ir.Operation) -> bool:
    """Whether an op or a function has Shardy's shardings in the form that they have in HLO."""
    if _target(op).startswith(_ROUND_TRIP):
        return True
    names = (FRONTEND_ATTRIBUTES, "arg_attrs", "res_attrs")
    return any(_ROUND_TRIP in str(op.attributes.get(name, "")) for name in names)


def _target(op: ir.Operation) -> str:
    if op.name != "stablehlo.custom_call":
        return ""
    return ir.StringAttr(op.attributes["call_target_name"]).value
