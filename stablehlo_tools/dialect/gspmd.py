"""Recognizes GSPMD's shardings, and Shardy's in the frontend attributes of HLO."""

from __future__ import annotations

import re

from stablehlo_tools.bindings import ir, write_bytecode
from stablehlo_tools.dialect.custom_calls import called_target
from stablehlo_tools.dialect.frontend_attributes import FRONTEND_ATTRIBUTES

GSPMD = "mhlo.sharding"
# On modules converted from HLO: the sharding of all results, and of each parameter.
OF_OUTPUT, OF_PARAMETERS = "mhlo.spmd_output_sharding", "mhlo.spmd_parameters_shardings"
_SHARDING = "Sharding"
_FULL_TO_SHARD, _SHARD_TO_FULL = "SPMDFullToShardShape", "SPMDShardToFullShape"
_UNSPECIFIED = re.compile(r"unspecified_dims=\[([\d,\s]*)\]")
# Prefixes of Shardy's attributes and ops in HLO (the round trip of Shardy through HLO).
_ROUND_TRIP = "xla.sdy."
_MANUAL_BODIES = ("xla.sdy.manual_computation_body", "xla.sdy.inlinable_manual_computation_body")


# The bytecode of every module with shardings of any form contains one of these.
_MARKS = (b"sdy", GSPMD.encode(), b"mhlo.spmd_", _SHARDING.encode(), b"SPMD")


def may_be_sharded(module: ir.Module) -> bool:
    """Returns True if a module may contain shardings of any form. Searches its bytecode."""
    data = write_bytecode(module)
    return any(mark in data for mark in _MARKS)


def is_gspmd(op: ir.Operation) -> bool:
    """Returns True if an op, a function or a module has GSPMD's shardings."""
    attributes = op.attributes
    if GSPMD in attributes or OF_OUTPUT in attributes or OF_PARAMETERS in attributes:
        return True
    if any(GSPMD in str(attributes.get(name, "")) for name in ("arg_attrs", "res_attrs")):
        return True
    return is_gspmd_call(op)


def is_gspmd_call(op: ir.Operation) -> bool:
    """Returns True if an op is a custom call for a sharding or for a border of a shard_map."""
    return is_sharding_call(op) or is_shard_map_border(op)


def is_sharding_call(op: ir.Operation) -> bool:
    """Returns True if an op is a custom call that states the sharding of its operand."""
    return called_target(op) == _SHARDING


def is_shard_map_border(op: ir.Operation) -> bool:
    """Returns True if an op begins or ends a shard_map."""
    return called_target(op) in (_FULL_TO_SHARD, _SHARD_TO_FULL)


def begins_shard_map(op: ir.Operation) -> bool:
    """Returns True if an op begins a shard_map: it converts a global value to a device's part."""
    return called_target(op) == _FULL_TO_SHARD


def unspecified_dims(op: ir.Operation) -> tuple[int, ...]:
    """Returns the dimensions that one of GSPMD's custom calls leaves open."""
    if not is_gspmd_call(op):
        return ()
    match = _UNSPECIFIED.search(str(op.attributes.get("backend_config", "")))
    return tuple(map(int, match[1].split(","))) if match and match[1].strip() else ()


def is_round_trip(op: ir.Operation) -> bool:
    """Returns True if an op or a function has Shardy's shardings in their HLO form."""
    if called_target(op).startswith(_ROUND_TRIP):
        return True
    names = (FRONTEND_ATTRIBUTES, "arg_attrs", "res_attrs")
    return any(_ROUND_TRIP in str(op.attributes.get(name, "")) for name in names)


def is_manual_body(function: str) -> bool:
    """Returns True if a function of this name is the body of a manual computation in HLO form."""
    return function.startswith(_MANUAL_BODIES)
