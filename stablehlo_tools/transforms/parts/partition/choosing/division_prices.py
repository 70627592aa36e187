"""Estimates the time of ops and reshards on one kind of hardware, in ns, by how they are divided.

Coarser than `cost/`, which times kernels as compilers make them. A search asks for the time of each
op with thousands of divisions, and only the difference between two of them matters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise, permutations
from typing import NamedTuple, Self

from stablehlo_tools.analysis.tasks.op_work import op_work, short_name
from stablehlo_tools.bindings import ir
from stablehlo_tools.cost.hardware import Hardware
from stablehlo_tools.cost.network_times import transfer_time
from stablehlo_tools.cost.transfer_sizes import DeviceTransfer
from stablehlo_tools.dialect.dimension_numbers import conv_numbers, scatter_numbers
from stablehlo_tools.dialect.names import CONVOLUTION, DOT_GENERAL, SCATTER
from stablehlo_tools.ir.builder import element_of, shape_of
from stablehlo_tools.transforms.parts.partition.choosing.division_layouts import (
    AtomList,
    Atoms,
    Layout,
    StrategyChoice,
)
from stablehlo_tools.transforms.parts.partition.local_body import WORTH, is_one_faster
from stablehlo_tools.transforms.parts.partition.sharding_rules import element_bytes

# Up to this many bytes an all_reduce costs the launch of a kernel only: compilers combine those of
# all weights' norms into one. Each norm still needs a kernel that makes its operand.
_SCALAR = 16
# Collectives that compilers combine for other small values, and the share of latency that each
# keeps, if it is one of many: XLA:GPU makes 26 all_reduces of the 88 sums of a ResNet's statistics.
# In a chain of products each waits for the one before: only tiny ones, such as statistics, have
# others beside.
_COMBINED = frozenset({"all_gather", "all_reduce", "reduce_scatter"})
SMALL, _TINY = 2**20, 2**16  # bytes
_OWN_LATENCY = 0.3
# The share of an op's written bytes that go to memory; the others stay within a fused kernel.
_FUSED = 0.5
# The factor on kernels on padded parts: masks, sizes that fit no tile (17 % of a ViT's step).
_PADDED = 1.15
# A TPU pads the batch of a convolution to a multiple of this.
_TILE = 8
# ns per row of a scatter that XLA:TPU runs row by row, in a loop of five kernels.
_ROW_NS = 5e3
# The share of that for unknown hardware: a GPU's kernel needs no longer for many rows.
_ROW_SHARE = 0.1

_Sizes = tuple[tuple[int, int], ...]  # dimensions, with their sizes


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware, and how its compiler treats some ops.

    The batch of a convolution is padded to a multiple of `tile`. Each row of a scatter costs
    `row_ns`. `is_any` is True if no hardware was given, and this one represents all kinds.
    """

    hardware: Hardware
    is_any: bool
    tile: int
    row_ns: float

    @classmethod
    def from_hardware(cls, hardware: Hardware, *, is_any: bool) -> Self:
        """Returns what is known of XLA for this hardware. For any hardware, ops that are slow on
        XLA:TPU count, too."""
        if hardware.is_torus:
            return cls(hardware, is_any, _TILE, _ROW_NS)
        if is_any:
            return cls(hardware, is_any, _TILE, _ROW_SHARE * _ROW_NS)
        return cls(hardware, is_any, 1, 0.0)


@dataclass(frozen=True, slots=True)
class OpTime:
    """The properties of an op that determine its time: the bytes of its tensors, operands first,
    and the FLOPs and type of its product.

    `tiled` are the dimensions of the first operand that are padded to tiles. `rows` are the
    dimensions of the last operand that count the windows of a scatter.
    """

    sizes: tuple[float, ...]
    operands: int
    written: float
    matrix_flops: float = 0.0
    dtype: str = ""
    tiled: _Sizes = ()
    rows: _Sizes = ()

    @classmethod
    def from_op(cls, op: ir.Operation) -> Self | None:
        """Returns the properties of an op; None for a product whose work is unknown."""
        sizes, operands = tuple(map(bytes_of, (*op.operands, *op.results))), len(op.operands)
        written = sum(sizes[operands:])
        if op.name not in (DOT_GENERAL, CONVOLUTION):
            return cls(sizes, operands, written, rows=_rows(op))
        product = op_work(op, short_name(op)).matmul
        if product is None:
            return None
        dtype, tiled = str(element_of(op.operands[0])), ()
        if op.name == CONVOLUTION:
            # The feature dimension of the image is the batch in the gradient of a kernel.
            numbers, shape = conv_numbers(op), shape_of(op.operands[0])
            tiled = tuple((d, shape[d]) for d in (numbers.input_batch, numbers.input_feature))
        return cls(sizes, operands, written, product.flops, dtype, tiled)

    def ns(self, choice: StrategyChoice, atoms: Atoms, machine: Machine) -> float:
        """Returns the ns of one run on one device."""
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
        if not self.tiled:  # reading the weights bounds the time of a product of few rows
            parts = (atoms.held_parts[number] for number in choice.layouts)
            moved = sum(size / part for size, part in zip(self.sizes, parts, strict=True))
            return padded * max(multiplied, moved / hardware.memory_rate)
        for held in _held(self.tiled, atoms, atoms.layouts[choice.layouts[0]]):
            multiplied *= -(-held // machine.tile) * machine.tile / held
        return padded * max(written, multiplied)

    def least_ns(self, parts: int, machine: Machine) -> float:
        """Returns a lower bound of `ns` for choices of at most so many parts."""
        hardware = machine.hardware
        written = _FUSED * self.written / hardware.memory_rate
        if not self.matrix_flops:
            return written / parts
        peak = hardware.peak(self.dtype) * hardware.matmul_model.efficiency
        moved = written if self.tiled else sum(self.sizes) / hardware.memory_rate
        return max(self.matrix_flops / peak, moved) / parts


def _held(sizes: _Sizes, atoms: Atoms, layout: Layout) -> list[int]:
    """Returns the sizes of dimensions on one device."""
    return [max(1, -(-size // atoms.size(layout[dim]))) for dim, size in sizes]


def _rows(op: ir.Operation) -> _Sizes:
    """Returns the dimensions that count the windows of a scatter that XLA:TPU turns into a loop;
    else ().

    Such a scatter has windows with an indexed dimension: five of the 22 forms tried with libtpu
    0.0.51, for any type, reducer and number of indices.
    """
    if op.name != SCATTER:
        return ()
    numbers = scatter_numbers(op)
    if set(numbers.index_map) <= set(numbers.omitted):
        return ()
    shape = shape_of(op.operands[len(op.operands) - 1])
    return tuple((dim, shape[dim]) for dim in numbers.batch_dims(len(shape)))


class Extent(NamedTuple):
    """The dimensions of a whole value, and the bytes of an element.

    `chained`: between products that need each other's results (see `PartitionProblem`).
    `regathered`: of a reduce, such as argmax, whose partial results are gathered, not added."""

    shape: tuple[int, ...]
    element_bytes: float
    chained: bool = False
    regathered: bool = False


def bytes_of(value: ir.Value) -> float:
    """Returns the bytes of a whole value; 0 if it is not a tensor."""
    if not isinstance(value.type, ir.RankedTensorType):
        return 0.0
    return math.prod(shape_of(value)) * element_bytes(value)


@dataclass(frozen=True)
class ReshardingStep:
    """One collective between two layouts. `size` is that of `DeviceTransfer`; `chained` that of the
    value's `Extent`."""

    kind: str
    atoms: AtomList
    size: float
    chained: bool = False


class ReshardingPrices:
    """Prices of resharding and of sums, for values with parts on all devices of a mesh.

    Latencies are multiplied by `latency_share`, which is less than 1 if a small program represents
    a large one. A sum of scalars costs the launch of a kernel as its latency. `combined` is the
    number of small values for which compilers may combine collectives.
    """

    def __init__(
        self, atoms: Atoms, hardware: Hardware, latency_share: float, combined: int
    ) -> None:
        self.atoms = atoms
        self.hardware = hardware
        self._latency_share = latency_share
        self._own_latency = _OWN_LATENCY + (1 - _OWN_LATENCY) / max(1, combined)
        self.step = cache(self._collective_ns)  # ns of one collective
        self._values: dict[tuple[Extent, int, AtomList, frozenset[int]], float] = {}
        self._single: dict[tuple[Extent, int, AtomList, int], float] = {}
        self.held = cache(self._held)

    def _held(self, extent: Extent, layout: Layout) -> float:
        """Returns the bytes of a device's part, with padding: one row of 8 for a row over 8."""
        parts = map(self.atoms.size, layout)
        sizes = zip(extent.shape, parts, strict=True)
        return extent.element_bytes * math.prod(-(-size // count) for size, count in sizes)

    def value(self, extent: Extent, made: int, partial: AtomList, wanted: frozenset[int]) -> float:
        """Returns the ns to give a value to its users.

        The value is made in the layout of number `made`, and is in parts of a sum along `partial`.
        `wanted` has the numbers of the users' layouts.
        """
        key = (extent, made, partial, wanted)
        price = self._values.get(key)
        if price is None:
            before = self.atoms.layouts[made]
            layouts = {self.atoms.layouts[number] for number in wanted}
            steps, summed = self.steps_to(extent, before, partial, layouts)
            price = sum(map(self.step, steps), 0.0)
            # If there are new atoms, a device copies its part of the elements that it holds. Half
            # of the copies are fused into the kernels that use them.
            price += sum(
                self.held(extent, layout) / self.hardware.memory_rate
                for layout in sorted(layouts)
                if not all(_has(summed, atom) for atoms in layout for atom in atoms)
            )
            self._values[key] = price
        return price

    def to_one(self, extent: Extent, made: int, partial: AtomList, wanted: int) -> float:
        """Returns the ns of `value` for one user."""
        if made == wanted and not partial:
            return 0.0
        key = (extent, made, partial, wanted)
        price = self._single.get(key)
        if price is None:
            price = self._single[key] = self.value(extent, made, partial, frozenset((wanted,)))
        return price

    def steps_to(
        self, extent: Extent, made: Layout, partial: AtomList, wanted: Set[Layout]
    ) -> tuple[list[ReshardingStep], Layout]:
        """Returns the collectives of `value`, and its layout when the sum is complete."""
        steps, summed = self._sum_steps(extent, made, partial, wanted)
        for layout in sorted(wanted):
            steps += self.reshard_steps(extent, summed, layout)
        return steps, summed

    def _sum_steps(
        self, extent: Extent, made: Layout, partial: AtomList, wanted: Set[Layout]
    ) -> tuple[list[ReshardingStep], Layout]:
        """Returns the collectives that complete a sum over `partial`, and its layout after them.

        Reduce_scatters run over the atoms that every wanted layout has, unless one all_reduce is
        faster than several collectives.
        """
        if not partial:
            return [], made
        held, chained = self.held(extent, made), extent.chained
        if extent.regathered:
            parts = held * self.atoms.size(partial)
            return [ReshardingStep("all_gather", partial, parts, chained)], made
        scattered = scattered_layout(made, partial, wanted)
        into = tuple(atom for atom in partial if _has(scattered, atom))
        rest = tuple(atom for atom in partial if atom not in into)
        steps = self._along_each("reduce_scatter", into, scattered, held, chained)
        if rest:
            left = held / self.atoms.size(into)
            steps.append(ReshardingStep("all_reduce", rest, left, chained))
        if len(steps) > 1:
            whole = ReshardingStep("all_reduce", partial, held, chained)
            devices = self.atoms.axes.mesh.size
            several = map(self._transfer, steps)
            if is_one_faster(self._transfer(whole), several, self.hardware, devices):
                return [whole], made
        return steps, scattered

    def reshard_steps(self, extent: Extent, made: Layout, wanted: Layout) -> list[ReshardingStep]:
        """Returns the collectives from one layout to another. Slices of a device's own elements
        need none."""
        if made == wanted:
            return []
        place_before = {atom: dim for dim, atoms in enumerate(made) for atom in atoms}
        place_after = {atom: dim for dim, atoms in enumerate(wanted) for atom in atoms}
        size_of = self.atoms.size
        held = self.held(extent, made)
        sliced = [atom for atom in place_after if atom not in place_before]
        gone = [atom for atom in place_before if atom not in place_after]
        moved = tuple(
            atom for atom, dim in place_before.items() if place_after.get(atom, dim) != dim
        )
        steps: list[ReshardingStep] = []
        # Atoms that are together in a dimension before and after must keep their order.
        is_reordered = any(
            [atom for atom in before if atom in after] != [atom for atom in after if atom in before]
            for before in made
            for after in wanted
        )
        # Those that stay in their dimension must be its major ones before and after.
        stay = [len(set(before) & set(after)) for before, after in zip(made, wanted, strict=True)]
        is_inner = any(one[:n] != two[:n] for one, two, n in zip(made, wanted, stay, strict=True))
        permuted = list(place_before) if is_reordered or is_inner else []
        for before, after in zip(made, wanted, strict=True):
            # If new atoms replace old ones in a dimension, a device needs another device's part.
            lost = [atom for atom in before if atom in gone]
            new = [atom for atom in after if atom in sliced]
            if lost and new:
                permuted += lost + new
                if size_of(lost) <= size_of(new):
                    gone = [atom for atom in gone if atom not in lost]
        if permuted:
            steps.append(ReshardingStep("collective_permute", tuple(dict.fromkeys(permuted)), held))
        # A device's part after the all_to_alls, before the all_gathers.
        part = self.held(
            extent,
            tuple(
                after + tuple(atom for atom in before if atom in gone)
                for before, after in zip(made, wanted, strict=True)
            ),
        )
        for places in sorted({(place_before[atom], place_after[atom]) for atom in moved}):
            along = tuple(a for a in moved if (place_before[a], place_after[a]) == places)
            steps.append(ReshardingStep("all_to_all", along, part))
        gathers = self._along_each("all_gather", gone, made, part * size_of(gone), extent.chained)
        return steps + gathers[::-1]

    def _along_each(
        self, kind: str, atoms: Sequence[int], layout: Layout, size: float, chained: bool
    ) -> list[ReshardingStep]:
        """Returns a collective along each dimension that has some of the atoms, in the fastest
        order, if that is worth it.

        `size` is that of the first collective. If a small program represents a large one, returns
        one collective over all atoms.
        """
        if self._latency_share < 1:
            return [ReshardingStep(kind, tuple(atoms), size, chained)] if atoms else []
        groups = [tuple(atom for atom in atoms if atom in each) for each in layout]

        def steps_in_order(order: Sequence[AtomList]) -> list[ReshardingStep]:
            sizes = accumulate(order, lambda n, group: n / self.atoms.size(group), initial=size)
            return [
                ReshardingStep(kind, *each, chained) for each in zip(order, sizes, strict=False)
            ]

        used = [group for group in groups if group]
        # Gathers run from the first dimension on, in reverse of this list (`CollectiveWriter`).
        default = steps_in_order(used[::-1] if kind == "all_gather" else used)
        best = min(map(steps_in_order, permutations(used)), key=self._sum_ns)
        return best if self._sum_ns(best) < WORTH * self._sum_ns(default) else default

    def _sum_ns(self, steps: Sequence[ReshardingStep]) -> float:
        return sum(map(self.step, steps))

    def _transfer(self, step: ReshardingStep) -> DeviceTransfer:
        mesh = self.atoms.axes
        groups = mesh.groups(mesh.canonical(self.atoms.refs[a] for a in sorted(step.atoms)))
        rows = tuple(tuple(group) for group in groups)
        # Which device sends to which is not known: count a ring through each group.
        if step.kind == "collective_permute":
            rows = tuple(pair for row in rows for pair in pairwise((*row, row[0])))
        return DeviceTransfer(step.kind, step.size, rows)

    def _collective_ns(self, step: ReshardingStep) -> float:
        time = transfer_time(self._transfer(step), self.hardware, self.atoms.axes.mesh.size)
        if step.kind == "all_reduce" and step.size <= _SCALAR:
            latency = self.hardware.launch_ns
        elif step.kind in _COMBINED and step.size <= (_TINY if step.chained else SMALL):
            latency = self._own_latency * time.latency_ns
        else:
            latency = time.latency_ns
        return time.ns - time.latency_ns + self._latency_share * latency


def scattered_layout(made: Layout, partial: AtomList, wanted: Set[Layout]) -> Layout:
    """Returns the layout of a sum over `partial` after reduce_scatters. They run over the atoms
    that every wanted layout has. Returns `made` if there are none."""
    shared = [atom for atom in partial if all(_has(layout, atom) for layout in wanted)]
    if not wanted or not shared:
        return made
    return tuple(
        before + tuple(atom for atom in after if atom in shared)
        for before, after in zip(made, min(wanted), strict=True)
    )


def _has(layout: Layout, atom: int) -> bool:
    return any(atom in atoms for atoms in layout)
