"""Facts about modules: liveness, dataflow that compilers cannot remove, the tree of sites."""

import pytest

from stablehlo_tools import bindings
from stablehlo_tools.analysis.communication import Site, communicating_functions
from stablehlo_tools.analysis.forced_chains import depends_on
from stablehlo_tools.analysis.liveness import dead_collectives
from stablehlo_tools.bindings import ir
from stablehlo_tools.diagnostics import to_place

PERMUTE = (
    '"stablehlo.collective_permute"({}) <{{channel_handle = #stablehlo.channel_handle<handle = 1, '
    "type = 0>, source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>}}> : ({}) -> {}"
)


def permute(operand: str, kind: str = "tensor<4xf32>") -> str:
    return PERMUTE.format(operand, kind, kind)


def parse(body: str, *, signature: str = "(%a: tensor<4xf32>, %p: tensor<i1>)") -> ir.Module:
    text = f"module attributes {{mhlo.num_partitions = 2 : i32}} {{\n{body}\n}}"
    return bindings.parse_module(text.replace("SIGNATURE", signature), bindings.new_context())


def dead_names(body: str) -> list[str]:
    """The location names of the dead collectives."""
    return [to_place(c.op.location).name for c in dead_collectives(parse(body))]


def test_unused_results_are_dead_directly_and_through_dead_ops():
    body = f"""func.func @main SIGNATURE -> tensor<4xf32> {{
      %used = {permute("%a")} loc("used")
      %dead = {permute("%a")} loc("dead")
      %twice = {permute("%dead")} loc("twice")
      %pure = stablehlo.negate %twice : tensor<4xf32>
      return %used : tensor<4xf32>
    }}"""
    assert dead_names(body) == ["dead", "twice"]


def test_each_carry_of_a_loop_is_judged_by_itself():
    body = f"""func.func @main SIGNATURE -> tensor<4xf32> {{
      %w:3 = stablehlo.while(%x = %a, %y = %a, %z = %a)
        : tensor<4xf32>, tensor<4xf32>, tensor<4xf32>
      cond {{
        %c = {permute("%x")} loc("condition")
        %s = stablehlo.slice %c [0:1] : (tensor<4xf32>) -> tensor<1xf32>
        %f = stablehlo.reshape %s : (tensor<1xf32>) -> tensor<f32>
        %q = stablehlo.compare LT, %f, %f : (tensor<f32>, tensor<f32>) -> tensor<i1>
        stablehlo.return %q : tensor<i1>
      }} do {{
        %1 = {permute("%x")} loc("live")
        %2 = {permute("%y")} loc("dead_carry")
        %3 = {permute("%z")} loc("feeds_live")
        %4 = stablehlo.add %1, %3 : tensor<4xf32>
        stablehlo.return %4, %2, %z : tensor<4xf32>, tensor<4xf32>, tensor<4xf32>
      }}
      return %w#0 : tensor<4xf32>
    }}"""
    assert dead_names(body) == ["dead_carry"]


def test_results_of_branches_and_calls_are_judged_by_position():
    body = f"""func.func private @f(%x: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {{
      %1 = {permute("%x")} loc("first")
      %2 = {permute("%x")} loc("second")
      return %1, %2 : tensor<4xf32>, tensor<4xf32>
    }}
    func.func @main SIGNATURE -> tensor<4xf32> {{
      %c:2 = func.call @f(%a) : (tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
      %b:2 = "stablehlo.if"(%p) ({{
        %1 = {permute("%c#1")} loc("then")
        stablehlo.return %1, %a : tensor<4xf32>, tensor<4xf32>
      }}, {{
        %2 = {permute("%a")} loc("else")
        stablehlo.return %a, %2 : tensor<4xf32>, tensor<4xf32>
      }}) : (tensor<i1>) -> (tensor<4xf32>, tensor<4xf32>)
      return %b#0 : tensor<4xf32>
    }}"""
    assert dead_names(body) == ["first", "else"]


def test_side_effects_keep_what_they_need_alive():
    body = f"""func.func @main SIGNATURE {{
      %1 = {permute("%a")} loc("printed")
      "stablehlo.if"(%p) ({{
        stablehlo.custom_call @print(%1) {{has_side_effect = true}} : (tensor<4xf32>) -> ()
        stablehlo.return
      }}, {{
        stablehlo.return
      }}) : (tensor<i1>) -> ()
      return
    }}"""
    assert dead_names(body) == []


@pytest.mark.parametrize(
    ("between", "kind", "implied"),
    [
        ("%m = stablehlo.tanh %x : TYPE", "tensor<4xf32>", True),
        ("%m = stablehlo.add %x, %a : TYPE", "tensor<4xf32>", True),
        ("%m = stablehlo.multiply %x, %a : TYPE", "tensor<4xf32>", True),
        ("%m = stablehlo.negate %a : TYPE", "tensor<4xf32>", False),
        ("%m = stablehlo.multiply %x, %a : TYPE", "tensor<4xi32>", False),  # 0 * x folds
        ("%m = stablehlo.subtract %x, %x : TYPE", "tensor<4xf32>", False),  # not on the list
        ("%m = stablehlo.select %p, %x, %a : tensor<i1>, TYPE", "tensor<4xf32>", False),
        ("%m = stablehlo.minimum %x, %a : TYPE", "tensor<4xf32>", False),
        ("%m = stablehlo.tanh %x : TYPE", "tensor<0xf32>", False),  # empty tensors vanish
        (
            "%c = stablehlo.concatenate %x, %a, dim = 0 : (TYPE, TYPE) -> tensor<8xf32>\n"
            "%m = stablehlo.slice %c [4:8] : (tensor<8xf32>) -> TYPE",
            "tensor<4xf32>",
            False,
        ),
    ],
)
def test_only_dependence_that_no_identity_removes_counts(between: str, kind: str, implied: bool):
    body = f"""func.func @main SIGNATURE -> {kind} {{
      %x = {permute("%a", kind)}
      {between.replace("TYPE", kind)}
      %y = {permute("%m", kind)}
      return %y : {kind}
    }}"""
    module = parse(body, signature=f"(%a: {kind}, %p: tensor<i1>)")
    block = module.body.operations[0].regions[0].blocks[0]
    permutes = [op for op in block.operations if op.name == "stablehlo.collective_permute"]
    first, second = (op.operation for op in permutes)
    assert depends_on(second, first) is implied
    assert not depends_on(first, second)


def shape(sites: list[Site]) -> list[object]:
    """The tree of sites as nested lists of op names."""
    return [
        [site.op.name.partition(".")[2], *(shape(region) for region in site.regions)]
        if site.regions
        else site.callee or site.op.name.partition(".")[2]
        for site in sites
    ]


def test_sites_follow_program_order_and_leave_silent_parts_out():
    body = f"""func.func private @silent(%x: tensor<4xf32>) -> tensor<4xf32> {{
      return %x : tensor<4xf32>
    }}
    func.func @main SIGNATURE -> tensor<4xf32> {{
      %0 = func.call @silent(%a) : (tensor<4xf32>) -> tensor<4xf32>
      %1 = func.call @talks(%a) : (tensor<4xf32>) -> tensor<4xf32>
      %2 = "stablehlo.if"(%p) ({{
        stablehlo.return %a : tensor<4xf32>
      }}, {{
        %3 = {permute("%1")}
        %4 = func.call @talks(%3) : (tensor<4xf32>) -> tensor<4xf32>
        stablehlo.return %4 : tensor<4xf32>
      }}) : (tensor<i1>) -> tensor<4xf32>
      %5 = {permute("%2")}
      return %5 : tensor<4xf32>
    }}
    func.func private @talks(%x: tensor<4xf32>) -> tensor<4xf32> {{
      %1 = {permute("%x")}
      return %1 : tensor<4xf32>
    }}"""
    functions = communicating_functions(parse(body))
    assert [function.name for function in functions] == ["talks", "main"]
    assert shape(functions[1].sites) == [
        "talks",
        ["if", [], ["collective_permute", "talks"]],
        "collective_permute",
    ]
