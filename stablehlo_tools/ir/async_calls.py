"""Converts jax's explicit asynchronous collectives to plain StableHLO collectives.

  stablehlo.custom_call @"all-gather-start"(%x) {… async_collective_config = "…"}
==>
  "stablehlo.all_gather"(%x) <{all_gather_dim = 0, replica_groups = …, channel_handle = …}>
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, from_mlir_error
from stablehlo_tools.dialect.communication_kinds import DIMENSIONS
from stablehlo_tools.dialect.custom_calls import ASYNC_STARTS, is_async_done, label, target_of
from stablehlo_tools.dialect.frontend_attributes import frontend_entries
from stablehlo_tools.dialect.names import ASYNC_DONE, ASYNC_START, CUSTOM_CALL
from stablehlo_tools.dialect.traits import Trait, ops_with, short_names
from stablehlo_tools.ir.builder import DEVICE_TO_DEVICE, Builder
from stablehlo_tools.ir.inline import copy_body
from stablehlo_tools.ir.rewriter import replace
from stablehlo_tools.ir.views import Function, WithBody
from stablehlo_tools.ir.walk import functions_by_name, ops_named, ops_where, terminator

CONFIG = "async_collective_config"
_GROUPS = "replica_groups"
_PAIRS = "permutation"
_SPELLED = {"all_gather_dim": "all_gather_dimension"}  # in configurations
_REDUCING = short_names(ops_with(Trait.ACROSS_DEVICES))
_OPTIONAL = frozenset({"channel_id", "use_global_device_ids", "tiled"})
_LARGEST = 2**63


def detached_collective(
    start: ir.Operation, functions: Mapping[str, ir.Operation]
) -> tuple[ir.Operation, ir.Module]:
    """Returns the collective of a start, and the module that holds it and has to outlive it.

    Raises a located ToolError if the configuration is malformed or has unknown entries.
    """
    with start.location:
        module = ir.Module.create()
        point = ir.InsertionPoint(module.body)
        stand_ins = ir.Operation.create(
            "builtin.unrealized_conversion_cast",
            results=[operand.type for operand in start.operands],
            ip=point,
        )
        return _write_collective(start, list(stand_ins.results), functions, point), module


def find_async_starts(module: ir.Module) -> list[ir.Operation]:
    """Returns jax's explicit asynchronous starts, in the order of the text."""
    return _calls(module, lambda op: target_of(op) in ASYNC_STARTS)


def is_waited_for_beside(start: ir.Operation) -> bool:
    """Returns True if only dones in the start's own block use it, as compilers require."""
    users = [use.owner.operation for result in start.results for use in result.uses]
    return all(is_async_done(user) and user.block == start.block for user in users)


def lower_async_calls(module: ir.Module) -> None:
    """Replaces explicit asynchronous collectives by plain ones, in place.

    Raises a located ToolError if a configuration is malformed or has unknown entries.
    """
    starts, dones = find_async_starts(module), _calls(module, is_async_done)
    functions = functions_by_name(module)
    for start in starts:
        with start.location:
            point = ir.InsertionPoint(start)
            plain = _write_collective(start, list(start.operands), functions, point)
        replace(start, plain.results)
    for done in dones:
        replace(done, done.operands)


def lower_async_regions(module: ir.Module) -> None:
    """Replaces each `stablehlo.async_start` that only dones read by the ops of its region, and the
    dones by the results of these ops, in place."""
    for start in ops_named(module.operation, (ASYNC_START,)):
        users = [use.owner.operation for use in start.results[0].uses]
        if any(user.name != ASYNC_DONE for user in users):
            continue
        _, values = copy_body(WithBody(start).body, list(start.operands), ir.InsertionPoint(start))
        for done in users:
            replace(done, values)
        start.erase()


def _calls(module: ir.Module, is_wanted: Callable[[ir.Operation], bool]) -> list[ir.Operation]:
    """Returns the custom calls of a module that satisfy a predicate, in the order of the text."""
    return ops_where(module.operation, lambda op: op.name == CUSTOM_CALL and is_wanted(op))


def _write_collective(
    start: ir.Operation,
    operands: list[ir.Value],
    functions: Mapping[str, ir.Operation],
    point: ir.InsertionPoint,
) -> ir.Operation:
    kind = ASYNC_STARTS[target_of(start)]
    if len(operands) != 1 or len(start.results) != 1:
        raise ToolError(
            f"{label(start)} takes {len(operands)} operands and has {len(start.results)} results, "
            "but must have one of each, as jax writes it",
            start.location,
        )
    op = Builder(point, start.location).create(
        f"stablehlo.{kind}",
        operands,
        [start.results[0].type],
        _attributes(start, kind, _configuration(start)),
        regions=int(kind in _REDUCING),
    )
    if kind in _REDUCING:
        _copy_reducer(start, functions, op, ir.RankedTensorType(operands[0].type))
    try:
        op.verify()
    except ir.MLIRError as error:
        told = from_mlir_error(error).diagnostic.message
        raise ToolError(f"{label(start)}: {told}", start.location) from None
    return op


def _configuration(start: ir.Operation) -> dict[str, Any]:
    text = frontend_entries(start).get(CONFIG)
    if not isinstance(text, ir.StringAttr):
        raise ToolError(
            f"{label(start)} has no {CONFIG} among its frontend attributes, which states its "
            "groups",
            start.location,
        )
    try:
        config: Any = json.loads(text.value)
    except (ValueError, RecursionError) as error:
        told = str(error) if isinstance(error, ValueError) else "nested too deep"
        raise _config_error(start, f"is invalid JSON: {told}") from None
    if not isinstance(config, dict):
        raise _config_error(start, "is not a JSON object")
    return config  # pyright: ignore[reportUnknownVariableType]


def _attributes(
    start: ir.Operation, kind: str, config: Mapping[str, Any]
) -> dict[str, ir.Attribute]:
    is_permute = kind == "collective_permute"
    dimensions = {_SPELLED.get(name, name): name for name in DIMENSIONS.get(kind, ())}
    unknown = config.keys() - dimensions.keys() - {_PAIRS if is_permute else _GROUPS} - _OPTIONAL
    if unknown:
        raise _config_error(start, f"has unknown entries: {', '.join(sorted(unknown))}")
    i64 = ir.IntegerType.get_signless(64)
    attributes: dict[str, ir.Attribute] = {
        name: ir.IntegerAttr.get(i64, _integer(start, config, key))
        for key, name in dimensions.items()
    }
    if is_permute:
        attributes["source_target_pairs"] = _table(start, config, _PAIRS, width=2)
    else:
        attributes["replica_groups"] = _table(start, config, _GROUPS)
    channel = _integer(start, config, "channel_id") if "channel_id" in config else 0
    if channel:
        attributes["channel_handle"] = bindings.ChannelHandle.get(channel, DEVICE_TO_DEVICE)
    if config.get("use_global_device_ids") not in (None, False):
        attributes["use_global_device_ids"] = ir.UnitAttr.get()
    return attributes


def _integer(start: ir.Operation, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise _config_error(start, f"must have {key}, a number from 0 on")
    return value


def _table(
    start: ir.Operation, config: Mapping[str, Any], key: str, *, width: int | None = None
) -> ir.Attribute:
    """Returns the integer matrix under `key`: rows of device ids, short rows padded with -1."""
    rows = config.get(key)
    if not isinstance(rows, list) or not all(
        isinstance(row, list)
        and (width is None or len(row) == width)
        and all(type(i) is int and 0 <= i < _LARGEST for i in row)
        for row in rows
    ):
        of = "pairs of ids" if width else "lists of ids"
        raise _config_error(start, f"must have {key}, a list of {of}")
    widest = width or max((len(row) for row in rows), default=0)  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
    padded = [[*row, *[-1] * (widest - len(row))] for row in rows]  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
    return ir.DenseIntElementsAttr.get(np.array(padded, np.int64).reshape(len(padded), widest))


def _copy_reducer(
    start: ir.Operation,
    functions: Mapping[str, ir.Operation],
    op: ir.Operation,
    operand: ir.RankedTensorType,
) -> None:
    """Copies the body of the function that a start names into the collective's region."""
    called = start.attributes.get("called_computations")
    symbols = () if called is None else ir.ArrayAttr(called)
    names = [ir.FlatSymbolRefAttr(symbol).value for symbol in symbols]
    function = functions.get(names[0]) if len(names) == 1 else None
    scalar = ir.RankedTensorType.get([], operand.element_type)
    combines = ir.TypeAttr.get(ir.FunctionType.get([scalar, scalar], [scalar]))
    if (
        function is None
        or len(function.regions[0].blocks) != 1
        or function.attributes["function_type"] != combines
    ):
        raise ToolError(
            f"{label(start)}: its called_computations must name one function of two {scalar} that "
            "returns one, the reduction",
            start.location,
        )
    body = Function(function).body
    block = op.regions[0].blocks.append(scalar, scalar)
    point = ir.InsertionPoint(block)
    _, returned = copy_body(body, list(block.arguments), point)
    Builder(point, terminator(body).location).end_region(returned)


def _config_error(start: ir.Operation, told: str) -> ToolError:
    return ToolError(f"{label(start)}: its {CONFIG} {told}", start.location)
