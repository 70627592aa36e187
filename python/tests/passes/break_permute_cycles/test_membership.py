"""The predicate that a device's id is one of a few: what it says of every id, and where it fits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from named_ops import NamedOps, read, refused

from stablehlo_tools.analysis.loops import comparison_direction
from stablehlo_tools.bindings import ir
from stablehlo_tools.ir.values import maker_of
from stablehlo_tools.transforms.break_permute_cycles import Membership

DEVICES = 9
HANDLE = "channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, "


def permute(channel: str = HANDLE, operand: str = "%x") -> str:
    """A permute of two ids."""
    return f"""
      %y = "stablehlo.collective_permute"({operand}) <{{{channel}source_target_pairs =
        dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>}}> : (tensor<4xf32>) -> tensor<4xf32>"""


def plain(channel: str = HANDLE) -> NamedOps:
    """A module with a permute and no mesh."""
    devices = f"mhlo.num_partitions = {DEVICES} : i32, mhlo.num_replicas = {DEVICES} : i32"
    return read(f"""
    module attributes {{{devices}}} {{
    func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {{{permute(channel)}
      return %y : tensor<4xf32>
    }} }}""")


def in_manual_computation(axes: str, *, called: bool = False) -> NamedOps:
    """A permute in a manual computation over some of the axes of a mesh of 2 x 3 x 1, or in a
    function of such a module."""
    sharding = '<@mesh, [{"stage", ?}]>'
    taken = ", ".join(f'"{axis}"' for axis in axes.split())
    return read(f"""
    module attributes {{mhlo.num_partitions = 6 : i32, mhlo.num_replicas = 1 : i32}} {{
    sdy.mesh @mesh = <["stage"=2, "data"=3, "one"=1]>
    func.func private @permuted(%x: tensor<4xf32>) -> tensor<4xf32> {{
      {permute() if called else "%y = stablehlo.tanh %x : tensor<4xf32>"}
      return %y : tensor<4xf32>
    }}
    func.func public @main(%a: tensor<8xf32>) -> tensor<8xf32> {{
      %r = sdy.manual_computation(%a) in_shardings=[{sharding}] out_shardings=[{sharding}]
        manual_axes={{{taken}}} (%x: tensor<4xf32>) {{
        {"%y = func.call @permuted(%x) : (tensor<4xf32>) -> tensor<4xf32>" if called else permute()}
        sdy.return %y : tensor<4xf32>
      }} : (tensor<8xf32>) -> tensor<8xf32>
      return %r : tensor<8xf32>
    }} }}""")


def written(named: NamedOps, ids: set[int]) -> ir.Value:
    """The predicate of these ids, in front of the module's permute."""
    value = Membership(named.module, named.facts).predicate(named.collectives[0], ids)
    named.module.operation.verify()
    return value


def says(value: ir.Value, own: int) -> bool | int | np.ndarray:
    """What a predicate is on one device, op by op."""
    op = maker_of(value)
    operands = [says(operand, own) for operand in op.operands]
    match op.name:
        case "stablehlo.partition_id" | "stablehlo.replica_id":
            return own
        case "stablehlo.constant":
            held = np.array(ir.DenseElementsAttr(op.attributes["value"]))
            return held if held.shape else int(held)
        case "stablehlo.compare":
            left, right = operands
            return {"EQ": left == right, "LT": left < right}[comparison_direction(op)]
        case "stablehlo.dynamic_slice":
            table, start = operands
            assert isinstance(table, np.ndarray)
            return table[min(int(start), len(table) - 1)]  # starts are clamped
        case "stablehlo.reshape":
            return bool(operands[0])
        case _:
            raise AssertionError(op.name)


@given(st.sets(st.integers(0, DEVICES - 1), min_size=1))
def test_the_predicate_holds_for_its_ids_and_no_other(ids: set[int]):
    value = written(plain(), ids)
    assert {own for own in range(DEVICES) if says(value, own)} == ids


@pytest.mark.parametrize(
    ("ids", "ops"),
    [
        ({3}, ["partition_id", "constant", "compare"]),
        ({0}, ["partition_id", "constant", "compare"]),
        ({0, 1, 2}, ["partition_id", "constant", "compare"]),
        ({0, 2}, ["partition_id", "constant", "dynamic_slice", "reshape"]),
        ({1, 2}, ["partition_id", "constant", "dynamic_slice", "reshape"]),
    ],
)
def test_one_id_or_the_first_ones_are_compared_and_others_looked_up(ids: set[int], ops: list[str]):
    named = plain()
    written(named, ids)
    before_permute = [view.operation.name for view in named.block.operations][:-2]
    assert [name.removeprefix("stablehlo.") for name in before_permute] == ops


def test_the_table_ends_in_an_entry_for_all_ids_behind_it():
    value = written(plain(), {1, 3})
    table = maker_of(maker_of(value).operands[0]).operands[0]
    held = says(table, 0)
    assert isinstance(held, np.ndarray)
    assert held.tolist() == [False, True, False, True, False]


def test_a_permute_without_a_channel_counts_replicas():
    named = plain(channel="")
    written(named, {0})
    assert next(iter(named.block.operations)).operation.name == "stablehlo.replica_id"


def test_beside_free_axes_the_id_is_read_in_a_computation_over_those():
    named = in_manual_computation("stage")
    value = written(named, {0, 1, 2})
    manual = maker_of(value)
    assert manual.name == "sdy.manual_computation"
    assert str(manual.attributes["manual_axes"]) == '#sdy<manual_axes{"data", "one"}>'
    inner = [view.operation.name for view in manual.regions[0].blocks[0].operations]
    assert inner[0] == "stablehlo.partition_id"
    returned = list(manual.regions[0].blocks[0].operations)[-1].operands[0]
    assert {own for own in range(6) if says(returned, own)} == {0, 1, 2}


def test_where_all_axes_of_several_devices_are_taken_it_is_a_plain_value():
    named = in_manual_computation("stage data")
    assert maker_of(written(named, {0})).name == "stablehlo.compare"


def checked(named: NamedOps, ids: set[int]) -> None:
    """What `check` says of the module's permute."""
    Membership(named.module, named.facts).check(named.collectives[0], ids, "P4")


@pytest.mark.parametrize("ids", [set[int](), {0, 1, 2}, {3, 4, 5}, set(range(6))])
def test_all_or_none_of_what_differs_along_a_free_axis_may_be_chosen(ids: set[int]):
    checked(in_manual_computation("stage"), ids)


@pytest.mark.parametrize(("ids", "group"), [({0}, "0, 1, 2"), ({0, 1, 2, 4, 5}, "3, 4, 5")])
def test_a_part_of_what_differs_along_a_free_axis_is_refused(ids: set[int], group: str):
    message = (
        "stablehlo.collective_permute: its cycle would be cut for only some of the devices "
        f"{group}, which differ only along free mesh axes around it, data, one: make all axes "
        "manual (P4)"
    )
    with refused(message):
        checked(in_manual_computation("stage"), ids)


def test_without_free_axes_any_ids_may_be_chosen():
    checked(plain(), {0})
    checked(in_manual_computation("stage data"), {0})


def test_in_a_function_it_is_not_known_which_axes_are_free():
    named = in_manual_computation("stage", called=True)
    message = (
        "stablehlo.collective_permute has a cycle and is in a called function, and the module's "
        "manual computations leave mesh axes free: inline the calls first (P4)"
    )
    with refused(message):
        checked(named, {0})
    checked(named, set())
