"""Keys that are equal for ops, and for blocks, that say the same."""

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
    """The name of an op, the attributes whose names count and the types of its results. `spell`
    makes comparable what belongs to a context."""
    said: Hashable
    try:
        said = tuple((name, spell(value)) for name, value in op.attributes.items() if is_said(name))
    except TypeError:  # a constant of complex numbers, of which the bindings have no attribute
        said = value_text(op)
    return op.name, said, tuple(spell(result.type) for result in op.results)


def block_key(
    block: ir.Block,
    outside: Callable[[ir.Value], Hashable],
    spell: Spell = lambda entity: entity,
    is_said: Callable[[str], bool] = lambda name: True,
) -> Hashable:
    """The arguments and ops of a block and of those in it. Operands are numbers, or what `outside`
    returns for a value that no op here makes."""
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
