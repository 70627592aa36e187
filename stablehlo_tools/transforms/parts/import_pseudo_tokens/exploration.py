"""Follows a root's zero forward through a module, through the arithmetic of pseudo-tokens.

Loops, branches and calls are assumed to pass a token on. If another value at the same position
turns out not to be a token, the assumption is dropped and the search restarts.

The arithmetic is recognized by structure alone. One walk collects what is needed of a module
(`TokenProgram`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from stablehlo_tools.analysis.communication import is_public
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import (
    ADD,
    ALL_REDUCE,
    BROADCAST,
    CALL,
    COMPARE,
    CONSTANT,
    CONVERT,
    MULTIPLY,
    RESHAPE,
    TRANSPOSE,
    WHILE,
)
from stablehlo_tools.dialect.reducers import REDUCERS
from stablehlo_tools.dialect.traits import BRANCHES, COLLECTIVES
from stablehlo_tools.ir.values import producer, splat_element
from stablehlo_tools.ir.views import Case, Combining, Function, While
from stablehlo_tools.ir.walk import (
    FUNCTION,
    callee_name,
    functions_by_name,
    symbol_name,
    terminator,
    walk,
)

Base = ir.Value | None  # the token that a value is computed from; None is the constant zero


def is_same(first: Base, second: Base) -> bool:
    """Returns True if two tokens are the same. (A value cannot be compared with None.)"""
    if first is None or second is None:
        return first is second
    return first == second


@dataclass(frozen=True, eq=False)
class TokenLink:
    """A collective that takes a token: its operand at `position` is `plain` + token."""

    collective: ir.Operation
    position: int
    plain: ir.Value
    base: Base


@dataclass(frozen=True, eq=False)
class Maker:
    """The op that computes the token after a collective from the token before it.

    `op` is the product, or the all_reduce itself; its operand at `position` is the old token.
    """

    collective: ir.Operation
    op: ir.Operation
    position: int
    base: Base
    token: ir.Value
    path: Sequence[ir.Operation] = ()

    @property
    def is_carry(self) -> bool:
        """True if the token is an operand and a result of the collective itself."""
        return self.op.name == ALL_REDUCE


@dataclass(frozen=True, eq=False)
class TokenFlow:
    """A token that the operand of `op` at `position` passes through a loop, a branch or a call."""

    op: ir.Operation
    position: int
    base: Base
    targets: tuple[ir.Value, ...]


@dataclass(frozen=True, eq=False)
class Escape:
    """A use of a token that is not part of a chain."""

    op: ir.Operation
    position: int
    base: Base


@dataclass(frozen=True, eq=False)
class TokenGraph:
    """The candidate chain of one root: None for the constant zeros of the module.

    Its methods may be called only after it is filled.
    """

    root: Base
    bases: dict[ir.Value, Base] = field(default_factory=dict[ir.Value, Base])
    images: list[ir.Operation] = field(default_factory=list[ir.Operation])
    links: list[TokenLink] = field(default_factory=list[TokenLink])
    makers: list[Maker] = field(default_factory=list[Maker])
    flows: list[TokenFlow] = field(default_factory=list[TokenFlow])
    escapes: list[Escape] = field(default_factory=list[Escape])

    @property
    def is_empty(self) -> bool:
        """True if no collective takes a token of this root."""
        return not self.links and not any(maker.is_carry for maker in self.makers)

    def collectives(self) -> Iterator[ir.Operation]:
        """Yields the collectives that take a token, with repeats."""
        yield from (link.collective for link in self.links)
        yield from (maker.collective for maker in self.makers if maker.is_carry)

    @cached_property
    def _handed(self) -> dict[Base, list[ir.Value]]:
        targets: dict[Base, list[ir.Value]] = {}
        for flow in self.flows:
            targets.setdefault(flow.base, []).extend(flow.targets)
        return targets

    @cached_property
    def _made(self) -> dict[Base, list[ir.Value]]:
        tokens: dict[Base, list[ir.Value]] = {}
        for maker in self.makers:
            tokens.setdefault(maker.base, []).append(maker.token)
        return tokens

    @cached_property
    def _taken(self) -> set[Base]:
        carries = [maker.base for maker in self.makers if maker.is_carry]
        return {*carries, *(link.base for link in self.links)}

    def downstream(self, base: Base, *, through_makers: bool) -> set[Base]:
        """Returns the tokens that a token is passed on to.

        `through_makers`: also those that are computed from it after a collective.
        """
        reached: set[Base] = {base}
        pending: list[Base] = [base]
        while pending:
            token = pending.pop()
            following = list(self._handed.get(token, ()))
            if through_makers:
                following += self._made.get(token, ())
            pending += [target for target in following if target not in reached]
            reached.update(following)
        return reached

    def made_tokens(self) -> set[Base]:
        """Returns the tokens that come after some collective, wherever they are passed on to."""
        return {
            token
            for maker in self.makers
            for token in self.downstream(maker.token, through_makers=False)
        }

    def feeds(self, token: ir.Value) -> bool:
        """Returns True if a collective takes this token."""
        return not self._taken.isdisjoint(self.downstream(token, through_makers=False))

    def is_chain(self) -> bool:
        """Returns True if a collective takes a token that was computed after another one."""
        return any(self.feeds(maker.token) for maker in self.makers)


@dataclass(frozen=True, eq=False)
class TokenProgram:
    """A module's functions, calls, zeros and collectives. An op's key is its first result."""

    functions: dict[str, ir.Operation]
    calls: dict[str, list[ir.Operation]] = field(
        default_factory=lambda: defaultdict[str, list[ir.Operation]](list)
    )
    zeros: list[ir.Value] = field(default_factory=list[ir.Value])
    tokened: list[ir.Operation] = field(default_factory=list[ir.Operation])
    positions: dict[ir.Value, int] = field(default_factory=dict[ir.Value, int])

    @staticmethod
    def from_module(module: ir.Module) -> TokenProgram:
        """Walks the module once."""
        program = TokenProgram(functions_by_name(module))

        def visit(op: ir.Operation) -> ir.WalkResult:
            if len(op.results):
                program.positions[op.results[0]] = len(program.positions)
            if op.name in TOKENED:
                program.tokened.append(op)
            elif op.name == CALL:
                program.calls[callee_name(op)].append(op)
            elif is_zero_constant(op):
                program.zeros.append(op.results[0])
            return ir.WalkResult.ADVANCE

        walk(module.operation, visit)
        return program

    def position(self, op: ir.Operation) -> int:
        """Returns the position in the program of an op with results."""
        return self.positions[op.results[0]]

    def callee(self, call: ir.Operation) -> ir.Operation | None:
        """Returns the called function if it has one block and only calls reach it; otherwise
        None."""
        function = self.functions.get(callee_name(call))
        if function is None or is_public(function) or len(function.regions[0].blocks) != 1:
            return None
        return function

    def entries(self) -> Sequence[tuple[str, ir.Operation]]:
        """Returns the public functions with a body, by name; only `main`, if it exists."""
        public = [
            (name, function)
            for name, function in self.functions.items()
            if is_public(function) and len(function.regions[0].blocks)
        ]
        return [entry for entry in public if entry[0] == "main"] or public


OR = "stablehlo.or"  # the sum of two booleans
# Ops that convert or reshape a zero to a zero.
RESHAPING = frozenset({CONVERT, BROADCAST, RESHAPE})

# The collectives to whose input torch-xla adds its token; an all_reduce has it as an operand.
FED_BY_ADDITION = COLLECTIVES - {ALL_REDUCE, "stablehlo.collective_broadcast"}
TOKENED = FED_BY_ADDITION | {ALL_REDUCE}
# Reductions of zeros that are zero. `xor` would be one too, but torch-xla does not use it.
ZERO_KEEPING = REDUCERS - {"xor"}

# Ops between a collective's result and the element of it that a token is multiplied by.
_ON_THE_WAY = frozenset({CONVERT, RESHAPE, TRANSPOSE})


def element_type(value: ir.Value) -> ir.Type | None:
    """Returns the element type of a tensor; None for a value of another type."""
    type_ = value.type
    return type_.element_type if isinstance(type_, ir.RankedTensorType) else None


def is_scalar(value: ir.Value) -> bool:
    """Returns True if a value is a tensor of rank 0."""
    type_ = value.type
    return isinstance(type_, ir.RankedTensorType) and type_.rank == 0


def is_zero_constant(op: ir.Operation) -> bool:
    """Returns True if an op is a constant with +0, or false, in every element."""
    if op.name != CONSTANT:
        return False
    # The bindings cannot read the attribute of a constant of another element type.
    if not isinstance(element_type(op.results[0]), ir.FloatType | ir.IntegerType):
        return False
    splat = splat_element(op)
    if isinstance(splat, ir.FloatAttr):
        return splat.value == 0 and math.copysign(1, splat.value) > 0
    return isinstance(splat, ir.IntegerAttr | ir.BoolAttr) and not splat.value


def is_zero(value: ir.Value) -> bool:
    """Returns True if constants alone show that a value is zero in every element."""
    source = _source_op(value)
    return source is not None and is_zero_constant(source)


def is_uniform_constant(value: ir.Value) -> bool:
    """Returns True if a value is a constant with the same number in every element."""
    source = _source_op(value)
    if source is None or source.name != CONSTANT:
        return False
    return isinstance(element_type(source.results[0]), ir.FloatType | ir.IntegerType) and (
        splat_element(source) is not None
    )


def is_test_for_zero(op: ir.Operation, position: int) -> bool:
    """Returns True if an op is `operand != 0`, torch-xla's conversion to a boolean."""
    if op.name != COMPARE or "NE" not in str(op.attributes["comparison_direction"]):
        return False
    return is_zero(op.operands[1 - position])


def first_element(value: ir.Value) -> tuple[ir.Operation, Sequence[ir.Operation]] | None:
    """Traces a scalar back to the collective whose first element it is, as torch-xla picks and
    scales it.

    Returns the collective and the ops between, the last one first; None if there is none.
    """
    path: list[ir.Operation] = []
    op = producer(value) if is_scalar(value) else None
    while op is not None and op.name not in TOKENED:
        source = _step_back(op)
        if source is None:
            return None
        path.append(op)
        op = producer(source)
    return None if op is None else (op, path)


def _step_back(op: ir.Operation) -> ir.Value | None:
    """Returns the array that an op on the way to a first element reads; None for another op."""
    if op.name in _ON_THE_WAY or _picks_first(op):
        return op.operands[0]
    if op.name != MULTIPLY:
        return None
    for position in (0, 1):
        if is_uniform_constant(op.operands[1 - position]):
            return op.operands[position]
    return None


def _picks_first(op: ir.Operation) -> bool:
    name = op.name
    if name == "stablehlo.slice":
        starts, limits = op.attributes["start_indices"], op.attributes["limit_indices"]
        return _all_are(starts, 0) and _all_are(limits, 1)
    if name in ("stablehlo.gather", "stablehlo.dynamic_slice"):
        indices = list(op.operands)[1:]
        return _all_are(op.attributes["slice_sizes"], 1) and all(map(is_zero, indices))
    return False


def _all_are(numbers: ir.Attribute, number: int) -> bool:
    entries: Sequence[int] = list(ir.DenseI64ArrayAttr(numbers))
    return all(entry == number for entry in entries)


def _source_op(value: ir.Value) -> ir.Operation | None:
    """Returns the op that a value comes from, through reshapes and conversions."""
    op = producer(value)
    while op is not None and op.name in RESHAPING:
        op = producer(op.operands[0])
    return op


_RETURNS = frozenset({"func.return", "stablehlo.return"})


def explore(
    program: TokenProgram, root: Base, not_tokens: frozenset[ir.Value] = frozenset()
) -> TokenGraph:
    """Returns all values that are zero because `root` is, with their uses.

    `not_tokens`: results that are not tokens, whatever their operands are.
    """
    refuted: set[Hashable] = set()
    while True:
        explorer = _Explorer(program, TokenGraph(root), refuted, not_tokens)
        explorer.run()
        bases = explorer.graph.bases
        wrong = {key for key, values in explorer.guesses if any(v not in bases for v in values)}
        if not wrong:
            return explorer.graph
        refuted |= wrong


@dataclass(frozen=True, eq=False)
class _TokenProduct:
    """A token times the first element of a collective's result, which `path` picks and scales."""

    op: ir.Operation
    position: int
    base: Base
    collective: ir.Operation
    path: Sequence[ir.Operation]


class _Explorer:
    def __init__(
        self,
        program: TokenProgram,
        graph: TokenGraph,
        refuted: set[Hashable],
        not_tokens: frozenset[ir.Value],
    ) -> None:
        self.program = program
        self.graph = graph
        self.refuted = refuted
        self.not_tokens = not_tokens
        self.pending: list[ir.Value] = []
        self.fed: set[tuple[ir.Value, Base]] = set()  # pairs of a collective and its token
        self.products: list[_TokenProduct] = []  # products with a first element that may be tokens
        # By key, the assumption that a passed value is a token, which holds if all these are.
        self.guesses: list[tuple[Hashable, Sequence[ir.Value]]] = []
        self.rules: dict[str, Callable[[ir.Operation, int, ir.Value, Base], bool]] = {
            ADD: self._sum,
            OR: self._sum,
            MULTIPLY: self._product,
            ALL_REDUCE: self._all_reduce,
            WHILE: lambda op, position, _, base: self._carried_by_loop(op, position, op, base),
            CALL: self._call,
        }

    def run(self) -> None:
        """Fills the graph."""
        if self.graph.root is None:
            for zero in self.program.zeros:
                self._add(zero, None)
        else:
            self._add(self.graph.root, self.graph.root)
        progress = True
        while progress:
            while self.pending:
                value = self.pending.pop()
                base = self.graph.bases[value]
                for use in value.uses:
                    op, position = use.owner.operation, use.operand_number
                    if not self._use(op, position, value, base):
                        self._escape(op, position, base)
            progress = self._make_products()
        for product in self.products:
            self._escape(product.op, product.position, product.base)
        # A token plus a token is not a link.
        for link in [each for each in self.graph.links if each.plain in self.graph.bases]:
            self.graph.links.remove(link)
            self._escape(link.collective, link.position, link.base)

    def _add(self, value: ir.Value, base: Base) -> None:
        if value not in self.graph.bases:
            self.graph.bases[value] = base
            self.pending.append(value)

    def _escape(self, op: ir.Operation, position: int, base: Base) -> None:
        self.graph.escapes.append(Escape(op, position, base))

    def _use(self, op: ir.Operation, position: int, value: ir.Value, base: Base) -> bool:
        """Records one use of a token; returns False if it is not part of a chain."""
        name = op.name
        if name in RESHAPING or is_test_for_zero(op, position):
            self.graph.images.append(op)
            self._add(op.results[0], base)
            return True
        if name in _RETURNS:
            return self._return(op, position, base)
        rule = self.rules.get(name)
        return rule is not None and rule(op, position, value, base)

    def _sum(self, op: ir.Operation, position: int, _: ir.Value, base: Base) -> bool:
        """Records a link for each collective that reads x + token; returns False for other
        readers."""
        plain = op.operands[1 - position]
        uses = list(op.results[0].uses)
        readers = [use for use in uses if use.owner.operation.name in FED_BY_ADDITION]
        for use in readers:
            collective = use.owner.operation
            self.graph.links.append(TokenLink(collective, use.operand_number, plain, base))
            self.fed.add((collective.results[0], base))
        if readers:
            self.graph.images.append(op)
        return len(readers) == len(uses)

    def _product(self, op: ir.Operation, position: int, _: ir.Value, base: Base) -> bool:
        element = first_element(op.operands[1 - position])
        if element is None or op.results[0] in self.not_tokens:
            return False
        self.products.append(_TokenProduct(op, position, base, *element))
        return True

    def _all_reduce(self, op: ir.Operation, position: int, value: ir.Value, base: Base) -> bool:
        """Records an all_reduce with the token as an additional last operand."""
        is_extra = position == len(op.operands) - 1 > 0
        token = op.results[position]
        if not is_extra or not is_scalar(value) or token in self.not_tokens:
            return False
        # The region must be `op(%a, %b)` of its two arguments, which reduces zeros to zero.
        block = Combining(op).combiner
        first = block.operations[0].operation
        if not (
            first.name.removeprefix("stablehlo.") in ZERO_KEEPING
            and list(terminator(block).operands) == list(first.results)
            and set(first.operands) == set(block.arguments)
        ):
            return False
        self.graph.makers.append(Maker(op, op, position, base, token))
        self._add(token, token)
        return True

    def _make_products(self) -> bool:
        """Turns token * first element into new tokens, if the collective took that token."""
        waiting: list[_TokenProduct] = []
        for product in self.products:
            collective, base, token = product.collective, product.base, product.op.results[0]
            if (collective.results[0], base) not in self.fed:
                waiting.append(product)
                continue
            maker = Maker(collective, product.op, product.position, base, token, product.path)
            self.graph.makers.append(maker)
            self._add(token, token)
        progress = len(waiting) < len(self.products)
        self.products = waiting
        return progress

    def _carried_by_loop(
        self, loop: ir.Operation, position: int, user: ir.Operation, base: Base
    ) -> bool:
        condition, body = While(loop).condition, While(loop).body
        targets = (condition.arguments[position], body.arguments[position], loop.results[position])
        both = (loop.operands[position], terminator(body).operands[position])
        return self._hand_on(user, position, base, targets, loop.results[position], both)

    def _call(self, op: ir.Operation, position: int, _: ir.Value, base: Base) -> bool:
        callee = self.program.callee(op)
        if callee is None:
            return False
        argument = Function(callee).body.arguments[position]
        handed = tuple(call.operands[position] for call in self.program.calls[callee_name(op)])
        return self._hand_on(op, position, base, (argument,), argument, handed)

    def _return(self, op: ir.Operation, position: int, base: Base) -> bool:
        parent = op.parent
        assert parent is not None
        if parent.name == FUNCTION:
            calls = [] if is_public(parent) else self.program.calls[symbol_name(parent)]
            results = tuple(call.results[position] for call in calls)
            key = (symbol_name(parent), position)
            return bool(calls) and self._hand_on(op, position, base, results, key, ())
        if parent.name in BRANCHES:
            result = parent.results[position]
            returned = tuple(terminator(b).operands[position] for b in Case(parent).branches)
            return self._hand_on(op, position, base, (result,), result, returned)
        if parent.name == WHILE and op.block == While(parent).body:
            return self._carried_by_loop(parent, position, op, base)
        return False

    def _hand_on(
        self,
        op: ir.Operation,
        position: int,
        base: Base,
        targets: tuple[ir.Value, ...],
        key: Hashable,
        values: Sequence[ir.Value],
    ) -> bool:
        """Records a token that is passed on to `targets`, which are tokens if `values` all are."""
        if key in self.refuted:
            return False
        self.guesses.append((key, values))
        self.graph.flows.append(TokenFlow(op, position, base, targets))
        for target in targets:
            self._add(target, target)
        return True
