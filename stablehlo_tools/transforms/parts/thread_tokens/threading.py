"""Writes a planned chain into the IR: links at the collectives, tokens through what carries.

Applying decides nothing. Functions are done callees first, so that a call finds its callee
already taking and returning tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.dialect.traits import BRANCHES
from stablehlo_tools.ir.carriers import (
    append,
    append_arguments,
    append_to_terminator,
    resize_function,
    terminator,
)
from stablehlo_tools.transforms.parts.thread_tokens.chain import (
    create_barrier,
    create_join,
    mark_carrier,
    may_decide_platform,
    token_type,
)
from stablehlo_tools.transforms.parts.thread_tokens.composites import Decompositions, to_composite
from stablehlo_tools.transforms.parts.thread_tokens.plan import Chain, FunctionPlan, Step

Tokens = dict[Chain, ir.Value]


@dataclass(frozen=True)
class Threader:
    """Threads the functions of one module; with `decompositions`, in the composite form."""

    decompositions: Decompositions | None = None

    def function(self, function: FunctionPlan) -> None:
        """Threads the chains of one function; a private one takes and returns them."""
        block = function.op.regions[0].blocks[0]
        if function.is_public:
            self._block(function.steps, {})
            return
        tokens = _token_arguments(block, function.chains)
        self._block(function.steps, tokens)
        append_to_terminator(block, _ordered(tokens, function.chains))
        resize_function(function.op, len(function.chains), len(function.chains))
        mark_carrier(function.op, len(function.chains))

    def _block(self, steps: Sequence[Step], tokens: Tokens) -> None:
        """Threads the steps of a block; `tokens` is left holding the chains' last tokens."""
        for step in steps:
            if step.collective is None or step.enters or step.leaves:
                _start_chains(step, tokens)
            if step.is_sealed:
                self._sealed(step, tokens)
            elif step.collective is None:
                self._carrier(step, tokens)
            elif self.decompositions is not None and _fits_composite(step):
                (chain,) = step.chains
                tokens[chain] = to_composite(step, tokens[chain], self.decompositions)
            else:
                _link(step, tokens)

    def _carrier(self, step: Step, tokens: Tokens) -> None:
        op = step.op
        op_is_loop = op.name == WHILE
        if op_is_loop:
            # The condition sees the tokens; that it runs before the body needs no token.
            condition = _token_arguments(op.regions[0].blocks[0], step.chains)
            self._block(step.regions[0], condition)
            self._returning(step, 1, _token_arguments(op.regions[1].blocks[0], step.chains))
        elif op.name in BRANCHES:
            for position in range(len(step.regions)):
                self._returning(step, position, dict(tokens))
        elif step.regions:
            self._returning(step, 0, _token_arguments(op.regions[0].blocks[0], step.chains))
        count = len(step.chains)
        entering = [] if op.name in BRANCHES else _ordered(tokens, step.chains)
        carrier = append(op, entering, [token_type(op.context)] * count)
        mark_carrier(carrier, count)
        leaving = list(carrier.results)[-count:]
        if op_is_loop:
            leaving = _after_conditions(step, carrier, leaving)
        tokens.update(zip(step.chains, leaving, strict=True))

    def _sealed(self, step: Step, tokens: Tokens) -> None:
        """A computation that no token enters: its operands and results are tied outside of it, its
        arguments and returned values inside, and the data between orders the one with the other.
        """
        op, block = step.op, step.op.regions[0].blocks[0]
        positions = [i for i, a in enumerate(block.arguments) if not may_decide_platform(a)]
        for chain in step.chains:
            tokens[chain] = tie_operands(op, tokens[chain], positions)
        inner: Tokens = {}
        for chain in reversed(step.chains):
            inner[chain] = _tie_arguments(block, positions, op.location)
        self._block(step.regions[0], inner)
        for chain in step.chains:
            tie_operands(terminator(block), inner[chain])
        for chain in step.chains:
            tokens[chain] = tie_results(op, tokens[chain])

    def _returning(self, step: Step, region: int, tokens: Tokens) -> None:
        """Threads a region that returns the tokens at its end, a silent one as they came."""
        self._block(step.regions[region], tokens)
        block = step.op.regions[region].blocks[0]
        append_to_terminator(block, _ordered(tokens, step.chains))


def _after_conditions(
    step: Step, loop: ir.Operation, leaving: Sequence[ir.Value]
) -> list[ir.Value]:
    """The loop's tokens, tied to its results where the condition communicates.

    Where the body does not, or only in collectives that are deleted, it hands the token on as it
    came; compilers see through that and take the token from before the loop.
    """
    in_condition = {chain for inner in step.regions[0] for chain in inner.chains}
    values = list(loop.results)[: -len(leaving)]
    after = ir.InsertionPoint.after(loop)
    return [
        _tie_values(values, token, after, loop.location) if chain in in_condition else token
        for chain, token in zip(step.chains, leaving, strict=True)
    ]


def _start_chains(step: Step, tokens: Tokens) -> None:
    """Starts, just before a step, those of its chains that have not begun."""
    for chain in step.chains:
        if chain not in tokens:
            tokens[chain] = create_join([], ir.InsertionPoint(step.op), step.op.location)


def _fits_composite(step: Step) -> bool:
    return step.done is None and step.token_operand is None and step.token_result is None


def _link(step: Step, tokens: Tokens) -> None:
    """Ties one communicating op into its chain, before and after, as the plan says."""
    (chain,) = step.chains
    if step.done is not None and step.done_moves_before is not None:
        step.done.move_before(step.done_moves_before)
    if step.beside is not None:
        tokens[chain] = _link_both(step, step.beside, tokens[chain])
        return
    if step.enters:
        tokens[chain] = _enter(step, tokens[chain])
    if step.leaves:
        tokens[chain] = _leave(step, tokens[chain])


def _link_both(step: Step, beside: Step, token: ir.Value) -> ir.Value:
    """Ties both halves of a transfer in, side by side: what comes next comes after both.

    The join holds the entering token too: of two tokens it would be one in front of an op.
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


def _enter(step: Step, token: ir.Value) -> ir.Value:
    op = step.op
    if step.token_operand is None:
        return tie_operands(op, token)
    own = op.operands[step.token_operand]
    join = create_join([own, token], ir.InsertionPoint(op), op.location)
    op.operands[step.token_operand] = join
    return token


def _leave(step: Step, token: ir.Value) -> ir.Value:
    last = step.done or step.op
    if step.token_result is None:
        return tie_results(last, token)
    after = ir.InsertionPoint.after(last)
    return create_join([last.results[step.token_result]], after, last.location)


def tie_operands(
    op: ir.Operation, token: ir.Value, positions: Sequence[int] | None = None
) -> ir.Value:
    """Lets an op read its operands, or those at `positions`, only after a token.

    Returns the token that comes out.
    """
    tied = range(len(op.operands)) if positions is None else positions
    operands = [op.operands[position] for position in tied]
    outputs, token = create_barrier(operands, token, ir.InsertionPoint(op), op.location)
    for position, output in zip(tied, outputs, strict=True):
        op.operands[position] = output
    return token


def tie_results(op: ir.Operation, token: ir.Value) -> ir.Value:
    """A token that comes after an op's results, which the others read beside it."""
    return _tie_values(list(op.results), token, ir.InsertionPoint.after(op), op.location)


def _tie_arguments(block: ir.Block, positions: Sequence[int], location: ir.Location) -> ir.Value:
    """A new token that comes after the block's arguments at `positions`."""
    arguments = [block.arguments[position] for position in positions]
    # Behind the constants: MLIR moves them to the front of a block, where they would change places.
    first = next(op for op in block.operations if op.operation.name != "stablehlo.constant")
    root = create_join([], ir.InsertionPoint(first), location)
    owner = root.owner
    assert not isinstance(owner, ir.Block)
    return _tie_values(arguments, root, ir.InsertionPoint.after(owner.operation), location)


def _tie_values(
    values: Sequence[ir.Value], token: ir.Value, ip: ir.InsertionPoint, location: ir.Location
) -> ir.Value:
    outputs, token = create_barrier(values, token, ip, location)
    barrier = token.owner
    assert not isinstance(barrier, ir.Block)
    for value, output in zip(values, outputs, strict=True):
        value.replace_all_uses_except(output, barrier.operation)
    return token


def _token_arguments(block: ir.Block, chains: Sequence[Chain]) -> Tokens:
    types = [token_type(block.owner.context)] * len(chains)
    return dict(zip(chains, append_arguments(block, types), strict=True))


def _ordered(tokens: Tokens, chains: Sequence[Chain]) -> list[ir.Value]:
    return [tokens[chain] for chain in chains]
