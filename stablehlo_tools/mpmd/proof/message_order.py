"""Finds the messages that the ranks of a set issue, for the verdict on their order (M8).

Once M1 and M2 hold, a rank issues the messages of `main` in program order, on the devices that M5
has checked. The collectives of its functions stay within the rank. So the messages come from the
reading of the rank, and each function is read once, not once per call.

The exception is a rank of one device with a function that may communicate: an unknown custom call,
or shardings that a compiler resolves. Then the programs are read as a whole, as by `check-order`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from stablehlo_tools.analysis.collectives import classify_communication
from stablehlo_tools.analysis.effects import is_unknown
from stablehlo_tools.analysis.partitioner_work import first_annotation
from stablehlo_tools.analysis.rendezvous import TRANSFER
from stablehlo_tools.artifacts.program_set import JobOptions, ProgramJob
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import to_place
from stablehlo_tools.dialect.custom_calls import is_async_done
from stablehlo_tools.dialect.names import CALL, CONVERT, CUSTOM_CALL
from stablehlo_tools.ir.values import producer
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import callee_name, functions_by_name, ops_named, ops_where, terminator
from stablehlo_tools.mpmd.rank_set import RankSet
from stablehlo_tools.mpmd.reading import RankMessage, RankReading
from stablehlo_tools.order.program import (
    NOWHERE,
    CollectiveIssue,
    CollectiveSignature,
    CompiledOrder,
    ProgramBlock,
    Rendezvous,
    TextOrder,
)

_REFERENCES = "called_computations"
type Pairs = tuple[tuple[int, ...], ...]
type Calls = tuple[ir.Operation, ...]  # nested calls, outermost first


def issued_messages(
    ranks: RankSet, readings: Sequence[RankReading], *, places: bool = False
) -> list[CompiledOrder]:
    """Returns the messages that each rank issues, if M1, M2 and M5 hold.

    Device r represents the devices of rank r. With `places` the ops have locations, for an error
    message. Raises a located ToolError for a function that cannot be read.
    """
    devices = ranks.manifest.devices
    if devices == 1 and any(map(_may_issue_more, readings)):
        # Messages show that a program is for one device. By M1 one without messages is, too.
        is_silent = any(not reading.messages for reading in readings)
        copies = tuple(program.copy() for program in ranks.programs)
        job = ProgramJob(copies, JobOptions(trust_partitioner=is_silent))
        return [read.program for read in job.read()]
    return [_program(reading, devices, places=places) for reading in readings]


def _program(reading: RankReading, devices: int, *, places: bool) -> CompiledOrder:
    surroundings = _MessageSurroundings.of_rank(reading) if devices == 1 else None
    meetings: dict[Pairs, tuple[Rendezvous, Rendezvous]] = {}
    issues: list[CollectiveIssue] = []
    for number, message in enumerate(reading.messages):
        if message.pairs not in meetings:
            source, target = (device // devices for device in message.pairs[0])
            pair = (source, target)
            meetings[message.pairs] = Rendezvous(pair, (source,)), Rendezvous(pair, (target,))
        meeting = meetings[message.pairs][0 if message.is_send else 1]
        issue = CollectiveIssue(
            number,
            CollectiveSignature(TRANSFER, (message.type,), f"channel {message.channel}"),
            (meeting,),
            to_place(message.op.location) if places else NOWHERE,
            "send" if message.is_send else "recv",
            "" if surroundings is None else surroundings.describe_conversion(message),
            (meeting.members,),
        )
        issues.append(issue)
    block = ProgramBlock(tuple(issues), TextOrder(len(issues)))
    return CompiledOrder(reading.name, (reading.rank,), block, (), to_place(reading.main.location))


def _may_issue_more(reading: RankReading) -> bool:
    """Returns True if a rank of one device may issue more than the messages of its `main`."""
    if first_annotation(reading.module) is not None:
        return True
    classify = classify_communication(reading.module.context)

    def may_issue(op: ir.Operation) -> bool:
        if classify(op) is not None or op.name == "func.constant":  # maybe of @main
            return True
        if op.name != CUSTOM_CALL:
            return False
        return is_async_done(op) or is_unknown(op) or _REFERENCES in op.attributes

    functions = functions_by_name(reading.module).values()
    return any(ops_where(each, may_issue) for each in functions if each != reading.main)


@dataclass(frozen=True)
class _MessageSurroundings:
    """The conversions next to a message after calls are inlined (`compiler_hazards`)."""

    functions: dict[str, ir.Operation]
    converts: bool

    @staticmethod
    def of_rank(reading: RankReading) -> _MessageSurroundings:
        """Returns the conversions around the messages of a rank; its `main` has none (M1)."""
        functions = functions_by_name(reading.module)
        converts = any(
            len(ops_named(function, {CONVERT}))
            for function in functions.values()
            if function != reading.main
        )
        return _MessageSurroundings(functions, converts)

    def describe_conversion(self, message: RankMessage) -> str:
        """Returns the conversion that a compiler may move across a message; "" if there is none."""
        if not self.converts:
            return ""
        if message.is_send:
            maker = self._maker(message.op.operands[0], ())
            if maker is None or maker.name != CONVERT:
                return ""
            return f"of a value converted from {_element(maker.operands[0])}"
        users = list(islice(self._users(message.op.results[0], ()), 2))
        is_alone = len(users) == 1 and users[0].name == CONVERT
        return f"converted to {_element(users[0].results[0])}" if is_alone else ""

    def _maker(self, value: ir.Value, calls: Calls) -> ir.Operation | None:
        """Returns the op that yields a value in the function of the innermost of `calls`."""
        maker = producer(value)
        if maker is None:
            if not calls:
                return None
            number = ir.BlockArgument(value).arg_number
            return self._maker(calls[-1].operands[number], calls[:-1])
        if maker.name != CALL:
            return maker
        returned = terminator(self._body(maker)).operands[ir.OpResult(value).result_number]
        return self._maker(returned, (*calls, maker))

    def _users(self, value: ir.Value, calls: Calls) -> Iterator[ir.Operation]:
        """Yields the ops that read a value in the function of the innermost of `calls`."""
        for use in value.uses:
            user, number = use.owner.operation, use.operand_number
            if user.name == CALL:
                yield from self._users(self._body(user).arguments[number], (*calls, user))
            elif user.name == "func.return" and calls:
                yield from self._users(calls[-1].results[number], calls[:-1])
            else:
                yield user

    def _body(self, call: ir.Operation) -> ir.Block:
        return Function(self.functions[callee_name(call)]).body


def _element(value: ir.Value) -> str:
    return str(ir.ShapedType(value.type).element_type)
