"""Rewrites the transfers between ranks, and permutes within one, in the forms that runtimes need.

For XLA:GPU (`with_both_ends`) every transfer has both ends in one program. XLA's verifier rejects a
module that sends and does not receive on the same pairs. The other end does nothing on this rank's
devices, because the pairs do not name them as its source or target.

    %t1 = "stablehlo.send"(%x, %t) {channel 1, pairs = [[0, 1]]}         // on rank 0
    ==>
    %t1 = "stablehlo.send"(%x, %t) {channel 1, pairs = [[0, 1]]}
    %_, %t2 = "stablehlo.recv"(%t1) {channel 1, pairs = [[0, 1]]}

    %y, %t1 = "stablehlo.recv"(%t) {channel 1, pairs = [[0, 1]]}         // on rank 1
    ==>
    %t0 = "stablehlo.send"(%zeros, %t) {channel 1, pairs = [[0, 1]]}
    %y, %t1 = "stablehlo.recv"(%t0) {channel 1, pairs = [[0, 1]]}

Every send and recv still reads the token of the one before it.

For processes on XLA:CPU (`with_permutes`) every transfer is a permute that all ranks take part in.
XLA:CPU has no send and recv, and every process must take part in every permute. So all ranks issue
the same permutes in one order, which `rounds_of` finds by running the ranks together. A rank that
only watches a permute contributes zeros. It also uses the result, or XLA would delete the permute
on that rank alone.

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
    return …, %k9                                                        // tensor<f32>: unused

In that form, permutes within a rank, in its functions, become gathers. All processes would have to
take part in a permute, but only the devices of one rank issue these.

    %y = "stablehlo.collective_permute"(%x) {pairs = [[0, 1], [2, 3]]}   // ranks of two devices
    ==>
    %y = call @permuted(%x)
    func @permuted(%x) {
      %all = "stablehlo.all_gather"(%x as one row) {groups = [[0, 1], [2, 3]]}
      %source = the entry of this device in the table [-1, 0, -1, 0]
      return (%source < 0) ? zeros : %all[%source]
    }
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import ModuleFacts, find_collectives
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, naming, note
from stablehlo_tools.dialect.names import AFTER_ALL, CALL, MANUAL_COMPUTATION, RECV, SEND
from stablehlo_tools.ir.builder import Builder, barrier
from stablehlo_tools.ir.carriers import append, append_to_terminator, resize_function
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import functions_by_name, terminator
from stablehlo_tools.mpmd.manifest import ManifestTransfer
from stablehlo_tools.mpmd.rank_set import RankSet
from stablehlo_tools.mpmd.reading import body_of

Round = tuple[ManifestTransfer, ...]  # of one type, between different ranks: one permute
PERMUTES = "permutes"
_WATCHED = "watched"
BOTH_ENDS = "both-ends"
# XLA:GPU divides autotuning among processes by the program's fingerprint. Processes with different
# programs deadlock while this flag is on, which is the default.
SHARDED_AUTOTUNING = "xla_gpu_shard_autotuning"
_COPIED = ("channel_handle", "is_host_transfer", "source_target_pairs")


@dataclass(frozen=True, eq=False)
class TransferEnd:
    """A send or a recv in `main`, and the transfer that it is an end of."""

    op: ir.Operation
    transfer: ManifestTransfer

    @property
    def is_send(self) -> bool:
        """True if it is the sending end."""
        return self.op.name == SEND

    @property
    def token(self) -> ir.Value:
        """The token that it yields."""
        return self.op.results[-1]

    @property
    def taken(self) -> ir.Value:
        """The token that it reads."""
        return self.op.operands[-1]


def ends_of(ranks: RankSet, rank: int) -> list[TransferEnd]:
    """Returns the ends of transfers of a rank in program order, chained by their tokens.

    Raises a located ToolError if the set is not in the form `pairs`.
    """
    known = ranks.manifest.of_channel()
    ends: list[TransferEnd] = []
    with naming(ranks.programs[rank].name):
        for view in body_of(ranks.main(rank)).operations:
            op = view.operation
            if op.name not in (SEND, RECV):
                continue
            channel = bindings.ChannelHandle(op.attributes["channel_handle"]).handle
            transfer = known.get(channel)
            if transfer is None:
                raise ToolError(f"{op.name}: the manifest has no channel {channel}", op.location)
            end = TransferEnd(op, transfer)
            if rank != (transfer.source if end.is_send else transfer.target):
                raise ToolError(
                    f"{op.name} on channel {channel} is on rank {rank}, but the channel goes from "
                    f"rank {transfer.source} to rank {transfer.target}",
                    op.location,
                )
            if ends and end.taken != ends[-1].token:
                raise ToolError(
                    f"{end.op.name} on channel {end.transfer.channel} must read the token of the "
                    f"transfer before it, on channel {ends[-1].transfer.channel}",
                    end.op.location,
                )
            ends.append(end)
    return ends


def check_form(ranks: RankSet, form: str) -> None:
    """Raises ToolError if a set is not in the form `pairs`, the only one that can be rewritten."""
    if ranks.manifest.form != "pairs":
        error = ToolError(
            f"the transfers of this set are in the form {ranks.manifest.form}, but form {form} "
            "can be made only from the form pairs"
        )
        error.input_name = ranks.name
        raise error


def zeros(type_: ir.Type, point: ir.InsertionPoint, location: ir.Location) -> ir.Value:
    """Returns a constant of zeros."""
    tensor = ir.RankedTensorType(type_)
    return Builder(point, location).splat(0, tensor.shape, tensor.element_type)


def zeros_of(type_: ir.Type) -> str:
    """Returns zeros of a tensor type, as text: `dense<0> : tensor<4xi32>`."""
    element = ir.RankedTensorType(type_).element_type
    text = "0"
    if isinstance(element, ir.ComplexType):
        text = "(0.0,0.0)"
    elif isinstance(element, ir.FloatType):
        text = '"0x' + "00" * max(1, element.width // 8) + '"'
    elif str(element) == "i1":
        text = "false"
    return f"dense<{text}> : {type_}"


_NAME, _PLACE = "permuted", "@NAME("


def gather_local_permutes(module: ir.Module, ranks: int, devices: int) -> None:
    """Rewrites every permute whose pairs are within ranks of so many devices, in place."""
    facts = ModuleFacts.from_module(module, [])
    made: dict[str, str] = {}
    taken = set(functions_by_name(module))
    for collective in find_collectives(module):
        op, pairs = collective.op, facts.groups(collective) or ()
        if collective.kind != "collective_permute" or op != collective.inner:
            continue
        if any(source // devices != target // devices for source, target in pairs):
            continue
        name = next(n for i in range(len(taken) + 1) if (n := f"{_NAME}_{i}") not in taken)
        type_ = ir.RankedTensorType(op.results[0].type)
        text = _function(type_, pairs, ranks, devices)
        if text not in made:
            made[text] = name
            taken.add(name)
            with module.context:
                parsed = ir.Module.parse(text.replace(_PLACE, f"@{name}("))
            for view in parsed.body.operations:
                view.operation.clone(ip=ir.InsertionPoint(module.body))
        with module.context:
            build = Builder(ir.InsertionPoint(op), op.location)
            attributes = {"callee": ir.FlatSymbolRefAttr.get(made[text])}
            call = build.create(CALL, list(op.operands), [type_], attributes)
        op.results[0].replace_all_uses_with(call.results[0])
        op.erase()


def _function(
    type_: ir.RankedTensorType, pairs: Sequence[Sequence[int]], ranks: int, devices: int
) -> str:
    """Returns the function that replaces a permute, with a placeholder for its name."""
    sizes, element = "".join(f"{size}x" for size in type_.shape), type_.element_type
    row, rows = (f"tensor<{count}x{sizes}{element}>" for count in (1, devices))
    groups = [[rank * devices + d for d in range(devices)] for rank in range(ranks)]
    # -1 if no pair ends at a device: the slice clamps it, and the select returns zeros.
    sources = {target: source % devices for source, target in pairs}
    table = [sources.get(device, -1) for device in range(ranks * devices)]
    count, axes = len(table), len(type_.shape)
    starts = "".join(", %zero" for _ in range(axes))
    indices = ", ".join(["tensor<i32>"] * (1 + axes))
    cut = ", ".join(map(str, (1, *type_.shape)))
    return f"""
      func.func private {_PLACE}%x: {type_}) -> {type_} {{
        %row = stablehlo.reshape %x : ({type_}) -> {row}
        %all = "stablehlo.all_gather"(%row) <{{
          all_gather_dim = 0 : i64,
          channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
          replica_groups = dense<{groups}> : tensor<{ranks}x{devices}xi64>, use_global_device_ids
        }}> : ({row}) -> {rows}
        %table = stablehlo.constant dense<{table}> : tensor<{count}xi32>
        %device = stablehlo.partition_id : tensor<ui32>
        %entry = stablehlo.dynamic_slice %table, %device, sizes = [1]
          : (tensor<{count}xi32>, tensor<ui32>) -> tensor<1xi32>
        %source = stablehlo.reshape %entry : (tensor<1xi32>) -> tensor<i32>
        %zero = stablehlo.constant dense<0> : tensor<i32>
        %found = stablehlo.dynamic_slice %all, %source{starts}, sizes = [{cut}]
          : ({rows}, {indices}) -> {row}
        %value = stablehlo.reshape %found : ({row}) -> {type_}
        %is_there = stablehlo.compare GE, %source, %zero
          : (tensor<i32>, tensor<i32>) -> tensor<i1>
        %none = stablehlo.constant {zeros_of(type_)}
        %y = stablehlo.select %is_there, %value, %none : tensor<i1>, {type_}
        return %y : {type_}
      }}
    """


def rounds_of(rows: Sequence[Sequence[ManifestTransfer]]) -> list[Round]:
    """Returns the transfers in an order that agrees with each rank's, simultaneous ones together.

    `rows[r]` are the transfers of rank r in its order. Raises ToolError if the ranks deadlock.
    """
    left = [deque(row) for row in rows]
    rounds: list[Round] = []
    while any(left):
        # The transfers that are next on both of their ranks. No rank is in two of them.
        ready = [
            row[0]
            for rank, row in enumerate(left)
            if row
            and row[0].source == rank
            and left[row[0].target]
            and left[row[0].target][0] == row[0]
        ]
        if not ready:
            notes = tuple(
                note(
                    f"rank {rank} waits for channel {row[0].channel} ({row[0].action}) from rank "
                    f"{row[0].source} to rank {row[0].target}"
                )
                for rank, row in enumerate(left)
                if row
            )
            raise (ToolError("the ranks wait for each other forever", notes=notes))
        # One permute moves tensors of one type.
        by_type: dict[str, list[ManifestTransfer]] = {}
        for transfer in ready:
            by_type.setdefault(transfer.type, []).append(transfer)
            left[transfer.source].popleft()
            left[transfer.target].popleft()
        rounds += map(tuple, by_type.values())
    return rounds


def with_permutes(ranks: RankSet) -> RankSet:
    """Returns a copy of a set in the form `permutes`. `main` gains a last result, not an output.

    Raises ToolError for a set that is not in the form `pairs`, whose transfers are not chained, or
    whose ranks deadlock.
    """
    check_form(ranks, PERMUTES)
    programs = tuple(program.copy() for program in ranks.programs)
    written = replace(ranks, programs=programs)
    ends = [ends_of(written, rank) for rank in range(ranks.ranks)]
    rounds = rounds_of([[end.transfer for end in row] for row in ends])
    for program in programs:
        gather_local_permutes(program.module, ranks.ranks, ranks.manifest.devices)
    for rank, row in enumerate(ends):
        with programs[rank].module.context, ir.Location.unknown():
            _PermuteWriter(written, rank, rounds).write(row)
    return replace(written, manifest=replace(ranks.manifest, form=PERMUTES))


@dataclass
class _PermuteWriter:
    """Rewrites the program of a rank."""

    ranks: RankSet
    rank: int
    rounds: Sequence[Round]
    functions: dict[str, str] = field(default_factory=dict[str, str])
    zeros: dict[str, ir.Value] = field(default_factory=dict[str, ir.Value])

    def write(self, ends: Sequence[TransferEnd]) -> None:
        """Inserts all permutes: own ones in place of the ends, watched ones before the next end."""
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
        # For each round the next end of this rank from there on; None after the last.
        following: list[TransferEnd | None] = [None]
        for end in reversed(order):
            following.append(end or following[-1])
        following.reverse()
        # A rank without transfers has no token, but takes part in all permutes.
        token = ends[0].taken if ends else None
        if token is None:
            build = Builder(self.top, ir.Location.unknown())
            token = build.create(AFTER_ALL, [], [bindings.TokenType.get()]).results[0]
        for number, (transfers, end) in enumerate(zip(self.rounds, order, strict=True), start=1):
            before = following[number - 1]
            point = ir.InsertionPoint(last if before is None else before.op)
            token = self._permute(number, transfers, end, token, point)
        block = Function(main).body
        inside = body_of(main)
        kept = self.kept
        append_to_terminator(inside, [kept])
        manual = next((v.operation for v in block.operations if v.name == MANUAL_COMPUTATION), None)
        if manual is not None:
            grown = append(manual, [], [kept.type])
            append_to_terminator(block, [grown.results[len(grown.results) - 1]])
        resize_function(main, 0, 1)

    def _permute(
        self,
        number: int,
        transfers: Round,
        end: TransferEnd | None,
        token: ir.Value,
        point: ir.InsertionPoint,
    ) -> ir.Value:
        build = Builder(point, end.op.location if end else self.location)
        if end is not None and end.is_send:
            given = end.op.operands[0]
        else:
            type_ = transfers[0].type
            if type_ not in self.zeros:
                self.zeros[type_] = zeros(ir.Type.parse(type_), self.top, ir.Location.unknown())
            given = self.zeros[type_]
        # One token through barriers around every permute fixes their order, the same on all ranks.
        given, token = barrier([given, token], point, build.location).results
        size = self.ranks.manifest.devices
        pairs = [pair for transfer in transfers for pair in transfer.pairs(size)]
        permuted = build.permute(given, pairs, number)
        tensor, token = barrier([permuted, token], point, build.location).results
        # The sum becomes a result of `main`: XLA keeps permutes whose value this rank ignores.
        attributes = {"callee": ir.FlatSymbolRefAttr.get(self._consumer_function(tensor.type))}
        operands, types = [self.kept, tensor], [self.kept.type]
        self.kept = build.create(CALL, operands, types, attributes).results[0]
        if end is not None:
            if not end.is_send:
                end.op.results[0].replace_all_uses_with(tensor)
            end.token.replace_all_uses_with(token)
            end.op.erase()
        return token

    def _consumer_function(self, type_: ir.Type) -> str:
        """Returns the function that uses a tensor of a type by adding its first element."""
        text = str(type_)
        if text not in self.functions:
            count = len(self.names)
            candidates = [_WATCHED, *(f"{_WATCHED}_{i}" for i in range(1, count + 2))]
            name = next(c for c in candidates if c not in self.names)
            self.names.add(name)
            self.functions[text] = name
            parsed = ir.Module.parse(_watching(name, ir.RankedTensorType(type_)))
            for view in parsed.body.operations:
                view.operation.clone(ip=ir.InsertionPoint(self.module.body))
        return self.functions[text]


def _watching(name: str, type_: ir.RankedTensorType) -> str:
    rank, element = type_.rank, type_.element_type
    ones = "x".join("1" * rank) + ("x" if rank else "")
    one = f"tensor<{ones}{element}>"
    lines = [f"func.func private @{name}(%kept: tensor<f32>, %value: {type_}) -> tensor<f32> {{"]
    starts = ", ".join("0:1" for _ in range(rank))
    source = "%value"
    if rank:
        lines.append(f"%first = stablehlo.slice %value [{starts}] : ({type_}) -> {one}")
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


def with_both_ends(ranks: RankSet) -> RankSet:
    """Returns a copy of a set in the form `both-ends`.

    Raises ToolError for a set that is not in the form `pairs`, or whose transfers are not chained.
    """
    check_form(ranks, BOTH_ENDS)
    programs = tuple(program.copy() for program in ranks.programs)
    written = replace(ranks, programs=programs)
    for rank in range(written.ranks):
        for end in ends_of(written, rank):
            op, present = end.op, end.op.attributes
            attributes = {name: present[name] for name in _COPIED if name in present}
            if end.is_send:
                build = Builder(ir.InsertionPoint.after(op), op.location)
                types = [op.operands[0].type, end.token.type]
                received = build.create(RECV, [end.token], types, attributes)
                end.token.replace_all_uses_except(received.results[1], [received])
            else:
                build = Builder(ir.InsertionPoint(op), op.location)
                value = zeros(op.results[0].type, build.point, op.location)
                sent = build.create(SEND, [value, end.taken], [end.token.type], attributes)
                op.operands[len(op.operands) - 1] = sent.results[0]
    return replace(written, manifest=replace(ranks.manifest, form=BOTH_ENDS))
