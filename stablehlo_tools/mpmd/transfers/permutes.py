"""Writes every transfer as a permute that all ranks take part in, as processes on XLA:CPU need it.

XLA:CPU has no send and recv, and between processes each must take part in every permute. So all
ranks issue the same permutes in one order. A rank that only watches gives zeros, and what comes to
it is used all the same, or XLA would delete the permute on that rank alone. Permutes that a rank
makes by itself, inside of its functions, go another way: see `local_permutes`.

    %y, %t1 = "stablehlo.recv"(%t) {channel 4, pairs = [[0, 1]]}         // on rank 1 of four
    ==>
    %zeros = stablehlo.constant dense<0.0>
    %a, %u = stablehlo.optimization_barrier %zeros, %t                   // another two ranks'
    %b = "stablehlo.collective_permute"(%a) {channel 3, pairs = [[2, 3]]}
    %c, %v = stablehlo.optimization_barrier %b, %u
    %k1 = call @watched(%k0, %c)
    %d, %w = stablehlo.optimization_barrier %zeros, %v
    %e = "stablehlo.collective_permute"(%d) {channel 4, pairs = [[0, 1]]}
    %y, %t1 = stablehlo.optimization_barrier %e, %w
    %k2 = call @watched(%k1, %y)
    …
    return …, %k9                                                        // tensor<f32>: of no use
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.names import CALL, MANUAL_COMPUTATION
from stablehlo_tools.ir.carriers import append, append_to_terminator, resize_function, terminator
from stablehlo_tools.ir.symbols import functions_by_name
from stablehlo_tools.mpmd.rank_set import RankSet
from stablehlo_tools.mpmd.reading import body_of
from stablehlo_tools.mpmd.transfers.ends import End, barrier, check_form, ends_of, zeros
from stablehlo_tools.mpmd.transfers.local_permutes import gather_local_permutes
from stablehlo_tools.mpmd.transfers.order import Round, rounds_of

FORM = "permutes"
_DEVICE_TO_DEVICE = 1
_PERMUTE = "stablehlo.collective_permute"
_WATCHED = "watched"


def with_permutes(ranks: RankSet) -> RankSet:
    """A copy of a set in this form; `main` gains a last result, which is no output.

    Raises a ToolError for a set that is not in the form `pairs`, whose transfers are not chained,
    or whose ranks wait for each other for ever.
    """
    check_form(ranks, FORM)
    programs = tuple(program.copy() for program in ranks.programs)
    written = replace(ranks, programs=programs)
    ends = [ends_of(written, rank) for rank in range(ranks.ranks)]
    rounds = rounds_of([[end.transfer for end in row] for row in ends])
    for program in programs:
        gather_local_permutes(program.module, ranks.ranks, ranks.manifest.devices)
    for rank, row in enumerate(ends):
        with programs[rank].module.context, ir.Location.unknown():
            _Writer(written, rank, rounds).write(row)
    return replace(written, manifest=replace(ranks.manifest, form=FORM))


@dataclass
class _Writer:
    """Rewrites the program of a rank."""

    ranks: RankSet
    rank: int
    rounds: Sequence[Round]
    functions: dict[str, str] = field(default_factory=dict[str, str])
    zeros: dict[str, ir.Value] = field(default_factory=dict[str, ir.Value])

    def write(self, ends: Sequence[End]) -> None:
        """Puts all permutes in, own ones where the ends stand, watched ones before the next end."""
        module = self.ranks.programs[self.rank].module
        main = self.ranks.main(self.rank)
        self.top = ir.InsertionPoint.at_block_begin(body_of(main))
        self.names = set(functions_by_name(module))
        self.module = module
        self.location = main.location
        scalar = ir.RankedTensorType.get([], ir.F32Type.get())
        self.kept = zeros(scalar, self.top, main.location)
        last = terminator(body_of(main))
        own = {end.transfer.channel: end for end in ends}
        order = [next((own[t.channel] for t in r if t.channel in own), None) for r in self.rounds]
        following = _following(order)
        token = ends[0].taken if ends else None
        if token is None:
            after_all = ir.Operation.create(
                "stablehlo.after_all", results=[bindings.TokenType.get()], ip=self.top
            )
            token = after_all.results[0]
        for number, (transfers, end) in enumerate(zip(self.rounds, order, strict=True), start=1):
            before = following[number - 1]
            point = ir.InsertionPoint(last if before is None else before.op)
            token = self._permute(number, transfers, end, token, point)
        self._return_kept(main)

    def _permute(
        self,
        number: int,
        transfers: Round,
        end: End | None,
        token: ir.Value,
        point: ir.InsertionPoint,
    ) -> ir.Value:
        location = end.op.location if end else self.location
        if end is not None and end.is_send:
            given = end.op.operands[0]
        else:
            given = self._zeros(transfers[0].type)
        given, token = barrier([given, token], point, location)
        size = self.ranks.manifest.devices
        pairs = [[t.source * size + d, t.target * size + d] for t in transfers for d in range(size)]
        permuted = ir.Operation.create(
            _PERMUTE,
            results=[given.type],
            operands=[given],
            attributes={
                "channel_handle": bindings.ChannelHandle.get(number, _DEVICE_TO_DEVICE),
                "source_target_pairs": ir.DenseElementsAttr.get(np.array(pairs, np.int64)),
            },
            loc=location,
            ip=point,
        ).results[0]
        found, token = barrier([permuted, token], point, location)
        self.kept = ir.Operation.create(
            CALL,
            results=[self.kept.type],
            operands=[self.kept, found],
            attributes={"callee": ir.FlatSymbolRefAttr.get(self._watched(found.type))},
            loc=location,
            ip=point,
        ).results[0]
        if end is not None:
            if not end.is_send:
                end.op.results[0].replace_all_uses_with(found)
            end.token.replace_all_uses_with(token)
            end.op.erase()
        return token

    def _zeros(self, kind: str) -> ir.Value:
        if kind not in self.zeros:
            made = zeros(ir.Type.parse(kind), self.top, ir.Location.unknown())
            self.zeros[kind] = made
        return self.zeros[kind]

    def _watched(self, kind: ir.Type) -> str:
        """The function that uses a tensor of a type: adds its first element to a number."""
        text = str(kind)
        if text not in self.functions:
            count = len(self.names)
            candidates = [_WATCHED, *(f"{_WATCHED}_{i}" for i in range(1, count + 2))]
            name = next(c for c in candidates if c not in self.names)
            self.names.add(name)
            self.functions[text] = name
            parsed = ir.Module.parse(_watching(name, ir.RankedTensorType(kind)))
            for view in parsed.body.operations:
                view.operation.clone(ip=ir.InsertionPoint(self.module.body))
        return self.functions[text]

    def _return_kept(self, main: ir.Operation) -> None:
        block = main.regions[0].blocks[0]
        inside = body_of(main)
        kept = self.kept
        append_to_terminator(inside, [kept])
        manual = next((v.operation for v in block.operations if v.name == MANUAL_COMPUTATION), None)
        if manual is not None:
            grown = append(manual, [], [kept.type])
            append_to_terminator(block, [grown.results[len(grown.results) - 1]])
        resize_function(main, 0, 1)


def _following(order: Sequence[End | None]) -> list[End | None]:
    """For each round, the end that it or the next own one replaces; None behind the last."""
    found: list[End | None] = []
    following: End | None = None
    for end in reversed(order):
        following = end or following
        found.append(following)
    return found[::-1]


def _watching(name: str, kind: ir.RankedTensorType) -> str:
    rank, element = kind.rank, kind.element_type
    ones = "x".join("1" * rank) + ("x" if rank else "")
    one = f"tensor<{ones}{element}>"
    lines = [f"func.func private @{name}(%kept: tensor<f32>, %value: {kind}) -> tensor<f32> {{"]
    starts = ", ".join("0:1" for _ in range(rank))
    source = "%value"
    if rank:
        lines.append(f"%first = stablehlo.slice %value [{starts}] : ({kind}) -> {one}")
        lines.append(f"%number = stablehlo.reshape %first : ({one}) -> tensor<{element}>")
        source = "%number"
    if isinstance(element, ir.ComplexType):
        part = ir.ComplexType(element).element_type
        lines.append(f"%real = stablehlo.real {source} : (tensor<{element}>) -> tensor<{part}>")
        source, element = "%real", part
    lines += [
        f"%small = stablehlo.convert {source} : (tensor<{element}>) -> tensor<f32>",
        "%sum = stablehlo.add %kept, %small : tensor<f32>",
        "return %sum : tensor<f32>",
        "}",
    ]
    return "\n".join(lines)
