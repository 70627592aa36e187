"""The table of operations for each element covers the ops that need more than one."""

from stablehlo_tools.cost.element_operations import OPERATIONS, element_operations, sort_operations
from stablehlo_tools.dialect.traits import Trait, ops_with, short_names
from stablehlo_tools.targets.hlo.work import KINDS


def test_each_transcendental_op_has_several_operations():
    assert short_names(ops_with(Trait.TRANSCENDENTAL)) <= OPERATIONS.keys()


def test_each_name_is_an_opcode_of_hlo_or_an_op_of_chlo():
    opcodes = {opcode.replace("-", "_") for opcode in KINDS}
    chlo = {name.removeprefix("chlo.") for name in ops_with(Trait.TRANSCENDENTAL) if "chlo" in name}
    assert OPERATIONS.keys() <= opcodes | chlo


def test_other_ops_have_one_operation():
    assert element_operations("add") == element_operations("convert") == 1


def test_a_bitonic_sort_of_eight_has_six_stages():
    assert sort_operations(8) == 6
    assert sort_operations(1) == sort_operations(2) == 1
