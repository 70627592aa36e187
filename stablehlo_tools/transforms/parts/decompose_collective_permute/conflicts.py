"""Which other collectives could wait for a transfer that waits for them.

Two collectives conflict where they have two devices in common, in one connected group of each: the
one device can be in the first while the other is in the second. What conflicts with a transfer
joins its group, through which further ones may conflict. (XLA's decomposer draws the same line:
collectives along the other axes of a mesh stay free.)
"""

from __future__ import annotations

from collections.abc import Sequence

from stablehlo_tools.analysis.collectives import Collective, ModuleFacts
from stablehlo_tools.dialect.collectives import TRANSFERS

_Groups = list[frozenset[int]]


def conflicting(
    transfers: Sequence[Collective], others: Sequence[Collective], facts: ModuleFacts
) -> list[Collective]:
    """Those of `others` that conflict with one of `transfers`, directly or through each other.

    Only collectives whose participants are known: the host never waits for a device's peers.
    """
    together: _Groups = []
    for transfer in transfers:
        together = _joined(together, _groups(transfer, facts))
    found: set[int] = set()
    waiting = {n: groups for n, c in enumerate(others) if (groups := _groups(c, facts))}
    while met := [n for n, groups in waiting.items() if _meet(together, groups)]:
        for n in met:
            together = _joined(together, waiting.pop(n))
        found.update(met)
    return [others[n] for n in sorted(found)]


def _groups(collective: Collective, facts: ModuleFacts) -> _Groups:
    """The connected groups of a collective's participants."""
    if collective.kind in TRANSFERS:
        return []
    return _joined([], [frozenset(group) for group in facts.groups(collective) or ()])


def _joined(groups: _Groups, more: Sequence[frozenset[int]]) -> _Groups:
    """The groups with more of them, those that have a device in common as one."""
    joined = list(groups)
    for group in more:
        touching = [g for g in joined if g & group]
        joined = [g for g in joined if not g & group]
        joined.append(group.union(*touching))
    return joined


def _meet(groups: _Groups, others: _Groups) -> bool:
    return any(len(group & other) > 1 for group in groups for other in others)
