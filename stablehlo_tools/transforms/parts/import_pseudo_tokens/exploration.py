"""Follows a root's zero forward through a module.

Loops, branches and calls are taken to hand a token on; where it turns out that one of their
other values is none, the guess is taken back and the search begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from stablehlo_tools.analysis.communication import is_public
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import CALL, WHILE
from stablehlo_tools.dialect.traits import BRANCHES
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.ir.symbols import FUNCTION, callee_name, symbol_name
from stablehlo_tools.transforms.parts.import_pseudo_tokens.graph import (
    Base,
    Escape,
    Flow,
    Link,
    Maker,
    TokenGraph,
)
from stablehlo_tools.transforms.parts.import_pseudo_tokens.patterns import (
    ADD,
    ALL_REDUCE,
    FED_BY_ADDITION,
    MULTIPLY,
    OR,
    RESHAPING,
    ZERO_KEEPING,
    FirstElement,
    first_element,
    is_scalar,
    is_test_for_zero,
)
from stablehlo_tools.transforms.parts.import_pseudo_tokens.program import Program

_RETURNS = frozenset({"func.return", "stablehlo.return"})


def explore(
    program: Program, root: Base, not_tokens: frozenset[ir.Value] = frozenset()
) -> TokenGraph:
    """Everything that is zero because `root` is, and what it is used for.

    `not_tokens` are results that make no token whatever goes into them.
    """
    refuted: set[Hashable] = set()
    while True:
        explorer = _Explorer(program, TokenGraph(root), refuted, not_tokens)
        explorer.run()
        wrong = explorer.wrong_guesses()
        if not wrong:
            return explorer.graph
        refuted |= wrong


def _keeps_zeros(all_reduce: ir.Operation) -> bool:
    """Whether zeros are reduced to zero: `op(%a, %b)` of the region's own two arguments."""
    block = all_reduce.regions[0].blocks[0]
    first = block.operations[0].operation
    return (
        first.name.removeprefix("stablehlo.") in ZERO_KEEPING
        and list(terminator(block).operands) == list(first.results)
        and set(first.operands) == set(block.arguments)
    )


@dataclass(frozen=True, eq=False)
class _Guess:
    """That a value handed around is a token; so it is, if all these values are."""

    key: Hashable
    values: tuple[ir.Value, ...]


@dataclass(frozen=True, eq=False)
class _Product:
    """A token times a first element."""

    op: ir.Operation
    position: int
    base: Base
    element: FirstElement


class _Explorer:
    def __init__(
        self,
        program: Program,
        graph: TokenGraph,
        refuted: set[Hashable],
        not_tokens: frozenset[ir.Value],
    ) -> None:
        self.program = program
        self.graph = graph
        self.refuted = refuted
        self.not_tokens = not_tokens
        self.pending: list[ir.Value] = []
        self.fed: set[tuple[ir.Value, Base]] = set()  # which collective takes which token
        self.products: list[_Product] = []  # of a first element, that may make a token
        self.guesses: list[_Guess] = []
        self.rules: dict[str, Callable[[ir.Operation, int, ir.Value, Base], bool]] = {
            ADD: self._sum,
            OR: self._sum,
            MULTIPLY: self._product,
            ALL_REDUCE: self._all_reduce,
            WHILE: self._loop,
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
                self._visit(self.pending.pop())
            progress = self._make_products()
        for product in self.products:
            self._escape(product.op, product.position, product.base)
        self._drop_sums_of_tokens()

    def wrong_guesses(self) -> set[Hashable]:
        """The guesses that some value refutes."""
        bases = self.graph.bases
        return {g.key for g in self.guesses if any(v not in bases for v in g.values)}

    def _add(self, value: ir.Value, base: Base) -> None:
        if value not in self.graph.bases:
            self.graph.bases[value] = base
            self.pending.append(value)

    def _escape(self, op: ir.Operation, position: int, base: Base) -> None:
        self.graph.escapes.append(Escape(op, position, base))

    def _visit(self, value: ir.Value) -> None:
        base = self.graph.bases[value]
        for use in value.uses:
            op, position = use.owner.operation, use.operand_number
            if not self._use(op, position, value, base):
                self._escape(op, position, base)

    def _use(self, op: ir.Operation, position: int, value: ir.Value, base: Base) -> bool:
        """Notes one use of a token; False for one that is no part of a chain."""
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
        """x + token: a link for each collective that reads it."""
        plain = op.operands[1 - position]
        uses = list(op.results[0].uses)
        readers = [use for use in uses if use.owner.operation.name in FED_BY_ADDITION]
        for use in readers:
            collective = use.owner.operation
            self.graph.links.append(Link(collective, use.operand_number, plain, base))
            self.fed.add((collective.results[0], base))
        if readers:
            self.graph.images.append(op)
        return len(readers) == len(uses)

    def _product(self, op: ir.Operation, position: int, _: ir.Value, base: Base) -> bool:
        element = first_element(op.operands[1 - position])
        if element is None or op.results[0] in self.not_tokens:
            return False
        self.products.append(_Product(op, position, base, element))
        return True

    def _all_reduce(self, op: ir.Operation, position: int, value: ir.Value, base: Base) -> bool:
        """An all_reduce with the token as one operand more, the last."""
        is_extra = position == len(op.operands) - 1 > 0
        token = op.results[position]
        if not is_extra or not is_scalar(value) or token in self.not_tokens:
            return False
        if not _keeps_zeros(op):
            return False
        self.graph.makers.append(Maker(op, op, position, base, token))
        self._add(token, token)
        return True

    def _make_products(self) -> bool:
        """Turns token * first element into new tokens, where the collective took that token."""
        waiting: list[_Product] = []
        for product in self.products:
            element, token = product.element, product.op.results[0]
            if (element.collective.results[0], product.base) not in self.fed:
                waiting.append(product)
                continue
            maker = Maker(
                element.collective, product.op, product.position, product.base, token, element.path
            )
            self.graph.makers.append(maker)
            self._add(token, token)
        progress = len(waiting) < len(self.products)
        self.products = waiting
        return progress

    def _drop_sums_of_tokens(self) -> None:
        """A token plus a token is no operand with a token added."""
        bases = self.graph.bases
        sums = [link for link in self.graph.links if link.plain in bases]
        for link in sums:
            self.graph.links.remove(link)
            self._escape(link.collective, link.position, link.base)

    def _loop(self, op: ir.Operation, position: int, _: ir.Value, base: Base) -> bool:
        return self._carried_by_loop(op, position, op, base)

    def _carried_by_loop(
        self, loop: ir.Operation, position: int, user: ir.Operation, base: Base
    ) -> bool:
        condition, body = (region.blocks[0] for region in loop.regions)
        targets = (
            condition.arguments[position],
            body.arguments[position],
            loop.results[position],
        )
        both = (loop.operands[position], terminator(body).operands[position])
        return self._hand_on(user, position, base, targets, loop.results[position], both)

    def _call(self, op: ir.Operation, position: int, _: ir.Value, base: Base) -> bool:
        callee = self.program.callee(op)
        if callee is None:
            return False
        argument = callee.regions[0].blocks[0].arguments[position]
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
            returned = tuple(
                terminator(region.blocks[0]).operands[position] for region in parent.regions
            )
            return self._hand_on(op, position, base, (result,), result, returned)
        if parent.name == WHILE and op.block == parent.regions[1].blocks[0]:
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
        """A token handed to `targets`, which are tokens if `values` all are."""
        if key in self.refuted:
            return False
        self.guesses.append(_Guess(key, tuple(values)))
        self.graph.flows.append(Flow(op, position, base, targets))
        for target in targets:
            self._add(target, target)
        return True
