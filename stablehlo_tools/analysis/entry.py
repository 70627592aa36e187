"""Reads the entry function: its arguments and results, and the names that jax gave them."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts, find_collectives
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.gspmd import is_manual_body, is_shard_map_border
from stablehlo_tools.dialect.names import (
    CALL,
    COMPOSITE,
    CUSTOM_CALL,
    MANUAL_COMPUTATION,
    PARTITION_ID,
)
from stablehlo_tools.dialect.traits import Trait, ops_with
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.platform_index import argument_number
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import ENTRY, callee_name, enclosing, functions_by_name, walk
from stablehlo_tools.order.program import UNKNOWN_CALL

_COLLECTIVES = ops_with(Trait.COLLECTIVE)
# Kinds that a program for all devices may have outside of manual computations.
_LEGAL_OUTSIDE = frozenset({"custom_call", UNKNOWN_CALL, "infeed", "outfeed"})


def is_per_device(module: ir.Module, listed: Sequence[Collective] | None = None) -> bool:
    """Returns True if `main` is the program of one device.

    It is if it communicates outside manual computations. GSPMD's custom calls at borders of manual
    regions do not nest, so the ops inside are not distinguished from those outside: False for
    modules with such calls. Collectives of groups of one send nothing, and a program for all
    devices may have them, so they do not count. `listed` are all collectives of the module, if
    known.
    """
    listed = find_collectives(module) if listed is None else listed
    collectives = [c for c in listed if c.kind not in _LEGAL_OUTSIDE]
    facts = ModuleFacts.from_module(module, collectives)
    communicating = {c.op for c in collectives if not facts.has_groups_of_one(c)}
    ops = _ops_outside_manual(module)
    if any(op.name == CUSTOM_CALL and is_shard_map_border(op) for op in ops):
        return False
    return any(op.name == PARTITION_ID or op in communicating for op in ops)


def _ops_outside_manual(module: ir.Module) -> list[ir.Operation]:
    """Returns the ops of `main` and its callees that are outside of manual computations."""
    functions = functions_by_name(module)
    pending = [ENTRY] if ENTRY in functions else list(functions)
    seen = set(pending)
    ops: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == MANUAL_COMPUTATION:
            return ir.WalkResult.SKIP
        ops.append(op)
        is_call = op.name in (CALL, COMPOSITE) and not is_manual_body(callee_name(op))
        if is_call and callee_name(op) not in seen:
            seen.add(callee_name(op))
            pending.append(callee_name(op))
        return ir.WalkResult.ADVANCE

    while pending:
        function = functions.get(pending.pop())
        if function is not None:
            walk(function, visit)
    return ops


def erase_groups_of_one(module: ir.Module) -> int:
    """Erases collectives of groups of one in place, and returns their number.

    Only in a program for all devices: XLA's partitioner refuses most of them. The result is
    replaced by the operand, or by zero for a permute without pairs.
    """
    listed = find_collectives(module)
    facts = ModuleFacts.from_module(module, listed)
    chosen = [
        each
        for each in listed
        if each.inner.name in _COLLECTIVES
        and enclosing(each.op, MANUAL_COMPUTATION) is None
        and facts.has_groups_of_one(each)
        and [v.type for v in each.inner.operands] == [v.type for v in each.op.results]
    ]
    if not chosen or is_per_device(module, listed):
        return 0
    outside = set(_ops_outside_manual(module))
    chosen = [each for each in chosen if each.inner in outside]
    for each in chosen:
        build = Builder(ir.InsertionPoint(each.op), each.op.location)
        for value, result in zip(each.op.operands, each.op.results, strict=True):
            zeros = (
                None if facts.groups(each) else build.splat(0, shape_of(value), element_of(value))
            )
            result.replace_all_uses_with(value if zeros is None else zeros)
        each.op.erase()
    return len(chosen)


_NAME = re.compile(r'"([^"]*)"(?!:\d)')  # a position in a file has a number after its name


def path_of(argument: ir.Value) -> str:
    """Returns the pytree path of an argument of `main`, as jax exported it: `batch['x']`.

    Without a path, returns the name in its location; empty if there is none.
    """
    name = _NAME.search(str(argument.location))
    return name[1] if name else ""


def argument_name(argument: ir.Value) -> str:
    """Returns `batch['x'] (argument 7)`, or `argument 7` without a path.

    The argument is one of `main`, or one of a manual computation, which is named by its operand.
    """
    outside = outside_of(argument)
    if not isinstance(outside.owner, ir.Block):
        return counted_name(argument)
    path, counted = path_of(outside), counted_name(argument)
    return f"{path} ({counted})" if path else counted


def counted_name(argument: ir.Value) -> str:
    """Returns `argument 7`, as the caller of `main` counts: without the platform index."""
    outside = outside_of(argument)
    if not isinstance(outside.owner, ir.Block):
        return f"operand {ir.BlockArgument(argument).arg_number} of the manual computation"
    return f"argument {argument_number(outside)}"


_ALIASED = "tf.aliasing_output"  # the result that uses an argument's memory
_DONATED = (_ALIASED, "jax.buffer_donor")


def attributes_of_arguments(function: ir.Operation) -> list[ir.DictAttr]:
    """Returns the attributes of each argument of a function; empty if it has none."""
    listed = function.attributes.get("arg_attrs")
    return [] if listed is None else [ir.DictAttr(each) for each in ir.ArrayAttr(listed)]


def is_donated(listed: Sequence[ir.DictAttr], number: int) -> bool:
    """Returns True if results may be written into the memory of an argument.

    `listed` are the `attributes_of_arguments` of the function.
    """
    return number < len(listed) and any(name in listed[number] for name in _DONATED)


def aliased_results(function: ir.Operation) -> dict[int, int]:
    """Returns, by argument, the result that is declared to use its memory."""
    return {
        number: ir.IntegerAttr(each[_ALIASED]).value
        for number, each in enumerate(attributes_of_arguments(function))
        if _ALIASED in each
    }


def next_values(function: ir.Operation) -> dict[int, int]:
    """Returns, by result, the donated argument whose memory it gets: the next value of a state.

    That is the declared one, or the first free argument of its type, as jax assigns them."""
    found = {result: argument for argument, result in aliased_results(function).items()}
    listed = attributes_of_arguments(function)
    donated = (n for n in range(len(listed)) if is_donated(listed, n))
    return found | pair_by_type(function, [n for n in donated if n not in found.values()], found)


def pair_by_type(
    function: ir.Operation, arguments: Sequence[int], paired: Container[int] = ()
) -> dict[int, int]:
    """Returns, by result, the first of the arguments with its type that no result before it has.

    Results in `paired` are left out."""
    types = {number: Function(function).body.arguments[number].type for number in arguments}
    found: dict[int, int] = {}
    for number, value in enumerate(Function(function).yields):
        same = (argument for argument, kind in types.items() if kind == value.type)
        if number not in paired and (argument := next(same, None)) is not None:
            found[number] = argument
            del types[argument]
    return found


def outside_of(argument: ir.Value) -> ir.Value:
    """Returns the operand for an argument of a manual computation; any other value itself."""
    owner = argument.owner
    if isinstance(owner, ir.Block) and owner.owner.name == MANUAL_COMPUTATION:
        return owner.owner.operation.operands[ir.BlockArgument(argument).arg_number]
    return argument
