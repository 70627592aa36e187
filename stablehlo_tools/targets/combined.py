"""Recovers which collectives XLA:TPU merged, from the dumps around its combiner passes.

The all-reduce combiner of XLA:TPU keeps the metadata of the first collective it merges and drops
every frontend attribute, so the ids of the others are gone from the schedule. The text dumped
before and after the pass still tells: the operands of the merged instruction are those of the
instructions it replaced, by name. Pure Python.

    before   %a = all-reduce(%x), tag 1     %b = all-reduce(%y), tag 2
    after    %c = all-reduce(%x, %y), op_name of 1          ==>   {1: (1, 2)}
"""

from __future__ import annotations

import re
from pathlib import Path

from stablehlo_tools.targets.scheduled_hlo import COLLECTIVES, Instruction, parse_computations

DUMP_PASSES = ".*combiner.*"  # for --xla_dump_hlo_pass_re
_BEFORE = re.compile(r"\.before_([\w-]*combiner)\.txt$")
_AFTER = re.compile(r"\.after_([\w-]*combiner)\.before_")

type _Found = dict[int, tuple[int, ...]]
type _Collectives = dict[tuple[str, str], Instruction]  # by computation and name


def read_combined(directory: Path) -> _Found:
    """From the first id of each merged collective to all its ids, from a directory of dumps."""
    found: _Found = {}
    before: dict[str, str] = {}
    for path in sorted(directory.glob("*combiner*.txt")):
        after = _AFTER.search(path.name)
        if after and after.group(1) in before:
            merge_ids(before.pop(after.group(1)), path.read_text(), found)
        awaited = _BEFORE.search(path.name)
        if awaited:
            before[awaited.group(1)] = path.read_text()
    return found


def merge_ids(before: str, after: str, found: _Found) -> None:
    """Adds to `found` what one run of a combiner merged; earlier findings count as ids."""
    old, new = _collectives(before), _collectives(after)
    users: dict[tuple[str, str], list[Instruction]] = {}
    for (computation, name), instruction in old.items():
        if (computation, name) not in new:
            for operand in instruction.operands:
                users.setdefault((computation, operand), []).append(instruction)
    for (computation, name), instruction in new.items():
        marked, lost = instruction.ids()
        if (computation, name) in old or not lost:
            continue
        merged = [
            replaced
            for operand in instruction.operands
            for replaced in users.get((computation, operand), ())
        ]
        ids = [i for replaced in merged for i in replaced.ids(found)[0]]
        if ids:
            found[marked[0]] = tuple(dict.fromkeys(ids))


def _collectives(text: str) -> _Collectives:
    computations, _ = parse_computations(text)
    return {
        (computation, instruction.name): instruction
        for computation, instructions in computations.items()
        for instruction in instructions
        if _kind(instruction) in COLLECTIVES
    }


def _kind(instruction: Instruction) -> str:
    return instruction.opcode.removesuffix("-start")
