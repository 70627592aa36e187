"""How modules say by GSPMD's shardings, or in XLA's frontend attributes, what is divided how."""

from __future__ import annotations

import re

from stablehlo_tools.bindings import ir, write_bytecode
from stablehlo_tools.dialect.frontend_attributes import FRONTEND_ATTRIBUTES

GSPMD = "mhlo.sharding"
# On modules that were HLO, of the results together, and of each argument.
OF_OUTPUT, OF_PARAMETERS = "mhlo.spmd_output_sharding", "mhlo.spmd_parameters_shardings"
_SHARDING = "Sharding"
_FULL_TO_SHARD, _SHARD_TO_FULL = "SPMDFullToShardShape", "SPMDShardToFullShape"
_UNSPECIFIED = re.compile(r"unspecified_dims=\[([\d,\s]*)\]")
# What Shardy's attributes and ops are called on their way through HLO.
_ROUND_TRIP = "xla.sdy."
_MANUAL_BODIES = ("xla.sdy.manual_computation_body", "xla.sdy.inlinable_manual_computation_body")


# What is in the bytecode of every module with shardings, by either or on their way between.
_MARKS = (b"sdy", GSPMD.encode(), b"mhlo.spmd_", _SHARDING.encode(), b"SPMD")


def may_be_sharded(module: ir.Module) -> bool:
    """Whether a module may say anything of shardings, in whatever form: asked of its bytes."""
    data = write_bytecode(module)
    return any(mark in data for mark in _MARKS)


def is_gspmd(op: ir.Operation) -> bool:
    """Whether an op, a function or a module says by GSPMD's shardings how values are divided."""
    attributes = op.attributes
    if GSPMD in attributes or OF_OUTPUT in attributes or OF_PARAMETERS in attributes:
        return True
    if any(GSPMD in str(attributes.get(name, "")) for name in ("arg_attrs", "res_attrs")):
        return True
    return is_gspmd_call(op)


def is_gspmd_call(op: ir.Operation) -> bool:
    """Whether an op is a custom call that marks a sharding, or the border of a shard_map."""
    return is_sharding_call(op) or is_shard_map_border(op)


def is_sharding_call(op: ir.Operation) -> bool:
    """Whether an op is a custom call that says how its operand is to be divided."""
    return _target(op) == _SHARDING


def is_shard_map_border(op: ir.Operation) -> bool:
    """Whether an op stands where a shard_map begins or ends."""
    return begins_shard_map(op) or ends_shard_map(op)


def begins_shard_map(op: ir.Operation) -> bool:
    """Whether the results of an op are what each device sees, in a program for all."""
    return _target(op) == _FULL_TO_SHARD


def ends_shard_map(op: ir.Operation) -> bool:
    """Whether the operand of an op is what each device sees, and its result a value for all."""
    return _target(op) == _SHARD_TO_FULL


def unspecified_dims(op: ir.Operation) -> tuple[int, ...]:
    """The dimensions of its result that one of GSPMD's custom calls says nothing of."""
    if not is_gspmd_call(op):
        return ()
    match = _UNSPECIFIED.search(str(op.attributes.get("backend_config", "")))
    return tuple(map(int, match[1].split(","))) if match and match[1].strip() else ()


def is_round_trip(op: ir.Operation) -> bool:
    """Whether an op or a function has Shardy's shardings in the form that they have in HLO."""
    if _target(op).startswith(_ROUND_TRIP):
        return True
    names = (FRONTEND_ATTRIBUTES, "arg_attrs", "res_attrs")
    return any(_ROUND_TRIP in str(op.attributes.get(name, "")) for name in names)


def is_manual_body(function: str) -> bool:
    """Whether a function of this name is the body of a manual computation, on its way as above."""
    return function.startswith(_MANUAL_BODIES)


def _target(op: ir.Operation) -> str:
    if op.name != "stablehlo.custom_call":
        return ""
    return ir.StringAttr(op.attributes["call_target_name"]).value
