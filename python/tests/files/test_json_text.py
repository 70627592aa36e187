"""JSON from anywhere is read by one reader: within its limits, or refused in one line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from stablehlo_tools.cli import main as command_line
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.files import json_text
from stablehlo_tools.files.json_text import JsonValue, parse_json, read_json

DEEP = "[" * 100_000 + "]" * 100_000
DEEP_BELOW = '{"a": ' * 3_000 + "1" + "}" * 3_000  # which Python's reader takes


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "1:1: error: invalid JSON: Expecting value"),
        (b'{"a": 1,\n "b": }', "2:7: error: invalid JSON: Expecting value"),
        (DEEP.encode(), "nests deeper than 100"),
        (DEEP_BELOW.encode(), "nests deeper than 100"),
        (b"[NaN]", "NaN is not a JSON number"),
        (b"[-Infinity]", "-Infinity is not a JSON number"),
        (b"[" + b"9" * 301 + b"]", "a number in this JSON has 301 digits"),
        (b"[" + b"9" * 5_000 + b"]", "a number in this JSON has 5000 digits"),
        (b'{"a": 1, "\\u0061": 2}', "the key 'a' appears twice"),
        (b'["\xff"]', "byte 2 is not UTF-8"),
        ('["a"]'.encode("utf-16"), "is not UTF-8"),
    ],
    ids=[
        "empty",
        "syntax",
        "deep",
        "deep-below",
        "nan",
        "inf",
        "long",
        "endless",
        "twice",
        "bytes",
        "utf-16",
    ],
)
def test_what_is_no_json_is_refused_in_one_line(data: bytes, said: str):
    with pytest.raises(ToolError) as refused:
        parse_json(data)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_is_json_is_read():
    content = {"a": [1, 2.5, None, True, "é😀"], "b": {"c": []}}
    text = json.dumps(content)
    assert parse_json(text) == parse_json(b"\xef\xbb\xbf" + text.encode()) == content
    nested = json.loads("[" * 100 + "]" * 100)
    assert parse_json("[" * 100 + "]" * 100) == nested
    assert parse_json('{"a": 1, "a": 2}', repeated_keys=True) == {"a": 2}


def test_a_file_is_read_and_inflated_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plain, packed = tmp_path / "plain.json", tmp_path / "packed.json.gz"
    plain.write_text(f'"{"x" * 1000}"')
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_json(plain) == read_json(packed) == "x" * 1000
    monkeypatch.setattr(json_text, "MOST_BYTES", 1001)
    with pytest.raises(ToolError, match="the file has more than 0 MiB, the most that is read"):
        read_json(plain)
    with pytest.raises(ToolError, match="the file inflates to more than 0 MiB"):
        read_json(packed)


def test_endless_files_are_refused():
    with pytest.raises(ToolError, match="the file has more than 512 MiB"):
        read_json("/dev/zero")


def test_a_value_says_where_it_stands():
    text = '{"a": 1,\n "some": [{"b": "]"},\n   {"b" : 5, "c": -1.0}]}'
    document = JsonValue.from_text(text)
    third = document.fields(("a", "some"))["some"].items()[1]
    with pytest.raises(ToolError, match=r"error: some\[1\]\.c: -1\.0 is not a number from 0"):
        third.fields(("b", "c"))["c"].amount()
    with pytest.raises(ToolError, match=r"error: some\[1\]: there is no d and no e"):
        third.fields(("b", "c", "d", "e"))
    with pytest.raises(ToolError, match=r"error: some\[1\]: unknown field 'c'; known: b"):
        third.fields(("b",))


@pytest.mark.parametrize(
    ("text", "read", "said"),
    [
        ("true", JsonValue.whole, "true is not a whole number from 0 to 2147483647"),
        ("1.0", JsonValue.whole, "1.0 is not a whole number"),
        ("1e999", JsonValue.amount, "Infinity is not a number from 0 up"),
        ("false", JsonValue.amount, "false is not a number"),
        ('"\\ud800"', JsonValue.string, "half of a surrogate pair"),
        ("[1, 2]", JsonValue.string, "a list of 2 is not a string"),
        ('"\\u001b[2J"', JsonValue.items, r"'\x1b[2J' is not a list"),
        ("null", JsonValue.entries, "null is not an object"),
    ],
)
def test_values_of_another_kind_are_told(text: str, read: object, said: str):
    assert callable(read)
    with pytest.raises(ToolError) as refused:
        read(JsonValue.from_text(text))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "words",
    [
        ["overlap-graph", "FILE", "-o", "OUTPUT"],
        ["import-trace", "FILE", "-o", "OUTPUT"],
        ["schedule", "1f1b", "--stages", "2", "--microbatches", "2", "--costs", "FILE"],
        ["schedule", "FILE"],
        ["inspect", "PROGRAM", "--hardware", "h100", "--measured", "FILE"],
        ["check-mpmd", "SET"],
    ],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize("content", [DEEP, DEEP_BELOW, '{"a": NaN}'], ids=["deep", "below", "nan"])
def test_every_command_refuses_it_in_one_line(
    words: list[str], content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file, program = tmp_path / "manifest.json", tmp_path / "program.mlir"
    file.write_text(content)
    program.write_text(
        "func.func @main(%x: tensor<f32>) -> tensor<f32> { return %x : tensor<f32> }"
    )
    output = tmp_path / "output.json"
    names = {"FILE": file, "OUTPUT": output, "PROGRAM": program, "SET": tmp_path}
    assert command_line.main([str(names.get(word, word)) for word in words]) == 2
    told, *tried = capsys.readouterr().err.splitlines()
    assert all(line.startswith("try: ") for line in tried)
    assert told.startswith(f"{file}: error: ")
    said = (
        "invalid JSON: NaN is not a JSON number" if "NaN" in content else "this JSON nests deeper"
    )
    assert f": {said}" in told
    assert not output.exists()
