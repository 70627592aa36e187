"""Looks for a link between two collectives that counts and that a compiler removes.

    python falsify_links.py cpu|gpu|tpu COUNT SEED

A link is what random ops make of a gathered value: `ElementBuilder` draws them. Links are tried
many to a module. For each, the analysis is asked whether a collective of what was made must come
after the gather, and whether the gather surely stays where what was made is returned; then the
compiler shows which gathers it deletes. Exits 1 where it deleted one that surely stays. Prints one
line of JSON: how many links were tried, count as order, count as use, and were deleted.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tempting_elements import ElementBuilder
from tempting_programs import DEVICES, Scope, Value, kind

from stablehlo_tools.targets.topologies import Target, environment, topology

LINKS = 40  # in a module
_GROUPS = "replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>"
_PAIRS = "source_target_pairs = dense<[[0, 1], [1, 2], [2, 3], [3, 0]]> : tensor<4x2xi64>"


@dataclass(frozen=True)
class Drawn:
    """Ops that make `last` of `first`, a gathered value of the same type as `last` or not."""

    first: Value
    lines: tuple[str, ...]
    last: Value


def links(seed: str, count: int) -> list[Drawn]:
    """Random links, with names of their own."""
    rng = random.Random(seed)
    builder = ElementBuilder(rng, replicas=True, simple=0.1)
    found: list[Drawn] = []
    for number in range(count):
        first = Value(f"%g{number}", rng.choice(("f32", "i32")))
        scope = Scope([], [first, Value("%a", "f32"), Value("%b", "i32")])
        value = first
        for _ in range(rng.choice((1, 1, 2, 2, 3))):
            value = builder.step(scope, value)
            scope.values.append(value)
        found.append(Drawn(first, tuple(scope.lines), value))
    return found


def program(drawn: list[Drawn], *, follow: bool) -> str:
    """A module of the links: with `follow`, each ends in a permute, and each gather is returned."""
    lines: list[str] = []
    returned: list[Value] = []
    for number, link in enumerate(drawn):
        part = kind(link.first.element, 2)
        lines.append(
            f'{link.first.name} = "stablehlo.all_gather"(%x{number}) <{{all_gather_dim = 0 : i64, '
            f"{_GROUPS}}}> : ({part}) -> {link.first.kind}"
        )
        lines += link.lines
        if follow:
            after = Value(f"%h{number}", link.last.element)
            lines.append(
                f'{after.name} = "stablehlo.collective_permute"({link.last.name}) <{{{_PAIRS}}}> : '
                f"({after.kind}) -> {after.kind}"
            )
            returned += [link.first, after]
        else:
            returned.append(link.last)
    arguments = ["%a: tensor<8xf32>", "%b: tensor<8xi32>", "%flag: tensor<i1>"]
    arguments += [f"%x{n}: {kind(link.first.element, 2)}" for n, link in enumerate(drawn)]
    values, kinds = ", ".join(v.name for v in returned), ", ".join(v.kind for v in returned)
    body = "\n".join(lines)
    return (
        f"module attributes {{mhlo.num_partitions = 1 : i32, mhlo.num_replicas = {DEVICES} : i32}} "
        f"{{\nfunc.func public @main({', '.join(arguments)}) -> ({kinds}) {{\n{body}\n"
        f"return {values} : {kinds}\n}}\n}}\n"
    )


def ordered(drawn: list[Drawn]) -> list[bool]:
    """Of each link, whether what follows it must come after its gather."""
    from stablehlo_tools.artifacts import artifact
    from stablehlo_tools.artifacts.program_set import JobOptions, ProgramJob
    from stablehlo_tools.order.program import CollectiveIssue

    loaded = artifact.parse(program(drawn, follow=True).encode())
    (part,) = ProgramJob((loaded,), JobOptions()).read()
    block = part.program.block
    kinds = [part.ops[node.id].kind for node in block.nodes if isinstance(node, CollectiveIssue)]
    assert kinds == ["all_gather", "collective_permute"] * len(drawn)
    return [block.has_order(2 * i, 2 * i + 1) for i in range(len(drawn))]


def used(drawn: list[Drawn]) -> list[bool]:
    """Of each link, whether its gather surely stays where only the link is returned."""
    from stablehlo_tools.analysis.collectives import find_collectives
    from stablehlo_tools.analysis.liveness import live_paths, surviving_values
    from stablehlo_tools.artifacts import artifact

    module = artifact.parse(program(drawn, follow=False).encode()).module
    collectives = find_collectives(module)
    live = surviving_values(module)
    return [c.op.results[0] in live or live_paths([c]) is not None for c in collectives]


def run(target: Target, count: int, seed: int, dump: Path) -> dict[str, object]:
    """Tries so many links."""
    from falsify_order import Compiler, RefusedError
    from random_order import _devices

    compiler = Compiler(target, _devices(target), dump)
    totals = dict.fromkeys(("links", "ordered", "used", "deleted", "refused"), 0)
    number = 0
    while totals["links"] < count:
        number += 1
        drawn = links(f"{seed} {number}", min(LINKS, count - totals["links"]))
        try:
            gone = compiler.deleted(program(drawn, follow=False))
        except RefusedError:
            totals["refused"] += 1
            assert totals["refused"] < 10, "nearly nothing compiles"
            continue
        counting, staying = ordered(drawn), used(drawn)
        for i, link in enumerate(drawn):
            if i not in gone or not (counting[i] or staying[i]):
                continue
            # It may have been merged with others, or moved: alone it is seen in any form.
            stays = compiler.issues(program([link], follow=False))
            assert stays, (number, i, counting[i], staying[i], "\n".join(link.lines))
            gone.discard(i)
        totals["links"] += len(drawn)
        totals["ordered"] += sum(counting)
        totals["used"] += sum(staying)
        totals["deleted"] += len(gone)
    return {"target": target.value, "seed": seed, **totals}


def main(target: Target, count: int, seed: int) -> None:
    """Tries links with one compiler."""
    with tempfile.TemporaryDirectory() as name:
        dump = Path(name) / "dump"
        os.environ.update(environment(topology(target, DEVICES), os.environ, dump))
        print(json.dumps(run(target, count, seed, dump)))


if __name__ == "__main__":
    main(Target(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
