"""Puts an identity on every communicating op, and finds it again where XLA drops it.

"stablehlo.all_gather"(%x) … loc("mlp/all_gather")
    ==>
    "stablehlo.all_gather"(%x) … {mhlo.frontend_attributes = {stablehlo_tools_id = "3"}}
                                 loc("mlp/all_gather#id3")

XLA keeps frontend attributes through its passes and joins them where it merges collectives
("1,2,3"). The all-reduce combiner of XLA:TPU drops them and keeps the op_name of its first
collective, which is made of the location: hence the mark in the location, too.

There is one of each in most programs, so its kind says which op it is. Where a program has
several of a kind they stay unknown: naming them in their order would presume what is to be read.
Pure Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stablehlo_tools.analysis.collectives import Collective, find_collectives
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Place, to_place
from stablehlo_tools.ir.async_calls import FRONTEND_ATTRIBUTES
from stablehlo_tools.ir.values import key_of
from stablehlo_tools.targets.hlo_text import TAG, TAG_MARK, parse_computations
from stablehlo_tools.targets.order import Item, program_ids, renumbered
from stablehlo_tools.targets.program_order import program_order


@dataclass(frozen=True)
class TaggedOp:
    """A communicating op of the program: its id, its kind (`all_gather`) and where it stands."""

    id: int
    kind: str
    place: Place


def tag_collectives(module: ir.Module) -> tuple[tuple[TaggedOp, ...], tuple[Item, ...]]:
    """Gives every communicating op an id and returns the ops by id, and the program's order.

    Ids are 0, 1, 2 … in the program's order; ops that `main` does not reach come last. Edits the
    module in place; frontend attributes that are there already are kept. Raises a located
    ToolError where the program's order is not understood.
    """
    collectives = find_collectives(module)
    by_text = {key_of(collective.op): number for number, collective in enumerate(collectives)}
    program = program_order(module, by_text)
    reached = program_ids(program)
    unreached = sorted(set(by_text.values()) - set(reached))
    numbers = {old: new for new, old in enumerate([*reached, *unreached])}
    tagged = [
        TaggedOp(numbers[n], c.kind, to_place(c.op.location)) for n, c in enumerate(collectives)
    ]
    for number, collective in enumerate(collectives):
        _tag(collective, numbers[number])
    return tuple(sorted(tagged, key=lambda op: op.id)), renumbered(program, numbers)


def _tag(collective: Collective, number: int) -> None:
    op = collective.attributed
    present = op.attributes.get(FRONTEND_ATTRIBUTES)
    entries = {} if present is None else {e.name: e.attr for e in ir.DictAttr(present)}
    context = op.context
    entries[TAG] = ir.StringAttr.get(str(number), context)
    op.attributes[FRONTEND_ATTRIBUTES] = ir.DictAttr.get(entries, context)
    for marked in {collective.op, op}:
        marked.location = _marked(marked.location, number)


def _marked(location: ir.Location, number: int) -> ir.Location:
    mark = f"{TAG_MARK}{number}"
    if isinstance(location, ir.NameLoc):
        name = location.name_str.rstrip(":") + mark
        return ir.Location.name(name, location.child_loc, location.context)
    return ir.Location.name(mark, location, location.context)


_KINDS = ("infeed", "outfeed")


def read_host_transfers(text: str, kinds: Mapping[int, str]) -> dict[str, tuple[int, ...]]:
    """Ids by instruction name, from scheduled HLO text and the kinds of the program's ops by id."""
    computations, _ = parse_computations(text)
    instructions = [i for block in computations.values() for i in block if i.opcode in _KINDS]
    ids_by_name: dict[str, tuple[int, ...]] = {}
    for kind in _KINDS:
        ids = [number for number, of in kinds.items() if of == kind]
        here = [i for i in instructions if i.opcode == kind]
        if len(ids) == len(here) == 1:
            ids_by_name[here[0].name] = (ids[0],)
    return ids_by_name
