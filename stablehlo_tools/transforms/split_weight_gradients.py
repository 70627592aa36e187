"""Divides backward loops over layers: first the chain of cotangents, then gradients of weights.

No op before the optimizer needs a gradient of weights, but the stage before waits for the cotangent
of a layer's input. Zero-bubble schedules run cotangents as soon as they can, and gradients of
weights when a rank would idle. So the two must be separate loops.

    %dx, %dw = stablehlo.while(%d = %dy)                       // d' = d·wᵀ, dw[i] = x[i]ᵀ·d
  ==>
    %dx, %stored = stablehlo.while(%d = %dy)                   // d' = d·wᵀ, stored[i] = d
    %dw = stablehlo.while(%rows = %stored)                     // dw[i] = x[i]ᵀ·stored[i]

The first loop stores the values that the second needs, chosen so that they have the fewest bytes.
In a decoder, that is one cotangent for each matrix: the other operand of its gradient is a
residual. The second loop recomputes cheap ops. It runs right after the first, in the same order.
Sums over layers that no op in the loop reads, such as gradients of weights that all layers share,
move with the rest.

Preconditions:
  P1  There is a backward loop over layers: its iterations carry a value, and it reads rows that a
      forward loop over layers has written.

Guarantees: the signature stays. All values are bitwise as before if the backend computes an op the
same way at every place.

A loop is divided if a contraction, a scatter, an inner loop or a collective has results that only
leave the loop. No other loop over layers with a chain may read them, as it reads residuals.
Other loops stay unchanged. If none can be divided, a warning says so. Calls are inlined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from stablehlo_tools.analysis.effects import Effects
from stablehlo_tools.analysis.layer_loops.backward_division import (
    BackwardDivision,
    awaited_carries,
    backward_loops,
    divide,
    layer_chains,
    states,
)
from stablehlo_tools.analysis.loops import LoopBody
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Diagnostics, ToolError, note
from stablehlo_tools.ir.builder import Builder, element_of, shape_of
from stablehlo_tools.ir.cleanup import erase_unused
from stablehlo_tools.ir.clone import emptied_clone
from stablehlo_tools.ir.inline import copy_with, inline_all_calls
from stablehlo_tools.ir.values import key_of, maker_of
from stablehlo_tools.ir.views import Function, While
from stablehlo_tools.ir.walk import entry_function, functions_by_name, terminator, values_used
from stablehlo_tools.ir.while_loop import iteration_of, room_for_rows
from stablehlo_tools.passes.base import Pass


@dataclass(frozen=True)
class SplitWeightGradientsPass(Pass):
    """The gradients of weights of a backward loop over layers move to a second loop after it.

    `explain`: a note for each loop on the results that move, and the bytes that are stored for
    them.
    """

    name: ClassVar[str] = "split-weight-gradients"
    explain: bool = False

    def run(self, module: ir.Module, diagnostics: Diagnostics) -> None:
        """Rewrites the module in place."""
        inline_all_calls(module)
        main = entry_function(module)
        block = Function(main).body
        effects = Effects(functions_by_name(module))
        chains = layer_chains(block, effects)
        loops = backward_loops(chains, block, effects)
        if not loops:
            raise ToolError(
                "split-weight-gradients: the program has no backward loop over layers: no loop "
                "reads rows that another loop over layers has written (P1)",
                main.location,
            )
        # A value for a later loop waits only if it waits there, too.
        divisions: list[BackwardDivision] = []
        for loop in reversed(loops):
            division = divide(loop, awaited_carries(loop, chains, divisions))
            if division is not None:
                divisions.append(division)
        planned = divisions[::-1]
        if not planned:
            diagnostics.warn(
                "split-weight-gradients: all work of the backward loops is part of their chains, "
                "so nothing is divided",
                main.location,
            )
            return
        if self.explain:
            diagnostics.collected += [
                note(
                    f"split-weight-gradients: {len(division.moved)} results of a loop over "
                    f"{division.loop.trips} layers move to a loop after it, which needs "
                    f"{len(division.stored)} values ({division.stored_bytes} bytes) that each "
                    "iteration stores",
                    division.loop.op.location,
                )
                for division in planned
            ]
        with ir.Location.unknown(module.context):
            for division in planned:
                write_division(division)
        erase_unused(block)


def write_division(division: BackwardDivision) -> None:
    """Replaces a loop by two."""
    op = division.loop.op
    first, second = (_Loop(division, takes_rows=later) for later in (False, True))
    build = Builder(ir.InsertionPoint(op), op.location)
    trips = division.loop.trips
    chain = first.write([room_for_rows(build, value, trips) for value in division.stored])
    rows = list(chain.results)[len(first.carries) :]
    gradients = second.write(rows)
    body = division.loop.body
    for carry, result in enumerate(op.results):
        if carry in body.invariant:
            result.replace_all_uses_with(op.operands[carry])
        elif carry in division.moved:
            result.replace_all_uses_with(gradients.results[second.carries.index(carry)])
        else:
            result.replace_all_uses_with(chain.results[first.carries.index(carry)])
    op.erase()


class _Loop:
    """One of the two loops, with the carries and ops of the divided one that it needs.

    The chain has all that is not moved, and stores a row of each stored value in an iteration. The
    loop that `takes_rows` computes the moved results from these rows and from values that are known
    at any time.
    """

    def __init__(self, division: BackwardDivision, *, takes_rows: bool) -> None:
        self._division = division
        self._takes_rows = takes_rows
        self._body: LoopBody = division.loop.body
        body, moved = self._body, division.moved
        self._behind = body.behind_barrier if takes_rows else {}
        self._ops: set[int] = set()
        self._used: set[int] = set(moved)
        ends: list[ir.Value] = []
        if not takes_rows:
            self._used = {c for c in (*states(body), *body.steps) if c not in moved}
            self._ops |= {i for i, op in enumerate(body.ops) if not len(op.results)}
            ends += division.stored
            for op in body.ops:
                if not len(op.results) or body.effects.has_effect(op):
                    ends += (*body.reads(op), *op.results)
        condition = While(division.loop.op).condition
        inside: dict[ir.Value, int] = {a: i for i, a in enumerate(condition.arguments)}
        for view in condition.operations:
            used = values_used(view.operation)
            self._used |= {inside[value] for value in used if value in inside}
        self._used.add(division.loop.counted.counter.position)
        self._gather(ends)
        self.carries = sorted(self._used)

    def _gather(self, ends: Sequence[ir.Value]) -> None:
        """Notes the ops and carries that values need."""
        body, given = self._body, set(self._division.stored if self._takes_rows else ())
        pending = [*ends, *(body.ends[carry] for carry in sorted(self._used))]
        seen: set[ir.Value] = set()
        while pending:
            asked = pending.pop()
            value = self._behind.get(asked, asked)
            if asked in given or value in seen:
                continue
            seen.add(value)
            number = body.argument_number(value)
            if number is not None:
                self._used.add(number)
                pending.append(body.ends[number])
            elif body.is_inside(value):
                maker = maker_of(value)
                self._ops.add(body.position_of[key_of(maker)])
                pending += body.reads(maker)

    def write(self, stacks: Sequence[ir.Value]) -> ir.Operation:
        """Writes the loop before the divided one, with stacks after its other carries; returns
        it."""
        old = self._division.loop.op
        operands = [*(old.operands[carry] for carry in self.carries), *stacks]
        types = [value.type for value in operands]
        new = emptied_clone(old, operands, types, ir.InsertionPoint(old))
        locations = [old.location] * len(types)
        condition, body = (
            ir.Block.create_at_start(region, types, locations) for region in new.regions
        )
        values = self._arguments(While(old).condition, condition)
        for view in While(old).condition.operations:
            copy = copy_with(view.operation, values, ir.InsertionPoint(condition))
            values.update(zip(view.operation.results, copy.results, strict=True))
        self._fill(body)
        return new

    def _arguments(self, old: ir.Block, new: ir.Block) -> dict[ir.Value, ir.Value]:
        return {old.arguments[carry]: new.arguments[i] for i, carry in enumerate(self.carries)}

    def _fill(self, block: ir.Block) -> None:
        body, stored = self._body, self._division.stored
        build = Builder(ir.InsertionPoint(block), self._division.loop.op.location)
        values = self._arguments(body.block, block)
        stacks: list[ir.Value] = [*list(block.arguments)[len(self.carries) :]]
        if self._takes_rows:
            for value, stack in zip(stored, stacks, strict=True):
                starts = self._row(build, values, len(shape_of(stack)))
                row = build.dynamic_slice(stack, starts, [1, *shape_of(value)])
                values[value] = build.reshape(row, shape_of(value))
        for position, op in enumerate(body.ops):
            if position in self._ops:
                copy = copy_with(op, values, ir.InsertionPoint(block))
                values.update(zip(op.results, copy.results, strict=True))
            for result in op.results:
                source = self._behind.get(result)
                if source is not None and (source in values or not body.is_inside(source)):
                    values[result] = values.get(source, source)
        if not self._takes_rows:
            for place, value in enumerate(stored):
                row = build.reshape(values[value], [1, *shape_of(value)])
                starts = self._row(build, values, len(shape_of(stacks[place])))
                stacks[place] = build.update(stacks[place], row, starts)
        ends = [body.ends[carry] for carry in self.carries]
        end = terminator(body.block)
        ir.Operation.create(
            end.name,
            operands=[*(values.get(value, value) for value in ends), *stacks],
            loc=end.location,
            ip=ir.InsertionPoint(block),
        )

    def _row(self, build: Builder, values: dict[ir.Value, ir.Value], rank: int) -> list[ir.Value]:
        """Returns the start indices of an iteration's row in a stack with `rank` dimensions."""
        loop = self._division.loop
        counter = loop.counted.counter
        index = iteration_of(
            build,
            values[self._body.arguments[counter.position]],
            loop.counted.starts[0],
            counter.step,
        )
        element = element_of(index)
        zero = build.splat(0, [], element)
        # Rows are numbered as the layers are, also if the loop begins with the last.
        if loop.reverse:
            index = build.same("subtract", build.splat(loop.trips - 1, [], element), index)
        return [index, *[zero] * (rank - 1)]
