"""The entry function: what a program takes and gives, and the names that jax gave them."""

from __future__ import annotations

import re
from collections.abc import Sequence

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
from stablehlo_tools.ir.walk import ENTRY, callee_name, enclosing, functions_by_name, walk
from stablehlo_tools.order.program import UNKNOWN_CALL

_COLLECTIVES = ops_with(Trait.COLLECTIVE)
# Of a program for all devices.
_LEGAL_OUTSIDE = frozenset({"custom_call", UNKNOWN_CALL, "infeed", "outfeed"})


def is_per_device(module: ir.Module, listed: Sequence[Collective] | None = None) -> bool:
    """Whether `main` is what one device runs: it communicates outside manual computations.

    Between GSPMD's custom calls, which do not nest, nothing is told apart: with them it is not.
    Collectives of groups of one send nothing: a program for all devices may have them, too.
    `listed` are all collectives of the module, if known.
    """
    listed = find_collectives(module) if listed is None else listed
    collectives = [c for c in listed if c.kind not in _LEGAL_OUTSIDE]
    facts = ModuleFacts.of(module, collectives)
    communicating = {c.op for c in collectives if not facts.has_groups_of_one(c)}
    ops = _ops_outside_manual(module)
    if any(op.name == CUSTOM_CALL and is_shard_map_border(op) for op in ops):
        return False
    return any(op.name == PARTITION_ID or op in communicating for op in ops)


def _ops_outside_manual(module: ir.Module) -> list[ir.Operation]:
    """The ops of `main`, and of all that it calls, that are outside of manual computations."""
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
    """Erases collectives of groups of one of a program for all devices, in place, and counts them.
    The result is the operand, or zero for a permute without pairs. XLA's partitioner refuses most.
    """
    listed = find_collectives(module)
    facts = ModuleFacts.of(module, listed)
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


_NAME = re.compile(r'"([^"]*)"(?!:\d)')  # of a place in a file a number follows


def path_of(argument: ir.Value) -> str:
    """The path in the pytree that jax exported an argument of `main` with, `batch['x']`, or what
    else its location names it; empty where it names nothing."""
    name = _NAME.search(str(argument.location))
    return name[1] if name else ""


def argument_name(argument: ir.Value) -> str:
    """`batch['x'] (argument 7)`, or `argument 7`: an argument of `main`, or the operand of a manual
    computation that an argument in there is."""
    outside = outside_of(argument)
    if not isinstance(outside.owner, ir.Block):
        return counted_name(argument)
    path, counted = path_of(outside), counted_name(argument)
    return f"{path} ({counted})" if path else counted


def counted_name(argument: ir.Value) -> str:
    """`argument 7`, as the caller of `main` counts: the index of a platform is none of them."""
    outside = outside_of(argument)
    if not isinstance(outside.owner, ir.Block):
        return f"operand {ir.BlockArgument(argument).arg_number} of the manual computation"
    return f"argument {argument_number(outside)}"


_ALIASED = "tf.aliasing_output"  # which result lies in an argument's memory
_DONATED = (_ALIASED, "jax.buffer_donor")


def attributes_of_arguments(function: ir.Operation) -> list[ir.DictAttr]:
    """What a function says of each of its arguments; empty where it says nothing of any."""
    listed = function.attributes.get("arg_attrs")
    return [] if listed is None else [ir.DictAttr(each) for each in ir.ArrayAttr(listed)]


def is_donated(listed: Sequence[ir.DictAttr], number: int) -> bool:
    """Whether a function of these `attributes_of_arguments` may write results into the memory of an
    argument."""
    return number < len(listed) and any(name in listed[number] for name in _DONATED)


def aliased_results(function: ir.Operation) -> dict[int, int]:
    """By argument, the result that lies in its memory, where a function says so."""
    return {
        number: ir.IntegerAttr(each[_ALIASED]).value
        for number, each in enumerate(attributes_of_arguments(function))
        if _ALIASED in each
    }


def outside_of(argument: ir.Value) -> ir.Value:
    """What an argument of a manual computation is outside of it; any other value itself."""
    owner = argument.owner
    if isinstance(owner, ir.Block) and owner.owner.name == MANUAL_COMPUTATION:
        return owner.owner.operation.operands[ir.BlockArgument(argument).arg_number]
    return argument
