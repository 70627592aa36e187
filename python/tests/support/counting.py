"""How often each op stands in a module."""

from collections import Counter

from stablehlo_tools.bindings import ir


def op_counts(module: ir.Module) -> Counter[str]:
    names: Counter[str] = Counter()

    def visit(op: ir.Operation) -> ir.WalkResult:
        names[op.name] += 1
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return names
