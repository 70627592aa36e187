"""HLO text as an input: values and the order of the collectives are those of the text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from stablehlo_tools import bindings
from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.artifacts.program_set import JobOptions, read_programs
from stablehlo_tools.diagnostics import ToolError, to_place
from stablehlo_tools.hlo_input.converter import MARK, mark_instructions, mark_of
from stablehlo_tools.hlo_input.hlo_text import HloText, is_hlo_text
from stablehlo_tools.order.program import TextOrder, blocks_of
from stablehlo_tools.order.verdict import decide
from stablehlo_tools.targets.scheduled_hlo import parse_schedule
from stablehlo_tools.verify import Options as VerifyOptions
from stablehlo_tools.verify import verify_artifacts

ROWS = jax.ShapeDtypeStruct((8, 16), jnp.float32)
CLOSE = VerifyOptions(trials=1)


def _step():
    """Collectives that nothing orders, beside a loop with one."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))

    def local(a: jax.Array, b: jax.Array) -> jax.Array:
        def body(_: int, c: jax.Array) -> jax.Array:
            return lax.ppermute(c, "x", [(k, (k + 1) % 8) for k in range(8)]) * 1.5

        gathered = lax.all_gather(a, "x", tiled=True)
        scattered = lax.psum_scatter(b, "x", tiled=True)
        shifted = lax.fori_loop(0, 5, body, a)
        product = lax.psum(gathered.T @ gathered, "x")
        return gathered.sum(0, keepdims=True) + scattered + shifted + product.sum()

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=False
    )
    return jax.jit(mapped)


def _sharded():
    """Sharded by annotations alone, with a constraint."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

    def step(a: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        b = lax.with_sharding_constraint(jnp.tanh(a @ w), NamedSharding(mesh, P("x", "y")))
        return b @ b.T, b.sum()

    over = {axes: NamedSharding(mesh, P(*axes)) for axes in ((), ("x",), (None, "y"))}
    return jax.jit(
        step, in_shardings=(over["x",], over[None, "y"]), out_shardings=(over["x",], over[()])
    )


def _artifact(text: str, tmp_path: Path, name: str = "step.hlo") -> Artifact:
    path = tmp_path / name
    path.write_text(text)
    return artifact.load(path)


def test_what_jax_lowers_is_what_it_exports(tmp_path: Path) -> None:
    """Shardy's ops come back out of the custom calls that they travel in."""
    step = _step()
    exported = artifact.from_exported(export.export(step)(ROWS, ROWS))
    text = step.lower(ROWS, ROWS).as_text(dialect="hlo")
    assert text is not None
    read = _artifact(text, tmp_path)
    assert not read.is_scheduled
    names = [view.operation.name for view in read.module.body.operations]
    assert names == ["sdy.mesh", "func.func"]
    assert "sdy.manual_computation" in artifact.to_text(read.module)
    assert verify_artifacts(exported, read, VerifyOptions(trials=1)).same


def test_annotations_come_back(tmp_path: Path) -> None:
    """Shardings of arguments, results and in between are Shardy's again, and nobody else's."""
    shapes = (
        jax.ShapeDtypeStruct((16, 8), jnp.float32),
        jax.ShapeDtypeStruct((8, 12), jnp.float32),
    )
    step = _sharded()
    text = step.lower(*shapes).as_text(dialect="hlo")
    assert text is not None
    printed = artifact.to_text(_artifact(text, tmp_path).module)
    assert 'sdy.sharding_constraint %1 <@mesh, [{"x"}, {"y"}]>' in printed
    assert printed.count("sdy.sharding = #sdy.sharding<@mesh, ") == 4
    assert "custom_call" not in printed
    assert "mhlo" not in printed


def test_a_schedule_is_kept(tmp_path: Path) -> None:
    """The ops stand in the order of the schedule, which XLA's converter does not keep."""
    text = _step().lower(ROWS, ROWS).compile().as_text()
    assert text is not None
    read = _artifact(text, tmp_path)
    assert read.is_scheduled
    issued = [event.kind.replace("-", "_") for event in parse_schedule(text).events if event.issues]
    assert [each.kind for each in find_collectives(read.module)] == issued
    (program,) = read_programs([str(tmp_path / "step.hlo")], JobOptions())
    assert all(isinstance(block.before, TextOrder) for block in blocks_of(program.block))
    assert "mhlo.num_partitions = 8" in artifact.to_text(read.module)


SCHEDULED = """HloModule m, is_scheduled=true, num_partitions=2

add {{
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT s = f32[] add(x, y)
}}

ENTRY e {{
  a = f32[4] parameter(0)
  b = f32[4] parameter(1)
  {first}
  {second}
  ROOT t = (f32[8], f32[2]) tuple(g, r)
}}
"""
GROUPS = "dimensions={0}, replica_groups={{0,1}}, use_global_device_ids=true"
GATHER = f"g = f32[8] all-gather(a), channel_id=1, {GROUPS}"
SCATTER = f"r = f32[2] reduce-scatter(b), channel_id=2, {GROUPS}, to_apply=add"


def test_schedules_decide_the_order_across_programs(tmp_path: Path) -> None:
    """Two schedules of the same order cannot hang, whatever the dataflow leaves open."""
    paths: list[str] = []
    for name, lines in (
        ("one", (GATHER, SCATTER)),
        ("two", (GATHER, SCATTER)),
        ("three", (SCATTER, GATHER)),
    ):
        path = tmp_path / f"{name}.hlo"
        path.write_text(SCHEDULED.format(first=lines[0], second=lines[1]))
        paths.append(str(path))
    assert decide(read_programs(paths[:2], JobOptions())).finding is None
    finding = decide(read_programs([paths[0], paths[2]], JobOptions())).finding
    assert finding is not None
    loose = [tmp_path / "a.hlo", tmp_path / "b.hlo"]
    for path in loose:
        path.write_text(Path(paths[0]).read_text().replace(", is_scheduled=true", ""))
    assert decide(read_programs([str(path) for path in loose], JobOptions())).finding is not None


def test_two_compilers_make_the_same_of_a_program(tmp_path: Path) -> None:
    """Texts behind all passes of two compilers (fusions, copies, bitcasts) compute the same."""
    from stablehlo_tools.targets.compilation import compile_artifact

    step = _step()
    text = step.lower(ROWS, ROWS).compile().as_text()
    assert text is not None
    exported = artifact.from_exported(export.export(step)(ROWS, ROWS))
    other = compile_artifact(exported, "tpu").text
    verification = verify_artifacts(
        _artifact(text, tmp_path), _artifact(other, tmp_path, "tpu.hlo"), CLOSE
    )
    assert verification.same


TILED = """HloModule m, is_scheduled=true

ENTRY e {
  a = f32[8,256]{1,0:T(8,128)} parameter(0)
  ROOT b = f32[2,8,128]{2,1,0:T(8,128)} bitcast(a)
}
"""


def test_a_bitcast_between_tiles_has_no_values(tmp_path: Path) -> None:
    """Where tiles may put elements elsewhere, nothing is said of the values."""
    read = _artifact(TILED, tmp_path)
    with pytest.raises(ToolError, match="a bitcast between tiled layouts"):
        verify_artifacts(read, read)
    with pytest.raises(ToolError, match="a bitcast between tiled layouts"):
        artifact.encode(read, artifact.ArtifactForm.BYTECODE)
    plain = _artifact(TILED.replace(":T(8,128)", ""), tmp_path)
    assert "stablehlo.reshape" in artifact.to_text(plain.module)


MIXED = """HloModule m, is_scheduled=true, num_partitions=2

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[]{:T(128)} parameter(0)
  %y = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%x, %y)
}

ENTRY %e (a: f32[8,256]) -> (bf16[8,256], f32[8,256], f32[8,256]) {
  %a = f32[8,256]{1,0:T(8,128)} parameter(0)
  %b = bf16[8,256]{1,0:T(8,128)} all-reduce(%a), channel_id=1, replica_groups={{0,1}}, to_apply=%add
  %c = f32[8,256]{1,0:T(8,128)} all-reduce(%a), channel_id=2, replica_groups={{0,1}}, to_apply=%add
  %d = bf16[8,256]{1,0:T(8,128)} all-reduce(%b), channel_id=3, replica_groups={{0,1}}, to_apply=%add
  %u = f32[8,256]{1,0:T(8,128)} tanh(%d)
  ROOT %t = (bf16[8,256]{1,0}, f32[8,256]{1,0}, f32[8,256]{1,0}) tuple(%b, %c, %u)
}
"""


def test_a_sum_in_another_precision_than_its_computation(tmp_path: Path) -> None:
    """XLA:TPU leaves the computation in f32 if it narrows an all_reduce."""
    read = _artifact(MIXED, tmp_path)
    collectives = find_collectives(read.module)
    signatures = [
        (str(each.op.operands[0].type), str(each.op.results[0].type)) for each in collectives
    ]
    wide, narrow = "tensor<8x256xf32>", "tensor<8x256xbf16>"
    assert signatures == [(wide, narrow), (wide, wide), (narrow, narrow)]
    lines = [to_place(each.op.location).line for each in collectives]
    assert lines == [11, 12, 13]


def test_marks_survive_what_they_mark() -> None:
    """A mark is in every instruction, and the module is otherwise as it was."""
    text = SCHEDULED.format(first=GATHER, second=SCATTER)
    proto = bindings.hlo_text_to_proto(text)
    context = bindings.new_context()
    with_marks = bindings.parse_module(
        bindings.hlo_proto_to_stablehlo(mark_instructions(proto)), context
    )
    without = bindings.parse_module(bindings.hlo_proto_to_stablehlo(proto), context)
    assert artifact.to_text(with_marks) == artifact.to_text(without)
    assert mark_of(f"jit(f)/add{MARK}2.17") == ("jit(f)/add", (2, 17))
    assert mark_of("jit(f)/add") == ("jit(f)/add", None)
    with pytest.raises(ValueError, match="a field ends after the end of its message"):
        mark_instructions(b"\x1a\x05ab")


@pytest.mark.parametrize(
    ("data", "is_hlo"),
    [
        (b"HloModule m\n", True),
        (b"\n// a comment\n/* and\nanother */ HloModule m, is_scheduled=true\n", True),
        (b"module { func.func @HloModule() { return } }", False),
        (b"// HloModule\nmodule {}\n", False),
    ],
)
def test_hlo_is_told_by_its_first_word(data: bytes, is_hlo: bool) -> None:
    assert is_hlo_text(data) is is_hlo


def test_lines_of_a_text_in_the_old_form() -> None:
    """Percent signs, operands with types, lines that go on: what other people's dumps have."""
    text = (
        "HloModule IrToHlo.9\n\n%Add.1 (x: f32[], y: f32[]) -> f32[] {\n"
        "  %x = f32[] parameter(0)\n  %y = f32[] parameter(1)\n"
        "  ROOT %add.2 = f32[] add(f32[] %x, f32[] %y)\n}\n\n"
        "ENTRY %IrToHlo.9 (p0: f32[4]) -> (f32[4]) {\n  %p0 = f32[4]{0} parameter(0)\n"
        "  %all-reduce.3 = f32[4]{0} all-reduce(f32[4]{0} %p0), replica_groups={{0,1}},\n"
        "    to_apply=%Add.1\n  ROOT %t = (f32[4]{0}) tuple(f32[4]{0} %all-reduce.3)\n}\n"
    )
    source = HloText(text)
    assert [source.place_of(0, i) for i in range(4)] == [
        *(("Add.1", line) for line in (4, 5, 6)),
        ("", 0),
    ]
    assert [source.place_of(1, i)[1] for i in range(3)] == [10, 11, 13]
    assert source.place_of(1, 0)[0] == "IrToHlo.9"
    assert source.place_of(2, 0) == ("", 0)
    assert source.line_of_name("all-reduce.3") == 11
    module = artifact.parse(text.encode(), "dump.txt").module
    (collective,) = find_collectives(module)
    assert "dump.txt" in str(collective.op.location)


def _filled(text: str, **words: str) -> str:
    """The text with longer ones in place of words."""
    for word, meaning in words.items():
        text = text.replace(word, meaning)
    return text


MERGED = """HloModule m, is_scheduled=true, num_partitions=2

add {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT s = f32[] add(x, y)
}

ENTRY e {
  a = f32[4] parameter(0)
  b = f32[2,4] parameter(1)
  gs = ((f32[4], f32[2,4]), (f32[8], /*index=1*/f32[4,4])) all-gather-start(a, b), DIM, GROUPS
  n = f32[4] negate(a)
  gd = (f32[8], f32[4,4]) all-gather-done(gs)
  g0 = f32[8] get-tuple-element(gd), index=0
  g1 = f32[4,4] get-tuple-element(gd), index=1
  rs = (f32[8], f32[4,4]) all-reduce-start(g0, g1), GROUPS, ADD, ALIASING
  rd = (f32[8], f32[4,4]) all-reduce-done(rs)
  r0 = f32[8] get-tuple-element(rd), index=0
  r1 = f32[4,4] get-tuple-element(rd), index=1
  sc = (f32[4], f32[2,4]) reduce-scatter(r0, r1), DIM, GROUPS, ADD
  scat0 = f32[4] get-tuple-element(sc), index=0
  scat1 = f32[2,4] get-tuple-element(sc), index=1
  cs = ((f32[4], f32[2,4]), (f32[4], f32[2,4])) collective-permute-start(scat0, scat1), PAIRS
  cd = (f32[4], f32[2,4]) collective-permute-done(cs)
  c0 = f32[4] get-tuple-element(cd), index=0
  c1 = f32[2,4] get-tuple-element(cd), index=1
  ex = (f32[4], f32[4]) all-to-all(c0, n), channel_id=1, replica_groups=mesh['x'=2] {'x'}
  e0 = f32[4] get-tuple-element(ex), index=0
  e1 = f32[4] get-tuple-element(ex), index=1
  ROOT t = (f32[4], f32[4], f32[2,4]) tuple(e0, e1, c1)
}
"""
MERGED_TEXT = _filled(
    MERGED,
    DIM="dimensions={0}",
    ADD="to_apply=add",
    GROUPS="channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true",
    PAIRS="channel_id=1, source_target_pairs={{0,1},{1,0}}",
    ALIASING="output_to_operand_aliasing={{0}: (0, {}), {1}: (1, {})}",
)

BY_HAND = """module @m attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  func.func @main(%a: tensor<4xf32>, %b: tensor<2x4xf32>)
      -> (tensor<4xf32>, tensor<4xf32>, tensor<2x4xf32>) {
    %g0 = "stablehlo.all_gather"(%a) {GATHER} : (tensor<4xf32>) -> tensor<8xf32>
    %g1 = "stablehlo.all_gather"(%b) {GATHER} : (tensor<2x4xf32>) -> tensor<4x4xf32>
    %d0 = stablehlo.add %g0, %g0 : tensor<8xf32>
    %d1 = stablehlo.add %g1, %g1 : tensor<4x4xf32>
    %s0 = "stablehlo.reduce_scatter"(%d0) ({
    ^bb0(%x: tensor<f32>, %y: tensor<f32>):
      %s = stablehlo.add %x, %y : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) {SCATTER} : (tensor<8xf32>) -> tensor<4xf32>
    %s1 = "stablehlo.reduce_scatter"(%d1) ({
    ^bb0(%x: tensor<f32>, %y: tensor<f32>):
      %s = stablehlo.add %x, %y : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) {SCATTER} : (tensor<4x4xf32>) -> tensor<2x4xf32>
    %c0 = "stablehlo.collective_permute"(%s0) {PERMUTE} : (tensor<4xf32>) -> tensor<4xf32>
    %c1 = "stablehlo.collective_permute"(%s1) {PERMUTE} : (tensor<2x4xf32>) -> tensor<2x4xf32>
    %n = stablehlo.negate %a : tensor<4xf32>
    %j = stablehlo.concatenate %c0, %n, dim = 0 : (tensor<4xf32>, tensor<4xf32>) -> tensor<8xf32>
    %x = "stablehlo.all_to_all"(%j) {EXCHANGE} : (tensor<8xf32>) -> tensor<8xf32>
    %e0 = stablehlo.slice %x [0:4] : (tensor<8xf32>) -> tensor<4xf32>
    %e1 = stablehlo.slice %x [4:8] : (tensor<8xf32>) -> tensor<4xf32>
    return %e0, %e1, %c1 : tensor<4xf32>, tensor<4xf32>, tensor<2x4xf32>
  }
}
"""
CHANNEL = "channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>"
MEMBERS = f"replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>, {CHANNEL}"
BY_HAND_TEXT = _filled(
    BY_HAND,
    GATHER=f"all_gather_dim = 0 : i64, {MEMBERS}, use_global_device_ids",
    SCATTER=f"scatter_dimension = 0 : i64, {MEMBERS}, use_global_device_ids",
    PERMUTE=f"source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>, {CHANNEL}",
    EXCHANGE="split_dimension = 0 : i64, concat_dimension = 0 : i64, split_count = 2 : i64, "
    + MEMBERS,
)


def test_merged_collectives_are_divided(tmp_path: Path) -> None:
    """Collectives of several operands, as XLA's combiners write them, compute what they did.

    By hand, the sum of what both devices gathered alike is twice that.
    """
    read = _artifact(MERGED_TEXT, tmp_path)
    kinds = [each.kind for each in find_collectives(read.module)]
    pairs = ("all_gather", "all_reduce", "reduce_scatter", "collective_permute")
    assert kinds == [kind for kind in pairs for _ in range(2)] + ["all_to_all"]
    by_hand = artifact.parse(BY_HAND_TEXT.encode(), "by_hand.mlir")
    assert verify_artifacts(by_hand, read, CLOSE).same


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: jnp.fft.fft(x + 1j * x), id="complex constants"),
        pytest.param(lambda x: (jnp.sort(x, 0), lax.top_k(x, 2)), id="bits in a comparison"),
    ],
)
def test_what_xla_makes_of_elements(function: Callable[[Any], Any], tmp_path: Path) -> None:
    lowered = jax.jit(function).lower(jax.ShapeDtypeStruct((4, 8), jnp.float32))
    given = _artifact(lowered.as_text(dialect="hlo"), tmp_path)
    compiled = _artifact(lowered.compile().as_text() or "", tmp_path)
    assert verify_artifacts(given, compiled, CLOSE).same


RETYPED = """HloModule retyped, entry_computation_layout={(f32[2,3]{0,1})->s32[6]{0}}

ENTRY main {
  a = f32[2,3]{0,1} parameter(0)
  ROOT b = s32[6]{0} bitcast(a)
}
"""
RETYPED_BY_HAND = """module {
  func.func @main(%a: tensor<2x3xf32>) -> tensor<6xi32> {
    %t = stablehlo.transpose %a, dims = [1, 0] : (tensor<2x3xf32>) -> tensor<3x2xf32>
    %b = stablehlo.bitcast_convert %t : (tensor<3x2xf32>) -> tensor<3x2xi32>
    %r = stablehlo.reshape %b : (tensor<3x2xi32>) -> tensor<6xi32>
    return %r : tensor<6xi32>
  }
}
"""


def test_a_bitcast_to_another_type(tmp_path: Path) -> None:
    by_hand = artifact.parse(RETYPED_BY_HAND.encode(), "by_hand.mlir")
    assert verify_artifacts(by_hand, _artifact(RETYPED, tmp_path), VerifyOptions(trials=1)).same
