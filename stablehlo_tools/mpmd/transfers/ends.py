"""The ends of transfers in the program of a rank, and small ops beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stablehlo_tools import bindings
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError, naming
from stablehlo_tools.mpmd.manifest import Transfer
from stablehlo_tools.mpmd.rank_set import RankSet
from stablehlo_tools.mpmd.reading import body_of

SEND, RECEIVE = "stablehlo.send", "stablehlo.recv"
BARRIER = "stablehlo.optimization_barrier"


@dataclass(frozen=True, eq=False)
class End:
    """A send or a recv in `main`, and the transfer that it is an end of."""

    op: ir.Operation
    transfer: Transfer

    @property
    def is_send(self) -> bool:
        """Whether it is the sending end."""
        return self.op.name == SEND

    @property
    def token(self) -> ir.Value:
        """The token that it gives."""
        return self.op.results[-1]

    @property
    def taken(self) -> ir.Value:
        """The token that it takes."""
        return self.op.operands[-1]


def ends_of(ranks: RankSet, rank: int) -> list[End]:
    """The ends of transfers of a rank in text order, chained by their tokens.

    Raises a located ToolError where the set is not in the form `pairs`.
    """
    known = ranks.manifest.of_channel()
    found: list[End] = []
    with naming(ranks.programs[rank].name):
        for view in body_of(ranks.main(rank)).operations:
            op = view.operation
            if op.name not in (SEND, RECEIVE):
                continue
            channel = bindings.ChannelHandle(op.attributes["channel_handle"]).handle
            transfer = known.get(channel)
            if transfer is None:
                raise ToolError(f"{op.name}: the manifest has no channel {channel}", op.location)
            end = End(op, transfer)
            if rank != (transfer.source if end.is_send else transfer.target):
                raise ToolError(
                    f"{op.name} on channel {channel} stands on rank {rank}, and the channel goes "
                    f"from rank {transfer.source} to rank {transfer.target}",
                    op.location,
                )
            _check_chained(end, found)
            found.append(end)
    return found


def _check_chained(end: End, before: Sequence[End]) -> None:
    if before and end.taken != before[-1].token:
        raise ToolError(
            f"{end.op.name} on channel {end.transfer.channel} does not take the token of the "
            f"transfer before it, on channel {before[-1].transfer.channel}",
            end.op.location,
        )


def check_form(ranks: RankSet, form: str) -> None:
    """Raises a ToolError where a set is not in the form `pairs`, the only one that is rewritten."""
    if ranks.manifest.form != "pairs":
        error = ToolError(
            f"the transfers of this set are in the form {ranks.manifest.form}, and form {form} is "
            "made of form pairs"
        )
        error.input_name = ranks.name
        raise error


def zeros(kind: ir.Type, point: ir.InsertionPoint, location: ir.Location) -> ir.Value:
    """A constant of zeros."""
    value = ir.Attribute.parse(zeros_of(kind), kind.context)
    return ir.Operation.create(
        "stablehlo.constant", results=[kind], attributes={"value": value}, loc=location, ip=point
    ).results[0]


def zeros_of(kind: ir.Type) -> str:
    """Zeros of a tensor type, as text: `dense<0> : tensor<4xi32>`."""
    element = ir.RankedTensorType(kind).element_type
    text = "0"
    if isinstance(element, ir.ComplexType):
        text = "(0.0,0.0)"
    elif isinstance(element, ir.FloatType):
        text = '"0x' + "00" * max(1, element.width // 8) + '"'
    elif str(element) == "i1":
        text = "false"
    return f"dense<{text}> : {kind}"


def barrier(
    values: Sequence[ir.Value], point: ir.InsertionPoint, location: ir.Location
) -> list[ir.Value]:
    """The values behind an optimization barrier."""
    types = [value.type for value in values]
    made = ir.Operation.create(
        BARRIER, results=types, operands=list(values), loc=location, ip=point
    )
    return list(made.results)
