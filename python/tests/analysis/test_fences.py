"""Which collectives no compiler rewrites: fenced by barriers, and surely needed as they are."""

from __future__ import annotations

import pytest
from order_cases import SUM, main

from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.analysis.compiler_hazards import Fences
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.ir.walk import entry_function

OPEN = "a compiler may find that no output needs this value unchanged"
REPLICAS = "replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>"
GROUPS = f"""channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
    {REPLICAS}, use_global_device_ids"""


def summed(kind: str = "tensor<4xf32>", operand: str = "%x", result: str = "%v") -> str:
    """`result` is the fenced sum of `operand` over the devices."""
    element = kind.removesuffix(">").split("x")[-1]
    number = result.removeprefix("%")
    return f"""%{number}b = stablehlo.optimization_barrier {operand} : {kind}
        %{number}r = "stablehlo.all_reduce"(%{number}b) <{{{GROUPS}}}>
            {SUM.replace("E", element)} : ({kind}) -> {kind}
        {result} = stablehlo.optimization_barrier %{number}r : {kind}"""


def doubts(body: str, results: str, arguments: str = "%x: tensor<4xf32>") -> list[str]:
    """The doubts about the collectives of a program, in the order of the text."""
    text = main(body, arguments=arguments, results=results)
    module = artifact.parse(text.encode()).module
    fences = Fences(entry_function(module))
    return [fences.doubt(collective) for collective in find_collectives(module)]


def doubt(body: str, results: str = "tensor<4xf32>", kind: str = "tensor<4xf32>") -> str:
    """The doubt about a fenced sum `%v`, of which the body makes the results."""
    (found,) = doubts(
        f"{summed(kind)}\n{body}", results, f"%x: {kind}, %y: {kind}, %i: tensor<i32>"
    )
    return found


def test_a_fenced_sum_that_is_returned() -> None:
    assert doubt("return %v : tensor<4xf32>") == ""


def test_one_barrier_for_operands_and_token() -> None:
    body = """%t = stablehlo.create_token : !stablehlo.token
        %b:2 = stablehlo.optimization_barrier %x, %t : tensor<4xf32>, !stablehlo.token
        %g = "stablehlo.all_gather"(%b#0) <{all_gather_dim = 0 : i64, GROUPS}>
            : (tensor<4xf32>) -> tensor<8xf32>
        %v:2 = stablehlo.optimization_barrier %g, %b#1 : tensor<8xf32>, !stablehlo.token
        return %v#0 : tensor<8xf32>"""
    assert doubts(body.replace("GROUPS", REPLICAS), "tensor<8xf32>") == [""]


@pytest.mark.parametrize("unused", ["%b = stablehlo.optimization_barrier %x : tensor<4xf32>", ""])
def test_no_barrier_before_it(unused: str) -> None:
    fenced = summed().replace("%vb = stablehlo.optimization_barrier %x : tensor<4xf32>", unused)
    body = f"{fenced.replace('(%vb)', '(%x)')}\nreturn %v : tensor<4xf32>"
    assert doubts(body, "tensor<4xf32>") == ["no barrier produces its operands"]


def test_a_use_beside_the_barrier() -> None:
    reason = "other ops than barriers use its results"
    beside = "%w = stablehlo.tanh %vr : tensor<4xf32>"
    assert doubt(f"{beside}\nreturn %v, %w : tensor<4xf32>, tensor<4xf32>", f"{F}, {F}") == reason
    assert doubt("return %vr : tensor<4xf32>") == reason


F = "tensor<4xf32>"


@pytest.mark.parametrize("element", ["bf16", "f16", "f8E4M3FN"])
def test_narrow_floats(element: str) -> None:
    kind = f"tensor<4x{element}>"
    expected = f"a compiler may exchange a type other than {element}"
    assert doubt(f"return %v : {kind}", kind, kind) == expected


@pytest.mark.parametrize("element", ["f64", "i32", "ui8", "i1"])
def test_types_that_stay(element: str) -> None:
    kind = f"tensor<4x{element}>"
    assert doubt(f"return %v : {kind}", kind, kind) == ""


def test_nothing_needs_it() -> None:
    assert doubt("return %x : tensor<4xf32>") == OPEN


def test_what_has_effects_is_never_rewritten() -> None:
    body = """%t = stablehlo.create_token : !stablehlo.token
        %u = "stablehlo.send"(%x, %t) <{
            channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
            source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>}>
            : (tensor<4xf32>, !stablehlo.token) -> !stablehlo.token
        return %x : tensor<4xf32>"""
    assert doubts(body, "tensor<4xf32>") == [""]


KEPT = {
    "tanh": "%w = stablehlo.tanh %v : tensor<4xf32>",
    "erf": "%w = chlo.erf %v : tensor<4xf32> -> tensor<4xf32>",
    "add": "%w = stablehlo.add %v, %y : tensor<4xf32>",
    "subtract": "%w = stablehlo.subtract %y, %v : tensor<4xf32>",
    "multiply": "%w = stablehlo.multiply %v, %y : tensor<4xf32>",
    "divide": "%w = stablehlo.divide %y, %v : tensor<4xf32>",
    "negate": "%w = stablehlo.negate %v : tensor<4xf32>",
    "reverse": "%w = stablehlo.reverse %v, dims = [0] : tensor<4xf32>",
    "reshape": """%s = stablehlo.reshape %v : (tensor<4xf32>) -> tensor<2x2xf32>
        %u = stablehlo.transpose %s, dims = [1, 0] : (tensor<2x2xf32>) -> tensor<2x2xf32>
        %w = stablehlo.reshape %u : (tensor<2x2xf32>) -> tensor<4xf32>""",
    "sum": """%z = stablehlo.constant dense<0.0> : tensor<f32>
        %s = stablehlo.reduce(%v init: %z) applies stablehlo.add across dimensions = [0]
            : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
        %w = stablehlo.broadcast_in_dim %s, dims = [] : (tensor<f32>) -> tensor<4xf32>""",
    "barrier": """%u:2 = stablehlo.optimization_barrier %y, %v : tensor<4xf32>, tensor<4xf32>
        %w = stablehlo.tanh %u#1 : tensor<4xf32>""",
}


@pytest.mark.parametrize("name", KEPT)
def test_ops_that_keep_their_operands(name: str) -> None:
    assert doubt(f"{KEPT[name]}\nreturn %w : tensor<4xf32>") == ""
    assert doubt(f"{KEPT[name]}\nreturn %x : tensor<4xf32>") == OPEN


HOLES = {
    "minus itself": "%w = stablehlo.subtract %v, %v : tensor<4xf32>",
    "other element of a barrier": """
        %u:2 = stablehlo.optimization_barrier %y, %v : tensor<4xf32>, tensor<4xf32>
        %w = stablehlo.tanh %u#0 : tensor<4xf32>""",
    "overwritten": "%w = stablehlo.dynamic_update_slice %v, %y, %i "
    ": (tensor<4xf32>, tensor<4xf32>, tensor<i32>) -> tensor<4xf32>",
    "scattered over": """%j = stablehlo.iota dim = 0 : tensor<4x1xi32>
        %w = "stablehlo.scatter"(%v, %j, %y) <{scatter_dimension_numbers = #stablehlo.scatter<
            inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}>
        ({^bb0(%a: tensor<f32>, %b: tensor<f32>): stablehlo.return %b : tensor<f32>})
            : (tensor<4xf32>, tensor<4x1xi32>, tensor<4xf32>) -> tensor<4xf32>""",
    "compared": """%c = stablehlo.compare EQ, %v, %v
            : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xi1>
        %w = stablehlo.select %c, %x, %y : tensor<4xi1>, tensor<4xf32>""",
    "selected": """%c = stablehlo.constant dense<true> : tensor<4xi1>
        %w = stablehlo.select %c, %x, %v : tensor<4xi1>, tensor<4xf32>""",
    "maximum": "%w = stablehlo.maximum %v, %y : tensor<4xf32>",
    "clamp": "%w = stablehlo.clamp %y, %v, %y : tensor<4xf32>",
    "power": "%w = stablehlo.power %v, %y : tensor<4xf32>",
    "slice": """%u = stablehlo.slice %v [0:2] : (tensor<4xf32>) -> tensor<2xf32>
        %w = stablehlo.concatenate %u, %u, dim = 0
            : (tensor<2xf32>, tensor<2xf32>) -> tensor<4xf32>""",
    "integers": """%u = stablehlo.convert %v : (tensor<4xf32>) -> tensor<4xi32>
        %w = stablehlo.convert %u : (tensor<4xi32>) -> tensor<4xf32>""",
    "converted": """%u = stablehlo.convert %v : (tensor<4xf32>) -> tensor<4xbf16>
        %w = stablehlo.convert %u : (tensor<4xbf16>) -> tensor<4xf32>""",
    "product": """%u = stablehlo.dot_general %v, %y, contracting_dims = [0] x [0]
            : (tensor<4xf32>, tensor<4xf32>) -> tensor<f32>
        %w = stablehlo.broadcast_in_dim %u, dims = [] : (tensor<f32>) -> tensor<4xf32>""",
    "no elements": """%z = stablehlo.constant dense<> : tensor<0xf32>
        %u = stablehlo.broadcast_in_dim %v, dims = [1] : (tensor<4xf32>) -> tensor<0x4xf32>
        %s = stablehlo.constant dense<0.0> : tensor<f32>
        %w = stablehlo.reduce(%u init: %s) applies stablehlo.add across dimensions = [0]
            : (tensor<0x4xf32>, tensor<f32>) -> tensor<4xf32>""",
    "largest": """%s = stablehlo.constant dense<0.0> : tensor<f32>
        %u = stablehlo.reduce(%v init: %s) applies stablehlo.maximum across dimensions = [0]
            : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
        %w = stablehlo.broadcast_in_dim %u, dims = [] : (tensor<f32>) -> tensor<4xf32>""",
    "branch": """%w = "stablehlo.case"(%i) ({ stablehlo.return %v : tensor<4xf32> },
            { stablehlo.return %x : tensor<4xf32> }) : (tensor<i32>) -> tensor<4xf32>""",
    "custom call": "%w = stablehlo.custom_call @f(%v) : (tensor<4xf32>) -> tensor<4xf32>",
}


@pytest.mark.parametrize("name", HOLES)
def test_ops_that_may_not_need_their_operands(name: str) -> None:
    assert doubt(f"{HOLES[name]}\nreturn %w : tensor<4xf32>") == OPEN
    assert doubt(f"{HOLES[name]}\nreturn %w, %v : {F}, {F}", f"{F}, {F}") == ""


def test_integers_are_kept_by_no_op() -> None:
    kind = "tensor<4xi32>"
    assert doubt(f"%w = stablehlo.add %v, %y : {kind}\nreturn %w : {kind}", kind, kind) == OPEN
    assert doubt(f"%w = stablehlo.negate %v : {kind}\nreturn %w : {kind}", kind, kind) == OPEN


def loop(ends: str, result: int, *, trips: int = 3, body: str = "", bound: str = "") -> str:
    """A loop with carries `%a`, of `%v`, and `%c`, of `%y`, which become `ends`; one is `%w`."""
    return f"""%zero = stablehlo.constant dense<0> : tensor<i32>
        %step = stablehlo.constant dense<1> : tensor<i32>
        %end = stablehlo.constant dense<{trips}> : tensor<i32>
        %l:3 = stablehlo.while(%n = %zero, %a = %v, %c = %y) : tensor<i32>, {F}, {F}
          cond {{
            %go = stablehlo.compare LT, %n, {bound or "%end"}
                : (tensor<i32>, tensor<i32>) -> tensor<i1>
            stablehlo.return %go : tensor<i1>
          }} do {{
            %next = stablehlo.add %n, %step : tensor<i32>
            {body}
            stablehlo.return %next, {ends} : tensor<i32>, {F}, {F}
          }}
        return %l#{result} : {F}"""


@pytest.mark.parametrize(
    ("ends", "result", "trips", "needed"),
    [
        ("%a, %c", 1, 3, True),
        ("%a, %c", 2, 3, False),
        ("%c, %c", 1, 3, False),  # the first iteration overwrites it
        ("%a, %a", 2, 3, True),
        ("%c, %a", 1, 1, False),  # turned round: after one trip the other one is there
        ("%c, %a", 2, 1, True),
        ("%c, %a", 1, 2, True),
        ("%c, %a", 2, 2, False),
        ("%c, %a", 2, 65, False),
        ("%a, %c", 1, 0, False),  # no iteration: XLA may still remove the loop, but nothing is said
    ],
)
def test_a_carry_of_a_loop(ends: str, result: int, trips: int, needed: bool) -> None:
    assert doubt(loop(ends, result, trips=trips)) == ("" if needed else OPEN)


def test_a_loop_that_may_not_run() -> None:
    assert doubt(loop("%a, %c", 1, bound="%i")) == OPEN


@pytest.mark.parametrize(
    ("ends", "result", "trips", "expected"),
    [
        ("%u, %c", 1, 3, ["", ""]),
        ("%u, %c", 2, 3, [OPEN, OPEN]),
        ("%a, %u", 2, 3, ["", OPEN]),  # of which a compiler that unrolls the loop needs the last
        ("%u, %c", 1, 0, [OPEN, OPEN]),
    ],
)
def test_a_sum_in_a_loop(ends: str, result: int, trips: int, expected: list[str]) -> None:
    inside = summed(operand="%a", result="%u")
    body = f"{summed()}\n{loop(ends, result, trips=trips, body=inside)}"
    assert doubts(body, F, f"%x: {F}, %y: {F}, %i: tensor<i32>") == expected


def test_a_sum_in_a_manual_computation() -> None:
    sharding = '[<@mesh, [{"i"}]>]'
    for returned, needed in (("%v", True), ("%p", False)):
        text = f"""module {{
          sdy.mesh @mesh = <["i"=2]>
          func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {{
            %w = sdy.manual_computation(%x) in_shardings={sharding} out_shardings={sharding}
                manual_axes={{"i"}} (%p: {F}) {{
              {summed(operand="%p")}
              sdy.return {returned} : {F}
            }} : (tensor<8xf32>) -> tensor<8xf32>
            %z = stablehlo.tanh %w : tensor<8xf32>
            return %z : tensor<8xf32>
          }}
        }}"""
        module = artifact.parse(text.encode()).module
        (collective,) = find_collectives(module)
        assert Fences(entry_function(module)).doubt(collective) == ("" if needed else OPEN)


ALIKE = "a compiler may find that all replicas have the same value"
ONES = f"%y = stablehlo.constant dense<1.0> : {F}"
REPLICATED = {
    "argument": ("", True),
    "product": (
        f"""%m = stablehlo.dot_general %x, %x2, contracting_dims = [] x []
            : ({F}, {F}) -> tensor<4x4xf32>
        %z = stablehlo.constant dense<0.0> : tensor<f32>
        %u = stablehlo.reduce(%m init: %z) applies stablehlo.add across dimensions = [0]
            : (tensor<4x4xf32>, tensor<f32>) -> {F}""",
        True,
    ),
    "converted": (
        f"""%n = stablehlo.convert %x : ({F}) -> tensor<4xbf16>
        %u = stablehlo.convert %n : (tensor<4xbf16>) -> {F}""",
        True,
    ),
    "barrier": (f"%u, %u2 = stablehlo.optimization_barrier %x, %x2 : {F}, {F}", True),
    "constant": (f"%u = stablehlo.constant dense<1.0> : {F}", False),
    "iota": (f"%u = stablehlo.iota dim = 0 : {F}", False),
    "sum of all": (summed(result="%u").replace(GROUPS, REPLICAS), False),
    "integers": (
        f"""%n = stablehlo.convert %x : ({F}) -> tensor<4xi32>
        %z = stablehlo.constant dense<0> : tensor<4xi32>
        %p = stablehlo.multiply %n, %z : tensor<4xi32>
        %u = stablehlo.convert %p : (tensor<4xi32>) -> {F}""",
        False,
    ),
    "branch": (
        f"""{ONES}
        %u = "stablehlo.case"(%i) ({{ stablehlo.return %y : {F} }},
            {{ stablehlo.return %y : {F} }}) : (tensor<i32>) -> {F}""",
        False,
    ),
}


@pytest.mark.parametrize("name", REPLICATED)
def test_a_sum_over_replicas_of_what_may_be_the_same_on_all(name: str) -> None:
    before, differs = REPLICATED[name]
    operand = "%u" if before else "%x"
    body = f"{before}\n{summed(operand=operand).replace(GROUPS, REPLICAS)}\nreturn %v : {F}"
    found = doubts(body, F, f"%x: {F}, %x2: {F}, %i: tensor<i32>")
    assert found[-1] == ("" if differs else ALIKE)


def test_an_argument_that_is_the_same_on_all_replicas() -> None:
    body = f"{summed().replace(GROUPS, REPLICAS)}\nreturn %v : {F}"
    same = f"%x: {F} {{mhlo.is_same_data_across_replicas = true}}"
    assert doubts(body, F, same) == [ALIKE]


def test_a_sum_over_replicas_of_a_carry() -> None:
    inside = summed(operand="%a", result="%u").replace(GROUPS, REPLICAS)
    body = f"{ONES.replace('%y', '%v')}\n{loop('%u, %c', 1, body=inside)}"
    assert doubts(body, F, f"%x: {F}, %y: {F}") == [ALIKE]
