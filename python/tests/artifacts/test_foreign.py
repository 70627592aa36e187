"""Files that are no artifact are told what they seem to be, and where they go wrong."""

import gzip
import io
import json
import pickle
import zipfile

import pytest

from stablehlo_tools import bindings
from stablehlo_tools.artifacts import artifact as artifacts
from stablehlo_tools.artifacts.foreign import binary_kind, text_kind
from stablehlo_tools.diagnostics import ToolError

PROGRAM = """
func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  return %x : tensor<2xf32>
}
"""


def zipped() -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        archive.writestr("a", "b")
    return written.getvalue()


BINARY = {  # each by a name of its own: what a library writes may hold the time
    "ZIP": zipped(),
    "gzip": gzip.compress(b"module {}"),
    "pickle": pickle.dumps({"step": 1}),
    "picture": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
    "safetensors": b"\x60\0\0\0\0\0\0\0" + b'{"w":{}}',
    "": b"\xff\xfe\x01\x00",
}


@pytest.mark.parametrize("kind", BINARY)
def test_bytes(kind: str) -> None:
    said = binary_kind(BINARY[kind])
    assert kind in said
    assert bool(said) == bool(kind)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("# A tool\n\nIt rewrites func and module %x.\n", "Markdown"),
        ('{"name": "1f1b", "rows": [', "JSON"),
        (json.dumps([1, 2]), "JSON"),
        ("import jax\n", "Python"),
        ('"""A step."""\n', "Python"),
        ("{ lambda ; a:f32[8]. let b:f32[8] = sin a in (b,) }", "jaxpr"),
        ("<!DOCTYPE html>\n", "HTML"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS"),
        ("[project]\nname = 1\n", "TOML"),
        ("name: CI\non: push\n", "YAML"),
        ("what is this\n", "no MLIR"),
        ("// a comment\nmodule @step {", ""),
        ("#sdy = 1\n", ""),
        ("func.func @main(", ""),
        ('"builtin.module"() ({', ""),
        ("sdy.mesh @mesh = <", ""),
    ],
)
def test_text(text: str, kind: str) -> None:
    said = text_kind(text)
    assert kind in said
    assert bool(said) == bool(kind)


def refusal(data: bytes) -> str:
    with pytest.raises(ToolError) as raised:
        artifacts.parse(data, "given")
    return str(raised.value)


def test_text_of_another_kind_is_told_at_its_first_line() -> None:
    said = refusal(b"\n# A tool\n")
    assert said.startswith("given:2:1: error: this seems to be Markdown, or a script; a program is")
    assert "\ntry: give it what jax.export writes: " in said


def test_a_syntax_error_has_its_line_and_the_end_is_told() -> None:
    said = refusal(PROGRAM.replace("return", "retrun").encode())
    assert said.startswith("given:3:3: error: a mistake in this MLIR text: ")
    assert "\ntry: mend that line" in said
    assert "the text ends here: was it cut off?\ntry: copy" in refusal(PROGRAM[:60].encode())


def test_what_does_not_verify_is_told_of_its_op() -> None:
    add = "%y = stablehlo.reshape %x : (tensor<2xf32>) -> tensor<3xf32>\n  return"
    assert refusal(PROGRAM.replace("return", add, 1).encode()).startswith("given:3:8: error: ")


@pytest.mark.parametrize("end", [20, 100, -1])
def test_bytecode_that_was_cut_off_says_at_which_byte(end: int) -> None:
    whole = bindings.write_bytecode(bindings.parse_module(PROGRAM, bindings.new_context()))
    cut = whole[:end]
    assert f"cut off: it ends at byte {len(cut)}, " in refusal(cut)
