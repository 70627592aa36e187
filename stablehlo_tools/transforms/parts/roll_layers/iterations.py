"""Proves that repeated ops are the iterations of a loop, by the source of each operand.

Each operand of op q is the same kind of source in every iteration, one of

    inside   a result of op r of the same iteration
    carried  a result of op r of the iteration before; in the first one, a value from outside
    same     one value from outside, or equal constants
    rows     a value from outside for each iteration: its weights, or a residual of the forward

Otherwise the ops are not a loop. The first and the last iteration may lack ops of the others:

  - A sum over all iterations begins with the first term, such as gradients of weights that all
    layers share. The first iteration of the loop adds that term to -0.0, the identity of addition.
  - A result of the last iteration may be unused, such as the cotangent of the input. The loop
    computes it all the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from stablehlo_tools.analysis.dataflow import Dataflow, Node
from stablehlo_tools.analysis.dimension_propagation.tilings import CONTRACTIONS
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import ADD, SHARDING_CONSTRAINT, WHILE
from stablehlo_tools.ir.values import CONSTANTS, describe_op, value_text
from stablehlo_tools.transforms.parts.roll_layers.repetitions import OpSequence, Repetition, phases

_MOST_PHASES = 12
_LEAST_OF_LAST = 3  # the last iteration has at least 1 / 3 of the ops of the others


class IterationResult(NamedTuple):
    """Result number `result` of op `position` of an iteration."""

    position: int
    result: int


@dataclass(frozen=True)
class IterationCarry:
    """A result of the iteration before. The first iteration reads value number `start`; if that is
    None, it reads the identity of addition."""

    made: IterationResult
    start: int | None


@dataclass(frozen=True)
class Inside:
    """A result of the same iteration."""

    made: IterationResult


@dataclass(frozen=True)
class Same:
    """A value from outside that all iterations read."""

    number: int


@dataclass(frozen=True)
class IterationRows:
    """A value from outside for each iteration, in the order in which they run; None for an
    iteration that does not read it."""

    numbers: tuple[int | None, ...]


Source = Inside | IterationCarry | Same | IterationRows


class NoLoopError(Exception):
    """The reason why repeated ops are not a loop, and the op that shows it."""

    def __init__(self, why: str, node: Node) -> None:
        super().__init__(why)
        self.why = why
        self.node = node


type Row = list[Node | None]  # the ops of an iteration, None for the ones it lacks
type Numbers = tuple[int | None, ...]  # of one value in each iteration


@dataclass(frozen=True)
class Iterations:
    """Ops that are the iterations of a loop.

    `template` are the ops of a complete iteration. `sources` are the sources of their operands and
    then of the values that their regions use. `ops[i][q]` is op q of iteration i, and `made[i][q]`
    are the numbers of its results. For a sum that the first iteration lacks, `made` holds its term.
    """

    template: tuple[Node, ...]
    ops: tuple[Row, ...]
    made: tuple[list[tuple[int, ...] | None], ...]
    sources: tuple[tuple[Source, ...], ...]

    @property
    def count(self) -> int:
        """The number of iterations."""
        return len(self.ops)

    @property
    def nodes(self) -> Iterator[Node]:
        """All ops of all iterations."""
        return (node for row in self.ops for node in row if node is not None)

    @property
    def carried(self) -> list[IterationCarry]:
        """The values that are carried from iteration to iteration."""
        sources = (s for row in self.sources for s in row if isinstance(s, IterationCarry))
        return list(dict.fromkeys(sources))

    @property
    def rows(self) -> list[IterationRows]:
        """The values that differ for each iteration."""
        sources = (s for row in self.sources for s in row if isinstance(s, IterationRows))
        return list(dict.fromkeys(sources))

    def row_of(self, made: IterationResult) -> Numbers:
        """Returns the numbers of a result in the iterations."""
        return tuple(_column([row[made.position] for row in self.made], made.result))

    def entries_of(self, carried: IterationCarry) -> Numbers:
        """Returns the numbers of a carried value at the start of each iteration."""
        return carried.start, *self.row_of(carried.made)[:-1]

    @property
    def invariant(self) -> list[int]:
        """The positions of ops whose results are the same in every iteration."""
        same: list[int] = []
        for position, sources in enumerate(self.sources):
            if all(
                isinstance(source, Same)
                or (isinstance(source, Inside) and source.made.position in same)
                for source in sources
            ):
                same.append(position)
        return same


def find_iterations(
    flow: Dataflow, sequence: OpSequence, repeated: Repetition, counts: Collection[int] = ()
) -> Iterations | NoLoopError:
    """Returns the loop that a repetition forms. Of its possible readings, the one with the most
    iterations counts, and of equal ones that with the fewest carried bytes. Returns the error of
    the likeliest reading if there is none.

    The last iteration may lack ops whose results are unused. Such an iteration is only added if the
    number of iterations is then one of `counts`, the numbers of the loops before it.
    """
    best: Iterations | None = None
    refused: NoLoopError | None = None
    for begin in phases(flow, sequence.nodes, repeated)[:_MOST_PHASES]:
        count = (repeated.limit - begin) // repeated.period
        try:
            found = _IterationReader(flow, sequence, begin, repeated.period, count).read(counts)
        except NoLoopError as error:
            refused = refused or error
            continue
        if best is None or found.count > best.count:
            best = found
    outcome = best or refused
    assert outcome is not None, "a repetition has two periods, and so a phase"
    return outcome


class _OperandLink(NamedTuple):
    """The op of the template that an operand comes from, in the same iteration or in the one
    before."""

    made: IterationResult
    is_carried: bool


class _IterationReader:
    """Reads `count` complete iterations of `period` ops from `begin` on."""

    def __init__(
        self, flow: Dataflow, sequence: OpSequence, begin: int, period: int, count: int
    ) -> None:
        self._flow = flow
        self._nodes = sequence.nodes
        self._looks = sequence.looks
        self._begin = begin
        self._period = period
        starts = range(begin, begin + count * period, period)
        self._complete: list[Row] = [list(sequence.nodes[at : at + period]) for at in starts]
        self._template = [node for node in self._complete[1] if node is not None]
        self._links = self._find_links()

    def read(self, counts: Collection[int]) -> Iterations:
        """Returns the loop, with an incomplete iteration at either end if there is one. Raises
        NoLoopError."""
        first, last = self._shorter_first(), self._shorter_last()
        attempts = [[*first, *self._complete, *last], [*self._complete, *last]] if last else []
        attempts = [rows for rows in attempts if len(rows) in counts]
        if first:
            attempts.append([*first, *self._complete])
        for rows in attempts:
            with suppress(NoLoopError):
                return self._build_iterations(rows)
        return self._build_iterations(self._complete)

    def _find_links(self) -> list[list[_OperandLink | None]]:
        """Returns the links of the operands of the second iteration; None for values from
        outside."""
        place = {
            number: (i, IterationResult(q, r))
            for i, row in enumerate(self._complete[:2])
            for q, node in enumerate(row)
            for r, number in enumerate(node.results if node else ())
        }
        later = {
            number for row in self._complete[2:] for node in row if node for number in node.results
        }
        links: list[list[_OperandLink | None]] = []
        for node in self._template:
            own: list[_OperandLink | None] = []
            for number in used_values(node):
                i, made = place.get(number, (None, IterationResult(0, 0)))
                if number in later:
                    raise NoLoopError("reads a result of a later iteration", node)
                own.append(None if i is None else _OperandLink(made, is_carried=i == 0))
            links.append(own)
        return links

    def _shorter_first(self) -> list[Row]:
        """Returns an iteration before the complete ones; it lacks sums, which then have only one
        term. Returns [] if there is none."""
        lacking = set[int]()
        for q in range(self._period):
            # It also lacks sharding constraints on such sums.
            link = self._links[q][0] if self._template[q].name == SHARDING_CONSTRAINT else None
            constrains = link and not link.is_carried and link.made.position in lacking
            if self._only_adds(q) or constrains:
                lacking.add(q)
        at = self._begin - (self._period - len(lacking))
        if not lacking or at < 0:
            return []
        row: Row = []
        for q in range(self._period):
            if q in lacking:
                row.append(None)
                continue
            if self._looks[at] != self._looks[self._begin + q]:
                return []
            row.append(self._nodes[at])
            at += 1
        return [row]

    def _only_adds(self, q: int) -> bool:
        """Returns True if an op adds a term to a carried value that no other op of an iteration
        uses."""
        node, links = self._template[q], self._links[q]
        handed = [link for link in links if link is not None and link.is_carried]
        own = [link for link in links if link is not None and not link.is_carried]
        if node.name != ADD or len(handed) != 1 or len(own) != 1:
            return False
        return sum(handed[0] == link for row in self._links for link in row) == 1

    def _shorter_last(self) -> list[Row]:
        """Returns an iteration after the complete ones that lacks ops with unused results; [] if
        there is none."""
        at = self._begin + self._period * len(self._complete)
        before, row = self._complete[-1], list[Node | None]()
        for q in range(self._period):
            is_next = at < len(self._nodes) and self._follows(q, at, before, row)
            row.append(self._nodes[at] if is_next else None)
            at += is_next
        present = [node for node in row if node is not None]
        if len(present) * _LEAST_OF_LAST < len(row):
            return []
        lacking = (node for node, own in zip(self._template, row, strict=True) if own is None)
        if any(node.name == WHILE for node in lacking):
            return []  # the number of its trips on unused values is unknown
        return [row] if any(node.name in CONTRACTIONS for node in present) else []

    def _follows(self, q: int, at: int, before: Row, row: Row) -> bool:
        """Returns True if the operands of an op in the last iteration correspond to those of op
        q."""
        if self._looks[at] != self._looks[self._begin + q]:
            return False
        own = used_values(self._nodes[at])
        for link, number in zip(self._links[q], own, strict=True):
            if link is None:
                continue
            maker = (before if link.is_carried else row)[link.made.position]
            if maker is None or maker.results[link.made.result] != number:
                return False
        return True

    def _build_iterations(self, ops: Sequence[Row]) -> Iterations:
        """Returns the iterations. Raises NoLoopError if an operand has different kinds of source in
        them."""
        made = [[None if node is None else node.results for node in row] for row in ops]
        for q, node in enumerate(ops[0]):
            if node is None:  # the first iteration lacks a sum: its term takes its place
                link = next(each for each in self._links[q] if each and not each.is_carried)
                term = made[0][link.made.position]
                made[0][q] = None if term is None else (term[link.made.result],)
        inside = {n for row in ops for node in row if node is not None for n in node.results}
        sources: list[tuple[Source, ...]] = []
        for q, node in enumerate(self._template):
            own = [None if each is None else used_values(each) for row in ops for each in (row[q],)]
            sources.append(
                tuple(
                    self._source(node, link, _column(own, k), made, inside)
                    for k, link in enumerate(self._links[q])
                )
            )
        found = Iterations(tuple(self._template), tuple(ops), tuple(made), tuple(sources))
        self._check(found)
        return found

    def _source(
        self,
        node: Node,
        link: _OperandLink | None,
        numbers: Sequence[int | None],
        made: Sequence[Sequence[tuple[int, ...] | None]],
        inside: set[int],
    ) -> Source:
        if link is None:
            return self._outside(node, numbers, inside)
        expected = _column([row[link.made.position] for row in made], link.made.result)
        if not link.is_carried:
            self._check_equal(node, numbers, expected)
            return Inside(link.made)
        self._check_equal(node, numbers[1:], expected[:-1])
        if numbers[0] in inside:
            raise NoLoopError("reads in the first iteration a result of another one", node)
        return IterationCarry(link.made, numbers[0])

    def _check_equal(
        self, node: Node, numbers: Sequence[int | None], expected: Sequence[int | None]
    ) -> None:
        pairs = zip(numbers, expected, strict=True)
        if any(own is not None and own != other for own, other in pairs):
            raise NoLoopError("reads results of different ops in different iterations", node)

    def _outside(self, node: Node, numbers: Sequence[int | None], inside: set[int]) -> Source:
        present = [number for number in numbers if number is not None]
        if not inside.isdisjoint(present):
            raise NoLoopError("reads in some iterations a result of another iteration", node)
        if len(set(present)) == 1 or len({value_text(n.op) for n in self._constants(present)}) == 1:
            return Same(present[0])
        if len({self._flow.values[number].type for number in present}) > 1:
            raise NoLoopError("reads values of different types in different iterations", node)
        return IterationRows(tuple(numbers))

    def _constants(self, numbers: Iterable[int | None]) -> list[Node]:
        """Returns the ops that make values if all of them are constants; otherwise an empty
        list."""
        makers = [self._flow.maker.get(number) for number in numbers if number is not None]
        constants = [node for node in makers if node is not None and node.name in CONSTANTS]
        return constants if len(constants) == len(makers) else []

    def _check(self, found: Iterations) -> None:
        """Raises NoLoopError unless layers pass a value on, each reads one of its own, and no op
        from outside is between them."""
        for node in found.template:
            if not all(
                isinstance(type_, ir.RankedTensorType)
                and type_.has_static_shape
                and isinstance(type_.element_type, ir.FloatType | ir.IntegerType | ir.ComplexType)
                for type_ in (value.type for value in (*node.op.operands, *node.op.results))
            ):
                raise NoLoopError("has values that cannot be stacked", node)
        # An iteration must carry a value that depends on its own carries.
        following: set[int] = set()
        for position, sources in enumerate(found.sources):
            if any(
                isinstance(source, IterationCarry)
                or (isinstance(source, Inside) and source.made.position in following)
                for source in sources
            ):
                following.add(position)
        if not (any(each.made.position in following for each in found.carried)):
            raise NoLoopError(
                "passes no value on that depends on the previous iteration", found.template[0]
            )
        if all(self._constants(row.numbers) for row in found.rows):
            raise NoLoopError("reads no value that differs between iterations", self._template[0])
        own = {node.index for node in found.nodes}
        made = {number for node in found.nodes for number in node.results}
        behind: set[int] = set()
        for node in self._flow.nodes[min(own) : max(own) + 1]:
            if node.index in own:
                between = behind.intersection(node.inputs)
                if between:
                    maker = self._flow.maker[min(between)]
                    raise NoLoopError(
                        f"reads a result of {describe_op(maker.op)} between layers", node
                    )
            elif not (made | behind).isdisjoint(node.inputs):
                behind.update(node.results)


def used_values(node: Node) -> tuple[int, ...]:
    """Returns the values that an op uses: its operands, and the captures of its regions."""
    return (*node.operands, *node.captures)


def _column(rows: Sequence[tuple[int, ...] | None], place: int) -> list[int | None]:
    return [None if row is None else row[place] for row in rows]
