"""Tags every communicating op with an id, and recovers the ids that XLA drops.

"stablehlo.all_gather"(%x) … loc("mlp/all_gather")
    ==>
    "stablehlo.all_gather"(%x) … {mhlo.frontend_attributes = {stablehlo_tools_id = "3"}}
                                 loc("mlp/all_gather#id3")

Ids count in the order in which the program issues its collectives: calls inlined, regions nested.
XLA keeps frontend attributes through its passes and joins them if it merges collectives ("1,2,3").
It drops two kinds:

**Collectives that XLA:TPU merges.** Its all-reduce combiner drops every frontend attribute and
keeps the metadata of the first collective. The op_name in the metadata is made from the location,
so the location is marked too. The ids of the other collectives are recovered from the texts dumped
before and after the pass: the operands of the merged instruction are those of the instructions that
it replaced, by name.

    before   %a = all-reduce(%x), tag 1     %b = all-reduce(%y), tag 2
    after    %c = all-reduce(%x, %y)                        ==>   {"c": (1, 2)}

**Infeeds and outfeeds.** Most programs have one of each, so the kind identifies the op. If there
are several of a kind, they stay unknown: numbering them in order would assume the order that is to
be verified.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.analysis.communication import (
    CommunicatingFunction,
    Site,
    communicating_functions,
)
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import Place, ToolError, to_place
from stablehlo_tools.dialect.frontend_attributes import FRONTEND_ATTRIBUTES, frontend_entries
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.dialect.traits import BRANCHES
from stablehlo_tools.hlo_input.async_forms import COLLECTIVES
from stablehlo_tools.hlo_input.instructions import TAG, TAG_MARK, HloInstruction
from stablehlo_tools.ir.values import key_of
from stablehlo_tools.ir.walk import ENTRY
from stablehlo_tools.targets.schedule_order import (
    Item,
    Repeat,
    ScheduleBranch,
    ScheduledIssue,
    places,
    program_ids,
    renumber_ids,
)
from stablehlo_tools.targets.scheduled_hlo import Computations, Identities, collective_computations

_HOST_TRANSFERS = ("infeed", "outfeed")
_MOST_PLACES = 1_000_000
_BEFORE = re.compile(r"\.before_([\w-]*combiner)\.txt$")
_AFTER = re.compile(r"\.after_([\w-]*combiner)\.before_")
type _Ids = Mapping[ir.Value | ir.Operation, int]
type _IdsByName = dict[str, tuple[int, ...]]  # ids by instruction name
type _Collectives = dict[tuple[str, str], HloInstruction]  # by computation and name


@dataclass(frozen=True)
class TaggedOp:
    """A communicating op of the program: its id, its kind (`all_gather`) and its location."""

    id: int
    kind: str
    place: Place


def tag_collectives(module: ir.Module) -> tuple[tuple[TaggedOp, ...], tuple[Item, ...]]:
    """Gives every communicating op an id and returns the ops by id, and the program's order.

    Ids are 0, 1, 2 … in the program's order; ops that `main` does not reach come last. Edits the
    module in place and keeps existing frontend attributes. Raises a located ToolError if the
    program's order cannot be determined.
    """
    collectives = find_collectives(module)
    by_text = {key_of(collective.op): number for number, collective in enumerate(collectives)}
    program = _program_order(module, by_text)
    reached = program_ids(program)
    unreached = sorted(set(by_text.values()) - set(reached))
    numbers = {old: new for new, old in enumerate([*reached, *unreached])}
    tagged = [
        TaggedOp(numbers[n], c.kind, to_place(c.op.location)) for n, c in enumerate(collectives)
    ]
    for number, collective in enumerate(collectives):
        op, context = collective.attributed, module.context
        entries = frontend_entries(op)
        entries[TAG] = ir.StringAttr.get(str(numbers[number]), context)
        op.attributes[FRONTEND_ATTRIBUTES] = ir.DictAttr.get(entries, context)
        mark = f"{TAG_MARK}{numbers[number]}"
        for marked in {collective.op, op}:
            location = marked.location
            if isinstance(location, ir.NameLoc):
                name = location.name_str.rstrip(":") + mark
                marked.location = ir.Location.name(name, location.child_loc, context)
            else:
                marked.location = ir.Location.name(mark, location, context)
    return tuple(sorted(tagged, key=lambda op: op.id)), renumber_ids(program, numbers)


def _program_order(module: ir.Module, ids: _Ids) -> tuple[Item, ...]:
    """Returns the items that `main` issues; `ids` numbers the collectives by the keys of their ops.

    Raises a located ToolError if the program's order cannot be determined.
    """
    expanded: dict[str, tuple[Item, ...]] = {}
    for function in communicating_functions(module):  # callees before callers
        items = _expand(function, ids, expanded)
        if sum(1 for _ in islice(places(items), _MOST_PLACES + 1)) > _MOST_PLACES:
            raise ToolError(
                f"@{function.name} issues more than {_MOST_PLACES} collectives, counting every "
                "call: too many to follow",
                function.op.location,
            )
        expanded[function.name] = items
    return expanded.get(ENTRY, ())


def _expand(
    function: CommunicatingFunction, ids: _Ids, expanded: dict[str, tuple[Item, ...]]
) -> tuple[Item, ...]:
    def items(sites: list[Site]) -> tuple[Item, ...]:
        return tuple(item for site in sites for item in of_site(site))

    def of_site(site: Site) -> tuple[Item, ...]:
        if site.collective is not None:
            return (ScheduledIssue(ids[key_of(site.collective.op)]),)
        if site.callee is not None:
            return expanded[site.callee]
        if site.op.name == WHILE:
            condition, body = (items(region) for region in site.regions)
            return (Repeat(condition, body),)
        if site.op.name in BRANCHES:
            return (ScheduleBranch(tuple(items(region) for region in site.regions)),)
        return tuple(item for region in site.regions for item in items(region))

    return items(function.sites)


def read_combined(directory: Path) -> _IdsByName:
    """The ids of each collective that a combiner made, from a directory of dumps."""
    ids_by_name: _IdsByName = {}
    before: dict[str, str] = {}
    for path in sorted(directory.glob("*combiner*.txt")):
        after = _AFTER.search(path.name)
        if after and after.group(1) in before:
            add_merged(before.pop(after.group(1)), path.read_text(), ids_by_name)
        awaited = _BEFORE.search(path.name)
        if awaited:
            before[awaited.group(1)] = path.read_text()
    return ids_by_name


def add_merged(before: str, after: str, ids_by_name: _IdsByName) -> None:
    """Adds to `ids_by_name` what one run of a combiner merged; earlier findings are used."""
    computations, _ = collective_computations(before)
    identities = Identities(computations, ids_by_name)
    old, new = _collectives_in(computations), _collectives_in(collective_computations(after)[0])
    users: dict[tuple[str, str], list[HloInstruction]] = {}
    for (computation, name), instruction in old.items():
        if (computation, name) not in new:
            for operand in instruction.operands:
                users.setdefault((computation, operand), []).append(instruction)
    for (computation, name), instruction in new.items():
        if (computation, name) in old or instruction.tagged_ids:
            continue
        replaced = [
            user
            for operand in instruction.operands
            for user in users.get((computation, operand), ())
        ]
        ids = dict.fromkeys(i for user in replaced for i in identities.instruction_ids(user)[0])
        if ids:
            ids_by_name[name] = tuple(ids)


def _collectives_in(computations: Computations) -> _Collectives:
    return {
        (computation, instruction.name): instruction
        for computation, instructions in computations.items()
        for instruction in instructions
        if instruction.opcode.removesuffix("-start") in COLLECTIVES
    }


def read_host_transfers(text: str, kinds: Mapping[int, str]) -> dict[str, tuple[int, ...]]:
    """Ids by instruction name, from scheduled HLO text and the kinds of the program's ops by id."""
    computations, _ = collective_computations(text)
    ids_by_name: dict[str, tuple[int, ...]] = {}
    for opcode in _HOST_TRANSFERS:
        ids = [number for number, kind in kinds.items() if kind == opcode]
        named = [i.name for block in computations.values() for i in block if i.opcode == opcode]
        if len(ids) == len(named) == 1:
            ids_by_name[named[0]] = (ids[0],)
    return ids_by_name
