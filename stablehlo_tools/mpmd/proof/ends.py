"""Whether the inputs and outputs of the original program lie where the manifest says: M9."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.carriers import terminator
from stablehlo_tools.mpmd.manifest import Entry, Manifest, Piece
from stablehlo_tools.mpmd.proof.findings import Findings, Rule
from stablehlo_tools.mpmd.reading import Reading


class _Side(NamedTuple):
    """The arguments of all ranks, or their results."""

    entry: str
    own: str
    types: Sequence[Sequence[ir.Type]]


def check_ends(manifest: Manifest, readings: Sequence[Reading], findings: Findings) -> None:
    """M9: every argument and result is named once, fits, and outputs are there as a whole."""
    blocks = [reading.main.regions[0].blocks[0] for reading in readings]
    arguments = [[argument.type for argument in block.arguments] for block in blocks]
    results = [[value.type for value in terminator(block).operands] for block in blocks]
    inputs = _Side("input", "argument", arguments)
    outputs = _Side("output", "result", results)
    for side, entries in ((inputs, manifest.inputs), (outputs, manifest.outputs)):
        _check_named(side, entries, readings, findings)
        for entry in entries:
            for piece in entry.pieces:
                _check_piece(side, entry, piece, readings, findings)
    for entry in manifest.outputs:
        _check_whole(entry, findings)


def _check_named(
    side: _Side, entries: Sequence[Entry], readings: Sequence[Reading], findings: Findings
) -> None:
    named: dict[tuple[int, int], list[str]] = {}
    for entry in entries:
        for piece in entry.pieces:
            named.setdefault((piece.rank, piece.number), []).append(entry.path)
    for reading, types in zip(readings, side.types, strict=True):
        for number in range(len(types)):
            paths = named.get((reading.rank, number), [])
            if len(paths) != 1:
                of = f"is of {' and of '.join(paths)}" if paths else f"is of no {side.entry}"
                said = f"{side.own} {number} {of} in the manifest"
                findings.add(Rule.ENDS, said, reading, reading.main)


def _check_piece(
    side: _Side, entry: Entry, piece: Piece, readings: Sequence[Reading], findings: Findings
) -> None:
    title = f"{side.entry} {entry.path}"
    if not 0 <= piece.rank < len(readings) or not 0 <= piece.number < len(side.types[piece.rank]):
        said = f"{title} has a piece in {side.own} {piece.number} of rank {piece.rank}: not there"
        findings.add(Rule.ENDS, said)
        return
    reading = readings[piece.rank]
    kind = side.types[piece.rank][piece.number]
    wanted = _piece_type(entry, piece, kind.context)
    if wanted is None:
        said = (
            f"{title}: rows {piece.start} to {piece.limit} of dimension {piece.dim} are not in it"
        )
        findings.add(Rule.ENDS, said, reading, reading.main)
    elif wanted != kind:
        said = f"{title} is {side.own} {piece.number}, of type {kind}, and its piece is {wanted}"
        findings.add(Rule.ENDS, said, reading, reading.main)


def _piece_type(entry: Entry, piece: Piece, context: ir.Context) -> ir.Type | None:
    whole = ir.Type.parse(entry.type, context)
    if piece.dim is None:
        return whole
    if not isinstance(whole, ir.RankedTensorType) or not 0 <= piece.dim < whole.rank:
        return None
    shape = list(whole.shape)
    if not 0 <= piece.start < piece.limit <= shape[piece.dim]:
        return None
    shape[piece.dim] = piece.limit - piece.start
    location = ir.Location.unknown(context)
    return ir.RankedTensorType.get(shape, whole.element_type, whole.encoding, loc=location)


def _check_whole(entry: Entry, findings: Findings) -> None:
    """The pieces of an output are disjoint, and together all of it."""
    if len(entry.pieces) == 1 and entry.pieces[0].dim is None:
        return
    dims = {piece.dim for piece in entry.pieces}
    spans = sorted((piece.start, piece.limit) for piece in entry.pieces)
    size = _size(entry, next(iter(dims))) if len(dims) == 1 else None
    at = 0
    for start, limit in spans:
        if start != at:
            size = None
        at = limit
    if size is None or at != size:
        said = f"the pieces of output {entry.path} are not all of it, or overlap"
        findings.add(Rule.ENDS, said)


def _size(entry: Entry, dim: int | None) -> int | None:
    """The size of a dimension, read from the text of the type."""
    shape = entry.type.removeprefix("tensor<").split("x")[:-1]
    return int(shape[dim]) if dim is not None and 0 <= dim < len(shape) else None
