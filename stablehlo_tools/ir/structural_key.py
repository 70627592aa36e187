"""Computes keys of ops and blocks that are equal for structurally equal ones."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.values import value_text

type Spell = Callable[[ir.Attribute | ir.Type], Hashable]


def op_key(
    op: ir.Operation,
    spell: Spell = lambda entity: entity,
    is_said: Callable[[str], bool] = lambda name: True,
) -> Hashable:
    """Returns a key of an op's name, its attributes and the types of its results.

    `is_said` selects attributes by name. `spell` converts attributes and types to keys that are
    comparable across contexts.
    """
    said: Hashable
    try:
        said = tuple((name, spell(value)) for name, value in op.attributes.items() if is_said(name))
    except TypeError:  # a complex constant, for which the bindings have no attribute
        said = value_text(op)
    return op.name, said, tuple(spell(result.type) for result in op.results)


def block_key(
    block: ir.Block,
    outside: Callable[[ir.Value], Hashable],
    spell: Spell = lambda entity: entity,
    is_said: Callable[[str], bool] = lambda name: True,
) -> Hashable:
    """Returns a key of the arguments and ops of a block, and of nested blocks.

    Operands become numbers; `outside` returns the key of a value defined outside the block.
    """
    numbers: dict[ir.Value, int] = {}

    def key(block: ir.Block) -> Hashable:
        for argument in block.arguments:
            numbers[argument] = len(numbers)
        ops: list[Hashable] = []
        for view in block.operations:
            op = view.operation
            reads = tuple(numbers[v] if v in numbers else outside(v) for v in op.operands)
            regions = tuple(tuple(map(key, region.blocks)) for region in op.regions)
            ops.append((op_key(op, spell, is_said), reads, regions))
            for result in op.results:
                numbers[result] = len(numbers)
        return tuple(spell(argument.type) for argument in block.arguments), tuple(ops)

    return key(block)
