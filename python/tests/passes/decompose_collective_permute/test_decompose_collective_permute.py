"""decompose-collective-permute: the order of sends and recvs, their values, and XLA:GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_permutes import permute

from stablehlo_tools.analysis.collectives import ModuleFacts, find_collectives
from stablehlo_tools.analysis.permute_pairs import Pair
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cli.main import main
from stablehlo_tools.diagnostics import Diagnostics, ToolError
from stablehlo_tools.passes.pipeline import Pipeline
from stablehlo_tools.targets.compilation import compile_artifact
from stablehlo_tools.targets.topologies import Target, missing_package
from stablehlo_tools.transforms.decompose_collective_permute import conflicting
from stablehlo_tools.verify.verification import Options, verify_artifacts

KIND = "tensor<4x2xf32>"
CHAIN = [(0, 1), (1, 2), (2, 3)]
BREAK = "break-permute-cycles,"
DECOMPOSE = "decompose-collective-permute"
GPU = missing_package(Target.GPU)


def module(body: str, results: Sequence[str], devices: int = 4) -> Artifact:
    kinds = ", ".join([KIND] * len(results))
    text = f"""module attributes {{mhlo.num_replicas = 1 : i32,
        mhlo.num_partitions = {devices} : i32}} {{
      func.func @main(%x: {KIND}, %y: {KIND}) -> ({kinds}) {{
        %zero = stablehlo.constant dense<0> : tensor<i32>
        %one = stablehlo.constant dense<1> : tensor<i32>
        %trips = stablehlo.constant dense<3> : tensor<i32>
        {body}
        return {", ".join(results)} : {kinds}
      }}
    }}"""
    return artifact.parse(text.encode())


def loop(body: str, carried: str, result: str) -> str:
    """Three iterations that carry `%p`; the results are `%w#0`, the counter, and `%w#1`."""
    return f"""%w:2 = stablehlo.while(%i = %zero, %p = {carried}) : tensor<i32>, {KIND}
      cond {{
        %c = stablehlo.compare LT, %i, %trips : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %c : tensor<i1>
      }} do {{
        %j = stablehlo.add %i, %one : tensor<i32>
        {body}
        stablehlo.return %j, {result} : tensor<i32>, {KIND}
      }}"""


def reduced(name: str, operand: str, groups: Sequence[Sequence[int]]) -> str:
    table = f"dense<{json.dumps(groups)}> : tensor<{len(groups)}x{len(groups[0])}xi64>"
    return f"""{name} = "stablehlo.all_reduce"({operand}) ({{
      ^bb0(%l: tensor<f32>, %r: tensor<f32>):
        %s = stablehlo.add %l, %r : tensor<f32>
        stablehlo.return %s : tensor<f32>
      }}) {{replica_groups = {table}, use_global_device_ids,
        channel_handle = #stablehlo.channel_handle<handle = 9, type = 1>}} : ({KIND}) -> {KIND}"""


def transformed(program: Artifact, pipeline: str) -> Artifact:
    result = program.copy()
    Pipeline.parse(pipeline).run(result.module, Diagnostics(), None)
    return result


# The order of what blocks.


def _runs(permutes: Sequence[Sequence[Pair]], firsts: Mapping[tuple[int, int], str]) -> bool:
    """Whether devices that block in each half until the other side has come get to the end.

    Each does the halves of one permute after those of the one before, and of each permute the
    half first that `firsts` says.
    """
    waiting: dict[int, list[tuple[int, Pair]]] = {}
    for number, pairs in enumerate(permutes):
        for device in sorted({device for pair in pairs for device in pair}):
            halves = {
                half: pair
                for pair in pairs
                for half, i in zip("sr", pair, strict=True)
                if i == device
            }
            order = sorted(halves, key=lambda half: half != firsts.get((number, device), "r"))
            waiting.setdefault(device, []).extend((number, halves[half]) for half in order)
    while any(waiting.values()):
        at = {device: steps[0] for device, steps in waiting.items() if steps}
        met = [step for step in at.values() if all(at.get(d) == step for d in step[1])]
        if not met:
            return False
        for device, step in at.items():
            if step in met:
                waiting[device].pop(0)
    return True


@st.composite
def _acyclic_permutes(draw: st.DrawFn) -> list[list[Pair]]:
    found: list[list[Pair]] = []
    for _ in range(draw(st.integers(1, 4))):
        line = draw(st.permutations(range(6)))
        links = draw(st.sets(st.integers(0, 4)))
        found.append([(line[i], line[i + 1]) for i in sorted(links)])
    return found


@settings(max_examples=100)
@given(
    _acyclic_permutes(),
    st.dictionaries(st.tuples(st.integers(0, 3), st.integers(0, 5)), st.sampled_from("sr")),
)
def test_any_device_may_send_or_receive_first(
    permutes: list[list[Pair]], firsts: dict[tuple[int, int], str]
):
    assert _runs(permutes, firsts)


def test_a_ring_could_wait_for_itself():
    assert not _runs([[*CHAIN, (3, 0)]], {})
    assert not _runs([[(0, 1), (1, 0)]], dict.fromkeys([(0, 0), (0, 1)], "s"))


def _verdict(program: Artifact, directory: Path, *options: str) -> str:
    path = directory / "program.mlir"
    path.write_text(artifact.to_text(program.module))
    with redirect_stdout(StringIO()) as told:
        main(["check-order", str(path), *options])
    return told.getvalue()


SEVERAL = "\n".join(
    [
        permute("%a", "%x", [*CHAIN, (3, 0)], KIND),
        permute("%b", "%x", [(3, 2), (2, 1), (1, 0)], KIND),
        reduced("%c", "%y", [[0, 1, 2, 3]]),
        permute("%d", "%y", [(0, 2), (1, 3)], KIND),
    ]
)


def test_check_order_finds_nothing_even_where_each_device_is_compiled_apart(tmp_path: Path):
    program = transformed(module(SEVERAL, ["%a", "%b", "%c", "%d"]), BREAK + DECOMPOSE)
    assert _verdict(program, tmp_path, "--strict").startswith("ordered")


def test_check_order_finds_the_deadlock_where_the_chain_is_cut(tmp_path: Path):
    program = transformed(module(SEVERAL, ["%a", "%b", "%c", "%d"]), BREAK + DECOMPOSE)
    with program.module.context:
        transfers = [c.op for c in find_collectives(program.module) if c.kind in ("send", "recv")]
        for op in transfers[1:]:
            op.operands[len(op.operands) - 1] = transfers[0].operands[0]
    assert _verdict(program, tmp_path, "--strict").startswith("may-deadlock")


IN_A_LOOP = module(
    f"""{permute("%a", "%x", CHAIN, KIND)}
    {loop(permute("%q", "%p", [*CHAIN, (3, 0)], KIND), "%a", "%q")}
    {permute("%b", "%w#1", [(3, 1)], KIND)}""",
    ["%b"],
)


@pytest.mark.parametrize("threading", ["", ",thread-tokens"])
def test_a_loop_is_ordered(threading: str, tmp_path: Path):
    program = transformed(IN_A_LOOP, BREAK + DECOMPOSE + threading)
    assert _verdict(program, tmp_path).startswith("ordered")
    assert _verdict(program, tmp_path, "--strict").startswith("ordered")


def test_a_loop_is_not_ordered_where_the_chain_is_cut(tmp_path: Path):
    program = transformed(IN_A_LOOP, BREAK + DECOMPOSE)
    with program.module.context:
        transfers = [c.op for c in find_collectives(program.module) if c.kind in ("send", "recv")]
        transfers[4].operands[0] = transfers[2].operands[0]  # those inside come second
    assert _verdict(program, tmp_path).startswith("may-deadlock")


# What XLA's own passes are tested for.


def kinds(program: Artifact) -> list[str]:
    return [collective.kind for collective in find_collectives(program.module)]


def test_every_permute_is_decomposed_in_program_order_and_not_only_in_loops():
    """XLA takes one of a loop, that of a parameter or the one with the most pairs."""
    body = "\n".join(
        [
            permute("%c", "%y", [(3, 0)], KIND),
            permute("%a", "%x", [(2, 3)], KIND),
            permute("%b", "%a", CHAIN, KIND),
        ]
    )
    program = transformed(module(body, ["%a", "%b", "%c"]), DECOMPOSE)
    assert kinds(program) == ["recv", "send"] * 3
    text = artifact.to_text(program.module)
    assert re.findall(r'recv".*?handle = (\d+).*?dense<\[\[(\d)', text) == [
        ("2", "3"),
        ("3", "2"),
        ("4", "0"),
    ]


@pytest.mark.parametrize("limit", [33, 32])
def test_the_threshold_is_the_smallest_size(limit: int):
    program = module(permute("%a", "%x", CHAIN, KIND), ["%a"])  # 32 bytes
    after = transformed(program, f"{DECOMPOSE}{{min-bytes={limit}}}")
    assert kinds(after) == (["collective_permute"] if limit == 33 else ["recv", "send"])


def test_a_cycle_is_refused_unless_it_is_small_or_broken():
    program = module(permute("%a", "%x", [*CHAIN, (3, 0)], KIND), ["%a"])
    with pytest.raises(ToolError, match=r"cycle 0>1>2>3>0.*run break-permute-cycles first \(P4\)"):
        transformed(program, DECOMPOSE)
    assert kinds(transformed(program, f"{DECOMPOSE}{{min-bytes=64}}")) == ["collective_permute"]
    assert kinds(transformed(program, BREAK + DECOMPOSE)) == ["recv", "send"] * 2


def test_the_place_in_the_source_is_kept():
    program = module(permute("%a", "%x", CHAIN, KIND) + ' loc("op1/op2/add")', ["%a"])
    after = transformed(program, DECOMPOSE)
    assert [str(c.op.location) for c in find_collectives(after.module)] == [
        'loc("op1/op2/add")'
    ] * 2


def test_frontend_attributes_are_kept():
    attribute = 'mhlo.frontend_attributes = {_xla_other = "xyz"}, source_target_pairs'
    line = permute("%a", "%x", CHAIN, KIND).replace("source_target_pairs", attribute)
    after = transformed(module(line, ["%a"]), DECOMPOSE)
    assert artifact.to_text(after.module).count('{_xla_other = "xyz"}') == 2


ACROSS = [(0, 2), (1, 3)]
CONFLICTS: dict[str, tuple[list[Pair], dict[str, str], list[str]]] = {
    "a permute": (CHAIN, {"ring": permute("%0", "%y", [*CHAIN, (3, 0)], KIND)}, ["ring"]),
    "an all_reduce": (CHAIN, {"all": reduced("%0", "%y", [[0, 1, 2, 3]])}, ["all"]),
    "another axis": (ACROSS, {"rows": reduced("%0", "%y", [[0, 1], [2, 3]])}, []),
    "some": (
        ACROSS,
        {
            "ring": permute("%0", "%y", [*CHAIN, (3, 0)], KIND),
            "own": reduced("%1", "%y", [[0], [1], [2], [3]]),
            "all": reduced("%2", "%y", [[0, 1, 2, 3]]),
        },
        ["ring", "all"],
    ),
    "through a third": (
        CHAIN,
        {
            "upper": permute("%0", "%y", [(4, 5), (5, 6), (6, 7), (7, 4)], KIND),
            "middle": permute("%1", "%y", [(2, 3), (3, 4), (4, 5), (5, 2)], KIND),
        },
        ["upper", "middle"],
    ),
    "elsewhere": ([(0, 1)], {"pair": permute("%0", "%y", [(6, 7)], KIND)}, []),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_conflicts(name: str):
    pairs, others, expected = CONFLICTS[name]
    program = module("\n".join([permute("%t", "%x", pairs, KIND), *others.values()]), ["%t"], 8)
    found = find_collectives(program.module)
    named = dict(zip((c.op.results[0] for c in found[1:]), others, strict=True))
    conflicts = conflicting(found[:1], found[1:], ModuleFacts.from_module(program.module))
    assert [named[c.op.results[0]] for c in conflicts] == expected


# Values.


def check_on_two(seed: int) -> None:
    """A program of permutes between two devices against its sends and recvs, interpreted."""
    rng = np.random.default_rng(seed)
    pairs: list[list[Pair]] = [[(0, 1)], [(1, 0)], [(0, 1), (1, 0)], [(1, 1)], [(1, 1), (0, 0)]]
    lines = [reduced("%s", "%y", [[0, 1]])] if rng.random() < 0.5 else []
    known = ["%x", "%y", *(["%s"] if lines else [])]

    def pick() -> str:
        return known[int(rng.integers(len(known)))]

    for number in range(int(rng.integers(1, 4))):
        chosen = pairs[int(rng.integers(len(pairs)))]
        lines.append(permute(f"%v{number}", pick(), chosen, KIND))
        lines.append(f"%u{number} = stablehlo.subtract %v{number}, {pick()} : {KIND}")
        known += [f"%v{number}", f"%u{number}"]
    chosen = pairs[int(rng.integers(3))]
    inner = f"{permute('%q', '%p', chosen, KIND)}\n%o = stablehlo.add %q, {pick()} : {KIND}"
    before = module("\n".join([*lines, loop(inner, pick(), "%o")]), [*known[2:], "%w#1"], 2)
    after = transformed(before, BREAK + DECOMPOSE)
    assert "collective_permute" not in kinds(after)
    assert verify_artifacts(before, after, Options(backend="interpreter")).same


@pytest.mark.parametrize("seed", range(1))
def test_values_in_the_reference_interpreter(seed: int):
    check_on_two(seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [*range(1, 4), *range(100, 160)])
def test_values_in_the_reference_interpreter_soak(seed: int):
    check_on_two(seed)


# XLA:GPU.


@pytest.mark.skipif(GPU is not None, reason=f"{GPU} is not installed")
@pytest.mark.parametrize("threading", [pytest.param("", marks=pytest.mark.soak), ",thread-tokens"])
def test_xla_gpu_keeps_the_chain_in_and_around_a_loop(threading: str):
    inner = loop(
        f"{permute('%f', '%p', [*CHAIN, (3, 0)], KIND)}\n%o = stablehlo.add %f, %y : {KIND}",
        "%a",
        "%o",
    )
    body = f"{permute('%a', '%x', CHAIN, KIND)}\n{inner}\n{permute('%b', '%y', [(3, 1)], KIND)}"
    program = transformed(module(body, ["%w#1", "%b"]), BREAK + DECOMPOSE + threading)
    compiled = compile_artifact(program, "gpu")
    starts = re.findall(
        r" (recv|send)\(.*?channel_id=(\d+).*?_xla_send_recv_source_target_pairs=(\S+?}}),",
        compiled.text,
    )
    # The dones are others. In the text a loop's body stands before what is around it.
    assert starts == [
        (kind, channel, pairs)
        for channel, pairs in (
            ("4", "{{3,0}}"),
            ("5", "{{0,1},{1,2},{2,3}}"),
            ("3", "{{0,1},{1,2},{2,3}}"),
            ("6", "{{3,1}}"),
        )
        for kind in ("recv", "send")
    ]
    assert compiled.order.same_order
    assert not compiled.order.deleted
