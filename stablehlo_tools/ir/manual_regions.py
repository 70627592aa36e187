"""Converts the ops between GSPMD's two shard_map custom calls to manual computations of Shardy.

    %0 = custom_call @Sharding(%x)             {mhlo.sharding = "{devices=[4,1]<=[4]}"}
    %1 = custom_call @SPMDFullToShardShape(%0) {mhlo.sharding = "{manual}"}
    %2 = add %1, %1
    %3 = custom_call @SPMDShardToFullShape(%2) {mhlo.sharding = "{devices=[4,1]<=[4]}"}
    ==>
    %3 = sdy.manual_computation(%x) in_shardings=[…] out_shardings=[…] manual_axes={"axis_0"} (%1) {
      %2 = add %1, %1
      sdy.return %2
    }

Only the data flow shows which calls belong together. A computation consists of the transitive uses
of the entering values, up to the calls that make the results global again. Cheap ops that it also
needs, such as constants, are copied into it.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.gspmd import (
    GSPMD,
    begins_shard_map,
    is_shard_map_border,
    is_sharding_call,
)
from stablehlo_tools.dialect.traits import CALLS
from stablehlo_tools.ir.builder import Builder
from stablehlo_tools.ir.values import has_uses, key_of, producer
from stablehlo_tools.ir.walk import is_inside, terminator, values_used

type ReadBorder = Callable[[ir.Operation], ManualBorder]


@dataclass(frozen=True)
class ManualBorder:
    """The shardings of a value that enters or leaves a manual computation.

    `around` are the axes that are manual outside it. `manual` are those that are manual in it, None
    if not stated. `every` are all axes. `sharding` is the value's sharding outside, and
    `divided` maps the axes of each dimension to their sizes.
    """

    around: frozenset[str]
    manual: frozenset[str] | None
    every: frozenset[str]
    sharding: ir.Attribute
    divided: tuple[Mapping[str, int], ...]


def wrap_manual_regions(block: ir.Block, read: ReadBorder) -> None:
    """Wraps the manual computations of a block, then of nested blocks, in place.

    Raises a located ToolError if they cannot be separated, or if shapes do not match shardings.
    """
    ops = [view.operation for view in block.operations]
    borders = {n: read(op) for n, op in enumerate(ops) if is_shard_map_border(op)}
    if borders:
        outermost = min((border.around for border in borders.values()), key=len)
        outer = {n: border for n, border in borders.items() if border.around == outermost}
        for region in _Regions(block, ops, outer).in_order():
            region.wrap()
        for view in block.operations:
            if is_shard_map_border(view.operation):
                raise ToolError(
                    "manual computations must not nest: this one is inside another, whose manual "
                    "axes differ (P1)",
                    view.operation.location,
                )
    for view in list(block.operations):
        for region in view.operation.regions:
            for inner in region.blocks:
                wrap_manual_regions(inner, read)


class _Regions:
    """The manual computations of one block, whose ops are numbered in order."""

    def __init__(
        self, block: ir.Block, ops: Sequence[ir.Operation], borders: Mapping[int, ManualBorder]
    ) -> None:
        self.block, self.ops, self.borders = block, ops, borders
        self.numbers = {key_of(op): number for number, op in enumerate(ops)}
        self.feeds: list[set[int]] = [set() for _ in ops]  # the ops whose results each op reads
        self.arguments: set[int] = set()  # the ops that read values from outside the block
        for number, op in enumerate(ops):
            for value in values_used(op):
                source = self._source(value)
                if source is None:
                    self.arguments.add(number)
                elif source != number:
                    self.feeds[number].add(source)
        self.users: list[list[int]] = [[] for _ in ops]
        for number, feeds in enumerate(self.feeds):
            for each in feeds:
                self.users[each].append(number)
        self.inside = self._made_inside()
        self.copied: set[int] = set()
        self._add_needed()

    def in_order(self) -> list[_ManualRegion]:
        """Sorts the block so that each computation's ops are adjacent; returns the computations."""
        parts = self._group_computations()
        order = self._topological_order(parts)
        end = terminator(self.block)
        for number in order:
            if self.ops[number] != end:
                self.ops[number].move_before(end)
        groups: dict[int, list[int]] = defaultdict(list)
        for number in order:
            if number in parts:
                groups[parts[number]].append(number)
        return [_ManualRegion(self, tuple(group)) for group in groups.values()]

    def _source(self, value: ir.Value) -> int | None:
        """Returns the number of this block's op that makes a value, or contains its maker.

        None for a value from outside.
        """
        owner = value.owner
        if isinstance(owner, ir.Block) and owner == self.block:
            return None
        above = owner.owner if isinstance(owner, ir.Block) else owner
        while above is not None:
            number = self.numbers.get(key_of(above.operation))
            if number is not None:
                return number
            above = above.operation.parent
        return None

    def _made_inside(self) -> set[int]:
        """Returns the borders and the transitive users of entering values, up to leaving calls.

        Raises a located ToolError if one reaches the terminator or a nested entering call.
        """
        inside = set(self.borders)
        pending = [number for number in self.borders if begins_shard_map(self.ops[number])]
        end = len(self.ops) - 1
        while pending:
            for user in self.users[pending.pop()]:
                if user == end:
                    raise ToolError(
                        "a value of a manual computation leaves it without SPMDShardToFullShape "
                        "(P1)",
                        self.ops[end].location,
                    )
                if user in self.borders and begins_shard_map(self.ops[user]):
                    raise ToolError(
                        "the operand of SPMDFullToShardShape is already one device's part: "
                        "manual computations must not nest (P1)",
                        self.ops[user].location,
                    )
                if user not in inside:
                    inside.add(user)
                    pending.append(user)
        return inside

    def _add_needed(self) -> None:
        """Finds the other ops that computations read: those to copy, and those that join them.

        Raises a located ToolError if such an op reads a value from outside, or is used outside.
        """
        entering = {n for n in self.borders if begins_shard_map(self.ops[n])}
        pending = [(number, number) for number in sorted(self.inside - entering)]
        needed: set[int] = set()
        while pending:
            number, user = pending.pop()
            feeds = self.feeds[number]
            if number in self.arguments or (feeds & set(self.borders)) - entering:
                raise ToolError(
                    f"{self.ops[user].name} in a manual computation reads a value from outside "
                    "that did not go through SPMDFullToShardShape (P1)",
                    self.ops[user].location,
                )
            added = sorted(feeds - self.inside - needed)
            needed.update(added)
            pending += [(feed, user) for feed in added]
        for number in sorted(needed):  # an op that reads an op inside is not copied
            op = self.ops[number]
            communicates = {"replica_groups", "source_target_pairs"}.intersection(op.attributes)
            is_cheap = not op.regions and op.name not in CALLS and not communicates
            if is_cheap and not self.feeds[number] & self.inside:
                self.copied.add(number)
                continue
            self.inside.add(number)
            if set(self.users[number]) - self.inside - needed:
                raise ToolError(
                    f"values both inside and outside a manual computation depend on {op.name} (P1)",
                    op.location,
                )

    def _group_computations(self) -> dict[int, int]:
        """Maps each op of a computation to the first op of that computation (union-find)."""
        first = {number: number for number in self.inside}

        def root(number: int) -> int:
            while first[number] != number:
                first[number] = first[first[number]]
                number = first[number]
            return number

        for number in sorted(self.inside):
            if number in self.borders and begins_shard_map(self.ops[number]):
                continue
            for feed in self.feeds[number] & self.inside:
                low, high = sorted((root(number), root(feed)))
                first[high] = low
        return {number: root(number) for number in sorted(self.inside)}

    def _topological_order(self, parts: Mapping[int, int]) -> list[int]:
        """Returns a topological order of all ops in which each computation's ops are adjacent.

        Otherwise keeps the order of the text. Raises a located ToolError for a cycle.
        """
        members: dict[int, list[int]] = defaultdict(list)
        for number in range(len(self.ops)):
            members[parts.get(number, number)].append(number)
        waits = {
            node: {parts.get(f, f) for n in numbers for f in self.feeds[n]} - {node}
            for node, numbers in members.items()
        }
        followers: dict[int, list[int]] = defaultdict(list)
        for node, nodes in waits.items():
            for each in nodes:
                followers[each].append(node)
        left = {node: len(nodes) for node, nodes in waits.items()}
        # Sorts a computation by its last op, so that it stays as close to that as possible.
        ready = [(members[node][-1], node) for node, count in left.items() if count == 0]
        heapq.heapify(ready)
        order: list[int] = []
        while ready:
            _, node = heapq.heappop(ready)
            order += members[node]
            for follower in followers[node]:
                left[follower] -= 1
                if left[follower] == 0:
                    heapq.heappush(ready, (members[follower][-1], follower))
        if len(order) < len(self.ops):
            stuck = next(node for node in members if left[node] and node in self.inside)
            raise ToolError(
                "two manual computations overlap: a value leaves one, and the program outside "
                "passes it back into it (P1)",
                self.ops[stuck].location,
            )
        return order


@dataclass(frozen=True)
class _ManualRegion:
    """The ops of one manual computation, which are adjacent."""

    regions: _Regions
    numbers: tuple[int, ...]

    def wrap(self) -> None:
        """Moves the ops into a manual computation, and erases the calls at its borders."""
        ops = [self.regions.ops[number] for number in self.numbers]
        borders = {n: self.regions.borders[n] for n in self.numbers if n in self.regions.borders}
        entering = [n for n in borders if begins_shard_map(self.regions.ops[n])]
        leaving = [n for n in borders if n not in entering]
        axes = self._manual_axes(borders)
        for number, border in borders.items():
            _check_shapes(self.regions.ops[number], border, axes)
        enters = [self.regions.ops[n] for n in entering]
        leaves = [self.regions.ops[n] for n in leaving]
        build = Builder(ir.InsertionPoint(ops[0]), (enters or leaves)[0].location)
        manual = build.manual_computation(
            [_skip_mark(op.operands[0]) for op in enters],
            [op.results[0].type for op in leaves],
            ([borders[n].sharding for n in entering], [borders[n].sharding for n in leaving]),
            sorted(axes),
        )
        block = manual.regions[0].blocks.append(
            *[op.results[0].type for op in enters], arg_locs=[op.location for op in enters]
        )
        for op, argument in zip(enters, block.arguments, strict=True):
            op.results[0].replace_all_uses_with(argument)
        for number, op in zip(self.numbers, ops, strict=True):
            if number not in borders:
                block.append(op)
        inside = Builder(ir.InsertionPoint(block), manual.location)
        inside.create("sdy.return", [op.operands[0] for op in leaves], [])
        for op, result in zip(leaves, manual.results, strict=True):
            op.results[0].replace_all_uses_with(result)
        self._copy_needed(manual, block)
        for op in leaves:
            op.erase()
        for op in enters:
            mark = producer(op.operands[0])
            op.erase()
            if mark is not None and _is_mark(mark) and not has_uses(mark.results[0]):
                mark.erase()

    def _manual_axes(self, borders: Mapping[int, ManualBorder]) -> frozenset[str]:
        said = [(n, border.manual) for n, border in borders.items() if border.manual is not None]
        first = next(iter(borders.values()))
        axes = said[0][1] if said else first.every - first.around
        for number, other in said:
            if other != axes or not axes:
                raise ToolError(
                    "manual computations must not nest: values enter one over the axes "
                    f"{sorted(axes)}, and this one over {sorted(other)} (P1)",
                    self.regions.ops[number].location,
                )
        return axes

    def _copy_needed(self, manual: ir.Operation, block: ir.Block) -> None:
        """Copies the other ops that the computation reads to its beginning."""
        needed: set[int] = set()
        pending = list(self.numbers)
        while pending:
            added = (self.regions.feeds[pending.pop()] & self.regions.copied) - needed
            needed |= added
            pending += added
        point = ir.InsertionPoint(block.operations[0])
        for number in sorted(needed):
            op = self.regions.ops[number]
            copy = op.clone(ip=point)
            for old, new in zip(op.results, copy.results, strict=True):
                for use in list(old.uses):
                    user = use.owner.operation
                    if is_inside(user, manual):
                        user.operands[use.operand_number] = new


def _check_shapes(op: ir.Operation, border: ManualBorder, axes: frozenset[str]) -> None:
    """Raises a ToolError if a device's part does not have the shape that the axes imply."""
    types = [op.operands[0].type, op.results[0].type]
    whole, local = types if begins_shard_map(op) else types[::-1]
    if not isinstance(whole, ir.RankedTensorType) or not isinstance(local, ir.RankedTensorType):
        return
    parts = [math.prod(s for a, s in dim.items() if a in axes) for dim in border.divided]
    if [size * count for size, count in zip(local.shape, parts, strict=False)] != whole.shape:
        raise ToolError(
            f"a device's part of {whole} is {local}, but its sharding over the manual axes "
            f"divides it into {' x '.join(map(str, parts)) or 1} parts (P1)",
            op.location,
        )


def _skip_mark(value: ir.Value) -> ir.Value:
    """Returns the operand of a @Sharding call, as the computation states that sharding itself."""
    op = producer(value)
    return op.operands[0] if op is not None and _is_mark(op) else value


def _is_mark(op: ir.Operation) -> bool:
    # A `shard_as` or `shard_like` also joins the value to a sharding group.
    return is_sharding_call(op) and "shard_" not in str(op.attributes[GSPMD])
