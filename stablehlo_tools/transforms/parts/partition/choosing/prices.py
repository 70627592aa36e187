"""What ops and reshards cost on one kind of hardware, in ns, by how they are divided.

Coarser than `cost/`, which times kernels as compilers make them: a search asks for the time of each
op divided in thousands of ways, and what counts is the difference between two of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise, permutations
from typing import Self

from stablehlo_tools.analysis.tasks.op_work import op_work, short_name
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.collectives import transfer_time
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.cost.transfers import Transfer
from stablehlo_tools.dialect.dimension_numbers import conv_numbers, scatter_numbers
from stablehlo_tools.dialect.names import CONVOLUTION, DOT_GENERAL, SCATTER
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.transforms.parts.partition.choosing.layouts import (
    AtomList,
    Atoms,
    Choice,
    Layout,
)
from stablehlo_tools.transforms.parts.partition.op_rules import element_bytes

# Bytes up to which an all_reduce goes along with others: compilers combine those of the norms of
# all weights into one, for a kernel each that makes what is summed.
_SCALAR = 16
# What compilers combine of other small values, and the share of latency that each keeps: of 88
# sums of a ResNet's statistics XLA:GPU makes 26 all_reduces.
_COMBINED = frozenset({"all_gather", "all_reduce", "reduce_scatter"})
_SMALL = 2**20  # bytes
_OWN_LATENCY = 0.3
# Of the bytes that an op writes, as many go to memory where it becomes part of a kernel.
_FUSED = 0.5
# Times as long take kernels on padded parts: masks, sizes that fit no tile (17 % of a ViT's step).
_PADDED = 1.15
# Images of a convolution that a TPU keeps side by side, also where there are fewer.
_TILE = 8
# ns of a row of a scatter where XLA:TPU runs the rows one by one, in a loop of five kernels.
_ROW_NS = 5e3
# Of that, what counts where hardware is not told: a GPU's kernel takes no longer for many rows.
_ROW_SHARE = 0.1

_Sizes = tuple[tuple[int, int], ...]  # dimensions, with how long they are


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware, and what its compiler makes of some ops: the images of a convolution are filled up
    to `tile`, and each row of a scatter takes `row_ns`. `is_any`: it stands for all kinds."""

    hardware: Hardware
    is_any: bool
    tile: int
    row_ns: float

    @classmethod
    def of(cls, hardware: Hardware, *, is_any: bool) -> Self:
        """What is known of XLA for this hardware; of any, what XLA:TPU is slow at counts, too."""
        if hardware.is_torus:
            return cls(hardware, is_any, _TILE, _ROW_NS)
        if is_any:
            return cls(hardware, is_any, _TILE, _ROW_SHARE * _ROW_NS)
        return cls(hardware, is_any, 1, 0.0)


@dataclass(frozen=True, slots=True)
class OpTime:
    """What decides how long an op takes: the bytes of its tensors, operands first, and what it
    multiplies, of which type.

    `tiled` are the dimensions of the first operand that lie in tiles, `rows` those of the last one
    that count the windows of a scatter.
    """

    sizes: tuple[float, ...]
    operands: int
    written: float
    matrix_flops: float = 0.0
    dtype: str = ""
    tiled: _Sizes = ()
    rows: _Sizes = ()

    @classmethod
    def of(cls, op: ir.Operation) -> Self | None:
        """None of a product that nobody can time."""
        sizes, operands = tuple(map(bytes_of, (*op.operands, *op.results))), len(op.operands)
        written = sum(sizes[operands:])
        if op.name not in (DOT_GENERAL, CONVOLUTION):
            return cls(sizes, operands, written, rows=_rows(op))
        product = op_work(op, short_name(op)).matmul
        if product is None:
            return None
        dtype = str(element_of(op.operands[0]))
        return cls(sizes, operands, written, product.flops, dtype, tiled=_tiled(op))

    def ns(self, choice: Choice, atoms: Atoms, machine: Machine) -> float:
        """Of one run on one device."""
        padded = 1.0 if choice.is_even else _PADDED
        hardware = machine.hardware
        written = _FUSED * self.written / choice.parts / hardware.memory_rate
        if self.rows:
            rows = _held(self.rows, atoms, atoms.layouts[choice.layouts[self.operands - 1]])
            return padded * max(written, machine.row_ns * math.prod(rows))
        if not self.matrix_flops:
            return padded * written
        peak = hardware.peak(self.dtype) * hardware.matmul_model.efficiency
        multiplied = self.matrix_flops / choice.parts / peak
        if not self.tiled:  # a product of few rows takes as long as its weights are read
            parts = (atoms.held_parts[number] for number in choice.layouts)
            moved = sum(size / part for size, part in zip(self.sizes, parts, strict=True))
            return padded * max(multiplied, moved / hardware.memory_rate)
        for held in _held(self.tiled, atoms, atoms.layouts[choice.layouts[0]]):
            multiplied *= -(-held // machine.tile) * machine.tile / held
        return padded * max(written, multiplied)


def _held(sizes: _Sizes, atoms: Atoms, layout: Layout) -> list[int]:
    """How long dimensions are on one device."""
    return [max(1, -(-size // atoms.size(layout[dim]))) for dim, size in sizes]


def _tiled(op: ir.Operation) -> _Sizes:
    """Of an image its batch, and what is the batch where the gradient of a kernel is a
    convolution."""
    if op.name != CONVOLUTION:
        return ()
    numbers, shape = conv_numbers(op), shape_of(op.operands[0])
    return tuple((dim, shape[dim]) for dim in (numbers.input_batch, numbers.input_feature))


def _rows(op: ir.Operation) -> _Sizes:
    """Of a scatter that XLA:TPU makes a loop of: one whose windows have an indexed dimension (seen
    with libtpu 0.0.51: of 22 forms these five, of whatever type, reducer and number of indices)."""
    if op.name != SCATTER:
        return ()
    numbers = scatter_numbers(op)
    if set(numbers.index_map) <= set(numbers.inserted):
        return ()
    shape = shape_of(op.operands[len(op.operands) - 1])
    return tuple((dim, shape[dim]) for dim in numbers.batch_dims(len(shape)))


def bytes_of(value: ir.Value) -> float:
    """Of a whole value; 0 of what is no tensor."""
    if not isinstance(value.type, ir.RankedTensorType):
        return 0.0
    return math.prod(shape_of(value)) * element_bytes(value)


@dataclass(frozen=True)
class Step:
    """One collective on the way from one layout to another; `size` as `Transfer` counts it."""

    kind: str
    atoms: AtomList
    size: float


class Prices:
    """Prices of resharding and of sums, of values that all devices of a mesh hold parts of.

    Latencies count by `latency_share`: all of them, or the part that a small program stands for;
    of sums of scalars the launch of a kernel.
    """

    def __init__(self, atoms: Atoms, hardware: Hardware, latency_share: float = 1.0) -> None:
        self.atoms = atoms
        self.hardware = hardware
        self._latency_share = latency_share
        self.step = cache(self._timed)  # ns of one collective
        self._values: dict[tuple[float, int, AtomList, frozenset[int]], float] = {}
        self._single: dict[tuple[float, int, AtomList, int], float] = {}

    def value(self, size: float, made: int, partial: AtomList, wanted: frozenset[int]) -> float:
        """ns to give a value of `size` bytes, made divided so and in parts of a sum, to its users,
        each of whom wants one of these layouts, by their numbers."""
        key = (size, made, partial, wanted)
        price = self._values.get(key)
        if price is None:
            before = self.atoms.layouts[made]
            layouts = {self.atoms.layouts[number] for number in wanted}
            steps = self.steps_to(size, before, partial, layouts)
            price = sum(map(self.step, steps))
            summed = scattered_layout(before, partial, layouts)
            price += sum(self._slice(size, summed, layout) for layout in sorted(layouts))
            self._values[key] = price
        return price

    def _slice(self, size: float, before: Layout, after: Layout) -> float:
        """ns in which a device copies its part of what it holds: half of them become part of the
        kernels that take them."""
        if all(_has(before, atom) for atoms in after for atom in atoms):
            return 0.0
        return size / self.atoms.parts(after) / self.hardware.memory_rate

    def to_one(self, size: float, made: int, partial: AtomList, wanted: int) -> float:
        """`value`, for one user."""
        if made == wanted and not partial:
            return 0.0
        key = (size, made, partial, wanted)
        price = self._single.get(key)
        if price is None:
            price = self._single[key] = self.value(size, made, partial, frozenset((wanted,)))
        return price

    def steps_to(
        self, size: float, made: Layout, partial: AtomList, wanted: Set[Layout]
    ) -> list[Step]:
        """The collectives of `value`."""
        steps: list[Step] = []
        if partial:
            held = size / self.atoms.parts(made)
            scattered = scattered_layout(made, partial, wanted)
            into = tuple(atom for atom in partial if _has(scattered, atom))
            rest = tuple(atom for atom in partial if atom not in into)
            steps += self._along_each("reduce_scatter", into, scattered, held)
            if rest:
                steps.append(Step("all_reduce", rest, held / self.atoms.size(into)))
            made = scattered
        for layout in sorted(wanted):
            steps += self.reshard_steps(size, made, layout)
        return steps

    def reshard_steps(self, size: float, made: Layout, wanted: Layout) -> list[Step]:
        """The collectives from one layout to another; slices of what a device holds cost none."""
        if made == wanted:
            return []
        place_before = {atom: dim for dim, atoms in enumerate(made) for atom in atoms}
        place_after = {atom: dim for dim, atoms in enumerate(wanted) for atom in atoms}
        size_of = self.atoms.size
        held = size / self.atoms.parts(made)
        sliced = [atom for atom in place_after if atom not in place_before]
        gone = [atom for atom in place_before if atom not in place_after]
        moved = tuple(
            atom for atom, dim in place_before.items() if place_after.get(atom, dim) != dim
        )
        steps: list[Step] = []
        whole = size / self.atoms.parts(wanted)
        is_permuted = _is_permuted(made, wanted) or _changes_order(made, wanted)
        permuted = list(place_before) if is_permuted else []
        for before, after in zip(made, wanted, strict=True):
            # Other atoms take the place of some: other parts, which other devices hold.
            lost = [atom for atom in before if atom in gone]
            new = [atom for atom in after if atom in sliced]
            if lost and new:
                permuted += lost + new
                if size_of(lost) <= size_of(new):
                    gone = [atom for atom in gone if atom not in lost]
        if permuted:
            steps.append(Step("collective_permute", tuple(dict.fromkeys(permuted)), held))
        held = min(held, whole / size_of(gone))
        for dim in sorted({place_after[atom] for atom in moved}):
            steps.append(Step("all_to_all", tuple(a for a in moved if place_after[a] == dim), held))
        return steps + self._along_each("all_gather", gone, made, whole)[::-1]

    def _along_each(
        self, kind: str, atoms: Sequence[int], layout: Layout, size: float
    ) -> list[Step]:
        """A collective along each dimension that has some of the atoms, the largest first, in the
        order that takes least time; one of all where a small program stands for a large one."""
        if self._latency_share < 1:
            return [Step(kind, tuple(atoms), size)] if atoms else []
        groups = [tuple(atom for atom in atoms if atom in each) for each in layout]

        def ordered(order: Sequence[AtomList]) -> list[Step]:
            sizes = accumulate(order, lambda n, group: n / self.atoms.size(group), initial=size)
            return [Step(kind, *each) for each in zip(order, sizes, strict=False)]

        orders = map(ordered, permutations(filter(None, groups)))
        return min(orders, key=lambda steps: sum(map(self.step, steps)))

    def _timed(self, step: Step) -> float:
        mesh = self.atoms.axes
        groups = mesh.groups(mesh.canonical(self.atoms.refs[a] for a in sorted(step.atoms)))
        rows = tuple(tuple(group) for group in groups)
        if step.kind == "collective_permute":
            rows = tuple(pair for row in rows for pair in pairwise((*row, row[0])))
        transfer = Transfer(step.kind, step.size, rows)
        time = transfer_time(transfer, self.hardware, mesh.mesh.size)
        if step.kind == "all_reduce" and step.size <= _SCALAR:
            latency = self.hardware.launch_ns
        elif step.kind in _COMBINED and step.size <= _SMALL:
            latency = _OWN_LATENCY * time.latency_ns
        else:
            latency = time.latency_ns
        return time.ns - time.latency_ns + self._latency_share * latency


def scattered_layout(made: Layout, partial: AtomList, wanted: Set[Layout]) -> Layout:
    """The layout in which a sum over `partial` is left by reduce_scatters over those of its atoms
    that divide it for all who want it; `made` where none does."""
    shared = [atom for atom in partial if all(_has(layout, atom) for layout in wanted)]
    if not wanted or not shared:
        return made
    return tuple(
        before + tuple(atom for atom in after if atom in shared)
        for before, after in zip(made, min(wanted), strict=True)
    )


def _has(layout: Layout, atom: int) -> bool:
    return any(atom in atoms for atoms in layout)


def _changes_order(made: Layout, wanted: Layout) -> bool:
    """Whether atoms that go from one dimension to another together stand there in another order."""
    for before in made:
        for after in wanted:
            together = [atom for atom in before if atom in after]
            if len(together) > 1 and together != [atom for atom in after if atom in before]:
                return True
    return False


def _is_permuted(made: Layout, wanted: Layout) -> bool:
    """Whether what stays in its dimension stands in another order, or behind what comes or goes."""
    for before, after in zip(made, wanted, strict=True):
        stays = tuple(atom for atom in before if atom in after)
        if stays not in (before[: len(stays)], ()) or stays != after[: len(stays)]:
            return True
    return False
