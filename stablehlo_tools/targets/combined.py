"""Recovers which collectives XLA:TPU merged, from the dumps around its combiner passes.

The all-reduce combiner of XLA:TPU keeps the metadata of the first collective it merges and drops
every frontend attribute, so the ids of the others are gone from the schedule. The text dumped
before and after the pass still tells: the operands of the merged instruction are those of the
instructions it replaced, by name. Pure Python.

    before   %a = all-reduce(%x), tag 1     %b = all-reduce(%y), tag 2
    after    %c = all-reduce(%x, %y)                        ==>   {"c": (1, 2)}
"""

from __future__ import annotations

import re
from pathlib import Path

from stablehlo_tools.targets.hlo_text import (
    COLLECTIVES,
    Computations,
    Identities,
    Instruction,
    parse_computations,
)

_BEFORE = re.compile(r"\.before_([\w-]*combiner)\.txt$")
_AFTER = re.compile(r"\.after_([\w-]*combiner)\.before_")

type _IdsByName = dict[str, tuple[int, ...]]  # ids by instruction name
type _Collectives = dict[tuple[str, str], Instruction]  # by computation and name


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
    computations, _ = parse_computations(before)
    identities = Identities(computations, ids_by_name)
    old, new = _collectives(computations), _collectives(parse_computations(after)[0])
    users: dict[tuple[str, str], list[Instruction]] = {}
    for (computation, name), instruction in old.items():
        if (computation, name) not in new:
            for operand in instruction.operands:
                users.setdefault((computation, operand), []).append(instruction)
    for (computation, name), instruction in new.items():
        if (computation, name) in old or instruction.tagged_ids():
            continue
        replaced = [
            user
            for operand in instruction.operands
            for user in users.get((computation, operand), ())
        ]
        ids = dict.fromkeys(i for user in replaced for i in identities.of(user)[0])
        if ids:
            ids_by_name[name] = tuple(ids)


def _collectives(computations: Computations) -> _Collectives:
    return {
        (computation, instruction.name): instruction
        for computation, instructions in computations.items()
        for instruction in instructions
        if _kind(instruction) in COLLECTIVES
    }


def _kind(instruction: Instruction) -> str:
    return instruction.opcode.removesuffix("-start")
