"""Writes a planned chain into the IR: links at the collectives, tokens through control flow.

Writing decides nothing. Functions are threaded callees first, so that a call's callee already takes
and returns tokens. A collective is linked by barriers around it. In the composite form it becomes
one op with a token operand and a token result:

    %x1, %t1 = optimization_barrier %x, %t0
    %g0 = "stablehlo.all_gather"(%x1)
    %g, %t2 = optimization_barrier %g0, %t1
  ==>
    %g, %t2 = stablehlo.composite "stablehlo_tools.all_gather" %x, %t0
        {decomposition = @stablehlo_tools.all_gather.0}

The decomposition holds the barrier form, so a compiler that does not know the composite gets the
same order from it. Equal collectives share one decomposition. Async pairs, and ops with a token of
their own, do not become composites.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import COMPOSITE, CONSTANT, WHILE
from stablehlo_tools.dialect.traits import BRANCHES
from stablehlo_tools.ir.builder import Builder
from stablehlo_tools.ir.carriers import (
    append,
    append_arguments,
    append_to_terminator,
    resize_function,
)
from stablehlo_tools.ir.rewriter import replace
from stablehlo_tools.ir.token_chain import (
    COMPOSITE_PREFIX,
    LINK,
    create_barrier,
    create_join,
    is_refined_by_jax,
    mark_carrier,
    may_decide_platform,
    tie_operands,
    tie_results,
    tie_values,
    token_type,
)
from stablehlo_tools.ir.values import maker_of
from stablehlo_tools.ir.views import Function, While, WithBody
from stablehlo_tools.ir.walk import FUNCTION, symbol_name, terminator
from stablehlo_tools.transforms.parts.thread_tokens.chain_plan import Chain, ChainStep, FunctionPlan

Tokens = dict[Chain, ir.Value]


@dataclass(frozen=True)
class Threader:
    """Threads the functions of one module; with `decompositions`, in the composite form."""

    decompositions: Decompositions | None = None

    def function(self, function: FunctionPlan) -> None:
        """Threads the chains of one function; a private one takes and returns the tokens."""
        block = Function(function.op).body
        if function.is_public:
            self._block(function.steps, {})
            return
        tokens = _token_arguments(block, function.chains)
        self._block(function.steps, tokens)
        append_to_terminator(block, [tokens[chain] for chain in function.chains])
        resize_function(function.op, len(function.chains), len(function.chains))
        mark_carrier(function.op, len(function.chains))

    def _block(self, steps: Sequence[ChainStep], tokens: Tokens) -> None:
        """Threads the steps of a block, and updates `tokens` to the chains' last tokens."""
        for step in steps:
            if step.collective is None or step.enters or step.leaves:
                for chain in step.chains:  # begins the chains that have no token yet
                    if chain not in tokens:
                        point = ir.InsertionPoint(step.op)
                        tokens[chain] = create_join([], point, step.op.location)
            if step.is_sealed:
                self._thread_sealed(step, tokens)
            elif step.collective is None:
                self._carrier(step, tokens)
            elif self.decompositions is not None and (
                step.done is None and step.token_operand is None and step.token_result is None
            ):
                (chain,) = step.chains
                tokens[chain] = to_composite(step, tokens[chain], self.decompositions)
            else:
                _link(step, tokens)

    def _carrier(self, step: ChainStep, tokens: Tokens) -> None:
        op = step.op
        if op.name == WHILE:
            # The condition gets the tokens, but returns none: it runs before the body anyway.
            condition = _token_arguments(While(op).condition, step.chains)
            self._block(step.regions[0], condition)
            self._returning(step, 1, _token_arguments(While(op).body, step.chains))
        elif op.name in BRANCHES:
            for position in range(len(step.regions)):
                self._returning(step, position, dict(tokens))
        elif step.regions:
            self._returning(step, 0, _token_arguments(WithBody(op).body, step.chains))
        count = len(step.chains)
        entering = [] if op.name in BRANCHES else [tokens[chain] for chain in step.chains]
        carrier = append(op, entering, [token_type(op.context)] * count)
        mark_carrier(carrier, count)
        leaving = list(carrier.results)[-count:]
        if carrier.name == WHILE:
            leaving = _after_conditions(step, carrier, leaving)
        tokens.update(zip(step.chains, leaving, strict=True))

    def _thread_sealed(self, step: ChainStep, tokens: Tokens) -> None:
        """Threads a computation that no token may enter.

        Tokens tie its operands and results outside, and its arguments and returned values inside.
        The data between orders the two chains.
        """
        op, block = step.op, WithBody(step.op).body
        positions = [i for i, a in enumerate(block.arguments) if not may_decide_platform(a)]
        for chain in step.chains:
            tokens[chain] = tie_operands(op, tokens[chain], positions)
        inner: Tokens = {}
        arguments = [block.arguments[position] for position in positions]
        for chain in reversed(step.chains):
            # After the constants: MLIR moves these to the front of a block, which would reorder
            # them.
            first = next(v for v in block.operations if v.operation.name != CONSTANT)
            point = ir.InsertionPoint(first)
            root = create_join([], point, op.location)
            after = ir.InsertionPoint.after(maker_of(root))
            inner[chain] = tie_values(arguments, root, after, op.location)
        self._block(step.regions[0], inner)
        for chain in step.chains:
            tie_operands(terminator(block), inner[chain])
        for chain in step.chains:
            tokens[chain] = tie_results(op, tokens[chain])

    def _returning(self, step: ChainStep, region: int, tokens: Tokens) -> None:
        """Threads a region that returns the tokens at its end, unchanged if it does not
        communicate."""
        self._block(step.regions[region], tokens)
        block = step.op.regions[region].blocks[0]
        append_to_terminator(block, [tokens[chain] for chain in step.chains])


def _after_conditions(
    step: ChainStep, loop: ir.Operation, leaving: Sequence[ir.Value]
) -> list[ir.Value]:
    """Returns the loop's tokens, tied to its results if the condition communicates.

    If the body has no collectives, or only some that are deleted, it yields the token unchanged.
    Compilers then replace the loop's token by the one before the loop.
    """
    in_condition = {chain for inner in step.regions[0] for chain in inner.chains}
    values = list(loop.results)[: -len(leaving)]
    after = ir.InsertionPoint.after(loop)
    return [
        tie_values(values, token, after, loop.location) if chain in in_condition else token
        for chain, token in zip(step.chains, leaving, strict=True)
    ]


def _link(step: ChainStep, tokens: Tokens) -> None:
    """Ties one communicating op into its chain, before and after, as planned."""
    (chain,) = step.chains
    if step.done is not None and step.done_moves_before is not None:
        step.done.move_before(step.done_moves_before)
    if step.beside is not None:
        tokens[chain] = _link_both(step, step.beside, tokens[chain])
        return
    if step.enters:
        tokens[chain] = _enter(step, tokens[chain])
    if step.leaves:
        last = step.done or step.op
        if step.token_result is None:
            tokens[chain] = tie_results(last, tokens[chain])
        else:
            after = ir.InsertionPoint.after(last)
            tokens[chain] = create_join([last.results[step.token_result]], after, last.location)


def _link_both(step: ChainStep, beside: ChainStep, token: ir.Value) -> ir.Value:
    """Ties both halves of a transfer in, in parallel: the next step follows both.

    The join includes the entering token too. `strip-tokens` would take a join of two tokens for one
    before an op.
    """
    if step.enters:
        _enter(step, token)
        _enter(beside, token)
    if not step.leaves:
        return token
    left = [
        half.op.results[half.token_result]
        for half in (step, beside)
        if half.token_result is not None
    ]
    return create_join([*left, token], ir.InsertionPoint.after(beside.op), beside.op.location)


def _enter(step: ChainStep, token: ir.Value) -> ir.Value:
    op = step.op
    if step.token_operand is None:
        return tie_operands(op, token)
    own = op.operands[step.token_operand]
    join = create_join([own, token], ir.InsertionPoint(op), op.location)
    op.operands[step.token_operand] = join
    return token


def _token_arguments(block: ir.Block, chains: Sequence[Chain]) -> Tokens:
    types = [token_type(block.owner.context)] * len(chains)
    return dict(zip(chains, append_arguments(block, types), strict=True))


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

    def symbol_for(self, collective: ir.Operation, kind: str) -> str:
        """Returns the symbol of a collective's decomposition; creates it for the first of equal
        ones."""
        if self.is_refined:
            types = [value.type for value in (*collective.operands, *collective.results)]
            if any(isinstance(t, ir.RankedTensorType) and not t.has_static_shape for t in types):
                raise ToolError(
                    f"{collective.name} with symbolic dimensions cannot become a composite, "
                    "because jax does not refine the shapes of composites: use form=barrier (P9)",
                    collective.location,
                )
        # The key is equal for two collectives that differ only in their operands and place.
        key = (_signature(collective), tuple(_region_likeness(collective, {}, collective)))
        if key not in self.names:
            stem = _composite_name(kind)
            while (symbol := f"{stem}.{self.next_number[stem]}") in self.taken:
                self.next_number[stem] += 1
            self.taken.add(symbol)
            _build_function(self.module, symbol, collective)
            self.names[key] = symbol
        return self.names[key]


def to_composite(step: ChainStep, token: ir.Value, decompositions: Decompositions) -> ir.Value:
    """Replaces a collective by its composite; returns the token that leaves it."""
    op = step.op
    assert step.collective is not None
    kind = step.collective.kind
    symbol = decompositions.symbol_for(op, kind)
    context = op.context
    composite = Builder(ir.InsertionPoint(op), op.location).create(
        COMPOSITE,
        [*op.operands, token],
        [*(result.type for result in op.results), token_type(context)],
        {
            "name": ir.StringAttr.get(_composite_name(kind), context),
            "decomposition": ir.FlatSymbolRefAttr.get(symbol, context),
            LINK: ir.UnitAttr.get(context),
        },
    )
    *outputs, token_out = composite.results
    replace(op, outputs)
    return token_out


def _composite_name(kind: str) -> str:
    """Returns a valid composite name: the dashes of cross-replica-sum are not allowed."""
    return COMPOSITE_PREFIX + kind.replace("-", "_")


def _build_function(module: ir.Module, symbol: str, collective: ir.Operation) -> None:
    context = module.context
    token = token_type(context)
    inputs = [*(operand.type for operand in collective.operands), token]
    outputs = [*(result.type for result in collective.results), token]
    location = collective.location
    attributes = {
        "sym_name": ir.StringAttr.get(symbol, context),
        "sym_visibility": ir.StringAttr.get("private", context),
        "function_type": ir.TypeAttr.get(ir.FunctionType.get(inputs, outputs, context)),
        LINK: ir.UnitAttr.get(context),
    }
    build = Builder(ir.InsertionPoint(module.body), location)
    function = build.create(FUNCTION, [], [], attributes, regions=1)
    block = ir.Block.create_at_start(function.regions[0], inputs, [location] * len(inputs))
    end = ir.InsertionPoint(block)
    *operands, token_in = block.arguments
    entered, token_mid = create_barrier(operands, token_in, end, location)
    inner = collective.clone(ip=end)
    for position, value in enumerate(entered):
        inner.operands[position] = value
    left, token_out = create_barrier(list(inner.results), token_mid, end, location)
    Builder(end, location).create("func.return", [*left, token_out], [])


def _signature(op: ir.Operation) -> Hashable:
    attributes = tuple(sorted((name, str(value)) for name, value in op.attributes.items()))
    types = tuple(str(value.type) for value in (*op.operands, *op.results))
    return (op.name, attributes, types)


def _region_likeness(
    op: ir.Operation, numbers: dict[ir.Value, int], collective: ir.Operation
) -> Iterator[Hashable]:
    """Yields keys for the contents of an op's regions, nested ones too, with operands by number."""
    for region in op.regions:
        for block in region.blocks:
            for value in block.arguments:
                numbers[value] = len(numbers)
            yield tuple((str(value.type), str(value.location)) for value in block.arguments)
            for inner in block.operations:
                if any(value not in numbers for value in inner.operation.operands):
                    raise ToolError(
                        f"{collective.name} cannot become a composite, because its reduction uses "
                        "a value from outside: use form=barrier (P9)",
                        collective.location,
                    )
                operands = tuple(numbers[value] for value in inner.operation.operands)
                yield (_signature(inner.operation), operands, str(inner.operation.location))
                yield from _region_likeness(inner.operation, numbers, collective)
                for value in inner.operation.results:
                    numbers[value] = len(numbers)
