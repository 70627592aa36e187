"""Which devices' operands a collective needs for the results that some devices need."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts
from stablehlo_tools.analysis.demand.levels import Need
from stablehlo_tools.dialect.traits import Trait, ops_with, short_names

_GROUPED = short_names(ops_with(Trait.GROUPED))


def exchange_rule(collective: Collective, facts: ModuleFacts) -> Callable[[Need], Need] | None:
    """What the devices need of the operands; None for what is not understood.

    A permute needs just the sources of the targets that need something; of the other collectives,
    a group with one member that needs something needs all.
    """
    if collective.is_async:
        return None
    groups = facts.groups(collective)
    if groups is None:
        return None
    if collective.kind == "collective_permute":
        return _permuted([source for source, _ in groups], [target for _, target in groups])
    if collective.kind not in _GROUPED:
        return None
    members = [list(group) for group in groups]

    def rule(need: Need) -> Need:
        found = np.zeros_like(need)
        for group in members:
            found[group] = need[group].any(axis=0)
        return found

    return rule


def _permuted(sources: list[int], targets: list[int]) -> Callable[[Need], Need]:
    def rule(need: Need) -> Need:
        found = np.zeros_like(need)
        np.logical_or.at(found, sources, need[targets])
        return found

    return rule
