"""Extents: the dimensions of two programs that have equal sizes, and the positions a twin keeps.

An extent is a range of positions. All dimensions that must have the same size share one extent. An
op may divide a dimension (a reshape, an argument's shards, halves of a batch). Then it is a product
of several extents, major first, like the digits of a number:

    4096 divided over 8 devices            ==>  8 x 512
    4096 = 32 heads of 128, halved         ==>  32 x 2 x 64

A twin keeps positions of an extent from both of its ends, and those around constants with which the
programs compare positions. So it is the full program restricted to some positions. All dimensions
of an extent keep the same positions, and an integer that counts positions means the same as at full
size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np


class TwinExtent:
    """A range of positions that dimensions share.

    `kept` says why the twin keeps all positions; "" if it need not. `positional` names an op that
    depends on the remaining positions, if there is one. Use `root` first: it represents all extents
    that were united.
    """

    __slots__ = ("_count", "_ends", "_of", "_wanted", "kept", "least", "nesting", "parts",
                 "positional", "size", "terms", "within")  # fmt: skip

    def __init__(self, size: int, kept: str = "", nesting: int = 0) -> None:
        self.size = size
        self.kept = kept
        self.positional = ""
        self.parts: tuple[TwinExtent, ...] = ()  # it is their product
        self.terms: tuple[TwinExtent, ...] = ()  # it is their sum
        self.nesting = nesting  # the number of nested sums around it
        self.least = 1  # positions that a twin needs at either end
        self._ends = self._count = size
        self._wanted: set[int] = set()
        self.within: Within | None = None  # the whole that it follows: it drops equally many
        self._of: TwinExtent | None = None

    @property
    def root(self) -> TwinExtent:
        """The extent that represents all that were united with this one."""
        found = self
        while found._of is not None:
            found = found._of
        passed = self
        while passed._of is not None and passed._of is not found:
            following = passed._of
            passed._of = found
            passed = following
        return found

    def become(self, other: TwinExtent) -> None:
        """Makes another root represent this one."""
        self._of = other
        other.least = max(other.least, self.least)

    @property
    def leaves(self) -> tuple[TwinExtent, ...]:
        """The extents whose product is this one, major first."""
        root = self.root
        if not root.parts:
            return (root,)
        return tuple(leaf for part in root.parts for leaf in part.leaves)

    @property
    def atoms(self) -> tuple[TwinExtent, ...]:
        """All undivided extents of its products and sums."""
        leaves = self.leaves
        if leaves == (self.root,) and not self.root.terms:
            return leaves
        return tuple(atom for e in leaves for part in (e.terms or (e,)) for atom in part.atoms)

    @property
    def count(self) -> int:
        """The number of positions of a leaf that the twin has."""
        return sum(term.reduced for term in self.terms) if self.terms else self._count

    def reduce(self, ends: int) -> None:
        """Reduces a leaf to `ends` positions at its ends, and the wanted ones."""
        self._ends = min(ends, self.size)
        self._count = len(self.own_positions())

    def want(self, position: int) -> None:
        """Makes the twin keep a position, unless `_MOST_WANTED` others are wanted already.

        A sum of extents ignores it."""
        for leaf in reversed(self.leaves):
            position, digit = divmod(position, leaf.size)
            if leaf.within is not None:
                leaf.within.whole.want(digit + leaf.within.start)
            elif len(leaf._wanted) < _MOST_WANTED:
                leaf._wanted.add(digit)

    def depend_on(self, why: str) -> None:
        """Records an op that depends on the positions of the extent that the twin has."""
        for atom in self.atoms:
            if atom.within is not None:
                atom.within.whole.depend_on(why)
            elif not atom.is_whole:
                atom.positional = atom.positional or why

    @property
    def reduced(self) -> int:
        """The number of positions that the twin has."""
        return math.prod(leaf.count for leaf in self.leaves)

    @property
    def positional_op(self) -> str:
        """The first op that depends on positions of one of its atoms; "" if none does."""
        found = (a.within.whole.positional_op if a.within else a.positional for a in self.atoms)
        return next(filter(None, found), "")

    @property
    def is_whole(self) -> bool:
        """True if the twin has all positions."""
        return self.reduced == self.size

    def positions(self) -> np.ndarray:
        """The positions that the twin has, ascending."""
        positions = np.zeros(1, np.int64)
        for leaf in self.leaves:
            positions = (positions[:, None] * leaf.size + leaf.own_positions()).reshape(-1)
        return positions

    def own_positions(self) -> np.ndarray:
        """Returns the positions of a leaf: its ends and the wanted ones, or those of its whole."""
        if self.terms:
            starts = np.cumsum([0, *(term.size for term in self.terms)])
            pairs = zip(self.terms, starts, strict=False)
            return np.concatenate([term.positions() + start for term, start in pairs])
        if self.within is not None:
            positions = self.within.whole.positions() - self.within.start
            return positions[(positions >= 0) & (positions < self.size)]
        tail = self._ends // 2
        ends = [np.arange(self._ends - tail), np.arange(self.size - tail, self.size)]
        return np.union1d(np.concatenate(ends), np.array(sorted(self._wanted), np.int64))


def keep(extent: TwinExtent, why: str) -> None:
    """Makes the twin keep all positions of an extent; `why` is shown to the user."""
    for atom in extent.atoms:
        atom.kept = atom.kept or why


def unite(one: TwinExtent, other: TwinExtent) -> None:
    """Makes two extents of the same size one."""
    _match([one], [other])


def divide(extent: TwinExtent, sizes: Sequence[int]) -> list[TwinExtent]:
    """Divides an extent into factors, major first; returns these.

    If another division of it is not compatible, all of it is kept."""
    parts = [TwinExtent(size) for size in sizes]
    if math.prod(sizes) != extent.size:
        keep(extent, "divided unevenly")
        return [TwinExtent(size, "divided unevenly") for size in sizes]
    _match([extent], parts)
    return parts


def _match(ones: Iterable[TwinExtent], others: Iterable[TwinExtent]) -> None:
    """Identifies two lists of extents whose products are equal."""
    left, right = list(ones)[::-1], list(others)[::-1]
    while left and right:
        if left[-1].size == 1 or right[-1].size == 1:
            (left if left[-1].size == 1 else right).pop()
            continue
        one, other = left.pop().root, right.pop().root
        if one is other:
            continue
        if one.size == other.size:
            _merge(one, other)
            continue
        if one.size < other.size:
            one, other, left, right = other, one, right, left
        if one.parts:
            left += one.parts[::-1]
            right.append(other)
        elif one.size % other.size:
            for extent in (one, other, *left, *right):
                keep(extent, f"divided by {other.size}, and by sizes that do not divide each other")
            return
        else:
            head = TwinExtent(other.size, one.kept)
            tail = TwinExtent(one.size // other.size, one.kept)
            terms, one.terms, one.parts = one.terms, (), (head, tail)
            if terms:
                _join_blocks(one, terms)
            left += [tail, head]
            right.append(other)


def _merge(one: TwinExtent, other: TwinExtent) -> None:
    """Makes two roots of the same size one."""
    if one.parts or (one.terms and not other.parts):
        one, other = other, one
    one.become(other)  # the more divided of the two
    if one.kept:
        keep(other, one.kept)
    if one.parts:
        _match(one.parts, other.parts)
    elif one.terms and other.parts:
        _join_blocks(other, one.terms)
    elif one.terms:
        _align(one.terms, other.terms)


def _align(ones: Iterable[TwinExtent], others: Iterable[TwinExtent]) -> None:
    """Identifies two lists of extents whose sums are equal."""
    left, right = list(ones)[::-1], list(others)[::-1]
    while left and right:
        one, other = left.pop().root, right.pop().root
        if one.size == other.size:
            unite(one, other)
            continue
        if one.size < other.size:
            one, other, left, right = other, one, right, left
        if not one.terms:
            if one.parts or one.kept or max(len(left) + len(right), one.nesting) > _TERMS:
                for extent in (one, other, *left, *right):
                    keep(extent, "overlapping slices of it are used")
                return
            sizes = (other.size, one.size - other.size)
            one.terms = tuple(TwinExtent(size, nesting=one.nesting + 1) for size in sizes)
        left += one.terms[::-1]
        right.append(other)


def _join_blocks(whole: TwinExtent, parts: Sequence[TwinExtent]) -> None:
    """Divides a whole and its parts into blocks of one size, which all drop the same positions.

    If there are more than `_BLOCKS` blocks, all positions are kept."""
    block = math.gcd(*(part.size for part in parts))
    if block == 1 or whole.size // block > _BLOCKS:
        why = f"slices of {' and '.join(str(p.size) for p in parts[:4])} are taken from it"
        for extent in (whole, *parts):
            keep(extent, why)
        return
    number, each = divide(whole, [whole.size // block, block])
    keep(number, "slices of it are used or joined")
    for part in parts:
        number, own = divide(part, [part.size // block, block])
        keep(number, "slices of it are used or joined")
        unite(own, each)


@dataclass(frozen=True, slots=True)
class Within:
    """A part of an extent, from `start` on, that drops as many positions as the whole does."""

    part: TwinExtent
    whole: TwinExtent
    start: int


_BLOCKS = 16  # most blocks of a whole; the twin has all of them
_TERMS = 64  # most terms of a sum, and most nested sums
_ENDS = 64  # most positions outside the longest part; the twin has all of them


class Extents:
    """All extents of two programs."""

    def __init__(self) -> None:
        self._within: list[Within] = []

    def join(self, whole: TwinExtent, parts: Sequence[TwinExtent]) -> None:
        """Makes a whole the concatenation of its parts.

        Equal parts drop the same positions. If all parts but one have few positions, these are
        kept. Otherwise each part drops the positions that it drops elsewhere.
        """
        parts = [part for part in parts if part.size]
        longest = max(parts, key=lambda part: part.size)
        if len(parts) == 1:
            unite(whole, longest)
        elif len({part.size for part in parts}) == 1 and longest.size > 1 and len(parts) <= _BLOCKS:
            _join_blocks(whole, parts)
        elif whole.size - longest.size <= _ENDS:
            start = 0
            for part in parts:
                if part is longest:
                    self._within.append(Within(part, whole, start))
                else:
                    keep(part, f"the part beside it is {longest.size} of {whole.size}")
                start += part.size
        else:
            sum_ = TwinExtent(whole.size)
            sum_.terms = tuple(parts)
            unite(whole, sum_)

    def settle(
        self,
        reducible: Sequence[TwinExtent],
        wanted: Iterable[tuple[TwinExtent, int]] = (),
        more: int = 0,
    ) -> None:
        """Decides which positions of each extent the twin has; only `reducible` ones drop any.

        `wanted` are positions to keep; each extent gets `more` positions. Extents that are next in
        size get different counts, so that extents whose sizes are equal by chance differ in the
        twin.
        """
        follows = self._followers(reducible)
        leaves = dict.fromkeys(atom for extent in reducible for atom in extent.atoms)
        led = [within for within in self._within if within.part.root in follows]
        for within in sorted(led, key=lambda within: within.whole.size):
            within.part.root.within = within  # the last one, the largest whole, remains
        for within in led:
            head = tail = 0
            step: Within | None = within
            while step is not None:
                head += step.start
                tail += step.whole.size - step.start - step.part.size
                last = step.whole.leaves[-1]
                last.least = max(last.least, head + 1, tail + 1)  # + 1: the first of the part
                step = last.within
        free = [e for e in leaves if not e.kept and e.within is None and e.size > _SMALL]
        for extent, position in wanted:
            extent.want(position)
        for place, leaf in enumerate(sorted(free, key=lambda leaf: -leaf.size)):
            count = max(_COUNTS[place % len(_COUNTS)], 2 * leaf.least)
            leaf.reduce(count + more if count + more < leaf.size else count)
        for part in sorted(follows, key=lambda part: -part.size):
            part.reduce(part.size)

    def _followers(self, reducible: Iterable[TwinExtent]) -> set[TwinExtent]:
        """Returns the parts that can follow their wholes; keeps the others and their wholes."""
        while True:
            # Unite wholes of one size that have the same part.
            united: dict[tuple[TwinExtent, int], TwinExtent] = {}
            for within in self._within:
                key = within.part.root, within.whole.size
                unite(united.setdefault(key, within.whole), within.whole)
            same = (Within(w.part.root, w.whole.root, w.start) for w in self._within)
            self._within = list(dict.fromkeys(same))
            free = {atom for e in reducible for atom in e.atoms if not atom.kept}
            wholes: dict[TwinExtent, set[TwinExtent]] = {}
            for within in self._within:
                wholes.setdefault(within.part.root, set()).add(within.whole.root)
            held = [within for within in self._within if not _can_follow(within, free, wholes)]
            apart = [w for w in held if not w.whole.root.parts and not w.whole.root.kept]
            if apart:
                self._take_apart(apart)
                continue
            for within in held:
                why = f"{within.part.size} of {within.whole.size} are sliced from it"
                keep(within.part, why)
                keep(within.whole, why)
            self._drop(held)
            if not held:
                return {part for part in wholes if not part.kept}

    def _take_apart(self, several: Sequence[Within]) -> None:
        """Makes undivided wholes the sum of a part and the positions before and after it.

        If several of them share an extent, it does so for one. If a whole is such a sum already, a
        part of it at another position has the same length.
        """
        touched: set[TwinExtent] = set()
        taken: list[Within] = []
        for within in several:
            if any(_are_alike(term, within.part) for term in within.whole.root.terms):
                taken.append(within)
                continue
            roots = {within.part.root, within.whole.root}
            if touched & roots:
                continue
            touched |= roots
            tail = within.whole.size - within.start - within.part.size
            why = f"the slice beside it is {within.part.size} of {within.whole.size}"
            sum_ = TwinExtent(within.whole.size)
            terms = (TwinExtent(within.start, why), within.part, TwinExtent(tail, why))
            sum_.terms = tuple(term for term in terms if term.size)
            unite(within.whole, sum_)
            touched.add(sum_.root)
            taken.append(within)
        self._drop(taken)

    def _drop(self, several: Iterable[Within]) -> None:
        dropped = set(several)
        self._within = [within for within in self._within if within not in dropped]


def _are_alike(one: TwinExtent, other: TwinExtent) -> bool:
    """Returns True if a twin has the same positions of two extents: their reducible leaves are the
    same."""
    leaves = one.leaves, other.leaves
    return len(leaves[0]) == len(leaves[1]) and all(
        mine is theirs or bool(mine.size == theirs.size and mine.kept and theirs.kept)
        for mine, theirs in zip(*leaves, strict=True)
    )


def _can_follow(
    within: Within, free: set[TwinExtent], wholes: Mapping[TwinExtent, set[TwinExtent]]
) -> bool:
    """Returns True if a part can drop as many positions as its whole; `wholes` maps all parts."""
    part, whole = within.part.root, within.whole.leaves
    if part.atoms != (part,) or part.kept or within.whole.root is part:
        return False
    tops = wholes[part]
    while any(top in wholes for top in tops):
        tops = {above for top in tops for above in wholes.get(top, (top,))}
    if len(tops) > 1:
        return False
    lost = whole[-1] in free or (whole[-1] in wholes and not whole[-1].kept)
    return lost and not any(leaf in free or leaf in wholes for leaf in whole[:-1])


_COUNTS = (3, 4)  # positions at both ends together
_SMALL = 4  # an extent of at most so many positions keeps them
_MOST_WANTED = 12  # wanted positions of an extent
