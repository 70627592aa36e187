"""Which results are the next step's arguments, and what ranks copy for that."""

from __future__ import annotations

from typing import Any

import pytest

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.mpmd.manifest import Manifest, ManifestEntry, ManifestPiece
from stablehlo_tools.mpmd.runtime.carried import Next, carried_of, keys_of, next_values

F32, I32 = "tensor<8x4xf32>", "tensor<i32>"


def manifest(inputs: list[tuple[Any, ...]], outputs: list[tuple[Any, ...]]) -> Manifest:
    """A manifest of nothing but entries: path, type, pieces."""

    def entries(listed: list[tuple[Any, ...]]) -> tuple[ManifestEntry, ...]:
        return tuple(ManifestEntry(each[0], each[1], tuple(each[2:])) for each in listed)

    none: Any = None
    return Manifest(
        "step", 1, "pairs", none, (), (), "h100", 0.0, entries(inputs), entries(outputs), ()
    )


@pytest.mark.parametrize(
    ("path", "keys"),
    [
        ("[0]", ("0",)),
        ("[0]['w']", ("0", "w")),
        ("[1][0].mu['a b'][3]", ("1", "0", "mu", "a b", "3")),
        ("""[0]["it's"]""", ("0", "it's")),
        ("['batch']['x']", ("batch", "x")),
        ("argument 3", ()),
        ("", ()),
    ],
)
def test_paths(path: str, keys: tuple[str, ...]):
    assert keys_of(path) == keys


def test_trees_of_names_are_carried_and_bare_arrays_are_not():
    """A loss has the type of a learning rate here."""
    listed = manifest(
        [("[0]['w']", F32), ("[1]", "tensor<f32>"), ("[2]", I32)],
        [("[0]['w']", F32), ("[1]", "tensor<f32>")],
    )
    assert carried_of(listed, None).inputs == {0: 0}


def test_of_trees_that_are_alike_those_in_the_same_place():
    listed = manifest(
        [("[0]['w']", F32), ("[1]['w']", F32), ("[2]", I32)],
        [("[0]['w']", F32), ("[1]['w']", F32), ("[2]", "tensor<f32>")],
    )
    assert carried_of(listed, None).inputs == {0: 0, 1: 1}


def test_the_loss_may_come_first():
    listed = manifest(
        [("[0]['w']", F32), ("[0]['b']", I32), ("[1]", I32)],
        [("[0]", "tensor<f32>"), ("[1]['w']", F32), ("[1]['b']", I32)],
    )
    assert carried_of(listed, None).inputs == {0: 1, 1: 2}


def test_the_result_may_be_the_state_itself():
    listed = manifest([("[0]['w']", F32), ("[1]", I32)], [("['w']", F32)])
    assert carried_of(listed, None).inputs == {0: 0}


def test_one_may_say_it():
    listed = manifest([("[0]", F32), ("[1]", F32)], [("[0]", "tensor<f32>"), ("[1]", F32)])
    with pytest.raises(ToolError, match="state the pairs"):
        carried_of(listed, None)
    assert carried_of(listed, {"[1]": "[0]"}).inputs == {0: 1}
    with pytest.raises(ToolError, match=r"result \[0\] is tensor<f32>"):
        carried_of(listed, {"[0]": "[0]"})
    with pytest.raises(ToolError, match=r"there is nothing at \[7\]"):
        carried_of(listed, {"[7]": "[0]"})


def test_an_argument_that_nothing_reads_is_not_in_the_program():
    listed = manifest(
        [("[0]['w']", F32), ("[1]", I32)], [("[0]['w']", F32), ("[0]['note']", I32), ("[1]", I32)]
    )
    found = carried_of(listed, None)
    assert found.inputs == {0: 0}
    assert found.unread == {("0", "note"): 1}


def test_a_tree_with_other_leaves_is_none():
    listed = manifest(
        [("[0]['w']", F32), ("[0]['v']", F32)], [("[0]['w']", F32), ("[1]", "tensor<f32>")]
    )
    with pytest.raises(ToolError, match="state the pairs"):
        carried_of(listed, None)


def test_rows_of_the_next_values():
    """Whole on a rank; the same rows; rows of another rank; rows of two ranks."""
    listed = manifest(
        [
            ("[0]['count']", I32, ManifestPiece(0, 0), ManifestPiece(1, 0)),
            ("[0]['w']", F32, ManifestPiece(0, 1, 0, 0, 4), ManifestPiece(1, 1, 0, 4, 8)),
            ("[0]['all']", F32, ManifestPiece(1, 2)),
            ("[0]['odd']", F32, ManifestPiece(1, 3, 0, 2, 6)),
        ],
        [
            ("[0]['count']", I32, ManifestPiece(0, 0)),
            ("[0]['w']", F32, ManifestPiece(0, 1, 0, 0, 4), ManifestPiece(1, 0, 0, 4, 8)),
            ("[0]['all']", F32, ManifestPiece(1, 1, 0, 4, 8), ManifestPiece(0, 2, 0, 0, 4)),
            ("[0]['odd']", F32, ManifestPiece(0, 3, 0, 0, 4), ManifestPiece(1, 2, 0, 4, 8)),
        ],
    )
    values = next_values(listed, carried_of(listed, None).inputs)
    assert values == [
        Next(0, 0, (ManifestPiece(0, 0),)),
        Next(1, 0, (ManifestPiece(0, 0),)),
        Next(0, 1, (ManifestPiece(0, 1),)),
        Next(1, 1, (ManifestPiece(1, 0),)),
        Next(1, 2, (ManifestPiece(0, 2), ManifestPiece(1, 1))),
        Next(1, 3, (ManifestPiece(0, 3, 0, 2, 4), ManifestPiece(1, 2, 0, 0, 2))),
    ]
    assert [value.own for value in values] == [0, None, 1, 0, None, None]
