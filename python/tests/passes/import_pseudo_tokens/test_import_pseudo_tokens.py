"""`import-pseudo-tokens` on real exports of torch-xla, and on modules written as it lowers them."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path

import pytest
from tree import FIXTURES

from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.analysis.liveness import dead_collectives
from stablehlo_tools.api.transforming import run_pipeline
from stablehlo_tools.artifacts import artifact as artifacts
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.names import AFTER_ALL, BARRIER
from stablehlo_tools.ir.walk import walk
from stablehlo_tools.passes.pipeline import Pipeline
from stablehlo_tools.verify import Options, verify_artifacts

EXPORTS = sorted((FIXTURES / "torch_xla").rglob("*.mlir"))  # by torch-xla 2.9 itself
WRITTEN = sorted((FIXTURES / "pseudo_tokens").glob("*.mlir"))

NAME = "import-pseudo-tokens"
ASSUMED = NAME + "{assume-zero-argument=0}"
PIPELINES = {"root_used": ASSUMED, "token_returned": ASSUMED, "single_all_gather": ASSUMED}
# What is left of float arithmetic that the user wrote; of an export of torch-xla nothing else is.
USERS_OWN = ("constant_root", "fsdp_step", "zero1_step", "ddp_step_f32")
KEEPS_ARITHMETIC = ("unused_results", "token_returned", "root_used")
ARITHMETIC = ("add", "multiply", "convert", "compare", "slice", "gather", "dynamic_slice")


def by_stem(path: Path) -> str:
    return path.stem


def pipeline_of(path: Path) -> str:
    return PIPELINES.get(path.stem, NAME)


def read(path: Path) -> Artifact:
    return artifacts.parse(path.read_bytes(), path.name)


def rewritten(source: Path | str, pipeline: str) -> Artifact:
    artifact = artifacts.parse(source.encode()) if isinstance(source, str) else read(source)
    run_pipeline(artifact, Pipeline.parse(pipeline))
    return artifact


def reported(source: str, pipeline: str = NAME) -> list[str]:
    collected = run_pipeline(artifacts.parse(source.encode()), Pipeline.parse(pipeline))
    return [diagnostic.message for diagnostic in collected.collected]


def kinds(artifact: Artifact) -> list[str]:
    return [collective.kind for collective in find_collectives(artifact.module)]


def ops(artifact: Artifact) -> Counter[str]:
    """How often each op stands in the module, reductions of collectives left out."""
    counted: Counter[str] = Counter()

    def visit(op: ir.Operation) -> ir.WalkResult:
        counted[op.name] += 1
        is_reduction = op.name in ("stablehlo.all_reduce", "stablehlo.reduce_scatter")
        return ir.WalkResult.SKIP if is_reduction else ir.WalkResult.ADVANCE

    walk(artifact.module.operation, visit)
    return counted


def main_of(artifact: Artifact) -> ir.Operation:
    return artifact.module.body.operations[0].operation


def uses_of_root(artifact: Artifact) -> int:
    return len(list(main_of(artifact).regions[0].blocks[0].arguments[0].uses))


def is_chained(artifact: Artifact) -> list[bool]:
    """For each collective, whether a barrier of the chain stands before and after it."""
    chained: list[bool] = []
    for collective in find_collectives(artifact.module):
        owner = collective.op.operands[0].owner
        before = not isinstance(owner, ir.Block) and owner.operation.name == BARRIER
        users = {use.owner.operation.name for use in collective.op.results[0].uses}
        chained.append(before and users == {BARRIER})
    return chained


def barriers_follow_one_another(artifact: Artifact) -> bool:
    """Whether all barriers form one chain, each on the token of the one before."""
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name in (BARRIER, AFTER_ALL):
            found.append(op)
        return ir.WalkResult.ADVANCE

    walk(artifact.module.operation, visit)
    tokens = [op.results[len(op.results) - 1] for op in found]
    incoming = [op.operands[len(op.operands) - 1] for op in found[1:]]
    return incoming == tokens[:-1]


@pytest.mark.parametrize("path", [*EXPORTS, *WRITTEN], ids=by_stem)
def test_import_chains_the_same_collectives_in_the_same_order(path: Path):
    before, after = read(path), rewritten(path, pipeline_of(path))
    assert kinds(after) == kinds(before)
    was_tokened = "notoken" not in path.stem
    assert is_chained(after) == [was_tokened or kind == "all_reduce" for kind in kinds(after)]
    assert barriers_follow_one_another(after)
    assert str(main_of(after).attributes["function_type"]) == str(
        main_of(before).attributes["function_type"]
    )


@pytest.mark.parametrize("path", EXPORTS, ids=by_stem)
def test_import_leaves_no_token_arithmetic_in_exports(path: Path):
    before, after = read(path), rewritten(path, NAME)
    assert uses_of_root(before) > 0
    assert uses_of_root(after) == 0
    left = {
        "ddp_step_f32": Counter(add=15, multiply=21, compare=1),
        "user_slices_like_token": Counter(add=1, multiply=1, slice=2),
        "zero_alias": Counter(multiply=1, compare=1),
        "ar_mixed_list": Counter(multiply=3),
        "rs_two_scale_bf16": Counter(multiply=1),
    }.get(path.stem, Counter())
    found = Counter({name: ops(after)[f"stablehlo.{name}"] for name in ARITHMETIC})
    assert +found == left


@pytest.mark.parametrize(
    "path", [path for path in WRITTEN if path.stem not in KEEPS_ARITHMETIC], ids=by_stem
)
def test_import_leaves_no_use_of_the_token(path: Path):
    after = rewritten(path, pipeline_of(path))
    if path.stem in USERS_OWN:
        assert "slice" not in str(after.module)
    else:
        found = {name for name in ARITHMETIC if ops(after)[f"stablehlo.{name}"]}
        assert found <= {"multiply"} if path.stem == "coalesced_reduce_scatter" else not found
    if path.stem != "constant_root":
        assert uses_of_root(after) == 0


@pytest.mark.parametrize("fork", ["strengthen", "preserve"])
@pytest.mark.parametrize("path", [*EXPORTS, *WRITTEN], ids=by_stem)
def test_import_keeps_every_collective_alive(path: Path, fork: str):
    before = read(path)
    options = pipeline_of(path).removeprefix(NAME).strip("{}")
    after = rewritten(path, f"{NAME}{{fork={fork} {options}}}")
    assert len(dead_collectives(after.module)) == len(dead_collectives(before.module)) == 0


@pytest.mark.parametrize("fork", ["strengthen", "preserve"])
@pytest.mark.parametrize("path", [*EXPORTS, *WRITTEN], ids=by_stem)
def test_second_import_changes_nothing_and_says_nothing(path: Path, fork: str):
    options = pipeline_of(path).removeprefix(NAME).strip("{}")
    once = rewritten(path, f"{NAME}{{fork={fork} {options}}}")
    text = artifacts.to_text(once.module)
    told = run_pipeline(once, Pipeline.parse(NAME))
    assert artifacts.to_text(once.module) == text
    assert not told.collected


@pytest.mark.parametrize("fork", ["strengthen", "preserve"])
@pytest.mark.parametrize("path", [*EXPORTS, *WRITTEN], ids=by_stem)
def test_imported_chain_can_be_stripped_and_threaded_anew(path: Path, fork: str):
    options = pipeline_of(path).removeprefix(NAME).strip("{}")
    imported = f"{NAME}{{fork={fork} {options}}}"
    stripped = rewritten(path, f"{imported},strip-tokens")
    assert not ops(stripped)[BARRIER] + ops(stripped)[AFTER_ALL]
    threaded = rewritten(path, f"{imported},thread-tokens")
    assert all(is_chained(threaded))
    again = rewritten(path, f"{imported},strip-tokens,thread-tokens")
    assert artifacts.to_text(again.module) == artifacts.to_text(threaded.module)


# Every kind of collective, tokens taken by slice and by gather, a fork, and an argument that is not
# shown to be zero; the others are for `make soak`.
QUICK = ("chain_all", "gathered_element", "coalesced_reduce_scatter", "token_returned")
COMPARED = [
    pytest.param(path, marks=() if path.stem in QUICK else pytest.mark.soak)
    for path in [*EXPORTS, *WRITTEN]
]


@pytest.mark.parametrize("path", COMPARED, ids=by_stem)
def test_import_keeps_values_when_the_token_is_zero(path: Path):
    before, after = read(path), rewritten(path, pipeline_of(path))
    fixed = {} if path.stem == "constant_root" else {0: 0.0}
    found = verify_artifacts(before, after, Options(arithmetic="floats", trials=1, fixed=fixed))
    assert found.same, found
    assert not found.vacuous


def test_values_differ_when_the_argument_is_not_zero():
    """The check above can fail: the chain does add the argument."""
    path = FIXTURES / "torch_xla" / "ag_two_unpinned.mlir"
    options = Options(trials=1, fixed={0: 1.0})
    assert not verify_artifacts(read(path), rewritten(path, NAME), options).same


def test_preserve_keeps_a_fork_a_fork():
    path = FIXTURES / "pseudo_tokens" / "coalesced_all_gather.mlir"
    after = rewritten(path, NAME + "{fork=preserve}")
    assert ops(after)[BARRIER] == 4  # in, out and two in: nothing waits for the fork or the last
    gathers = [collective.op for collective in find_collectives(after.module)]
    tokens = [list(gather.operands[0].owner.operands)[-1] for gather in gathers]
    assert tokens[0] == tokens[1] != tokens[2]


def test_preserve_of_a_plain_chain_is_a_chain():
    path = FIXTURES / "torch_xla" / "chain_all.mlir"
    assert barriers_follow_one_another(rewritten(path, NAME + "{fork=preserve}"))


def test_attributes_of_the_collectives_stay():
    path = FIXTURES / "torch_xla" / "chain_all.mlir"
    text = path.read_text().replace(
        "all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>}>",
        "all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 7, type = 1>"
        ", replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids}> "
        '{mhlo.frontend_attributes = {note = "mine"}}',
    )
    text = text.replace(
        "replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>}> ({",
        "channel_handle = #stablehlo.channel_handle<handle = 3, type = 1>"
        ", replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids}> ({",
    )

    def attributes(artifact: Artifact) -> list[dict[str, str]]:
        return [
            {name: str(value) for name, value in collective.op.attributes.items()}
            for collective in find_collectives(artifact.module)
        ]

    before, after = artifacts.parse(text.encode()), rewritten(text, NAME)
    assert attributes(after) == attributes(before)
    assert attributes(after)[2]["mhlo.frontend_attributes"] == '{note = "mine"}'
    assert [str(c.op.location) for c in find_collectives(after.module)] == [
        str(c.op.location) for c in find_collectives(before.module)
    ]


@pytest.mark.parametrize("path", EXPORTS, ids=by_stem)
def test_dropping_the_argument_keeps_the_others(path: Path):
    before = read(path)
    after = rewritten(path, NAME + "{drop-token-argument}")
    inputs = [
        [str(argument.type) for argument in main_of(a).regions[0].blocks[0].arguments]
        for a in (before, after)
    ]
    assert inputs[1] == inputs[0][1:]


def test_each_rank_of_the_deadlock_pair_comes_to_the_same_order():
    directory = FIXTURES / "torch_xla" / "deadlock_pair"
    first, second = (rewritten(directory / f"token_r{rank}.mlir", NAME) for rank in (0, 1))
    assert kinds(first) == kinds(second) == ["all_reduce", "all_gather", "reduce_scatter"]
    assert barriers_follow_one_another(first)
    assert barriers_follow_one_another(second)


def test_a_lone_addition_in_a_torch_xla_module_stays_and_is_told_of():
    path = FIXTURES / "pseudo_tokens" / "single_all_gather.mlir"
    after = rewritten(path, NAME)
    assert artifacts.to_text(after.module) == artifacts.to_text(read(path).module)
    (told,) = reported(path.read_text())
    assert "so it stays" in told
    assert "assume-zero-argument=0" in told


def test_the_name_of_another_program_is_no_evidence():
    text = (FIXTURES / "torch_xla" / "chain_all.mlir").read_text().replace("@IrToHlo.76", "@jit_f")
    with pytest.raises(ToolError, match=r"argument 0 of @main .* not shown to be zero: the module"):
        rewritten(text, NAME)
    assert all(is_chained(rewritten(text, ASSUMED)))


def test_user_reading_the_root_refutes_it():
    with pytest.raises(ToolError, match=r"stablehlo\.add uses the value as well \(P1\)"):
        rewritten(FIXTURES / "pseudo_tokens" / "root_used.mlir", NAME)


def test_api_warns_of_what_was_taken_for_zero():
    from stablehlo_tools.api.transforming import transform

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        transform(read(FIXTURES / "torch_xla" / "chain_all.mlir"), NAME)
    (told,) = (str(each.message) for each in caught)
    assert "argument 0 of @main is taken as torch-xla's token" in told
    assert "warning" not in told, "Python says that it is one"


def test_option_is_written_as_it_is_read():
    text = NAME + "{fork=preserve drop-token-argument assume-zero-argument=3}"
    assert str(Pipeline.parse(text)) == text
    with pytest.raises(ToolError, match="must be a whole number"):
        Pipeline.parse(NAME + "{assume-zero-argument=first}")
