"""The composite form of the chain: each collective an op with a token in and a token out.

    %x1, %t1 = optimization_barrier %x, %t0
    %g0 = "stablehlo.all_gather"(%x1)
    %g, %t2 = optimization_barrier %g0, %t1
  ==>
    %g, %t2 = stablehlo.composite "stablehlo_tools.all_gather" %x, %t0
        {decomposition = @stablehlo_tools.all_gather.0}

The decomposition holds the barrier form, so a compiler that does not know the composite gets the
same order from it. Collectives that are alike share one decomposition. Async pairs and ops with a
token of their own already carry one and stay as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator

from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import COMPOSITE
from stablehlo_tools.ir.inline import inline_call
from stablehlo_tools.ir.symbols import FUNCTION, callee_name, symbol_name
from stablehlo_tools.ir.walk import walk
from stablehlo_tools.transforms.parts.thread_tokens.chain import (
    COMPOSITE_PREFIX,
    LINK,
    create_barrier,
    is_refined_by_jax,
    token_type,
)
from stablehlo_tools.transforms.parts.thread_tokens.plan import Step


class Decompositions:
    """The decomposition functions of a module, one for each kind of collective in it."""

    def __init__(self, module: ir.Module) -> None:
        self.module = module
        self.is_refined = is_refined_by_jax(module)
        self.names: dict[Hashable, str] = {}
        self.next_number: defaultdict[str, int] = defaultdict(int)  # by kind
        self.taken = {
            symbol_name(op) for op in module.body.operations if "sym_name" in op.attributes
        }

    def of(self, collective: ir.Operation, kind: str) -> str:
        """The symbol of the collective's decomposition, made when it is the first of its like."""
        if self.is_refined:
            _check_static(collective)
        key = _likeness(collective)
        if key not in self.names:
            self.names[key] = self._create(collective, kind)
        return self.names[key]

    def _create(self, collective: ir.Operation, kind: str) -> str:
        stem = _composite_name(kind)
        while (symbol := f"{stem}.{self.next_number[stem]}") in self.taken:
            self.next_number[stem] += 1
        self.taken.add(symbol)
        _build_function(self.module, symbol, collective)
        return symbol


def to_composite(step: Step, token: ir.Value, decompositions: Decompositions) -> ir.Value:
    """Replaces a collective by its composite; returns the token that leaves it."""
    op = step.op
    assert step.collective is not None
    kind = step.collective.kind
    symbol = decompositions.of(op, kind)
    context = op.context
    composite = ir.Operation.create(
        COMPOSITE,
        results=[*(result.type for result in op.results), token_type(context)],
        operands=[*op.operands, token],
        attributes={
            "name": ir.StringAttr.get(_composite_name(kind), context),
            "decomposition": ir.FlatSymbolRefAttr.get(symbol, context),
            LINK: ir.UnitAttr.get(context),
        },
        loc=op.location,
        ip=ir.InsertionPoint(op),
    )
    *outputs, token_out = composite.results
    for result, output in zip(op.results, outputs, strict=True):
        result.replace_all_uses_with(output)
    op.erase()
    return token_out


def _composite_name(kind: str) -> str:
    """A name that composites may have: cross-replica-sum has dashes, which those have not."""
    return COMPOSITE_PREFIX + kind.replace("-", "_")


def restore_collective(composite: ir.Operation, decomposition: ir.Operation) -> ir.Operation:
    """Puts the collective of a decomposition where a composite stands, on its operands."""
    body = decomposition.regions[0].blocks[0]
    inner = next(op.operation for op in body.operations if LINK not in op.attributes)
    collective = inner.clone(ip=ir.InsertionPoint(composite))
    for position in range(len(inner.operands)):
        collective.operands[position] = composite.operands[position]
    collective.location = composite.location
    return collective


def inline_composites(module: ir.Module) -> None:
    """Puts the decompositions of the chain where its composites stand, each with its location."""
    composites: list[ir.Operation] = []
    functions: dict[str, ir.Operation] = {}

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == COMPOSITE and LINK in op.attributes:
            composites.append(op)
        elif op.name == FUNCTION and LINK in op.attributes:
            functions[symbol_name(op)] = op
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
    for composite in composites:
        location = composite.location
        for copy in inline_call(composite, functions[callee_name(composite)]):
            copy.location = location
    for function in functions.values():
        function.erase()


def _build_function(module: ir.Module, symbol: str, collective: ir.Operation) -> None:
    context = module.context
    token = token_type(context)
    inputs = [*(operand.type for operand in collective.operands), token]
    outputs = [*(result.type for result in collective.results), token]
    function = ir.Operation.create(
        FUNCTION,
        attributes={
            "sym_name": ir.StringAttr.get(symbol, context),
            "sym_visibility": ir.StringAttr.get("private", context),
            "function_type": ir.TypeAttr.get(ir.FunctionType.get(inputs, outputs, context)),
            LINK: ir.UnitAttr.get(context),
        },
        regions=1,
        loc=collective.location,
        ip=ir.InsertionPoint(module.body),
    )
    location = collective.location
    block = ir.Block.create_at_start(function.regions[0], inputs, [location] * len(inputs))
    end = ir.InsertionPoint(block)
    *operands, token_in = block.arguments
    entered, token_mid = create_barrier(operands, token_in, end, location)
    inner = collective.clone(ip=end)
    for position, value in enumerate(entered):
        inner.operands[position] = value
    left, token_out = create_barrier(list(inner.results), token_mid, end, location)
    ir.Operation.create("func.return", operands=[*left, token_out], loc=location, ip=end)


def _check_static(collective: ir.Operation) -> None:
    types = [value.type for value in (*collective.operands, *collective.results)]
    if any(isinstance(t, ir.RankedTensorType) and not t.has_static_shape for t in types):
        raise ToolError(
            f"{collective.name} with symbolic dimensions cannot become a composite, whose shapes "
            "jax does not refine: use form=barrier (P9)",
            collective.location,
        )


def _likeness(op: ir.Operation) -> Hashable:
    """Equal for two collectives that differ in nothing but their operands and place."""
    return (_signature(op), tuple(_region_likeness(op, {}, op)))


def _signature(op: ir.Operation) -> Hashable:
    attributes = tuple(sorted((name, str(value)) for name, value in op.attributes.items()))
    types = tuple(str(value.type) for value in (*op.operands, *op.results))
    return (op.name, attributes, types)


def _region_likeness(
    op: ir.Operation, numbers: dict[ir.Value, int], collective: ir.Operation
) -> Iterator[Hashable]:
    """What stands in the regions of an op, nested ones too, with where each operand comes from."""
    for region in op.regions:
        for block in region.blocks:
            for value in block.arguments:
                numbers[value] = len(numbers)
            yield tuple((str(value.type), str(value.location)) for value in block.arguments)
            for inner in block.operations:
                yield _inner_likeness(inner.operation, numbers, collective)
                yield from _region_likeness(inner.operation, numbers, collective)
                for value in inner.operation.results:
                    numbers[value] = len(numbers)


def _inner_likeness(
    inner: ir.Operation, numbers: dict[ir.Value, int], collective: ir.Operation
) -> Hashable:
    if any(value not in numbers for value in inner.operands):
        raise ToolError(
            f"{collective.name} whose reduction uses a value from outside of it cannot become a "
            "composite: use form=barrier (P9)",
            collective.location,
        )
    operands = tuple(numbers[value] for value in inner.operands)
    return (_signature(inner), operands, str(inner.location))
