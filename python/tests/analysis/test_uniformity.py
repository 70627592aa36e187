"""Which devices hold equal values, and how often loops run."""

from __future__ import annotations

import pytest

from stablehlo_tools.analysis.collectives import ModuleFacts
from stablehlo_tools.analysis.entry import is_per_device
from stablehlo_tools.analysis.uniformity import Uniformity, Variation
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.walk import main_function, terminator, walk

GRID = "mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32"
REPLICAS = "mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 4 : i32"
IDS = "%d = stablehlo.partition_id : tensor<ui32>"
CHANNEL = "channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>"
PAIRS = "replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>"
HALVES = f"{CHANNEL}, {PAIRS}, use_global_device_ids"
MAX = """({
    ^bb0(%a: tensor<ui32>, %b: tensor<ui32>):
      %m = stablehlo.maximum %a, %b : tensor<ui32>
      stablehlo.return %m : tensor<ui32>
    })"""


def evaluated(text: str) -> tuple[ir.Module, Uniformity]:
    """A module of four devices, and everything known of it."""
    module = artifact.parse(text.encode()).module
    found = Uniformity(module, ModuleFacts.from_module(module), range(4))
    main = main_function(module)
    assert main is not None
    found.bind_arguments(main, is_per_device(module), None)
    found.block(main.regions[0].blocks[0])
    return module, found


def returned(body: str, arguments: str = "", kind: str = "tensor<ui32>", grid: str = GRID):
    """What is known of the value that a program returns."""
    module, found = evaluated(
        f'module attributes {{{grid}}} {{ sdy.mesh @mesh = <["x"=2, "y"=2]>\n'
        f"func.func @main({arguments}) -> {kind} {{\n{body}\n}} }}"
    )
    main = main_function(module)
    assert main is not None
    return found.variation_of(terminator(main.regions[0].blocks[0]).operands[0])


def test_a_device_id_is_known_for_each_device() -> None:
    assert returned(f"{IDS}\nreturn %d : tensor<ui32>") == Variation((0, 1, 2, 3), (0, 1, 2, 3))
    replica = "%d = stablehlo.replica_id : tensor<ui32>"
    known = returned(f"{replica}\nreturn %d : tensor<ui32>", grid=REPLICAS)
    assert known.values == (0, 1, 2, 3)
    assert returned(f"{replica}\nreturn %d : tensor<ui32>").values == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("%r = stablehlo.remainder %d, %two : tensor<ui32>", (0, 1, 0, 1)),
        ("%r = stablehlo.divide %d, %two : tensor<ui32>", (0, 0, 1, 1)),
        ("%r = stablehlo.and %d, %two : tensor<ui32>", (0, 0, 2, 2)),
        ("%r = stablehlo.subtract %d, %two : tensor<ui32>", (2**32 - 2, 2**32 - 1, 0, 1)),
        ("%r = stablehlo.minimum %d, %two : tensor<ui32>", (0, 1, 2, 2)),
        ("%r = stablehlo.xor %d, %d : tensor<ui32>", (0, 0, 0, 0)),
        ("%r = stablehlo.not %d : tensor<ui32>", tuple(2**32 - 1 - i for i in range(4))),
        ("%r = stablehlo.negate %d : tensor<ui32>", (0, *(2**32 - i for i in range(1, 4)))),
    ],
)
def test_integers_of_device_ids_are_computed(line: str, values: tuple[int, ...]) -> None:
    two = "%two = stablehlo.constant dense<2> : tensor<ui32>"
    assert returned(f"{IDS}\n{two}\n{line}\nreturn %r : tensor<ui32>").values == values


def test_signed_division_rounds_towards_zero() -> None:
    body = f"""{IDS}
        %i = stablehlo.convert %d : (tensor<ui32>) -> tensor<i32>
        %three = stablehlo.constant dense<-3> : tensor<i32>
        %two = stablehlo.constant dense<2> : tensor<i32>
        %s = stablehlo.add %i, %three : tensor<i32>
        %r = stablehlo.OP %s, %two : tensor<i32>
        return %r : tensor<i32>"""
    divided = returned(body.replace("OP", "divide"), kind="tensor<i32>")
    assert divided.values == (-1, -1, 0, 0)
    rest = returned(body.replace("OP", "remainder"), kind="tensor<i32>")
    assert rest.values == (-1, 0, -1, 0)


def test_constants_are_equal_everywhere() -> None:
    known = returned("%c = stablehlo.constant dense<7> : tensor<ui32>\nreturn %c : tensor<ui32>")
    assert known == Variation((0, 0, 0, 0), (7, 7, 7, 7))


def test_an_argument_of_a_program_for_one_device_differs_unless_it_is_said_to_be_alike() -> None:
    body = f"{IDS}\nreturn %x : tensor<ui32>"  # the id makes it a program for one device
    assert returned(body, "%x: tensor<ui32>").classes == (0, 1, 2, 3)
    alike = '%x: tensor<ui32> {mhlo.sharding = "{replicated}"}'
    assert returned(body, alike).classes == (0, 0, 0, 0)
    shared = "%x: tensor<ui32> {mhlo.is_same_data_across_replicas}"
    assert returned(body, shared, grid=REPLICAS).classes == (0, 0, 0, 0)


def test_an_argument_of_a_program_for_all_devices_is_one_value() -> None:
    assert returned("return %x : tensor<ui32>", "%x: tensor<ui32>").classes == (0, 0, 0, 0)


def test_a_value_of_unknown_origin_differs() -> None:
    body = "%r = stablehlo.custom_call @draw() : () -> tensor<ui32>\nreturn %r : tensor<ui32>"
    assert returned(body).classes == (0, 1, 2, 3)


def test_a_reduction_is_equal_within_each_group() -> None:
    reduced = (
        f'{IDS}\n%r = "stablehlo.all_reduce"(%d) <{{{HALVES}}}> {MAX} : '
        "(tensor<ui32>) -> tensor<ui32>\nreturn %r : tensor<ui32>"
    )
    assert returned(reduced).classes == (0, 0, 1, 1)
    everywhere = reduced.replace(
        "[[0, 1], [2, 3]]> : tensor<2x2xi64>", "[[0, 1, 2, 3]]> : tensor<1x4xi64>"
    )
    assert returned(everywhere).classes == (0, 0, 0, 0)


def test_a_reduction_of_equals_is_equal_across_groups() -> None:
    body = f"""{IDS}
        %two = stablehlo.constant dense<2> : tensor<ui32>
        %p = stablehlo.remainder %d, %two : tensor<ui32>
        %r = "stablehlo.all_reduce"(%p) <{{{HALVES}}}> {MAX} : (tensor<ui32>) -> tensor<ui32>
        return %r : tensor<ui32>"""
    assert returned(body).classes == (0, 0, 0, 0)


def test_a_permute_moves_classes_and_leaves_zeros() -> None:
    pairs = "source_target_pairs = dense<[[0, 1], [0, 2]]> : tensor<2x2xi64>"
    body = f"""{IDS}
        %r = "stablehlo.collective_permute"(%d) <{{{CHANNEL}, {pairs}}}>
          : (tensor<ui32>) -> tensor<ui32>
        return %r : tensor<ui32>"""
    assert returned(body.replace("[0, 2]", "[3, 2]")).classes == (0, 1, 2, 0)


MANUAL = """
    %r = sdy.manual_computation(%x) in_shardings=[<@mesh, [{IN}]>]
        out_shardings=[<@mesh, [{OUT}]>]
        manual_axes={"x", "y"} (%s: tensor<SIZExui32>) {
      %g = stablehlo.slice %s [0:1] : (tensor<SIZExui32>) -> tensor<1xui32>
      sdy.return %s : tensor<SIZExui32>
    } : (tensor<4xui32>) -> tensor<4xui32>
    return %r : tensor<4xui32>"""


@pytest.mark.parametrize(
    ("axes", "size", "classes"),
    [
        ("", 4, (0, 0, 0, 0)),
        ('"x"', 2, (0, 0, 1, 1)),
        ('"y"', 2, (0, 1, 0, 1)),
        ('"x", "y"', 1, (0, 1, 2, 3)),
    ],
)
def test_a_shard_differs_along_the_axes_that_divide_it(
    axes: str, size: int, classes: tuple[int, ...]
) -> None:
    body = MANUAL.replace("IN", axes).replace("OUT", axes)
    body = body.replace("SIZE", str(size))
    module, found = evaluated(
        f'module attributes {{{GRID}}} {{ sdy.mesh @mesh = <["x"=2, "y"=2]>\n'
        f"func.func @main(%x: tensor<4xui32>) -> tensor<4xui32> {{ {body} }} }}"
    )
    slices: list[ir.Value] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == "stablehlo.slice":
            slices.append(op.results[0])
        return ir.WalkResult.ADVANCE

    walk(module.operation, visit)
    assert [found.variation_of(value).classes for value in slices] == [classes]


CLAIMED = """
    %r = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"x"}]>] out_shardings=[<@mesh, [OUT]>]
        manual_axes={"x", "y"} (%s: tensor<2xui32>) {
      %d = stablehlo.partition_id : tensor<ui32>
      %b = stablehlo.broadcast_in_dim %d, dims = [] : (tensor<ui32>) -> tensor<2xui32>
      sdy.return %b : tensor<2xui32>
    } : (tensor<4xui32>) -> tensor<RESULTxui32>
    return %r : tensor<RESULTxui32>"""


def test_what_is_only_said_to_be_replicated_differs_as_it_was_computed() -> None:
    """With `check_vma=False` nobody checks what `out_specs` say."""
    argument = "%x: tensor<4xui32>"
    body = CLAIMED.replace("OUT", "{}").replace("RESULT", "2")
    assert returned(body, argument, "tensor<2xui32>").classes == (0, 1, 2, 3)
    body = CLAIMED.replace("OUT", '{"x"}').replace("RESULT", "4")
    assert returned(body, argument, "tensor<4xui32>").classes == (0, 1, 2, 3)
    body = CLAIMED.replace("OUT", '{"x", "y"}').replace("RESULT", "8")
    assert returned(body, argument, "tensor<8xui32>").classes == (0, 0, 0, 0)


def test_a_sharding_may_bring_its_own_mesh() -> None:
    body = CLAIMED.replace("@mesh", 'mesh<["x"=2, "y"=2]>').replace("OUT", '{"x", "y"}')
    kind = "tensor<8xui32>"
    assert returned(body.replace("RESULT", "8"), "%x: tensor<4xui32>", kind).classes == (0,) * 4


def test_a_branch_known_for_each_device_gives_each_its_own() -> None:
    body = f"""{IDS}
        %two = stablehlo.constant dense<2> : tensor<ui32>
        %ten = stablehlo.constant dense<10> : tensor<ui32>
        %p = stablehlo.compare LT, %d, %two : (tensor<ui32>, tensor<ui32>) -> tensor<i1>
        %r = "stablehlo.if"(%p) ({{
          stablehlo.return %ten : tensor<ui32>
        }}, {{
          stablehlo.return %d : tensor<ui32>
        }}) : (tensor<i1>) -> tensor<ui32>
        return %r : tensor<ui32>"""
    assert returned(body).values == (10, 10, 2, 3)


def test_a_branch_not_known_joins_the_predicate() -> None:
    body = f"""{IDS}
        %ten = stablehlo.constant dense<10> : tensor<ui32>
        %two = stablehlo.constant dense<20> : tensor<ui32>
        %r = "stablehlo.if"(%p) ({{
          stablehlo.return %ten : tensor<ui32>
        }}, {{
          stablehlo.return %two : tensor<ui32>
        }}) : (tensor<i1>) -> tensor<ui32>
        return %r : tensor<ui32>"""
    assert returned(body, "%p: tensor<i1>").classes == (0, 1, 2, 3)
    alike = '%p: tensor<i1> {mhlo.sharding = "{replicated}"}'
    assert returned(body, alike).classes == (0, 0, 0, 0)
