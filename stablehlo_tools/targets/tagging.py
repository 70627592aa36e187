"""Puts an identity on every communicating op that survives XLA.

    "stablehlo.all_gather"(%x) … loc("mlp/all_gather")
    ==>
    "stablehlo.all_gather"(%x) … {mhlo.frontend_attributes = {stablehlo_tools_id = "3"}}
                                 loc("mlp/all_gather#id3")

XLA keeps frontend attributes through its passes and joins them where it merges collectives
("1,2,3"). The all-reduce combiner of XLA:TPU drops them and keeps the op_name of its first
collective, which is made of the location: hence the mark in the location, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from stablehlo_tools.analysis.collectives import Collective, find_collectives
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Place, to_place
from stablehlo_tools.targets.scheduled_hlo import TAG, TAG_MARK

_FRONTEND_ATTRIBUTES = "mhlo.frontend_attributes"


@dataclass(frozen=True)
class TaggedOp:
    """A communicating op of the program: its id, its kind (`all_gather`) and where it stands."""

    id: int
    kind: str
    place: Place


def tag_collectives(module: ir.Module) -> list[TaggedOp]:
    """Gives every communicating op an id, 0, 1, 2 … in the order of the module's text.

    Edits the module in place; frontend attributes that are there already are kept.
    """
    tagged: list[TaggedOp] = []
    for number, collective in enumerate(find_collectives(module)):
        tagged.append(TaggedOp(number, collective.kind, to_place(collective.op.location)))
        _tag(collective, number)
    return tagged


def read_tag(op: ir.Operation) -> int | None:
    """The id that `tag_collectives` gave an op."""
    attributes = op.attributes.get(_FRONTEND_ATTRIBUTES)
    if not isinstance(attributes, ir.DictAttr) or TAG not in attributes:
        return None
    return int(ir.StringAttr(attributes[TAG]).value)


def _tag(collective: Collective, number: int) -> None:
    op = collective.inner
    present = op.attributes.get(_FRONTEND_ATTRIBUTES)
    entries = {entry.name: entry.attr for entry in present} if present else {}
    context = op.context
    entries[TAG] = ir.StringAttr.get(str(number), context)
    op.attributes[_FRONTEND_ATTRIBUTES] = ir.DictAttr.get(entries, context)
    for marked in {collective.op, op}:
        marked.location = _marked(marked.location, number)


def _marked(location: ir.Location, number: int) -> ir.Location:
    mark = f"{TAG_MARK}{number}"
    if isinstance(location, ir.NameLoc):
        name = location.name_str.rstrip(":") + mark
        return ir.Location.name(name, location.child_loc, location.context)
    return ir.Location.name(mark, location, location.context)
