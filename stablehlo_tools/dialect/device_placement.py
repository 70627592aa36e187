"""In which memory a value lies: jax's annotation of a value, and the memory kind of an argument.

    %h = stablehlo.custom_call @annotate_device_placement(%x) {has_side_effect = true,
             mhlo.frontend_attributes = {_xla_buffer_placement = "pinned_host"}}

One of jax's stable custom calls (jax.export keeps it compatible). XLA:GPU and XLA:TPU copy what is
placed in the host's memory, and back where a second one says "device"; neither changes a value.
"""

from __future__ import annotations

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.custom_calls import target_of
from stablehlo_tools.dialect.frontend_attributes import FRONTEND_ATTRIBUTES
from stablehlo_tools.dialect.names import CUSTOM_CALL

HOST = "pinned_host"
DEVICE = "device"

_TARGET = "annotate_device_placement"
_PLACEMENT = "_xla_buffer_placement"
MEMORY_KIND = "mhlo.memory_kind"  # of an argument or a result of `main`
_OF_HOST = frozenset({HOST, "unpinned_host"})


def placement(op: ir.Operation) -> str | None:
    """The memory that an annotation puts its operand in; None of another op."""
    if op.name != CUSTOM_CALL or target_of(op) != _TARGET:
        return None
    attributes = op.attributes.get(FRONTEND_ATTRIBUTES)
    if not isinstance(attributes, ir.DictAttr) or _PLACEMENT not in attributes:
        return DEVICE
    value = attributes[_PLACEMENT]
    return value.value if isinstance(value, ir.StringAttr) else DEVICE


def puts_in_host(op: ir.Operation) -> bool:
    """Whether an op is an annotation that puts a value in the host's memory."""
    return placement(op) in _OF_HOST


def lies_in_host(function: ir.Operation, list_name: str, number: int) -> bool:
    """Whether a function's `arg_attrs` or `res_attrs` say that one lies in the host's memory."""
    if list_name not in function.attributes:
        return False
    entry = ir.DictAttr(ir.ArrayAttr(function.attributes[list_name])[number])
    if MEMORY_KIND not in entry:
        return False
    kind = entry[MEMORY_KIND]
    return isinstance(kind, ir.StringAttr) and kind.value in _OF_HOST


def placed(value: ir.Value, memory: str, place: ir.Location, point: ir.InsertionPoint) -> ir.Value:
    """A value, in a memory from here on."""
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
