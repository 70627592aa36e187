"""Divisions of values and ops, as numbers that are quick to compare.

A mesh axis is split into *atoms* wherever a sharding of the program names a part of it, so that two
atoms never overlap. A *layout* lists the atoms that divide each dimension of a value, major first.
A *strategy* lists those on each factor of an op.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations, pairwise

from stablehlo_tools.analysis.replica_groups import AxisRef
from stablehlo_tools.analysis.shardings import Axes, Dims, MeshAxes, ShardingRule

_MOST_PADDED = 2.0  # limit on the padded size, as a multiple of the actual size

AtomList = tuple[int, ...]
Layout = tuple[AtomList, ...]
Strategy = tuple[AtomList, ...]


class Atoms:
    """The atoms of a mesh; an axis of one device has none.

    With `joined`, neighbouring axes may also be moved as one."""

    def __init__(self, axes: MeshAxes, used: Iterable[AxisRef], *, joined: bool = False) -> None:
        self.axes = axes
        self._joined = joined
        cuts = {name: {1, size} for name, size in axes.mesh.axes}
        for axis in used:
            if axis.size is not None:
                cuts[axis.name] |= {axis.pre_size, axis.pre_size * axis.size}
        self.refs: list[AxisRef] = []
        self._of_axis: dict[str, list[int]] = {}
        self._starts: list[int] = []
        for name, size in axes.mesh.axes:
            numbers = self._of_axis.setdefault(name, [])
            for start, end in pairwise(sorted(cuts[name])):
                numbers.append(len(self.refs))
                whole = start == 1 and end == size
                self.refs.append(AxisRef(name) if whole else AxisRef(name, start, end // start))
                self._starts.append(start)
        self.sizes = [axes.size([ref]) for ref in self.refs]
        self.layouts: list[Layout] = []
        self.held_parts: list[int] = []  # the number of parts of each layout
        self._numbers: dict[Layout, int] = {}
        self.sums: list[AtomList] = []  # the atoms along which choices leave parts of a sum
        self._sum_numbers: dict[AtomList, int] = {}
        self.tensor_layouts: list[int] = []  # of all choices, concatenated

    def number(self, layout: Layout) -> int:
        """Returns the number of a layout, its index in `layouts`."""
        number = self._numbers.get(layout)
        if number is None:
            number = self._numbers[layout] = len(self.layouts)
            self.layouts.append(layout)
            self.held_parts.append(self.parts(layout))
        return number

    def sum_number(self, partial: AtomList) -> int:
        """Returns the number of a list of atoms to sum over, its index in `sums`."""
        number = self._sum_numbers.setdefault(partial, len(self.sums))
        if number == len(self.sums):
            self.sums.append(partial)
        return number

    @property
    def movable(self) -> list[AtomList]:
        """The lists of atoms to move at once: each axis, and each atom of an axis that is split."""
        whole = [tuple(atoms) for atoms in self._of_axis.values() if atoms]
        if self._joined:  # the longest first
            spans = sorted(combinations(range(len(whole) + 1), 2), key=lambda s: s[0] - s[1])
            return [tuple(atom for atoms in whole[i:j] for atom in atoms) for i, j in spans]
        return whole + [(atom,) for atoms in whole if len(atoms) > 1 for atom in atoms]

    def size(self, atoms: Iterable[int]) -> int:
        """Returns the number of parts into which atoms divide."""
        return math.prod(self.sizes[atom] for atom in atoms)

    def parts(self, layout: Layout) -> int:
        """Returns the number of parts into which a layout divides a value."""
        return math.prod(self.sizes[atom] for atoms in layout for atom in atoms)

    def layout(self, dims: Dims) -> Layout:
        """Returns the atoms of a sharding."""

        def atoms_in(axis: AxisRef) -> list[int]:
            atoms, first = self._of_axis[axis.name], axis.pre_size
            if axis.size is None:
                return atoms
            end = first * axis.size
            return [n for n in atoms if first <= self._starts[n] < end]

        return tuple(tuple(n for axis in axes for n in atoms_in(axis)) for axes in dims)

    def axes_of(self, atoms: Iterable[int]) -> Axes:
        """Returns the axes that consist of these atoms."""
        return self.axes.canonical(self.refs[atom] for atom in atoms)

    def dims(self, layout: Layout) -> Dims:
        """Returns the sharding of a layout."""
        return tuple(self.axes_of(atoms) for atoms in layout)


@dataclass(frozen=True, eq=False)
class StrategyChoice:
    """A strategy that an op can run by, with its properties.

    `layouts` are the numbers of its tensors' layouts, operands first. They begin at `first_tensor`
    in `Atoms.tensor_layouts`. `partial` are the atoms along which each device holds only a part of
    the results; their number is `sum_number`.
    """

    strategy: Strategy
    layouts: tuple[int, ...]
    first_tensor: int
    partial: AtomList
    sum_number: int
    parts: int  # the number of parts of the work
    is_even: bool  # True if no part is padded


class RuleForm:
    """The strategies that a sharding rule allows; all ops with the same rule share it.

    `fixed` are the factors that must not be divided. With `pads`, others may be divided unevenly.
    """

    def __init__(
        self, rule: ShardingRule, fixed: frozenset[int], atoms: Atoms, *, pads: bool
    ) -> None:
        self.rule = rule
        self.fixed = fixed
        self._pads = pads
        self.atoms = atoms
        self.choice = cache(self._build_choice)  # of a strategy
        self._agreed: dict[tuple[tuple[tuple[int, AtomList], ...], ...], StrategyChoice] = {}
        self._moved: dict[tuple[Strategy, AtomList, int], StrategyChoice | None] = {}

    def _build_choice(self, strategy: Strategy) -> StrategyChoice | None:
        """Returns the choice of a strategy; None if the op cannot run by it."""
        layouts = self._strategy_layouts(strategy)
        if layouts is None:
            return None
        numbers = tuple(map(self.atoms.number, layouts))
        first_tensor = len(self.atoms.tensor_layouts)
        self.atoms.tensor_layouts += numbers
        partial = tuple(a for f in sorted(self.rule.reduced) for a in strategy[f])
        return StrategyChoice(
            strategy,
            numbers,
            first_tensor,
            partial,
            self.atoms.sum_number(partial),
            self.atoms.parts(strategy),
            all(
                size % self.atoms.size(atoms) == 0
                for size, atoms in zip(self.rule.sizes, strategy, strict=True)
            ),
        )

    def _strategy_layouts(self, strategy: Strategy) -> list[Layout] | None:
        size, sizes = self.atoms.size, self.rule.sizes
        used = [atom for atoms in strategy for atom in atoms]
        # An axis cannot divide two factors of an op.
        if len(set(used)) != len(used):
            return None
        for factor, atoms in enumerate(strategy):
            whole, padded = sizes[factor], -(-sizes[factor] // size(atoms)) * size(atoms)
            may_pad = factor in self._padded and padded < _MOST_PADDED * whole
            if atoms and (factor in self.fixed or not (padded == whole or may_pad)):
                return None
        layouts: list[Layout] = []
        for tensor in self.rule.tensors:
            layout: list[AtomList] = []
            for factors in tensor:
                joined: AtomList = ()
                is_open = True  # all factors so far are divided into single elements
                for factor in factors:
                    if strategy[factor] and not is_open:
                        return None
                    joined += strategy[factor]
                    is_open = is_open and size(strategy[factor]) == sizes[factor]
                layout.append(joined)
            layouts.append(tuple(layout))
        return layouts

    @cached_property
    def _padded(self) -> set[int]:
        """The factors that never share a dimension with another factor."""
        joined = {
            factor
            for tensor in self.rule.tensors
            for factors in tensor
            if len(factors) > 1
            for factor in factors
        }
        return set(range(len(self.rule.sizes))) - joined if self._pads else set()

    def move_atoms(self, strategy: Strategy, atoms: AtomList, factor: int) -> StrategyChoice | None:
        """Returns the strategy with these atoms on a factor, after the atoms that it has, or as its
        only ones. Returns None if neither is possible."""
        key = (strategy, atoms, factor)
        if key not in self._moved:
            rest = [tuple(a for a in each if a not in atoms) for each in strategy]
            found = None
            for taken in ((*rest[factor], *atoms), atoms):
                found = found or self.choice((*rest[:factor], taken, *rest[factor + 1 :]))
            self._moved[key] = found
        return self._moved[key]

    def fit_layout(self, tensor: int, layout: Layout) -> dict[int, AtomList]:
        """Returns the atoms on each factor by a tensor's layout. Atoms that do not fit are left
        out."""
        fitted: dict[int, AtomList] = {}
        for factors, atoms in zip(self.rule.tensors[tensor], layout, strict=True):
            rest = atoms
            for factor in factors:
                room, taken = self.rule.sizes[factor], 0
                while taken < len(rest) and (
                    factor in self._padded or room % self.atoms.sizes[rest[taken]] == 0
                ):
                    room //= self.atoms.sizes[rest[taken]]
                    taken += 1
                if taken and factor not in self.fixed:
                    fitted[factor] = rest[:taken]
                rest = rest[taken:]
                if room > 1:
                    break
        return fitted

    def grant_wishes(self, wishes: Sequence[dict[int, AtomList]]) -> StrategyChoice:
        """Returns the choice that grants the wishes in order; a wish gets what earlier ones left
        free."""
        key = tuple(tuple(wish.items()) for wish in wishes)
        if key not in self._agreed:
            self._agreed[key] = self._agree(wishes)
        return self._agreed[key]

    def _agree(self, wishes: Sequence[dict[int, AtomList]]) -> StrategyChoice:
        strategy: list[AtomList] = [()] * len(self.rule.sizes)
        used: set[int] = set()
        for wish in wishes:
            for factor, atoms in wish.items():
                if strategy[factor] or used.intersection(atoms):
                    continue
                trial = [*strategy]
                trial[factor] = atoms
                if self.choice(tuple(trial)) is not None:
                    strategy = trial
                    used.update(atoms)
        choice = self.choice(tuple(strategy))
        assert choice is not None, "each step was checked"
        return choice

    @cached_property
    def first_dims(self) -> list[list[tuple[int, int]]]:
        """For each factor, the (tensor, dimension) pairs in which it is the major factor."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.rule.sizes]
        for number, tensor in enumerate(self.rule.tensors):
            for dim, factors in enumerate(tensor):
                real = [f for f in factors if self.rule.sizes[f] > 1]
                if real and real[0] not in self.fixed:
                    found[real[0]].append((number, dim))
        return found
