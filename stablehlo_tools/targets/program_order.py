"""The order in which a program issues its collectives: calls inlined, regions nested."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from stablehlo_tools.analysis.communication import (
    CommunicatingFunction,
    Site,
    communicating_functions,
)
from stablehlo_tools.analysis.entry import ENTRY
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import WHILE
from stablehlo_tools.dialect.traits import BRANCHES
from stablehlo_tools.ir.values import key_of
from stablehlo_tools.targets.order import Branch, Issue, Item, Repeat, places

_MOST_PLACES = 1_000_000

type Ids = Mapping[ir.Value | ir.Operation, int]


def program_order(module: ir.Module, ids: Ids) -> tuple[Item, ...]:
    """What `main` issues; `ids` numbers the collectives by the keys of their ops.

    Raises a located ToolError where the program's order is not understood.
    """
    expanded: dict[str, tuple[Item, ...]] = {}
    for function in communicating_functions(module):  # callees before callers
        items = _expand(function, ids, expanded)
        if sum(1 for _ in islice(places(items), _MOST_PLACES + 1)) > _MOST_PLACES:
            raise ToolError(
                f"@{function.name} issues more than {_MOST_PLACES} collectives, calls counted "
                "each time: too many to follow",
                function.op.location,
            )
        expanded[function.name] = items
    return expanded.get(ENTRY, ())


def _expand(
    function: CommunicatingFunction,
    ids: Ids,
    expanded: dict[str, tuple[Item, ...]],
) -> tuple[Item, ...]:
    def items(sites: list[Site]) -> tuple[Item, ...]:
        return tuple(item for site in sites for item in of_site(site))

    def of_site(site: Site) -> tuple[Item, ...]:
        if site.collective is not None:
            return (Issue(ids[key_of(site.collective.op)]),)
        if site.callee is not None:
            return expanded[site.callee]
        if site.op.name == WHILE:
            condition, body = (items(region) for region in site.regions)
            return (Repeat(condition, body),)
        if site.op.name in BRANCHES:
            return (Branch(tuple(items(region) for region in site.regions)),)
        return tuple(item for region in site.regions for item in items(region))

    return items(function.sites)
