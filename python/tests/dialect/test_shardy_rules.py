"""The relation of dimensions, held against the sharding rules that Shardy writes on ops."""

from __future__ import annotations

from collections import Counter

import pytest
from dimension_cases import KEPT, NOT_RUN, OTHERS
from models.zoo import MODELS
from shardy_rules import NO_RULE, differences

from stablehlo_tools import bindings
from stablehlo_tools.analysis.shardings import rule_of
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.dialect.dimensions import dimensions_of
from stablehlo_tools.ir.walk import walk
from stablehlo_tools.passes.native_passes import NativePasses

# With the cases of every kind, these have each op of the zoo; `make soak` takes all its programs.
EVERY_OP = ("convnet-channels-step", "mamba-forward", "moe-shard-map-step", "permute-loop")


def differing(module: ir.Module) -> tuple[list[str], Counter[str]]:
    """Ops whose relation is not what Shardy says, and how many of each were the same."""
    texts: list[str] = []
    same: Counter[str] = Counter()

    def visit(op: ir.Operation) -> ir.WalkResult:
        rule, relation = rule_of(op), dimensions_of(op)
        if rule is None or relation is None:
            if rule is not None or (relation is not None and op.name not in NO_RULE):
                texts.append(f"only one of them: {op}")
            return ir.WalkResult.ADVANCE
        theirs, ours = differences(op, rule, relation)
        if theirs or ours:
            texts.append(f"{op}\n  Shardy's: {theirs}\n  ours: {ours}")
        else:
            same[op.name] += 1
        return ir.WalkResult.ADVANCE

    with NativePasses(module.context) as native:
        walk(native.run(module, "sdy-populate-op-sharding-rules").operation, visit)
    return texts, same


def test_ops_of_every_kind_are_as_shardy_has_them():
    context = bindings.new_context()
    functions = [
        case.text(size).replace("@main", f"@{case.name}_{size}")
        for case in (*KEPT, *OTHERS, *NOT_RUN)
        for size in (4, 5)
    ]
    module = bindings.parse_module("\n".join(functions), context)
    texts, same = differing(module)
    assert not texts
    assert len(same) > 25


def zoo_module(name: str) -> ir.Module:
    """A program of the zoo."""
    built = MODELS[name].build()
    data = built.encode() if isinstance(built, str) else built.mlir_module_serialized
    return artifact.parse(data, name).module


@pytest.mark.parametrize("name", EVERY_OP)
def test_ops_of_the_zoo_are_as_shardy_has_them(name: str):
    texts, same = differing(zoo_module(name))
    assert not texts
    assert same


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(MODELS.keys() - set(EVERY_OP)))
def test_all_programs_of_the_zoo_are_as_shardy_has_them(name: str):
    texts, _ = differing(zoo_module(name))
    assert not texts
