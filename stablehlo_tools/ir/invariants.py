"""Results of loops that are what the loops were given."""

from __future__ import annotations

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.ir.walk import walk


def forward_invariants(module: ir.Module) -> None:
    """Lets what a loop is given stand for a result that every iteration hands on as it came."""

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == "stablehlo.while":
            block = op.regions[1].blocks[0]
            ends = terminator(block).operands
            for place, argument in enumerate(block.arguments):
                if ends[place] == argument:
                    op.results[place].replace_all_uses_with(op.operands[place])
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
