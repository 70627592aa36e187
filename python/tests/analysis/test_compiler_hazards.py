"""What compilers put in place of a collective, by what stands beside it, is no surprise."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from order_cases import all_reduce, main, read, rule, verdict

from stablehlo_tools.api import transforming
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.passes.pipeline import Pipeline
from stablehlo_tools.targets.compilation import compile_artifact
from stablehlo_tools.targets.topologies import Target, missing_package

F, WIDE = "tensor<4xf32>", "tensor<8xf32>"
EVERY = frozenset(Target)
ACCELERATORS = frozenset({Target.GPU, Target.TPU})


@dataclass(frozen=True)
class Pair:
    """Two bodies with the same collectives, which some compilers do not issue alike.

    `threaded` are the compilers that do not even where a token leads past the collectives;
    `unseen` those of which check-order does not say so then.
    """

    name: str
    one: str
    other: str
    targets: frozenset[Target]
    threaded: frozenset[Target] = frozenset()
    unseen: frozenset[Target] = frozenset()


def _gather(result: str, value: str) -> str:
    return (
        f'{result} = "stablehlo.all_gather"({value}) <{{all_gather_dim = 0 : i64, replica_groups = '
        f"dense<[[0, 1]]> : tensor<1x2xi64>}}> : ({F}) -> {WIDE}"
    )


OWN = f"""%d = stablehlo.replica_id : tensor<ui32>
    %e = stablehlo.convert %d : (tensor<ui32>) -> tensor<i32>
    %k = stablehlo.constant dense<4> : tensor<i32>
    %o = stablehlo.multiply %e, %k : tensor<i32>
    %v = stablehlo.dynamic_slice %g, %o, sizes = [4] : ({WIDE}, tensor<i32>) -> {F}"""
DOWN = f"%v = stablehlo.convert %g : ({WIDE}) -> tensor<8xbf16>"
ONE = f"%c = stablehlo.constant dense<1.0> : {F}"
PAIRS = [
    Pair(
        "all_reduce_of_a_constant",
        f"{ONE}\n{all_reduce('%r', '%c')}\nreturn %r : {F}",
        f"{all_reduce('%r', '%x')}\nreturn %r : {F}",
        EVERY,
        ACCELERATORS,
    ),
    Pair(
        "all_gather_of_a_constant",
        f"{ONE}\n{_gather('%g', '%c')}\nreturn %g : {WIDE}",
        f"{_gather('%g', '%x')}\nreturn %g : {WIDE}",
        EVERY,
    ),
    Pair(
        "all_reduce_of_what_is_reduced",
        f"{all_reduce('%p', '%x')}\n%q = stablehlo.tanh %p : {F}\n{all_reduce('%r', '%q')}\n"
        f"return %r : {F}",
        f"{all_reduce('%p', '%x')}\n%q = stablehlo.add %p, %x : {F}\n{all_reduce('%r', '%q')}\n"
        f"return %r : {F}",
        ACCELERATORS,
        ACCELERATORS,
    ),
    Pair(
        "own_part_of_an_all_gather",
        f"{_gather('%g', '%x')}\n{OWN}\nreturn %v : {F}",
        f"{_gather('%g', '%x')}\n{OWN}\nreturn %v, %g : {F}, {WIDE}",
        ACCELERATORS,
    ),
    Pair(
        "own_part_of_an_all_reduce",
        f"{all_reduce('%g', '%w', WIDE)}\n{OWN}\nreturn %v : {F}",
        f"{all_reduce('%g', '%w', WIDE)}\n{OWN}\nreturn %v, %g : {F}, {WIDE}",
        frozenset({Target.GPU}),
    ),
    Pair(
        "conversion_after_an_all_gather",
        f"{_gather('%g', '%x')}\n{DOWN}\nreturn %v : tensor<8xbf16>",
        f"{_gather('%g', '%x')}\nreturn %g : {WIDE}",
        ACCELERATORS,
        unseen=frozenset({Target.TPU}),
    ),
]


def _module(body: str) -> str:
    results = body.rpartition(" : ")[2]
    return main(body, arguments=f"%x: {F}, %w: {WIDE}", results=results)


def _threaded(text: str) -> str:
    loaded = artifact.parse(text.encode())
    transforming.run_pipeline(loaded, Pipeline.parse("thread-tokens"))
    return artifact.to_text(loaded.module, locations=False)


def _made(text: str, target: Target) -> list[tuple[str, str]]:
    """The kinds and element types that are issued."""
    compiled = compile_artifact(artifact.parse(text.encode()), target)
    events = (event for event in compiled.schedule.events if event.issues)
    return [(event.kind, "bf16" if "bf16" in event.shape else "f32") for event in events]


# What the others make of it is read in the soak.
TARGETS = [
    Target.GPU,
    *(pytest.param(target, marks=pytest.mark.soak) for target in (Target.TPU, Target.CPU)),
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_programs_of_which_one_may_be_rewritten(pair: Pair) -> None:
    one, other = _module(pair.one), _module(pair.other)
    assert rule(verdict(read(one, other))) == "rewritten"
    assert rule(verdict(read(other, one))) == "rewritten"
    assert rule(verdict(read(one, one))) == "ordered"


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_threaded_programs_are_rewritten_no_more(pair: Pair) -> None:
    one, other = _threaded(_module(pair.one)), _threaded(_module(pair.other))
    expected = "rewritten" if pair.threaded else "ordered"
    assert rule(verdict(read(one, other))) == expected


# A constant, what holds no more than a part, and what is to become smaller; the others are alike.
COMPILED = {
    "all_reduce_of_a_constant": Target.GPU,
    "own_part_of_an_all_gather": Target.TPU,
    "conversion_after_an_all_gather": Target.CPU,
}


@pytest.mark.parametrize(
    ("pair", "target"),
    [
        pytest.param(
            pair,
            target,
            id=f"{pair.name}-{target.value}",
            marks=() if COMPILED.get(pair.name) is target else pytest.mark.soak,
        )
        for pair in PAIRS
        for target in Target
    ],
)
def test_compilers_rewrite_as_is_said(pair: Pair, target: Target) -> None:
    if missing_package(target) is not None:
        pytest.skip(f"{target.title} is not installed")
    texts = [_module(pair.one), _module(pair.other)]
    one, other = (_made(text, target) for text in texts)
    assert (one != other) == (target in pair.targets)
    one, other = (_made(_threaded(text), target) for text in texts)
    assert (one != other) == (target in pair.threaded | pair.unseen)


EMPTY = """%e = stablehlo.slice %x [0:0] : (tensor<4xf32>) -> tensor<0xf32>
    %b:2 = stablehlo.optimization_barrier %g, %e : tensor<4xf32>, tensor<0xf32>"""
NEXT = """%n:2 = stablehlo.optimization_barrier %z, %y : tensor<0xf32>, tensor<4xf32>
    %v = "stablehlo.collective_permute"(%n#1) <{source_target_pairs = dense<[[0, 1], [1, 0]]>
      : tensor<2x2xi64>}> : (tensor<4xf32>) -> tensor<4xf32>
    return %b#0, %v, %n#0 : tensor<4xf32>, tensor<4xf32>, tensor<0xf32>"""


BETWEEN = ["%z = stablehlo.negate %b#1 : tensor<0xf32>", all_reduce("%z", "%b#1", "tensor<0xf32>")]


@pytest.mark.parametrize("between", BETWEEN, ids=["op", "collective"])
def test_nothing_waits_for_a_tensor_without_elements(between: str) -> None:
    """XLA:CPU and XLA:TPU issue the second collective first, where the first must wait for more."""
    body = f"{all_reduce('%g', '%x')}\n{EMPTY}\n{between}\n{NEXT}"
    results = "tensor<4xf32>, tensor<4xf32>, tensor<0xf32>"
    text = main(body, arguments=f"%x: {F}, %y: {F}", results=results)
    decided = verdict(read(text, text))
    assert rule(decided) == "unordered"
    assert decided.collectives == 4  # none without elements


def _loop(body: str) -> str:
    """A loop as long as its own carry %q is great, reduced in its condition."""
    return main(
        f"""%z = stablehlo.constant dense<0.0> : {F}
        %w:3 = stablehlo.while(%q = %x, %i = %y, %s = %z) : {F}, {F}, {F}
        cond {{
          {all_reduce("%m", "%q")}
          %e = stablehlo.slice %m [0:1] : ({F}) -> tensor<1xf32>
          %f = stablehlo.reshape %e : (tensor<1xf32>) -> tensor<f32>
          %k = stablehlo.constant dense<1.0> : tensor<f32>
          %p = stablehlo.compare GT, %f, %k : (tensor<f32>, tensor<f32>) -> tensor<i1>
          stablehlo.return %p : tensor<i1>
        }} do {{
          {body}
          stablehlo.return %n, %i, %t : {F}, {F}, {F}
        }}
        return %w#0, %w#2 : {F}, {F}""",
        arguments=f"%x: {F}, %y: {F}",
        results=f"{F}, {F}",
    )


HALF = f"%h = stablehlo.constant dense<0.5> : {F}\n%n = stablehlo.multiply %q, %h : {F}"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (f"{HALF}\n%t = stablehlo.negate %s : {F}", "ordered"),
        (
            f"{all_reduce('%r', '%q')}\n%n = stablehlo.tanh %r : {F}\n"
            f"%t = stablehlo.add %s, %n : {F}",
            "ordered",
        ),
        (
            f"{all_reduce('%r', '%i')}\n%n = stablehlo.multiply %q, %r : {F}\n"
            f"%t = stablehlo.negate %s : {F}",
            "overlapping-iterations",
        ),
        (
            f"{HALF}\n{all_reduce('%r', '%n')}\n%t = stablehlo.add %s, %r : {F}",
            "overlapping-iterations",
        ),
    ],
    ids=["tested", "carried", "invariant", "added_up"],
)
def test_collectives_that_compilers_move_out_of_a_loop(body: str, expected: str) -> None:
    text = _loop(body)
    assert rule(verdict(read(text, text))) == expected


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.value)
def test_compilers_move_what_is_invariant_out_of_a_loop_of_unknown_length(target: Target) -> None:
    if missing_package(target) is not None:
        pytest.skip(f"{target.title} is not installed")
    body = (
        '%r = "stablehlo.collective_permute"(%i) <{source_target_pairs = dense<[[0, 1], [1, 0]]> '
        f": tensor<2x2xi64>}}> : ({F}) -> {F}\n%n = stablehlo.multiply %q, %r : {F}\n"
        f"%t = stablehlo.negate %s : {F}"
    )
    text = _loop(body)
    assert rule(verdict(read(text, text))) != "ordered"
    compiled = compile_artifact(artifact.parse(text.encode()), target)
    (permute,) = (
        e for e in compiled.schedule.events if e.issues and e.kind == "collective-permute"
    )
    assert (not permute.nesting) == (target is not Target.GPU)


def test_bounds_of_which_one_is_a_list_and_one_counts_up() -> None:
    kind = "tensor<8xi32>"
    body = f"""{all_reduce("%r", "%y", kind)}
        %low = stablehlo.constant dense<[0, 1, 2, 3, 4, 5, 6, 7]> : {kind}
        %high = stablehlo.iota dim = 0 : {kind}
        %v = stablehlo.clamp %low, %r, %high : {kind}
        return %v : {kind}"""
    text = main(body, arguments=f"%y: {kind}", results=kind)
    assert rule(verdict(read(text, text))) == "ordered"
