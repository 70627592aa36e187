"""Forms of a schedule: what is written reads back to the cell, and what is wrong is named."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_settings import SLICES

from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.schedules.catalogue import build, entries
from stablehlo_tools.schedules.explicit_tables import align_columns, with_communication
from stablehlo_tools.schedules.forms import (
    encode_timed,
    from_csv,
    from_json,
    from_text,
    read_table,
    to_csv,
    to_json,
    to_text,
)
from stablehlo_tools.schedules.setting import ScheduleSetting, costs, unit_costs
from stablehlo_tools.schedules.table import (
    Action,
    ActionKind,
    ActionPair,
    Placement,
    Step,
    Table,
    backward,
    bidirectional,
    drop_idle_cells,
    forward,
    loop,
    table_of,
    v_shape,
)
from stablehlo_tools.schedules.table_simulator import simulate
from stablehlo_tools.schedules.validator import violations


class Form(NamedTuple):
    """How a table is written, and read again."""

    encode: Callable[[Table], str]
    decode: Callable[[str], Table]


CSV, JSON_FORM, TEXT = Form(to_csv, from_csv), Form(to_json, from_json), Form(to_text, from_text)
NAMES = [entry.name for entry in entries() if entry.name != "auto"]  # that one searches for long
SIZES = [(2, 1), (2, 5), (4, 8)]


def _built(name: str, ranks: int, microbatches: int) -> Table | None:
    try:
        slices = SLICES[name]
        return build(
            name, ScheduleSetting(ranks, microbatches, unit_costs(ranks), sequence_slices=slices)
        )
    except ToolError:
        return None  # not every schedule exists for every size


def _refusal(decode: Callable[[], Any], name: str = "t.csv") -> str:
    with pytest.raises(ToolError) as caught:
        decode()
    return caught.value.diagnostic.render(caught.value.input_name or name)


def _two_opposite(microbatches: int) -> Table:
    """Four ranks, two pipelines in opposite directions, with a pair wherever one can be."""
    placement = bidirectional(4)
    rows: list[list[Step | None]] = [[] for _ in range(4)]
    for microbatch in range(microbatches):
        for stage in range(4):
            rows[placement.rank_of(stage, microbatch)].append(forward(stage, microbatch))
        for stage in reversed(range(4)):
            rows[placement.rank_of(stage, microbatch)].append(backward(stage, microbatch))
    rows[0][1:3] = [ActionPair(forward(3, 1), backward(0, 0))]
    return table_of("opposite", placement, microbatches, rows)


def _round_trips(table: Table) -> None:
    for form in (JSON_FORM, TEXT):
        encoded = form.encode(table)
        assert form.decode(encoded) == table
        assert form.encode(form.decode(encoded)) == encoded
    encoded = to_csv(table)
    read = from_csv(encoded, table.name)
    assert replace(read, sequence_slices=table.sequence_slices) == table
    assert to_csv(from_csv(encoded, table.name)) == encoded


def test_every_named_schedule_is_built_somewhere():
    assert [name for name in NAMES if not any(_built(name, *size) for size in SIZES)] == []


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_named_schedules_read_back(name: str, ranks: int, microbatches: int):
    table = _built(name, ranks, microbatches)
    if table is None:
        assert any(_built(name, *size) for size in SIZES)
        return
    if table.placement.form == "bidirectional" and microbatches == 1:
        return  # one microbatch goes one way: its CSV is that of a loop
    _round_trips(table)
    _round_trips(align_columns(table))
    _round_trips(with_communication(table))


def test_two_opposite_pipelines_read_back():
    table = _two_opposite(6)
    _round_trips(table)
    assert from_csv(to_csv(table)).placement.form == "bidirectional"


PLACEMENTS = st.one_of(
    st.builds(loop, st.integers(1, 5), st.integers(1, 3)),
    st.builds(v_shape, st.integers(1, 5), st.integers(1, 3)),
    st.permutations(range(4)).map(lambda ranks: Placement(4, (tuple(ranks),))),
)


@st.composite
def _tables(draw: st.DrawFn) -> Table:
    """Any rows at all, but with each stage's forwards on its rank: a CSV says no more than that."""
    placement = draw(PLACEMENTS)
    microbatches = draw(st.integers(1, 4))
    seed = random.Random(draw(st.integers(0, 10**6)))
    rows: list[list[Step | None]] = [[] for _ in range(placement.ranks)]
    for stage in range(placement.stages):
        for microbatch in range(microbatches):
            row = rows[placement.rank_of(stage, microbatch)]
            row.append(forward(stage, microbatch))
            kind = seed.choice(list(ActionKind)[1:])
            row.append(Action(kind, stage, microbatch))
            row.append(seed.choice([None, backward(stage, microbatch)]))
            row.append(ActionPair(forward(stage, microbatch), backward(stage, microbatch)))
    rows[0].append(backward(0, 0))  # so that the table is one of training
    for row in rows:
        seed.shuffle(row)
    return table_of("any", placement, microbatches, rows)


@given(_tables())
@settings(max_examples=60, derandomize=True)
def test_any_rows_read_back(table: Table):
    _round_trips(table)


@pytest.mark.parametrize("rows", [[[None]], [[]], [[None, None]], [[forward(0, 0), None]]])
def test_rows_of_idle_cells_stay_as_they_are(rows: list[list[Step | None]]):
    rows = [*rows, [forward(1, 0)]]
    table = table_of("idle", Placement(2, ((0, 1),)), 1, rows, training=False)
    for form in (JSON_FORM, TEXT):
        assert form.decode(form.encode(table)) == table
    assert from_csv(to_csv(table), "idle", table.placement) == table


@pytest.mark.parametrize("name", ['a "b", c\n: \\', "größer", "x,y", "", "rank 0:"])
def test_names_read_back(name: str):
    table = table_of(name, loop(1), 1, [[forward(0, 0), backward(0, 0)]])
    for form in (JSON_FORM, TEXT):
        assert form.decode(form.encode(table)) == table


@pytest.mark.parametrize("name", NAMES)
def test_aligned_columns_are_unit_steps(name: str):
    """Every column one step: what the simulator says where each step takes one unit of time."""
    table = _built(name, 4, 8)
    assert table is not None
    spread = align_columns(table)
    assert drop_idle_cells(spread) == drop_idle_cells(table)
    one = costs(table.stages, 1, 1, 1, backward=1, overlapped=0.5)
    timeline = simulate(drop_idle_cells(table), one)
    columns = [
        [column for column, step in enumerate(row) if step is not None] for row in spread.rows
    ]
    assert columns == [list(starts) for starts in timeline.starts]


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("name", NAMES)
def test_aligned_transfers_stand_between_maker_and_user(name: str, late: bool):
    bare = _built(name, 4, 5) or _built(name, 4, 8)
    assert bare is not None
    table = with_communication(bare, late=late)
    spread = align_columns(table)
    assert drop_idle_cells(spread) == drop_idle_cells(table)
    column = {
        action: at
        for row in spread.rows
        for at, step in enumerate(row)
        if step is not None
        for action in (step if isinstance(step, ActionPair) else (step,))
    }
    sends = [action for action in column if action.kind.is_send]
    assert sends
    for kind, stage, microbatch in sends:
        forwards = kind is ActionKind.SEND_FORWARD
        received = ActionKind.RECEIVE_FORWARD if forwards else ActionKind.RECEIVE_BACKWARD
        there = stage + (1 if forwards else -1)
        made = (
            (ActionKind.FORWARD,) if forwards else (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
        )
        maker = next(a for k in made if (a := Action(k, stage, microbatch)) in column)
        user = next(a for k in made if (a := Action(k, there, microbatch)) in column)
        send, receive = Action(kind, stage, microbatch), Action(received, there, microbatch)
        assert column[maker] < column[send] < column[receive] < column[user]


def test_aligned_names_what_waits_for_ever():
    rows = [[backward(0, 0), forward(0, 0)], [forward(1, 0), backward(1, 0)]]
    table = table_of("crossed", loop(2), 1, rows)
    assert "crossed: rank 0: 0B0 waits for ever" in _refusal(lambda: align_columns(table))


TORCH = "0F0,0F1,,,0B0,,0B1\r\n,1F0,1B0,1F1,1B1\r\n"


@pytest.mark.parametrize(
    "content",
    [
        TORCH,
        TORCH.replace("\r\n", "\n"),
        TORCH.replace("\r\n", "\r"),
        TORCH + "\r\n \r\n\n",
        TORCH.rstrip(),
        "\ufeff" + TORCH,
        TORCH.replace("0F0", ' "0F0" ').replace("1B0", '"1B0"').replace("1B1", "\t1B1 "),
    ],
    ids=["crlf", "lf", "cr", "blank-last-lines", "no-last-line-end", "bom", "quotes-and-spaces"],
)
def test_csv_as_others_write_it(content: str):
    table = from_csv(content, "torch")
    assert to_csv(table) == TORCH.replace("\r\n", "\n")
    assert (table.placement, table.microbatches, table.training) == (loop(2), 2, True)


def test_csv_keeps_trailing_idle_cells():
    table = from_csv("0F0,0B0,,\n,1F0,1B0,,,\n")
    assert [len(row) for row in table.rows] == [4, 6]
    assert to_csv(table) == "0F0,0B0,,\n,1F0,1B0,,,\n"


def test_csv_of_pairs_and_transfers():
    content = "0F7,2SEND_F5,3RECV_F5,2SEND_B5,1RECV_B5,(0F1;0B3)OVERLAP_F_B\n1F0,2F0,3I2,3W2,3F0\n"
    table = from_csv(content, placement=Placement(2, ((0, 1, 1, 1),)))
    assert to_csv(table) == content
    assert table.rows[0][-1] == ActionPair(forward(0, 1), backward(0, 3))
    assert table.rows[0][1] == Action(ActionKind.SEND_FORWARD, 2, 5)


def test_csv_without_a_backward_is_forward_only():
    assert not from_csv("0F0,0F1\n,1F0,1F1\n").training
    assert from_csv("0F0,0F1,0I0,0I1\n,1F0,1F1,1I0,1I1\n").training


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("0X0", "'0X0' is not an action: an action is STAGE, one of F B I W SEND_F RECV_F"),
        ("F0", "'F0' is not an action"),
        ("0F", "'0F' is not an action"),
        ("0f0", "'0f0' is not an action"),
        ("-1F0", "'-1F0' is not an action"),
        ("0F0 0F1", "'0F0 0F1' is not an action"),
        ("0F1.0", "'0F1.0' is not an action"),
        ("٣F0", "'٣F0' is not an action"),
        ("0F1234567890", "'0F1234567890' is not an action"),
        ("0UNSHARD", "'0UNSHARD': UNSHARD gathers parameters, which a schedule of microbatches"),
        ("0RESHARD", "'0RESHARD': RESHARD frees gathered parameters"),
        ("0REDUCE_GRAD", "'0REDUCE_GRAD': REDUCE_GRAD reduces gradients across replicas"),
        ("(0F7;7B3)", "'(0F7;7B3)' is not a pair: it must end in OVERLAP_F_B"),
        ("(0F7;7B3)OVERLAP", "is not a pair: it must end in OVERLAP_F_B"),
        ("(0B7;7F3)OVERLAP_F_B", "is not a pair: a pair is one F and then one B"),
        ("(0F7;7I3)OVERLAP_F_B", "is not a pair: a pair is one F and then one B"),
        ("(0F7;7B3;1F1)OVERLAP_F_B", "is not an action"),
        ("(0F7)OVERLAP_F_B", "is not an action"),
        ('"0F1', "a quote in the middle of a cell, or never closed"),
        ('0F1"x"', "a quote in the middle of a cell, or never closed"),
    ],
)
def test_csv_names_line_column_and_cell(cell: str, said: str):
    message = _refusal(lambda: from_csv(f"0F0,0B0\n1F0, {cell},1B0\n"))
    # An unclosed quote begins where its cell begins, before the space.
    column = 5 if "quote" in said else 6
    assert message.startswith(f"t.csv:2:{column}: error: rank 1, cell 2: ")
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "empty schedule"),
        ("\n\n", "empty schedule"),
        (",,\n,\n", "empty schedule: no row has an action"),
        ("0F0,0B0\n2F0,2B0\n", "no rank runs stage 1, but the actions name stages up to 2"),
        ("0F0,0B0,0F99\n1F0,1B0\n", "rank 0: 0F99: microbatch 99 is too large for 5 actions"),
        ("0F0,0B0\n90F0,1B0\n", "rank 1: 90F0: stage 90 is too large for 4 actions"),
        (
            "0F0,1F1\n1F0,0F1\n0F2,1F2\n",
            "stage 0 runs on ranks 0 and 1 and 2, but no rank runs most",
        ),
    ],
    ids=["empty", "blank", "idle", "gap", "microbatch", "stage", "scattered"],
)
def test_csv_without_a_placement_in_it(content: str, said: str):
    assert said in _refusal(lambda: from_csv(content))


def test_csv_with_another_placement_than_rows():
    assert "2 rows for a placement of 3 ranks" in _refusal(
        lambda: from_csv("0F0\n1F0", placement=loop(3))
    )


def test_a_stray_forward_leaves_the_placement_as_it_is():
    """The validator is to report it: most of the stage's forwards say where the stage is."""
    table = _built("1f1b", 4, 8)
    assert table is not None
    rows = [list(row) for row in table.rows]
    rows[0].append(rows[3].pop(rows[3].index(forward(3, 5))))
    stray = table_of("1f1b", table.placement, 8, rows)
    assert from_csv(to_csv(stray), "1f1b") == stray


JSON = {
    "name": "x",
    "ranks": 2,
    "stages": 2,
    "microbatches": 1,
    "training": True,
    "placement": {"form": "loop", "routes": [[0, 1]]},
    "rows": [["0F0", None, "0B0"], ["1F0", "1B0"]],
}


def test_json_says_what_the_table_says():
    table = from_json(json.dumps(JSON))
    assert json.loads(to_json(table)) == JSON
    needed = {key: JSON[key] for key in ("name", "microbatches", "training", "rows")}
    needed["placement"] = {"routes": [[0, 1]]}
    assert from_json(json.dumps(needed)) == table


def test_timed_json_reads_as_its_table():
    table = _built("1f1b", 4, 3)
    assert table is not None
    timeline = simulate(table, costs(4, communication=0.5, message=3))
    content = json.loads(encode_timed(timeline))
    assert from_json(json.dumps(content)) == table
    assert content["metrics"]["makespan"] == timeline.makespan
    assert content["metrics"]["bytes_sent"] == 3 * content["metrics"]["messages"] == 54
    assert content["costs"]["communication"] == 0.5
    assert content["timeline"][3][0] == [timeline.starts[3][0], timeline.ends[3][0]] == [4.5, 5.5]
    assert [len(row) for row in content["timeline"]] == [len(row) for row in content["rows"]]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rows": None}, "rows is not a list: None"),
        ({"rows": [[0], []]}, "rows[0][0]: 0 is neither an action in quotes nor null"),
        ({"rows": [["0F0"], ["1F0", "1Q0"]]}, "rows[1][1]: '1Q0' is not an action"),
        ({"rows": [["0F0", "0B0"], "1F0"]}, "rows[1] is not a list: '1F0'"),
        ({"microbatches": 0}, "microbatches: 0; a schedule needs 1 or more"),
        ({"microbatches": 1.5}, "microbatches: 1.5 is not a whole number from 0 up"),
        ({"microbatches": True}, "microbatches: True is not a whole number"),
        ({"microbatches": 10**12}, "1000000000000 microbatches, but all rows together have 4"),
        ({"name": 3}, "the name of a schedule must be a string"),
        ({"training": 1}, "training true or false"),
        ({"ranks": 3}, "ranks is 3, but rows and routes have 2"),
        ({"stages": 4}, "stages is 4, but rows and routes have 2"),
        ({"placement": [0, 1]}, "placement must be an object with routes"),
        ({"placement": {"routes": []}}, "placement.routes must be one or more lists of ranks"),
        ({"placement": {"routes": [[0, 1], [1]]}}, "all of one length"),
        ({"placement": {"routes": [[0, 2]]}}, "placement.routes names rank 2, but there are 2"),
        ({"placement": {"routes": [[0, -1]]}}, "-1 is not a whole number"),
        ({"placement": {"form": "v", "routes": [[0, 1]]}}, "form is 'v', but these routes are"),
        ({"row": []}, "unknown key 'row'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "said",
)
def test_json_names_the_key(changes: dict[str, Any], said: str):
    assert said in _refusal(lambda: from_json(json.dumps({**JSON, **changes})))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "a schedule must be an object"),
        ("{}", "the schedule has no name and no microbatches"),
        ('{\n "name": x}', "t.csv:2:10: error: invalid JSON"),
        ("[" * 100_000, "nests deeper than 100"),
        ('{"name": ' + "9" * 5000 + "}", "a number in this JSON has 5000 digits"),
    ],
    ids=["list", "empty", "syntax", "deep", "endless"],
)
def test_json_that_is_no_table(content: str, said: str):
    assert said in _refusal(lambda: from_json(content))


def test_text_is_for_reading():
    table = align_columns(from_csv(TORCH, "torch"))
    assert to_text(table) == (
        "schedule torch, loop of 2 ranks x 1, 2 microbatches, training\n"
        "rank 0: 0F0 0F1  .  0B0  .  0B1\n"
        "rank 1:  .  1F0 1B0 1F1 1B1\n"
    )


def test_text_passes_over_comments():
    table = from_text("# a remark\n\n" + to_text(from_csv(TORCH, "torch")) + "\n#\n")
    assert to_csv(table) == TORCH.replace("\r\n", "\n")


HEADER = "schedule x, loop of 2 ranks x 1, 1 microbatches, training\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("# nothing\n", "every line is blank or a comment"),
        ("schedule x\n", "t.csv:1:1: error: the first line of a schedule must be like"),
        (HEADER + "rank 0: 0F0\n", "1 rows for a placement of 2 ranks"),
        (HEADER + "rank 1: 0F0\n", "t.csv:2:1: error: write 'rank 0: ' and its steps here"),
        (HEADER + "rank 0: 0F0\nrank 1: .  0Q0\n", "t.csv:3:12: error: '0Q0' is not an action"),
        (
            HEADER.replace("x 1", "x 9") + "rank 0: 0F0\nrank 1: 1F0\n",
            "2 ranks x 9: give at least 1",
        ),
        (
            HEADER.replace("x 1", "x 0") + "rank 0: 0F0\nrank 1: 1F0\n",
            "2 ranks x 0: give at least 1",
        ),
        (
            HEADER.replace("1 m", "0 m") + "rank 0: 0F0\nrank 1: 1F0\n",
            "microbatches: 0; a schedule needs 1 or more",
        ),
        (
            "schedule x, routes 0 2 of 2 ranks, 1 microbatches, training\nrank 0: .\nrank 1: .\n",
            "t.csv:1:20: error: each route must name a rank below 2",
        ),
        (
            "schedule x, routes 0 1; 1 of 2 ranks, 1 microbatches, training\nrank 0:\nrank 1:\n",
            "and all must be equally long",
        ),
    ],
    ids=[
        *("nothing", "header", "few-rows", "order", "cell", "many-chunks", "no-chunks"),
        *("no-microbatch", "rank", "lengths"),
    ],
)
def test_text_names_line_and_column(content: str, said: str):
    assert said in _refusal(lambda: from_text(content))


@pytest.mark.parametrize("suffix", [".csv", ".json", ".txt", "", ".CSV"])
@pytest.mark.parametrize("form", [CSV, JSON_FORM, TEXT], ids=["csv", "json", "text"])
def test_files_are_read_by_suffix_or_content(tmp_path: Path, form: Any, suffix: str):
    table = _built("eager-1f1b", 3, 4)
    assert table is not None
    path = tmp_path / f"eager-1f1b{suffix}"
    path.write_bytes(form.encode(table).encode())
    named = {".csv": CSV, ".json": JSON_FORM}.get(suffix.lower())
    if named not in (None, form):
        assert str(path) in _refusal(lambda: read_table(str(path)))
        return
    assert read_table(str(path)) == table


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, "cannot read the file: No such file or directory"),
        (b"", "the file is empty"),
        (b" \n", "the file is empty"),
        (b"0F0\xff", "byte 3 is not UTF-8"),
        (b"0F0,1Q1\n", ":1:5: error: rank 0, cell 2: '1Q1' is not an action"),
        (b"module {\n}\n", ":1:1: error: rank 0, cell 1: 'module {' is not an action"),
    ],
    ids=["missing", "empty", "blank", "bytes", "cell", "mlir"],
)
def test_unreadable_files_are_named(tmp_path: Path, data: bytes | None, said: str):
    path = tmp_path / "table"
    if data is not None:
        path.write_bytes(data)
    message = _refusal(lambda: read_table(str(path)))
    assert message.startswith(str(path))
    assert said in message


def test_a_directory_is_no_schedule(tmp_path: Path):
    assert "Is a directory" in _refusal(lambda: read_table(str(tmp_path)))


DAMAGE = '0123456789FBIW,();"\n .SENDRCV_#xrank:{}[]-'


def _damaged(content: str, rng: random.Random) -> str:
    """The content with a few characters changed, lost, added, or a stretch lost or doubled."""
    letters = list(content)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        at = rng.randrange(len(letters) + 1)
        end = at + rng.choice([0, 1, rng.randrange(30)])
        letters[at:end] = rng.choice(["", rng.choice(DAMAGE), letters[at:end] * 2])
    return "".join(letters)


def _damage(seed: int, count: int) -> int:
    """Damages written tables; returns how many still read, and then say what they said."""
    rng = random.Random(seed)
    bare = [_built(name, 3, 4) for name in ("1f1b", "zb-h1", "looped-bfs")]
    tables = [*(table for table in bare if table is not None), _two_opposite(4)]
    tables += [with_communication(table) for table in tables[:2]]
    written = [(form, form.encode(table)) for form in (CSV, JSON_FORM, TEXT) for table in tables]
    read = 0
    for _ in range(count):
        form, content = rng.choice(written)
        try:
            table = form.decode(_damaged(content, rng))
        except ToolError:
            continue
        read += 1
        assert from_json(to_json(table)) == table
        violations(table, unit_costs(table.stages))
    return read


def test_damaged_files_are_read_or_refused():
    assert _damage(seed=1, count=600) > 10


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(8))
def test_many_damaged_files_are_read_or_refused(seed: int):
    assert _damage(seed, 20_000) > 300
