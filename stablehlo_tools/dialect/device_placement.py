"""Reads and writes memory placement: jax's annotation of a value, an argument's memory kind.

    %h = stablehlo.custom_call @annotate_device_placement(%x) {has_side_effect = true,
             mhlo.frontend_attributes = {_xla_buffer_placement = "pinned_host"}}

This is one of jax's stable custom calls (jax.export keeps it compatible). XLA:GPU and XLA:TPU copy
the value to the host's memory, and back at a second annotation with "device". Values do not change.
"""

from __future__ import annotations

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.custom_calls import called_target
from stablehlo_tools.dialect.frontend_attributes import (
    FRONTEND_ATTRIBUTES,
    entries_of,
    frontend_entries,
)
from stablehlo_tools.dialect.names import CUSTOM_CALL

HOST = "pinned_host"
DEVICE = "device"

_TARGET = "annotate_device_placement"
_PLACEMENT = "_xla_buffer_placement"
MEMORY_KIND = "mhlo.memory_kind"  # of an argument or a result of `main`
_OF_HOST = frozenset({HOST, "unpinned_host"})


def placement(op: ir.Operation) -> str | None:
    """Returns the memory that an annotation moves its operand to; None for other ops."""
    if called_target(op) != _TARGET:
        return None
    value = frontend_entries(op).get(_PLACEMENT)
    return value.value if isinstance(value, ir.StringAttr) else DEVICE


def puts_in_host(op: ir.Operation) -> bool:
    """Returns True if an op is an annotation that moves a value to the host's memory."""
    return placement(op) in _OF_HOST


def lies_in_host(function: ir.Operation, list_name: str, number: int) -> bool:
    """Returns True if entry `number` of `arg_attrs` or `res_attrs` is in the host's memory."""
    if list_name not in function.attributes:
        return False
    kind = entries_of(ir.ArrayAttr(function.attributes[list_name])[number]).get(MEMORY_KIND)
    return isinstance(kind, ir.StringAttr) and kind.value in _OF_HOST


def annotate_memory(
    value: ir.Value, memory: str, place: ir.Location, point: ir.InsertionPoint
) -> ir.Value:
    """Annotates a value with a memory; returns the annotated value."""
    text = ir.StringAttr.get
    with place:
        call = ir.Operation.create(
            CUSTOM_CALL,
            results=[value.type],
            operands=[value],
            attributes={
                "call_target_name": text(_TARGET),
                "has_side_effect": ir.BoolAttr.get(True),
                FRONTEND_ATTRIBUTES: ir.DictAttr.get({_PLACEMENT: text(memory)}),
            },
            ip=point,
        )
    return call.results[0]
