"""Blocks under construction, and dependences as they are seen from outside of a loop or branch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import and_, or_

from stablehlo_tools.analysis.dependence import Dependence
from stablehlo_tools.order.program import Block, Issue, Node, Signature, TextOrder


@dataclass
class Level:
    """A block under construction: its nodes, the bit of each, and what each must come after."""

    nodes: list[Node] = field(default_factory=list[Node])
    bits: list[int] = field(default_factory=list[int])
    after: list[int] = field(default_factory=list[int])
    is_chain: bool = False
    name: str = ""  # of the place in the program, the same in programs of the same form
    forms: Counter[Signature] = field(default_factory=Counter[Signature])

    def nested(self, region: int) -> Level:
        """A level for a region of the next loop or branch."""
        count = sum(1 for node in self.nodes if not isinstance(node, Issue))
        return Level(name=f"{self.name}/{count}.{region}")

    def block(self) -> Block:
        """The finished block."""
        if self.is_chain:
            return Block(tuple(self.nodes), TextOrder(len(self.nodes)))
        return Block(tuple(self.nodes), tuple(self._positions(after) for after in self.after))

    def all_bits(self) -> int:
        """The bits of all nodes."""
        return reduce(or_, self.bits, 0)

    def _positions(self, after: int) -> int:
        if not self.bits:
            return 0
        first = self.bits[0].bit_length() - 1
        if self.bits[-1].bit_length() - first == len(self.bits):  # bits in a row: the usual case
            return after >> first & (1 << len(self.bits)) - 1
        return sum(1 << i for i, bit in enumerate(self.bits) if after & bit)


@dataclass(frozen=True)
class Iteration:
    """One reading of a loop's regions, and what the body's returned values depend on."""

    condition: Level
    body: Level
    ends: list[Dependence]

    def levels(self) -> tuple[Level, Level]:
        """The condition and the body."""
        return self.condition, self.body

    def all_bits(self) -> int:
        """The bits of all nodes of an iteration."""
        return self.condition.all_bits() | self.body.all_bits()


def common_before(levels: Iterable[Level]) -> int:
    """What every node of the levels must come after."""
    after = [bits for level in levels for bits in level.after]
    return reduce(and_, after, -1) if after else 0


def below(bit: int) -> int:
    """All bits below one, given by its position."""
    return (1 << bit) - 1


def from_outside(part: Dependence, inner: int, bit: int, first: int) -> Dependence:
    """A dependence as the outside sees it: `bit` in place of all the `inner` bits."""
    outside = below(first)
    return part.mapped(lambda bits: bits & outside | (bit if inner & ~bits == 0 else 0))


def either(parts: Sequence[Dependence]) -> Dependence:
    """A result of a branch. Not of its predicate: where both sides are alike, that is dropped."""
    return reduce(Dependence.common, parts)
