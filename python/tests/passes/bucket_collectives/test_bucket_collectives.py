"""Merged collectives: one op, in a module that verifies, and bitwise the values of before.

Sums and products are of small whole numbers, so exact in any order; what is only moved has any
bits, those of NaN and infinities among them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
import random_buckets
from bucket_candidates import candidates
from random_buckets import DEVICES, Program, arguments, random_program
from soaking import first

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.transforms.parts.bucket_collectives.merge import Merger


def merged(program: Artifact, *, several_operands: bool = True) -> Artifact:
    """The program after each set of candidates became one."""
    result = program.copy()
    with result.module.context:
        found = find_collectives(result.module)
        merger = Merger(result.module, found, several_operands=several_operands)
        for members in candidates(found, merger):
            merger.merge(members)
    result.module.operation.verify()
    return result


def run(program: Artifact, shape: Program, values: list[list[Any]]) -> list[list[bytes]]:
    devices = jax.devices()[:DEVICES]
    executable = bindings.compile_for_devices(
        bindings.write_bytecode(program.module),
        shape.replicas,
        DEVICES // shape.replicas,
        devices,
        partitioned=shape.form == "manual",
    )
    results = bindings.run_on_devices(executable, values, devices)
    return [[np.asarray(part).tobytes() for part in parts] for parts in results]


GROUPS = "replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>"
OTHER_GROUPS = "replica_groups = dense<[[1, 0]]> : tensor<1x2xi64>"
GLOBAL = "channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids"
TWO_REPLICAS = "mhlo.num_replicas = 2 : i32, mhlo.num_partitions = 1 : i32"
TWO_PARTITIONS = "mhlo.num_replicas = 1 : i32, mhlo.num_partitions = 2 : i32"


def gather(
    operand: str, attributes: str = GROUPS, *, size: str = "2", element: str = "f32", dim: int = 0
) -> str:
    taken, given = f"tensor<{size}x{element}>", f"tensor<{2 * int(size)}x{element}>"
    return (
        f'"stablehlo.all_gather"({operand}) {{all_gather_dim = {dim} : i64, {attributes}}} '
        f": ({taken}) -> {given}"
    )


def reduce(operand: str, kind: str = "add", attributes: str = GROUPS, element: str = "f32") -> str:
    scalar = f"tensor<{element}>"
    return (
        f'"stablehlo.all_reduce"({operand}) ({{\n^bb0(%l: {scalar}, %r: {scalar}):\n'
        f"%s = stablehlo.{kind} %l, %r : {scalar}\nstablehlo.return %s : {scalar}\n}}) "
        f"{{{attributes}}} : (tensor<2x{element}>) -> tensor<2x{element}>"
    )


def effect(name: str, operand: str, size: int) -> str:
    return (
        f"stablehlo.custom_call @{name}({operand}) {{has_side_effect = true}} : "
        f"(tensor<{size}xf32>) -> tensor<2xf32>"
    )


def module(body: str, counts: str = TWO_REPLICAS, above: str = "") -> Artifact:
    text = f"""module attributes {{{counts}}} {{
      {above}
      func.func @main(%x: tensor<2xf32>, %y: tensor<2xf32>, %h: tensor<2xbf16>, %b: tensor<2xi1>,
                      %p: tensor<i1>) {{
        {body}
        return
      }}
    }}"""
    return artifact.parse(text.encode())


def why_not(program: Artifact) -> str | None:
    """Why all the collectives of a program cannot become one."""
    with program.module.context:
        found = find_collectives(program.module)
        return Merger(program.module, found).why_not(found)


def ops(program: Artifact) -> list[str]:
    """The names of the ops of `main`, in order, without their dialects."""
    main = program.module.body.operations[-1]
    return [op.operation.name.split(".")[-1] for op in main.regions[0].blocks[0].operations]


def merge_all(program: Artifact, **options: bool) -> list[str]:
    """Merges all the collectives of a program; the names of the ops of `main` afterwards."""
    with program.module.context:
        found = find_collectives(program.module)
        Merger(program.module, found, **options).merge(found)
    program.module.operation.verify()
    return ops(program)


def check(seed: int) -> None:
    shape = random_program(seed)
    before = artifact.parse(shape.text().encode())
    after = merged(before, several_operands=seed % 3 != 0)
    assert len(find_collectives(after.module)) == 1, shape.text()
    with jax.enable_x64(True):
        values = arguments(shape, seed)
        assert run(before, shape, values) == run(after, shape, values), shape.text()


@pytest.mark.parametrize("seed", first(7, range(14)))
def test_random_buckets(seed: int):
    check(seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1400))
def test_random_buckets_soak(seed: int):
    check(seed)


REFUSED = {
    "C1": [gather("%x"), reduce("%y")],
    "C4 order": [gather("%x"), gather("%y", OTHER_GROUPS)],
    "C5": [reduce("%x"), reduce("%y", "maximum")],
    "C5 types": [reduce("%x"), reduce("%h", element="bf16")],
    "C6": [
        gather("%x", GROUPS + ', mhlo.frontend_attributes = {combiner_key = "1"}'),
        gather("%y"),
    ],
    "C6 sharding": [gather("%x", GROUPS + ', mhlo.sharding = "{replicated}"'), gather("%y")],
    "C7": [gather("%x"), gather("%b", element="i1")],
}


@pytest.mark.parametrize("name", REFUSED)
def test_collectives_that_are_not_alike_are_refused(name: str):
    first, second = REFUSED[name]
    reason = why_not(module(f"%0 = {first}\n%1 = {second}"))
    assert reason is not None
    assert reason.endswith(f"({name[:2]})")


def test_ids_that_count_differently_are_refused_c4():
    reason = why_not(module(f"%0 = {gather('%x', f'{GROUPS}, {GLOBAL}')}\n%1 = {gather('%y')}"))
    assert reason == "they count ids differently: flattened_ids and cross_replica (C4)"


def test_groups_over_mesh_axes_equal_those_in_dense_form():
    mesh = (
        '#stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [#stablehlo.axis_ref<name = "x">]>'
    )
    program = module(
        f"%0 = {gather('%x', f'{GROUPS}, {GLOBAL}')}\n"
        f"%1 = {gather('%y', f'replica_groups = {mesh}, {GLOBAL}')}",
        TWO_PARTITIONS,
        'sdy.mesh @mesh = <["x"=2]>',
    )
    assert why_not(program) is None


def test_the_order_of_members_does_not_matter_to_an_all_reduce():
    program = module(f"%0 = {reduce('%x')}\n%1 = {reduce('%y', attributes=OTHER_GROUPS)}")
    assert why_not(program) is None


def test_reducers_with_the_same_ops_are_alike():
    larger = """"stablehlo.all_reduce"(OPERAND) ({
      ^bb0(%l: tensor<f32>, %r: tensor<f32>):
        %m = stablehlo.OP %l, %r : tensor<f32>
        %n = stablehlo.add %m, %r : tensor<f32>
        stablehlo.return %n : tensor<f32>
      }) {GROUPS} : (tensor<2xf32>) -> tensor<2xf32>""".replace("GROUPS", GROUPS)
    texts = [larger.replace("OPERAND", "%x").replace("OP", "maximum")]
    texts += [larger.replace("OPERAND", "%y").replace("OP", op) for op in ("maximum", "minimum")]
    same = module(f"%0 = {texts[0]}\n%1 = {texts[1]}")
    different = module(f"%0 = {texts[0]}\n%1 = {texts[2]}")
    assert why_not(same) is None
    assert why_not(different) == "they reduce differently (C5)"


def test_an_async_start_is_refused_c2():
    start = f""""stablehlo.async_start"(%x) ({{
      ^bb0(%a: tensor<2xf32>):
        %g = {gather("%a")}
        stablehlo.return %g : tensor<4xf32>
      }}) : (tensor<2xf32>) -> !stablehlo.future<tensor<4xf32>>"""
    assert why_not(module(f"%0 = {start}\n%1 = {gather('%y')}")) == "it is an async_start (C2)"


def test_several_blocks_are_refused_c2():
    branch = f"""%i = "stablehlo.if"(%p) ({{
        %1 = {gather("%y")}
        stablehlo.return %1 : tensor<4xf32>
      }}, {{
        %2 = stablehlo.constant dense<0.0> : tensor<4xf32>
        stablehlo.return %2 : tensor<4xf32>
      }}) : (tensor<i1>) -> tensor<4xf32>"""
    reason = why_not(module(f"%0 = {gather('%x')}\n{branch}"))
    assert reason == "they are in different blocks (C2)"


def test_symbolic_shapes_are_refused_c3():
    symbolic = f""""stablehlo.all_gather"(%d) {{all_gather_dim = 0 : i64, {GROUPS}}}
      : (tensor<?xf32>) -> tensor<?xf32>"""
    reason = why_not(
        module(f"%d = stablehlo.custom_call @make() : () -> tensor<?xf32>\n%0 = {symbolic}")
    )
    assert reason is not None
    assert reason.endswith("(C3)")


def test_what_has_no_elements_is_refused_c3():
    rows = "%r = stablehlo.slice %x [0:0] : (tensor<2xf32>) -> tensor<0xf32>"
    empty = f""""stablehlo.all_gather"(%e) {{all_gather_dim = 1 : i64, {GROUPS}}}
      : (tensor<0x1xf32>) -> tensor<0x2xf32>"""
    shaped = "%e = stablehlo.reshape %r : (tensor<0xf32>) -> tensor<0x1xf32>"
    reason = why_not(module(f"{rows}\n{shaped}\n%0 = {empty}\n%1 = {empty}"))
    assert reason == "it moves no elements (C3)"


def test_an_all_to_all_of_several_operands_is_refused_c3():
    several = f""""stablehlo.all_to_all"(%x, %y) {{split_dimension = 0 : i64,
      concat_dimension = 0 : i64, split_count = 2 : i64, {GROUPS}}}
      : (tensor<2xf32>, tensor<2xf32>) -> (tensor<2xf32>, tensor<2xf32>)"""
    reason = why_not(module(f"%0:2 = {several}"))
    assert reason is not None
    assert reason.endswith("(C3)")


def test_a_token_chain_is_refused_c8():
    chained = """%t = stablehlo.create_token : !stablehlo.token
        %z:2 = stablehlo.optimization_barrier %x, %t : tensor<2xf32>, !stablehlo.token"""
    reason = why_not(module(f"{chained}\n%0 = {gather('%z#0')}\n%1 = {gather('%y')}"))
    assert reason is not None
    assert reason.endswith("(C8)")


HALF = "%f = stablehlo.slice %0 [0:2] : (tensor<4xf32>) -> tensor<2xf32>"


def test_a_dependence_is_refused_c9():
    body = f"%0 = {gather('%x')}\n{HALF}\n%1 = {gather('%f')}"
    assert why_not(module(body)) == "one of them feeds another (C9)"


def test_a_direct_dependence_is_refused_c9():
    body = f"%0 = {reduce('%x')}\n%1 = {reduce('%0')}"
    assert why_not(module(body)) == "one of them feeds another (C9)"


def test_a_dependence_through_a_region_is_refused_c9():
    body = f"""%0 = {gather("%x")}
      %i = "stablehlo.if"(%p) ({{
        {HALF}
        stablehlo.return %f : tensor<2xf32>
      }}, {{
        stablehlo.return %y : tensor<2xf32>
      }}) : (tensor<i1>) -> tensor<2xf32>
      %1 = {gather("%i")}"""
    assert why_not(module(body)) == "one of them feeds another (C9)"


def test_effects_keep_their_order_c9():
    first, second = effect("one", "%0", 4), effect("two", "%y", 2)
    body = f"%0 = {gather('%x')}\n%e = {first}\n%f = {second}\n%1 = {gather('%f')}"
    with_effects = module(body)
    found = [c for c in find_collectives(with_effects.module) if c.kind == "all_gather"]
    reason = Merger(with_effects.module).why_not(found)
    assert reason == "ops with effects between them would be reordered (C9)"


def test_an_axis_left_free_is_refused_c10():
    body = f"""%m:2 = sdy.manual_computation(%x, %y)
        in_shardings=[<@mesh, [{{}}]>, <@mesh, [{{}}]>]
        out_shardings=[<@mesh, [{{}}]>, <@mesh, [{{}}]>]
        manual_axes={{"x"}} (%a: tensor<2xf32>, %c: tensor<2xf32>) {{
      %0 = {gather("%a", f"{GROUPS}, {GLOBAL}")}
      %1 = {gather("%c", f"{GROUPS}, {GLOBAL}")}
      sdy.return %0, %1 : tensor<4xf32>, tensor<4xf32>
    }} : (tensor<2xf32>, tensor<2xf32>) -> (tensor<4xf32>, tensor<4xf32>)"""
    counts = "mhlo.num_replicas = 1 : i32, mhlo.num_partitions = 4 : i32"
    free = module(body, counts, 'sdy.mesh @mesh = <["x"=2, "y"=2]>')
    assert why_not(free) == "a mesh axis is left free around it (C10)"
    assert why_not(module(body, counts, 'sdy.mesh @mesh = <["x"=2, "y"=1]>')) is None


def test_merging_the_unlike_is_a_located_error():
    program = module(f"%0 = {gather('%x')}\n%1 = {gather('%y', OTHER_GROUPS)}")
    before = artifact.to_text(program.module)
    with pytest.raises(ToolError, match=r"cannot merge these 2 collectives: .*\(C4\)"):
        merge_all(program)
    assert artifact.to_text(program.module) == before


def test_users_in_between_move_down_with_what_uses_them():
    body = f"""%0 = {gather("%x")}
      %n = stablehlo.negate %0 : tensor<4xf32>
      %u = stablehlo.abs %y : tensor<2xf32>
      %m = stablehlo.exponential %n : tensor<4xf32>
      %1 = {gather("%u")}"""
    names = merge_all(module(body))
    assert names == ["abs", "all_gather", "negate", "exponential", "return"]


def test_a_user_in_a_region_moves_with_its_op():
    body = f"""%0 = {gather("%x")}
      %i = "stablehlo.if"(%p) ({{
        stablehlo.return %0 : tensor<4xf32>
      }}, {{
        %c = stablehlo.constant dense<0.0> : tensor<4xf32>
        stablehlo.return %c : tensor<4xf32>
      }}) : (tensor<i1>) -> tensor<4xf32>
      %u = stablehlo.abs %y : tensor<2xf32>
      %1 = {gather("%u")}"""
    assert merge_all(module(body)) == ["abs", "all_gather", "if", "return"]


def test_effects_behind_one_that_moves_move_along():
    first, second = effect("one", "%0", 4), effect("two", "%y", 2)
    program = module(
        f"%0 = {gather('%x')}\n%e = {first}\n%u = stablehlo.abs %y : tensor<2xf32>\n"
        f"%f = {second}\n%v = stablehlo.negate %u : tensor<2xf32>\n%1 = {gather('%v')}"
    )
    with program.module.context:
        found = [c for c in find_collectives(program.module) if c.kind == "all_gather"]
        Merger(program.module).merge(found)
    program.module.operation.verify()
    assert ops(program) == ["abs", "negate", "all_gather", "custom_call", "custom_call", "return"]
    assert re.findall(r"@(one|two)", artifact.to_text(program.module)) == ["one", "two"]


def test_several_operands_only_where_xla_takes_them():
    body = f"%0 = {reduce('%x')}\n%1 = {reduce('%y')}"
    assert merge_all(module(body)) == ["all_reduce", "return"]
    joined = ["concatenate", "all_reduce", "slice", "slice", "return"]
    assert merge_all(module(body), several_operands=False) == joined
    partitions = body.replace(GROUPS, f"{GROUPS}, {GLOBAL}")
    assert merge_all(module(partitions, TWO_PARTITIONS)) == joined


def test_attributes_and_locations_are_kept():
    attributes = GROUPS + ', mhlo.frontend_attributes = {a = "1"}'
    text = f'%0 = {gather("%x", attributes)} loc("one")\n%1 = {gather("%y", attributes)} loc("two")'
    program = module(text)
    merge_all(program)
    (merged,) = find_collectives(program.module)
    assert str(merged.op.attributes["mhlo.frontend_attributes"]) == '{a = "1"}'
    assert 'fused["one", "two"]' in str(merged.op.location)


def test_a_merged_collective_merges_again():
    program = module(
        f"%0 = {gather('%x')}\n%1 = {gather('%y')}\n%2 = {gather('%h', element='bf16')}"
    )
    with program.module.context:
        merger = Merger(program.module)
        one, two, three = find_collectives(program.module)
        again = merger.merge([one, two])
        whole = next(c for c in find_collectives(program.module) if c.op == again)
        merger.merge([whole, three])
    program.module.operation.verify()
    assert len(find_collectives(program.module)) == 1


def chains(program: Artifact) -> list[list[int]]:
    """The candidates of a program, by the positions of collectives in its text."""
    with program.module.context:
        found = find_collectives(program.module)
        places = {collective.op.results[0]: n for n, collective in enumerate(found)}
        sets: Sequence[Sequence[Any]] = candidates(found, Merger(program.module, found))
        return [[places[c.op.results[0]] for c in members] for members in sets]


def test_candidates_need_none_of_each_other():
    body = "\n".join(
        [
            f"%0 = {reduce('%x')}",
            f"%1 = {reduce('%y')}",
            f"%2 = {reduce('%0')}",
            f"%3 = {reduce('%1')}",
            f"%4 = {reduce('%x', 'maximum')}",
        ]
    )
    assert chains(module(body)) == [[0, 1], [2, 3]]


def test_candidates_are_of_one_block():
    loop = f"""%w = stablehlo.while(%i = %x) : tensor<2xf32>
      cond {{
        stablehlo.return %p : tensor<i1>
      }} do {{
        %2 = {reduce("%i")}
        %3 = {reduce("%y")}
        %s = stablehlo.add %2, %3 : tensor<2xf32>
        stablehlo.return %s : tensor<2xf32>
      }}
      %0 = {reduce("%x")}
      %1 = {reduce("%w")}"""
    assert chains(module(loop)) == [[0, 1], [2, 3]]


def test_nan_payloads_survive_among_other_types():
    text = random_buckets.text_of_two_gathers("bf16", "f32")
    before = artifact.parse(text.encode())
    shape = Program(np.random.default_rng(0), "partitions", "all_gather")
    bf16 = np.array([0x7F81, 0xFFC1, 0x7FFF, 0x8000], np.uint16)
    f32 = np.array([0x7F800001, 0xFFC00001, 0x7FFFFFFF, 0x80000000], np.uint32)
    values: list[list[Any]] = [
        [bits.view(dtype)] * DEVICES
        for bits, dtype in ((bf16, jax.numpy.bfloat16), (f32, np.float32))
    ]
    results = run(merged(before), shape, values)
    assert [parts[0] for parts in results] == [
        np.tile(bits, DEVICES).tobytes() for bits in (bf16, f32)
    ]


LOOP_IN_BRANCH = """
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %three = stablehlo.constant dense<3> : tensor<i32>
    %w:3 = stablehlo.while(%i = %zero, %p = %a0, %q = %a1)
        : tensor<i32>, tensor<4x2xf32>, tensor<4x3xf32>
      cond {
        %c = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %c : tensor<i1>
      } do {
        %j = stablehlo.add %i, %one : tensor<i32>
        %r:2 = "stablehlo.case"(%j) ({
          FIRST
          SECOND
          stablehlo.return %s, %t : tensor<4x2xf32>, tensor<4x3xf32>
        }, {
          %n = stablehlo.negate %p : tensor<4x2xf32>
          stablehlo.return %n, %q : tensor<4x2xf32>, tensor<4x3xf32>
        }) : (tensor<i32>) -> (tensor<4x2xf32>, tensor<4x3xf32>)
        stablehlo.return %j, %r#0, %r#1 : tensor<i32>, tensor<4x2xf32>, tensor<4x3xf32>
      }"""


def test_in_a_branch_of_a_loop():
    shape = Program(np.random.default_rng(0), "manual", "collective_permute")
    shape.arguments = ["tensor<4x2xf32>", "tensor<4x3xf32>"]
    shift = """"stablehlo.collective_permute"(OPERAND) {
        source_target_pairs = dense<[[0, 1], [1, 2], [2, 0], [5, 7]]> : tensor<4x2xi64>,
        channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>} : (KIND) -> KIND"""
    first = "%s = " + shift.replace("OPERAND", "%p").replace("KIND", shape.arguments[0])
    second = "%t = " + shift.replace("OPERAND", "%q").replace("KIND", shape.arguments[1])
    body = LOOP_IN_BRANCH.replace("FIRST", first).replace("SECOND", second)
    body = body.replace('"stablehlo.case"(%j)', '"stablehlo.case"(%i)')
    shape.lines = [body]
    shape.results = [("%w#1", shape.arguments[0]), ("%w#2", shape.arguments[1])]
    before = artifact.parse(shape.text().encode())
    after = merged(before)
    assert len(find_collectives(after.module)) == 1
    values = arguments(shape, 0)
    assert run(before, shape, values) == run(after, shape, values)
