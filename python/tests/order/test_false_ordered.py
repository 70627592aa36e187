"""Against a false `ordered`: what a compiler deletes, or takes the order of, all the same.

Each test says first what the compiler does, and then what check-order should say.
"""

from __future__ import annotations

import pytest
from order_cases import all_reduce, main, read, rule, verdict

from stablehlo_tools.api.transforming import run_pipeline
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.passes.pipeline import Pipeline
from stablehlo_tools.targets.compilation import compile_artifact
from stablehlo_tools.targets.topologies import Target, missing_package


def gathers(count: int, between: str) -> str:
    """Gathers with a token between each and the next; `between` uses what comes of a barrier."""
    lines = ["%t0 = stablehlo.create_token : !stablehlo.token"]
    for i in range(count):
        lines.append(
            f"""%h{i}:2 = stablehlo.optimization_barrier %x{i}, %t{i}
                : tensor<64xf32>, !stablehlo.token
            %g{i} = "stablehlo.all_gather"(%h{i}#0) <{{all_gather_dim = 0 : i64,
                replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>}}>
                : (tensor<64xf32>) -> tensor<128xf32>
            %f{i}:2 = stablehlo.optimization_barrier %g{i}, %h{i}#1
                : tensor<128xf32>, !stablehlo.token
            {between.replace("N", str(i))}
            %t{i + 1} = stablehlo.after_all %f{i}#1 : !stablehlo.token"""
        )
    values = ", ".join(f"%g{i}" for i in range(count))
    types = ", ".join(["tensor<128xf32>"] * count)
    arguments = ", ".join(f"%x{i}: tensor<64xf32>" for i in range(count))
    body = "\n".join([*lines, f"return {values} : {types}"])
    return main(body, arguments=arguments, results=types)


def test_a_barrier_orders_nothing_by_what_only_dead_code_uses() -> None:
    """XLA drops the code, the element and the dependence: no token reaches what it compiles."""
    text = gathers(2, "%dN = stablehlo.negate %fN#0 : tensor<128xf32>")
    compiled = compile_artifact(artifact.parse(text.encode()), Target.CPU).text
    assert "opt-barrier" not in compiled
    assert "after-all" not in compiled
    assert rule(verdict(read(text, text))) != "ordered"


def test_nor_where_the_program_is_read_op_by_op() -> None:
    branch = """%p = stablehlo.constant dense<true> : tensor<i1>
        %s = stablehlo.add %g0, %g1 : tensor<128xf32>
        %e = "stablehlo.if"(%p) ({
          %q = "stablehlo.collective_permute"(%s) <{
            source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>}>
            : (tensor<128xf32>) -> tensor<128xf32>
          stablehlo.return %q : tensor<128xf32>
        }, {
          stablehlo.return %s : tensor<128xf32>
        }) : (tensor<i1>) -> tensor<128xf32>
        return %g0, %e"""
    text = gathers(2, "%dN = stablehlo.negate %fN#0 : tensor<128xf32>")
    text = text.replace("return %g0, %g1", branch)
    assert rule(verdict(read(text, text))) != "ordered"


def two(body: str, *, kept: bool) -> str:
    """A gather of an integer, of which `body` makes `%v`; or the gather itself is returned."""
    t = "tensor<8xi32>"
    gather = f"""%g = "stablehlo.all_gather"(%x) <{{all_gather_dim = 0 : i64,
        replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>}}> : (tensor<4xi32>) -> {t}"""
    end = f"return %{'g' if kept else 'v'} : {t}"
    return main(f"{gather}\n{body}\n{end}", arguments="%x: tensor<4xi32>", results=t)


ZERO = """%c = stablehlo.constant dense<0> : tensor<8xi32>
    %v = stablehlo.multiply %g, %c : tensor<8xi32>"""
SAME = "%v = stablehlo.subtract %g, %g : tensor<8xi32>"
CONSTANT = "%c = stablehlo.constant dense<1.0> : tensor<4xf32>"


SLICE = """%i = stablehlo.replica_id : tensor<ui32>
    %j = stablehlo.convert %i : (tensor<ui32>) -> tensor<i32>
    %n = stablehlo.constant dense<4> : tensor<i32>
    %o = stablehlo.multiply %j, %n : tensor<i32>
    %d = stablehlo.dynamic_slice %g, %o, sizes = [4] : (tensor<8xi32>, tensor<i32>) -> tensor<4xi32>
    %v = stablehlo.concatenate %d, %d, dim = 0 : (tensor<4xi32>, tensor<4xi32>) -> tensor<8xi32>"""
SUMS = [
    main(
        f"{CONSTANT}\n{all_reduce('%r', value)}\nreturn %r : tensor<4xf32>",
        arguments="%x: tensor<4xf32>",
        results="tensor<4xf32>",
    )
    for value in ("%c", "%x")
]


@pytest.mark.parametrize(
    ("target", "deleted", "kept"),
    [
        pytest.param(Target.CPU, two(ZERO, kept=False), two(ZERO, kept=True), id="times_zero"),
        pytest.param(
            Target.CPU,
            two(SAME, kept=False),
            two(SAME, kept=True),
            id="minus_itself",
            marks=pytest.mark.soak,
        ),
        pytest.param(Target.CPU, *SUMS, id="sum_of_a_constant"),
        pytest.param(Target.TPU, two(SLICE, kept=False), two(SLICE, kept=True), id="own_slice"),
    ],
)
def test_what_a_simplifier_deletes_is_not_issued(target: Target, deleted: str, kept: str) -> None:
    if missing_package(target) is not None:
        pytest.skip(f"{target.title} is not installed")
    for text, ids in ((deleted, (0,)), (kept, ())):
        loaded = artifact.parse(text.encode())
        assert compile_artifact(loaded, target).order.deleted == ids
    assert rule(verdict(read(deleted, kept))) != "ordered"


@pytest.mark.parametrize(
    ("target", "body"),
    [
        pytest.param(Target.GPU, ZERO, id="gpu-times_zero"),
        pytest.param(Target.TPU, SLICE, id="tpu-own_slice"),
        pytest.param(Target.GPU, SLICE, id="gpu-own_slice", marks=pytest.mark.soak),
        pytest.param(Target.TPU, ZERO, id="tpu-times_zero", marks=pytest.mark.soak),
    ],
)
def test_a_token_does_not_keep_such_a_collective(target: Target, body: str) -> None:
    """But behind a barrier neither looks for the slice."""
    if missing_package(target) is not None:
        pytest.skip(f"{target.title} is not installed")
    (threaded,) = read(two(body, kept=False))
    run_pipeline(threaded, Pipeline.parse("thread-tokens"))
    deleted = compile_artifact(threaded, target).order.deleted
    assert deleted == (() if body == SLICE else (0,))
