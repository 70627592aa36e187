"""Writes the program of one rank: its actions in the order of the schedule, and the ops outside it.

`main` holds calls, sends, recvs and barriers only. Two chains of tokens order it. One connects all
sends and recvs, the other the barriers before and after each call.

func.func private @prepare(<arguments>) -> (<fixed values that phases need>, <empty sums>)

runs before the first action, and `finish_0`, … after the last. Round n of the finish runs the
rank's ops after the loop over microbatches whose operands are there by then; then values are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from math import prod

from stablehlo_tools.analysis.dataflow import Node
from stablehlo_tools.analysis.loop_carries import ROWS
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import AFTER_ALL, CALL, RECV, SEND
from stablehlo_tools.ir.builder import Builder, barrier, shape_of, transfer_attributes
from stablehlo_tools.ir.inline import copy_with
from stablehlo_tools.ir.views import Function
from stablehlo_tools.mpmd.manifest import FINISH, PREPARE, ManifestPiece
from stablehlo_tools.mpmd.writing.fixed import BlockRows, Key, elements_in, identity
from stablehlo_tools.mpmd.writing.phases import (
    PhaseFunction,
    StageWriter,
    add_barrier,
    isolate_conversions,
    private_function,
)
from stablehlo_tools.mpmd.writing.program_plan import EpilogueValue, RankPlan, Returned
from stablehlo_tools.schedules.table import Action, actions_of


@dataclass(frozen=True)
class Written:
    """The arguments and results of a rank, in order, as rows of those of the program."""

    arguments: tuple[BlockRows, ...]
    returned: tuple[Returned, ...]


class RankWriter:
    """Writes `main` and its functions into the body of an empty module."""

    def __init__(self, plan: RankPlan, rank: int, module: ir.Module, devices: int) -> None:
        self._plan, self._rank, self._module, self._devices = plan, rank, module, devices
        self._place = plan.step.loop.op.location
        self._context = module.context
        self._token = ir.Type.parse("!stablehlo.token", self._context)
        self._given: dict[BlockRows, ir.Value] = {}
        self._fixed: dict[Key, ir.Value] = {}
        self._values: dict[tuple[int, int], ir.Value] = {}  # by number and microbatch
        self._sums: dict[int, ir.Value] = {}
        self._made: dict[EpilogueValue, ir.Value] = {}
        self._numbers: dict[int, ir.Value] = {}

    def write(self) -> Written:
        """Writes `main` and all functions that it calls."""
        main = private_function("main", [], [], self._module.body, self._place)
        main.attributes["sym_visibility"] = ir.StringAttr.get("public", self._context)
        self._block = Function(main).body
        self._build = Builder(ir.InsertionPoint(self._block), self._place)
        # Two chains, so that a message waits only for actions whose data it needs. Sends and
        # receives then overlap with computation.
        self._messages = self._build.create(AFTER_ALL, [], [self._token]).results[0]
        self._actions = self._build.create(AFTER_ALL, [], [self._token]).results[0]
        for microbatch in range(self._plan.table.microbatches):
            self._numbers[microbatch] = self._build.i32(microbatch)
        self._prepare()
        for phase in self._plan.phases_on(self._rank):
            if not phase.is_empty:
                StageWriter(self._plan.step, self._plan.fixed, phase).write(self._module.body)
        for action in actions_of(self._plan.table.rows[self._rank]):
            self._action(action)
        returned = self._finish()
        values = [value for value, _ in returned]
        self._build.create("func.return", values, [])
        taken = [argument.type for argument in self._block.arguments]
        type_ = ir.FunctionType.get(taken, [value.type for value in values], self._context)
        main.attributes["function_type"] = ir.TypeAttr.get(type_, self._context)
        return Written(tuple(self._given), tuple(each for _, each in returned))

    def _key(self, key: Key) -> ir.Value:
        """Returns a fixed value: an argument of `main` (added if new), or a result of `prepare`."""
        if key in self._fixed:
            return self._fixed[key]
        plan, rows = self._plan, self._plan.fixed.argument_rows(key)
        assert rows is not None, "all that is computed is prepared"
        if rows not in self._given:
            argument = plan.step.outer.values[plan.step.outer.root.arguments[rows.argument]]
            type_ = plan.fixed.value(key).type
            self._given[rows] = self._block.add_argument(type_, argument.location)
        self._fixed[key] = self._given[rows]
        return self._given[rows]

    def _is_at_hand(self, key: Key) -> bool:
        return key in self._fixed or self._plan.fixed.argument_rows(key) is not None

    def _prepare(self) -> None:
        """Writes `prepare`, which computes fixed values of phases, and initial values of sums.

        The first rank that adds to a carry starts from the program's initial value, the others from
        the identity of the reducer.
        """
        plan, loop = self._plan, self._plan.step.loop
        keys = dict.fromkeys(key for phase in plan.phases_on(self._rank) for key in phase.fixed)
        computed = [key for key in keys if plan.fixed.argument_rows(key) is None]
        carries = [carry for carry, ranks in plan.ranks_of.items() if self._rank in ranks]
        starts = {
            carry: plan.fixed.key_of(loop.op.operands[carry])
            for carry in carries
            if plan.starts_on(carry) == self._rank
        }
        leaves = plan.fixed.cone([*computed, *starts.values()], self._is_at_hand)
        if not computed and not carries:
            return
        given = [plan.fixed.value(key).type for key in computed]
        given += [loop.op.results[carry].type for carry in carries]
        taken = [plan.fixed.value(key).type for key in leaves]
        function = private_function(PREPARE, taken, given, self._module.body, self._place)
        body = Function(function).body
        build = Builder(ir.InsertionPoint(body), self._place)
        known: dict[Key, ir.Value] = dict(zip(leaves, body.arguments, strict=True))
        returned = [plan.fixed.write(key, known, build.point) for key in computed]
        for carry in carries:
            if carry in starts:
                returned.append(plan.fixed.write(starts[carry], known, build.point))
            else:
                reducer = loop.accumulators[carry].reducer
                returned.append(identity(reducer, loop.op.results[carry], build))
        build.create("func.return", returned, [])
        results = list(self._call(PREPARE, given, [self._key(key) for key in leaves]).results)
        self._fixed.update(zip(computed, results, strict=False))
        self._sums.update(zip(carries, results[len(computed) :], strict=True))

    def _action(self, action: Action) -> None:
        if action.kind.is_compute:
            phase = self._plan.phase_of(action)
            if not phase.is_empty:
                self._compute(phase, action.microbatch)
        elif action.kind.is_send:
            for channel in self._plan.channels(action):
                self._send(channel.number, self._values[channel.value, action.microbatch])
        else:
            for channel in self._plan.channels(action):
                type_ = self._plan.step.flow.values[channel.value].type
                self._values[channel.value, action.microbatch] = self._recv(channel.number, type_)

    def _compute(self, phase: PhaseFunction, microbatch: int) -> None:
        """Writes a barrier, the call of the phase, and a barrier."""
        # Compilers inline calls and order ops by data dependences alone. A forward could then run
        # long before its turn, with its activation live all that time. The barriers chain one token
        # from action to action, so that each runs in its turn and the memory is that of the
        # schedule.
        plan = self._plan
        fresh = [self._numbers[microbatch]]
        fresh += [self._values[number, microbatch] for number in phase.takes]
        fresh = self._barrier(fresh)
        operands = [*fresh, *map(self._key, phase.fixed)]
        operands += [self._sums[carry] for carry in phase.accumulators]
        types = [plan.step.flow.values[number].type for number in phase.gives]
        types += [plan.step.loop.op.results[carry].type for carry in phase.accumulators]
        results = list(self._call(phase.name, types, operands).results)
        given, sums = results[: len(phase.gives)], results[len(phase.gives) :]
        # Some of the results in the barrier are enough to hold the call in its place.
        if given:
            given = self._barrier(given)
        else:
            sums = self._barrier(sums)
        for number, value in zip(phase.gives, given, strict=True):
            self._values[number, microbatch] = value
        self._sums.update(zip(phase.accumulators, sums, strict=True))

    def _barrier(self, values: Sequence[ir.Value]) -> list[ir.Value]:
        """Returns the values after a barrier that orders them between earlier and later actions."""
        operands = [*values, self._actions]
        results: list[ir.Value] = list(barrier(operands, self._build.point, self._place).results)
        self._actions = results[-1]
        return results[:-1]

    def _send(self, channel: int, value: ir.Value) -> None:
        # NCCL runs the sends and recvs of a device in the order of their issue. The single chain of
        # tokens keeps the order of the schedule, which does not deadlock.
        operands, transfer = [value, self._messages], self._transfer(channel)
        self._messages = self._build.create(SEND, operands, [self._token], transfer).results[0]

    def _recv(self, channel: int, type_: ir.Type) -> ir.Value:
        types, transfer = [type_, self._token], self._transfer(channel)
        op = self._build.create(RECV, [self._messages], types, transfer)
        self._messages = op.results[1]
        return op.results[0]

    def _transfer(self, channel: int) -> dict[str, ir.Attribute]:
        pairs = self._plan.transfers[channel - 1].pairs(self._devices)
        attributes = transfer_attributes(channel, pairs, self._context)
        return attributes | {"is_host_transfer": ir.BoolAttr.get(False, self._context)}

    def _call(
        self, name: str, types: Sequence[ir.Type], operands: Sequence[ir.Value]
    ) -> ir.Operation:
        callee = ir.FlatSymbolRefAttr.get(name, self._context)
        return self._build.create(CALL, operands, types, {"callee": callee})

    def _finish(self) -> list[tuple[ir.Value, Returned]]:
        """Writes the rounds of the finish. Returns the results of `main`."""
        plan, finish = self._plan, self._plan.finish
        for carry, value in self._sums.items():
            self._made[EpilogueValue("part", carry, self._rank)] = value
        for number in range(finish.rounds):
            function = finish_function(plan, number, self._rank, self._is_at_hand)
            if function is not None:
                types = function.write(plan, self._module.body)
                operands = [self._local_value(made) for made in function.takes]
                operands += map(self._key, function.fixed)
                results = list(self._call(function.name, types, operands).results)
                self._made.update(zip(function.gives, results, strict=False))
                fixed = results[len(function.gives) :]
                self._fixed.update(zip(function.gives_fixed, fixed, strict=True))
            for message in plan.finish_messages:
                if message.round != number:
                    continue
                if message.source == self._rank:
                    self._send(message.channel, self._local_value(message.sent))
                elif message.target == self._rank:
                    type_ = ir.Type.parse(plan.transfers[message.channel - 1].type, self._context)
                    self._made[message.sent] = self._recv(message.channel, type_)
        returned: list[tuple[ir.Value, Returned]] = []
        for each in finish.returned:
            if each.rank == self._rank:
                home = finish.home.get(each.number)
                if home is None:
                    value = self._key(plan.fixed.key_outside(each.number))
                else:
                    value = self._local_value(EpilogueValue("value", each.number, home))
                returned.append((value, each))
        return returned

    def _local_value(self, made: EpilogueValue) -> ir.Value:
        """Returns a value that this rank computed or received.

        If only one rank adds to a carry, its sum is the total.
        """
        if made not in self._made and made.what == "value":
            carry = self._plan.carry_of.get(made.number)
            assert carry is not None, "a value is made before it is read"
            return self._sums[carry]
        return self._made[made]


def pieces_of(
    written: Sequence[Written],
) -> tuple[dict[int, list[ManifestPiece]], dict[int, list[ManifestPiece]]]:
    """Returns the pieces of each argument of the program, and those of each result."""
    inputs: dict[int, list[ManifestPiece]] = {}
    outputs: dict[int, list[ManifestPiece]] = {}
    for rank, each in enumerate(written):
        for number, rows in enumerate(each.arguments):
            inputs.setdefault(rows.argument, []).append(ManifestPiece(rank, number, *rows[1:]))
        for number, part in enumerate(each.returned):
            outputs.setdefault(part.rows.argument, []).append(
                ManifestPiece(rank, number, *part.rows[1:])
            )
    return inputs, outputs


@dataclass(frozen=True)
class FinishFunction:
    """The ops of one rank in one round of the finish. `takes` and `gives` depend on the loop;
    `fixed` and `gives_fixed` depend on arguments alone."""

    rank: int
    name: str
    nodes: tuple[Node, ...]
    totals: tuple[tuple[int, tuple[EpilogueValue, ...]], ...]  # combined parts, by carry
    takes: tuple[EpilogueValue, ...]
    fixed: tuple[Key, ...]
    gives: tuple[EpilogueValue, ...]
    gives_fixed: tuple[Key, ...]

    def write(self, plan: RankPlan, block: ir.Block) -> list[ir.Type]:
        """Writes the function at the end of a module's block. Returns the types of its results."""
        place = plan.step.loop.op.location
        taken = [plan.type_of(made) for made in self.takes]
        taken += [plan.fixed.value(key).type for key in self.fixed]
        given = [plan.type_of(made) for made in self.gives]
        given += [plan.fixed.value(key).type for key in self.gives_fixed]
        function = private_function(self.name, taken, given, block, place)
        body = Function(function).body
        arguments: list[ir.Value] = list(body.arguments)
        point = ir.InsertionPoint(body)
        build = Builder(point, place)
        made = {
            each: value
            if each.rank == self.rank or each.what == "part"
            else add_barrier(value, point)
            for each, value in zip(self.takes, arguments, strict=False)
        }
        known = dict(zip(self.fixed, arguments[len(self.takes) :], strict=True))
        for pack in [each for each in self.takes if each.what == "pack"]:
            start = 0
            for each in plan.packed[pack]:  # the values of a message, each in its shape
                shape = shape_of(plan.value_of(each))
                limit = start + prod(shape)
                made[each] = build.reshape(build.slice_along(made[pack], 0, start, limit), shape)
                start = limit
        values = {each.number: value for each, value in made.items() if each.what == "value"}
        for carry, parts in self.totals:
            reducer = plan.step.loop.accumulators[carry].reducer
            combine = partial(build.same, "add" if reducer == ROWS else reducer)
            values[plan.total_of(carry)] = reduce(combine, [made[part] for part in parts])
        for node in self.nodes:
            stand_ins: dict[ir.Value, ir.Value] = {}
            for source in node.inputs:
                value = values.get(source)
                if value is None:
                    value = plan.fixed.write(plan.fixed.key_outside(source), known, point)
                stand_ins[plan.step.outer.values[source]] = value
            copy = copy_with(node.op, stand_ins, point)
            values.update(zip(node.results, copy.results, strict=True))
        returned: list[ir.Value] = []
        for each in self.gives:
            if each.what == "pack":  # the values of one message, concatenated
                sent = isolate_conversions([values[one.number] for one in plan.packed[each]], point)
                flat = [build.reshape(value, [elements_in(value)]) for value in sent]
                returned.append(build.concatenate(flat, 0))
            else:
                returned.append(values[each.number])
        returned = isolate_conversions(returned, point)
        returned += [plan.fixed.write(key, known, point) for key in self.gives_fixed]
        build.create("func.return", returned, [])
        return given


def finish_function(
    plan: RankPlan, number: int, rank: int, is_at_hand: Callable[[Key], bool]
) -> FinishFunction | None:
    """Returns the ops of a rank in round `number`; None if there are none.

    `is_at_hand` returns True for a fixed value that the rank already has.
    """
    finish = plan.finish
    nodes = finish.ops.get((number, rank), [])
    totals = [
        (carry, tuple(parts))
        for carry, parts in finish.totals.get((number, rank), [])
        if len(parts) > 1
    ]
    own = {n for node in nodes for n in node.results}
    own |= {plan.total_of(carry) for carry, _ in totals}
    takes: dict[EpilogueValue, None] = dict.fromkeys(part for _, parts in totals for part in parts)
    keys: dict[Key, None] = {}
    for node in nodes:
        for source in node.inputs:
            if source in own:
                continue
            if source in finish.home:
                made = EpilogueValue("value", source, finish.home[source])
                takes[plan.pack_with.get((made, rank), made)] = None
            else:
                keys[plan.fixed.key_outside(source)] = None
    gives = [
        EpilogueValue("value", source, rank)
        for source in sorted(own)
        if plan.is_read_later(source, number, rank)
    ]
    for message in plan.finish_messages:
        packed = plan.packed.get(message.sent)
        if packed and (message.round, message.source) == (number, rank):
            gives.append(message.sent)
            takes.update((made, None) for made in packed if made.number not in own)
    fixed_results = plan.fixed_results(rank) if number == 0 else []
    fixed_results = [key for key in fixed_results if not is_at_hand(key)]
    if not gives and not fixed_results:
        return None
    return FinishFunction(
        rank,
        f"{FINISH}_{number}",
        tuple(nodes),
        tuple(totals),
        tuple(takes),
        tuple(plan.fixed.cone([*keys, *fixed_results], is_at_hand)),
        tuple(gives),
        tuple(fixed_results),
    )
