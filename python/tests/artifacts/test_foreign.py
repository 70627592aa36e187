"""Errors for files that are no artifact, or a damaged one."""

import pytest

from stablehlo_tools import bindings
from stablehlo_tools.artifacts import artifact as artifacts
from stablehlo_tools.diagnostics import ToolError

PROGRAM = """
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  return %x : tensor<2xf32>
}
"""


def refusal(data: bytes) -> str:
    with pytest.raises(ToolError) as raised:
        artifacts.parse(data, "given")
    return str(raised.value)


def test_text_of_another_kind_is_told_at_its_first_line() -> None:
    said = refusal(b"\n# A tool\n")
    assert said.startswith("given:2:1: error: text, but not MLIR; expected a program")
    assert "\ntry: give it what jax.export writes: " in said


def test_a_syntax_error_has_its_line_and_the_end_is_told() -> None:
    said = refusal(PROGRAM.replace("return", "retrun").encode())
    assert said.startswith("given:3:3: error: invalid MLIR text: ")
    assert "\ntry: correct that line" in said
    assert "the text ends here: was it cut off?\ntry: copy" in refusal(PROGRAM[:60].encode())


def test_what_does_not_verify_is_told_of_its_op() -> None:
    add = "%y = stablehlo.reshape %x : (tensor<2xf32>) -> tensor<3xf32>\n  return"
    assert refusal(PROGRAM.replace("return", add, 1).encode()).startswith("given:3:8: error: ")


@pytest.mark.parametrize("end", [20, 100, -1])
def test_bytecode_that_was_cut_off_says_at_which_byte(end: int) -> None:
    whole = bindings.write_bytecode(bindings.parse_module(PROGRAM, bindings.new_context()))
    cut = whole[:end]
    assert f"cut off: it ends at byte {len(cut)}, " in refusal(cut)
