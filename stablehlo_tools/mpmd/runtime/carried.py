"""Finds the results of a step that are arguments of the next one, and copies them to other ranks.

A result is on one rank, an argument on every rank that reads it, such as a step counter or tied
weights. If another rank reads the next value, it is sent there at the end of the program:

    return %new, %count                                  // rank 0 has the counter
  ==>
    %t1 = "stablehlo.send"(%count, %t) {channel 41, pairs = [[0, 1]]}
    return %new, %count

    %count, %t1 = "stablehlo.recv"(%t) {channel 41, pairs = [[0, 1]]}       // rank 1 reads it
    return %new, %count

Programs are those of a device here (`running.localisation`), in the form `pairs`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import AFTER_ALL, RECV, SEND
from stablehlo_tools.ir.builder import Builder, transfer_attributes
from stablehlo_tools.ir.carriers import append_to_terminator, resize_function
from stablehlo_tools.ir.token_chain import token_type
from stablehlo_tools.ir.views import Function
from stablehlo_tools.ir.walk import entry_function, terminator
from stablehlo_tools.mpmd.manifest import (
    FINISH,
    Manifest,
    ManifestEntry,
    ManifestPiece,
    ManifestTransfer,
)
from stablehlo_tools.mpmd.rank_set import RankSet
from stablehlo_tools.mpmd.running.localisation import LocalProgram
from stablehlo_tools.mpmd.running.rank_child import value_of

type Keys = tuple[str, ...]
_KEY = re.compile(r"""\[(?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)"|([^\]]+))\]|\.(\w+)""")


def keys_of(path: str) -> Keys:
    """Returns the keys of a pytree path: `[0]['w'].mu[3]` yields 0, w, mu, 3; () if it is
    invalid."""
    matches = list(_KEY.finditer(path))
    if "".join(match.group(0) for match in matches) != path:
        return ()
    return tuple(next(g for g in match.groups() if g is not None) for match in matches)


@dataclass(frozen=True)
class CarriedState:
    """The results that are arguments of the next step.

    `inputs` has, by the number of an input, the output that is its next value. `unread` has the
    outputs for arguments that the program lacks because no op reads them, by the keys of their
    paths.
    """

    inputs: Mapping[int, int]
    unread: Mapping[Keys, int]


def carried_of(manifest: Manifest, told: Mapping[str, str] | None) -> CarriedState:
    """Returns the results that are the next values of arguments.

    `told` maps paths of results to paths of arguments, each with all leaves below it. Without it, a
    result is the next value of an argument if both are trees of names with the same leaves. The
    argument may lack leaves that no op reads. Of several such arguments, the one at the same
    position is chosen, else the first. Raises ToolError if there is no match.
    """
    inputs = [keys_of(entry.path) for entry in manifest.inputs]
    outputs = [keys_of(entry.path) for entry in manifest.outputs]
    if told is None:
        pairs = _infer_pairs(manifest, inputs, outputs)
    else:
        pairs = [(keys_of(result), keys_of(argument)) for result, argument in told.items()]
    carried: dict[int, int] = {}
    unread: dict[Keys, int] = {}
    for result, argument in pairs:
        leaves = _below(manifest.inputs, inputs, argument)
        for rest, number in _below(manifest.outputs, outputs, result).items():
            if rest not in leaves:
                unread[(*argument, *rest)] = number
                continue
            source, target = manifest.outputs[number], manifest.inputs[leaves[rest]]
            if source.type != target.type:
                raise ToolError(
                    f"result {source.path} is {source.type}, but argument {target.path} is "
                    f"{target.type}"
                )
            carried[leaves[rest]] = number
    if not carried:
        raise ToolError(
            "no result of this step matches an argument of the next one; state the pairs, result "
            "first: carried={'[0]': '[0]'}"
        )
    return CarriedState(carried, unread)


def _below(entries: Sequence[ManifestEntry], keys: Sequence[Keys], prefix: Keys) -> dict[Keys, int]:
    """Returns the entries below a path, by the rest of their paths. Raises ToolError for none."""
    found = {
        each[len(prefix) :]: number
        for number, each in enumerate(keys)
        if entries[number].path and each[: len(prefix)] == prefix
    }
    if not found:
        shown = "".join(f"[{key if key.isdecimal() else repr(key)}]" for key in prefix)
        raise ToolError(f"there is nothing at {shown or 'the root'}")
    return found


def _infer_pairs(
    manifest: Manifest, inputs: Sequence[Keys], outputs: Sequence[Keys]
) -> list[tuple[Keys, Keys]]:
    """Returns the pairs of result and argument that are the same tree of names.

    A bare array is never the next value of another: a loss may have the type of a learning rate.
    """
    arguments = _trees(manifest.inputs, inputs, 1)
    left = set(arguments)
    pairs: list[tuple[Keys, Keys]] = []
    for depth in (1, 0):  # the result may be the tree itself
        for place, tree in _trees(manifest.outputs, outputs, depth).items():
            within = [argument for argument in sorted(left) if arguments[argument] <= tree]
            alike = [argument for argument in within if arguments[argument] == tree] or within
            if alike and not (depth == 0 and pairs):
                taken = place if place in alike else alike[0]
                left.discard(taken)
                pairs.append((place, taken))
    return pairs


type _Tree = frozenset[tuple[Keys, str]]


def _trees(entries: Sequence[ManifestEntry], keys: Sequence[Keys], depth: int) -> dict[Keys, _Tree]:
    """Returns the trees below the first `depth` keys of the paths, without bare arrays."""
    found: dict[Keys, set[tuple[Keys, str]]] = {}
    for entry, each in zip(entries, keys, strict=True):
        if len(each) > depth:
            found.setdefault(each[:depth], set()).add((each[depth:], entry.type))
        elif each:
            found.setdefault(each[:depth], set()).add(((), entry.type))
    return {
        place: frozenset(tree) for place, tree in found.items() if all(rest for rest, _ in tree)
    }


@dataclass(frozen=True)
class Next:
    """The next value of argument `number` of a rank: parts in the order of their rows along `dim`.

    A part is a whole result of a rank, or the rows of it that the piece names.
    """

    rank: int
    number: int
    parts: tuple[ManifestPiece, ...]
    dim: int = 0

    @property
    def own(self) -> int | None:
        """The result of the same rank that is the whole next value; None if there is none."""
        (first, *others) = self.parts
        is_own = not others and first.rank == self.rank and first.dim is None
        return first.number if is_own else None


def next_values(manifest: Manifest, carried: Mapping[int, int]) -> list[Next]:
    """Returns the next values of all arguments that are carried, in one order for all ranks."""
    return [
        _next(manifest.outputs[output], piece)
        for number, output in sorted(carried.items())
        for piece in manifest.inputs[number].pieces
    ]


def _next(output: ManifestEntry, wanted: ManifestPiece) -> Next:
    """Returns the next value of a piece of an argument, as rows of the output's pieces."""
    dims = {piece.dim for piece in (wanted, *output.pieces)} - {None}
    if len(dims) > 1:
        raise ToolError(f"{output.path} is cut along several dimensions, and only one is supported")
    if not dims:
        (whole,) = output.pieces
        return Next(wanted.rank, wanted.number, (ManifestPiece(whole.rank, whole.number),))
    (dim,) = dims
    assert dim is not None
    start, limit = _rows(output, wanted, dim)
    parts: list[ManifestPiece] = []
    for piece in sorted(output.pieces, key=lambda piece: piece.start):
        first, last = _rows(output, piece, dim)
        low, high = max(first, start), min(last, limit)
        if (low, high) == (first, last):
            parts.append(ManifestPiece(piece.rank, piece.number))
        elif low < high:
            parts.append(ManifestPiece(piece.rank, piece.number, dim, low - first, high - first))
    return Next(wanted.rank, wanted.number, tuple(parts), dim)


def _rows(entry: ManifestEntry, piece: ManifestPiece, dim: int) -> tuple[int, int]:
    if piece.dim is not None:
        return piece.start, piece.limit
    return 0, value_of(entry.type, entry.path).shape[dim]


def check_devices(
    manifest: Manifest, programs: Sequence[LocalProgram], values: Sequence[Next]
) -> None:
    """Raises ToolError if a rank's devices divide a result and the next argument differently."""
    paths = {
        (piece.rank, piece.number): entry.path
        for entry in manifest.inputs
        for piece in entry.pieces
    }
    for value in values:
        wanted = programs[value.rank].inputs[value.number]
        for part in value.parts:
            given = programs[part.rank].outputs[part.number]
            is_cut = part.dim is not None and any(
                len(index) > part.dim and index[part.dim] != slice(None) for index in given
            )
            if given != wanted or is_cut:
                raise ToolError(
                    f"the devices of rank {part.rank} divide the next value of "
                    f"{paths[value.rank, value.number]} differently from its argument: export the "
                    "step with the same shardings on both sides"
                )


def with_copies(
    ranks: RankSet, values: Sequence[Next]
) -> tuple[RankSet, dict[int, dict[int, int]]]:
    """Returns the set with copies of results that other ranks read next, and the results to carry.

    The second value has, by rank and number of an argument, the result that is its next value.
    """
    writers = [_CarriedWriter(ranks, rank) for rank in range(ranks.ranks)]
    transfers = list(ranks.manifest.transfers)
    following: dict[int, dict[int, int]] = {rank: {} for rank in range(ranks.ranks)}
    channel = max((transfer.channel for transfer in transfers), default=0)
    sent: dict[tuple[ManifestPiece, int], ir.Value] = {}
    for value in values:
        if value.own is not None:
            following[value.rank][value.number] = value.own
            continue
        received: list[ir.Value] = []
        for part in value.parts:
            given = writers[part.rank].rows(part)
            if part.rank == value.rank:
                received.append(given)
                continue
            if (part, value.rank) not in sent:
                channel += 1
                transfer = ManifestTransfer(
                    channel, FINISH, 0, part.rank, value.rank, str(given.type)
                )
                transfers.append(transfer)
                writers[part.rank].send(given, transfer)
                sent[part, value.rank] = writers[value.rank].receive(given.type, transfer)
            received.append(sent[part, value.rank])
        following[value.rank][value.number] = writers[value.rank].give(received, value.dim)
    for writer in writers:
        writer.end()
    manifest = replace(ranks.manifest, transfers=tuple(transfers))
    return replace(ranks, manifest=manifest), following


class _CarriedWriter:
    """Appends ops to the program of a rank."""

    def __init__(self, ranks: RankSet, rank: int) -> None:
        self._main = entry_function(ranks.programs[rank].module)
        self._block = Function(self._main).body
        self._devices = ranks.manifest.devices
        self._results = list(terminator(self._block).operands)
        self._given: list[ir.Value] = []
        end = ir.InsertionPoint(terminator(self._block))
        self._builder = Builder(end, self._main.location)
        self._token: ir.Value | None = None
        for view in self._block.operations:
            if view.operation.name in (SEND, RECV):
                self._token = view.operation.results[-1]

    def rows(self, part: ManifestPiece) -> ir.Value:
        """Returns the rows of a result."""
        value = self._results[part.number]
        if part.dim is None:
            return value
        return self._builder.slice_along(value, part.dim, part.start, part.limit)

    def send(self, value: ir.Value, transfer: ManifestTransfer) -> None:
        """Sends a value."""
        operands, ends = [value, self._chain()], self._ends(transfer)
        self._token = self._builder.create(SEND, operands, [operands[1].type], ends).results[0]

    def receive(self, type_: ir.Type, transfer: ManifestTransfer) -> ir.Value:
        """Receives a value of a type, which may belong to another context."""
        with self._main.context:
            own = ir.Type.parse(str(type_))
        token, ends = self._chain(), self._ends(transfer)
        op = self._builder.create(RECV, [token], [own, token.type], ends)
        self._token = op.results[1]
        return op.results[0]

    def give(self, values: Sequence[ir.Value], dim: int) -> int:
        """Adds the concatenation of values along `dim` as a result. Returns its number."""
        value = values[0] if len(values) == 1 else self._builder.concatenate(values, dim)
        self._given.append(value)
        return len(self._results) + len(self._given) - 1

    def end(self) -> None:
        """Makes `main` return the added results."""
        with self._main.context, self._main.location:
            append_to_terminator(self._block, self._given)
            resize_function(self._main, 0, len(self._given))

    def _chain(self) -> ir.Value:
        if self._token is None:
            kinds = [token_type(self._main.context)]
            self._token = self._builder.create(AFTER_ALL, [], kinds).results[0]
        assert self._token is not None
        return self._token

    def _ends(self, transfer: ManifestTransfer) -> dict[str, ir.Attribute]:
        pairs = transfer.pairs(self._devices)
        return transfer_attributes(transfer.channel, pairs, self._main.context)
