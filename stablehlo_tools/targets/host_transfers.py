"""Recovers the identity of an infeed and an outfeed, whose tag and location XLA:TPU both drop.

There is one of each in most programs, so its kind says which op it is. Where a program has
several of a kind they stay unknown: naming them in their order would presume what is to be read.
Pure Python.
"""

from __future__ import annotations

from collections.abc import Mapping

from stablehlo_tools.targets.hlo_text import parse_computations

_KINDS = ("infeed", "outfeed")


def read_host_transfers(text: str, kinds: Mapping[int, str]) -> dict[str, tuple[int, ...]]:
    """Ids by instruction name, from scheduled HLO text and the kinds of the program's ops by id."""
    computations, _ = parse_computations(text)
    instructions = [i for block in computations.values() for i in block if i.opcode in _KINDS]
    found: dict[str, tuple[int, ...]] = {}
    for kind in _KINDS:
        ids = [number for number, of in kinds.items() if of == kind]
        here = [i for i in instructions if i.opcode == kind]
        if len(ids) == len(here) == 1:
            found[here[0].name] = (ids[0],)
    return found
