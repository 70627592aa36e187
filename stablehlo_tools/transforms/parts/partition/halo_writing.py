"""Writes plans of `halo` as ops: slices, collective_permutes and concatenates or selects.

    %y = slice %x [3:32]                    // x of 32 elements over 4 devices
    ==>
    %own = slice %x [3:8]                   // the same on every device
    %sent = slice %x [0:3]
    %next = collective_permute %sent        // from each device to the one before
    %y = concatenate %own, %next

If devices differ, each looks up its entry in a table by its position: the supply it uses, its
start, or the places that it fills.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stablehlo_tools.analysis.shardings import Axes, MeshAxes
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.values import has_uses, maker_of, splat_of
from stablehlo_tools.transforms.parts.partition.halo import (
    FILLING,
    DimensionParts,
    HaloPiece,
    HaloPlan,
    PlacedRun,
    plan,
)

# The most slices to concatenate, if all devices cut them at the same places. Beyond that, masks
# combine whole ranges.
_MOST_SEGMENTS = 12


class DeviceGroup:
    """Writes device-dependent scalars (i32) at the top of a body, and collective_permutes. Channel
    handles count up from `channel`."""

    def __init__(self, body: ir.Block, axes: MeshAxes, location: ir.Location, channel: int) -> None:
        self._axes = axes
        self._location = location
        self._channel = channel
        build = Builder(ir.InsertionPoint.at_block_begin(body), location)
        unsigned = ir.IntegerType.get_unsigned(32, location.context)
        self._partition = build.op("partition_id", [], build.tensor([], unsigned))
        self._last = maker_of(self._partition)
        self._made: dict[tuple[Axes, int | tuple[int, ...]], ir.Value] = {}

    def start(self, axes: Axes, local_size: int) -> ir.Value:
        """Returns the index of the first element of a device's part, which has `local_size`
        elements along the axes."""
        starts = [position * local_size for position in range(self._axes.size(axes))]
        return self._looked_up((axes, local_size), starts)

    def by_position(self, axes: Axes, numbers: Sequence[int]) -> ir.Value:
        """Returns the entry of `numbers` at the device's position along the axes."""
        return self._looked_up((axes, tuple(numbers)), numbers)

    def _looked_up(
        self, key: tuple[Axes, int | tuple[int, ...]], numbers: Sequence[int]
    ) -> ir.Value:
        if key not in self._made:
            build = Builder(ir.InsertionPoint.after(self._last), self._location)
            # One entry for each partition id.
            table = [numbers[int(position)] for position in self._axes.positions(key[0])]
            row = build.dynamic_slice(build.table(table), [self._partition], [1])
            self._made[key] = build.reshape(row, [])
            self._last = maker_of(self._made[key])
        return self._made[key]

    def zero(self) -> ir.Value:
        """Returns the constant 0."""
        key = ((), 0)
        if key not in self._made:
            self._made[key] = Builder(ir.InsertionPoint.after(self._last), self._location).i32(0)
            self._last = maker_of(self._made[key])
        return self._made[key]

    def permute(
        self, build: Builder, value: ir.Value, axes: Axes, pairs: Sequence[tuple[int, int]]
    ) -> ir.Value:
        """Writes a collective_permute between positions along the axes. A device that receives
        nothing gets zeros."""
        rows = [(group[s], group[t]) for group in self._axes.groups(axes) for s, t in pairs]
        return build.permute(value, rows, self.next_channel())

    def next_channel(self) -> int:
        """Returns a channel handle that no other collective has."""
        self._channel += 1
        return self._channel - 1

    def finish(self) -> None:
        """Erases the partition id if it is unused."""
        if not has_uses(self._partition):
            maker_of(self._partition).erase()


@dataclass(frozen=True)
class MovedTarget:
    """A target that is put together from pieces of sources along one dimension."""

    sources: tuple[ir.Value, ...]
    parts: tuple[DimensionParts, ...]
    pieces: tuple[HaloPiece, ...]
    target: DimensionParts
    filling: ir.Value | None = None  # a scalar, for the places between the pieces
    is_zero: bool = False  # the filling has the bits of zero, which a permute leaves by default

    @property
    def plan(self) -> HaloPlan:
        """The messages and runs that make the target."""
        return plan(self.parts, self.pieces, self.target, self.filling is not None)

    def replace_values(self, names: Mapping[ir.Value, ir.Value]) -> MovedTarget:
        """Returns the same target with values of a body replaced by values around it."""
        sources = tuple(names.get(source, source) for source in self.sources)
        filling = None if self.filling is None else names.get(self.filling, self.filling)
        return replace(self, sources=sources, filling=filling)


def seen_through(
    moved: MovedTarget, known: Callable[[ir.Value], MovedTarget | None]
) -> MovedTarget:
    """Replaces sources of a target by the sources that they were put together from.

    `known` returns how a value was made, or None. Example: x[1:] of a padded x reads x itself.
    Returns `moved` unchanged if the new plan sends more than both plans together.
    """
    sources: list[tuple[ir.Value, DimensionParts]] = []
    pieces: list[HaloPiece] = []
    filling, hidden = moved.filling, 0

    def place(value: ir.Value, parts: DimensionParts) -> int:
        if (value, parts) not in sources:
            sources.append((value, parts))
        return sources.index((value, parts))

    for piece in moved.pieces:
        value, parts = moved.sources[piece.source], moved.parts[piece.source]
        inner = known(value)
        behind: list[HaloPiece] = []  # the pieces that it is made of, at their places
        for each in inner.pieces if inner is not None else ():
            begin = max(piece.start, each.place)
            end = min(piece.start + piece.size, each.place + each.size)
            if begin < end:
                start, where = each.start + begin - each.place, piece.place + begin - piece.start
                behind.append(HaloPiece(each.source, start, where, end - begin))
        gaps = sum(each.size for each in behind) < piece.size
        usable = inner is not None and inner.target == parts
        if inner is not None and gaps and inner.filling is not None:
            usable = usable and (filling is None or alike(filling, inner.filling))
        if inner is None or not usable:
            pieces.append(replace(piece, source=place(value, parts)))
            continue
        if gaps:
            filling = filling or inner.filling
        hidden += inner.plan.sent
        for each in behind:
            number = place(inner.sources[each.source], inner.parts[each.source])
            pieces.append(replace(each, source=number))
    values, layouts = tuple(v for v, _ in sources), tuple(parts for _, parts in sources)
    found = MovedTarget(values or moved.sources, layouts or moved.parts, tuple(pieces),
    moved.target,
                  filling, moved.is_zero or is_zero(filling))  # fmt: skip
    return found if found.plan.sent <= moved.plan.sent + hidden else moved


def alike(one: ir.Value, other: ir.Value) -> bool:
    """Returns True if two scalars are the same value or constant; 0.0 and -0.0 differ."""
    numbers = [splat_of(value) for value in (one, other)]
    same = None not in numbers and repr(numbers[0]) == repr(numbers[1])
    return one == other or (same and one.type == other.type)


def is_zero(filling: ir.Value | None) -> bool:
    """Returns True if a scalar has the bits of zero, which a device gets that no permute sends
    to."""
    return filling is not None and repr(splat_of(filling)) in ("0", "0.0", "False")


def undefined(build: Builder, shape: Sequence[int], element: ir.Type) -> ir.Value:
    """Returns a tensor with undefined contents. It is written as zeros."""
    return build.splat(0, shape, element)


def resize_dim(build: Builder, value: ir.Value, dim: int, size: int) -> ir.Value:
    """Returns the value with undefined elements appended to a dimension, or without its last
    elements."""
    now = shape_of(value)[dim]
    if size <= now:
        return value if size == now else build.slice_along(value, dim, 0, size)
    return _pad_dim(build, value, dim, 0, size - now)


def embed_in_dim(build: Builder, value: ir.Value, dim: int, start: int, size: int) -> ir.Value:
    """Returns the value placed from `start` on in a dimension of `size` places, with undefined
    elements around it."""
    return _pad_dim(build, value, dim, start, size - start - shape_of(value)[dim])


def _pad_dim(
    build: Builder, value: ir.Value, dim: int, low: int, high: int, filling: ir.Value | None = None
) -> ir.Value:
    if not low and not high:
        return value
    edges = [[0] * len(shape_of(value)) for _ in range(3)]
    edges[0][dim], edges[1][dim] = low, high
    if filling is None:
        filling = undefined(build, [], element_of(value))
    return build.pad(value, filling, *edges)


# For each device, the supply and offset of one stretch of places; None if contents are undefined.
_Taken = tuple[tuple[int, int] | None, ...]


class MoveWriter:
    """Writes a target along a dimension that the axes divide."""

    def __init__(
        self, devices: DeviceGroup, build: Builder, moved: MovedTarget, dim: int, axes: Axes
    ) -> None:
        self._devices = devices
        self._build = build
        self._moved = moved
        self._plan = moved.plan
        self._dim = dim
        self._axes = axes
        self._length = moved.target.length
        self._supplies = list(moved.sources)

    def write(self) -> ir.Value:
        """Writes the device's range of the target."""
        for message in self._plan.messages:
            value, first = self._supplies[message.source], message.offsets[0]
            if len(set(message.offsets)) == 1:
                value = self._cut(value, first, first + message.size)
            else:
                table = [0] * len(self._plan.runs)
                for (sender, _), offset in zip(message.pairs, message.offsets, strict=True):
                    table[sender] = offset
                value = self._cut_at(value, table, message.size)
            sent = self._devices.permute(self._build, value, self._axes, message.pairs)
            self._supplies.append(sent)
        # Cut the range so that each device fills each stretch from one supply, or from none.
        ends = {0, self._length}
        ends.update(end for runs in self._plan.runs for run in runs for end in (run.low, run.high))
        segments: list[tuple[int, int, _Taken]] = []
        for start, high in itertools.pairwise(sorted(ends)):
            low = start
            taken = tuple(
                next(((r.supply, r.offset) for r in runs if r.low <= start < r.high), None)
                for runs in self._plan.runs
            )
            # Join stretches for which no device has different supplies.
            if segments and all(
                a is None or b is None or a == b
                for a, b in zip(segments[-1][2], taken, strict=True)
            ):
                before = segments.pop()
                low, taken = before[0], tuple(a or b for a, b in zip(before[2], taken, strict=True))
            segments.append((low, high, taken))
        if sum(len(_suppliers(taken)) for _, _, taken in segments) > _MOST_SEGMENTS:
            return self._write_layers()
        # Concatenate the stretches; a select picks each device's supply.
        joined = [self._segment(low, high, taken) for low, high, taken in segments]
        if not joined:
            return self._cut(self._supplies[0], 0, 0)
        return joined[0] if len(joined) == 1 else self._build.concatenate(joined, self._dim)

    def _segment(self, low: int, high: int, taken: _Taken) -> ir.Value:
        suppliers = _suppliers(taken)
        if not suppliers:
            return self._blank(high - low)
        if self._moved.is_zero and len(suppliers) == 2 and (FILLING, 0) in suppliers:
            supply = max(number for number, _ in suppliers) - len(self._moved.sources)
            filled = {d for d, each in enumerate(taken) if each == (FILLING, 0)}
            # A message brings the zeros: no device that needs them receives it.
            if supply >= 0 and all(to not in filled for _, to in self._plan.messages[supply].pairs):
                suppliers.remove((FILLING, 0))
        first, *others = suppliers
        value = self._stretch(first, low, high)
        for other in others:
            chosen = self._devices.by_position(self._axes, [int(t == other) for t in taken])
            here = self._build.compare("NE", chosen, self._devices.zero())
            stretch = self._stretch(other, low, high)
            value = self._build.same("select", here, stretch, value)
        return value

    def _stretch(self, taken: tuple[int, int], low: int, high: int) -> ir.Value:
        supply, offset = taken
        if supply == FILLING:
            return self._broadcast_filling(high - low)
        value = self._supplies[supply]
        size = shape_of(value)[self._dim]
        begin, end = low + offset, high + offset
        inside = self._cut(value, max(begin, 0), min(end, size))
        edges = max(-begin, 0), max(end - size, 0)
        if any(edges) and self._moved.is_zero:  # a permute may supply the filling, so pad with it
            nothing = self._build.splat(0, [], element_of(value))
            return _pad_dim(self._build, inside, self._dim, *edges, nothing)
        return _pad_dim(self._build, inside, self._dim, *edges)

    def _write_layers(self) -> ir.Value:
        """Writes the target by selects over whole ranges, with a mask of the places of each
        supply."""
        layers: dict[tuple[int, int], dict[int, PlacedRun]] = {}
        for device, runs in enumerate(self._plan.runs):
            seen: dict[int, int] = {}
            for run in runs:
                number = seen[run.supply] = seen.get(run.supply, -1) + 1
                if run.supply != FILLING:
                    layers.setdefault((run.supply, number), {})[device] = run
        made = None if self._moved.filling is None else self._broadcast_filling(self._length)
        for (supply, _), runs in sorted(layers.items()):
            value = self._align_supply(supply, runs)
            if made is None:
                made = value
                continue
            empty = PlacedRun(FILLING, 0, 0, 0)
            each = [runs.get(d, empty) for d in range(len(self._plan.runs))]
            ranges = [run.low for run in each], [run.high for run in each]
            where = shape_of(value), self._dim
            mask = within(self._devices, self._build, self._axes, ranges, where)
            made = self._build.same("select", mask, value, made)
        return self._blank(self._length) if made is None else made

    def _align_supply(self, supply: int, runs: dict[int, PlacedRun]) -> ir.Value:
        """Returns a supply shifted to the places where each device needs it."""
        value = self._supplies[supply]
        offsets = [run.offset for run in runs.values()]
        low = max(0, -min(offsets))
        high = max(0, max(offsets) + self._length - shape_of(value)[self._dim])
        value = _pad_dim(self._build, value, self._dim, low, high)
        table = [runs[d].offset + low if d in runs else 0 for d in range(len(self._plan.runs))]
        if len(set(offsets)) == 1:
            return self._cut(value, offsets[0] + low, offsets[0] + low + self._length)
        return self._cut_at(value, table, self._length)

    def _cut(self, value: ir.Value, low: int, high: int) -> ir.Value:
        if (low, high) == (0, shape_of(value)[self._dim]):
            return value
        return self._build.slice_along(value, self._dim, low, high)

    def _cut_at(self, value: ir.Value, table: Sequence[int], size: int) -> ir.Value:
        sizes = shape_of(value)
        sizes[self._dim] = size
        starts = [self._devices.zero()] * len(sizes)
        starts[self._dim] = self._devices.by_position(self._axes, table)
        return self._build.dynamic_slice(value, starts, sizes)

    def _blank(self, size: int) -> ir.Value:
        return undefined(self._build, self._shape(size), element_of(self._supplies[0]))

    def _broadcast_filling(self, size: int) -> ir.Value:
        assert self._moved.filling is not None, "a plan with gaps to fill has a filling"
        return self._build.broadcast(self._moved.filling, self._shape(size), [])

    def _shape(self, size: int) -> list[int]:
        shape = shape_of(self._supplies[0])
        shape[self._dim] = size
        return shape


def within(
    devices: DeviceGroup,
    build: Builder,
    axes: Axes,
    ranges: tuple[Sequence[int], Sequence[int]],
    where: tuple[Sequence[int], int],
) -> ir.Value:
    """Returns a mask that is True along one dimension for places within a range.

    `ranges` has the lower and the upper limits by position along the axes; `where` is the shape and
    the dimension.
    """
    (lows, highs), (shape, dim) = ranges, where
    if not axes:
        by_place = np.arange(shape[dim])
        alone = build.constant((lows[0] <= by_place) & (by_place < highs[0]))
        return build.broadcast(alone, shape, [dim])
    i32 = ir.IntegerType.get_signless(32, build.context)
    places = build.iota(build.tensor([shape[dim]], i32), 0)
    mask: ir.Value | None = None
    for direction, numbers in (("GE", lows), ("LT", highs)):
        if direction == "GE" and not any(numbers):
            continue
        limit = build.broadcast(devices.by_position(axes, numbers), [shape[dim]], [])
        side = build.compare(direction, places, limit)
        mask = side if mask is None else build.same("and", mask, side)
    assert mask is not None, "places have an upper limit"
    return build.broadcast(mask, shape, [dim])


def _suppliers(taken: _Taken) -> list[tuple[int, int]]:
    """Returns the supplies that devices use, those of most devices first."""
    counts = Counter(each for each in taken if each is not None)
    return sorted(counts, key=lambda each: (-counts[each], each))
