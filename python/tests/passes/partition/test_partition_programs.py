"""partition on named programs: the values of the same function on one device, bit for bit."""

from __future__ import annotations

import functools
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.export import Exported
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_programs import MESHES, PROGRAMS, Constrain, ShardedProgram, complaint

import stablehlo_tools
from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.api.transforming import run_pipeline
from stablehlo_tools.artifacts.artifact import from_exported
from stablehlo_tools.diagnostics import Place, ToolError, to_place
from stablehlo_tools.passes.pipeline import Pipeline
from stablehlo_tools.transforms import partition
from stablehlo_tools.transforms.parts.partition import local_ops

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

_ROWS = np.arange(32 * 8, dtype=np.float32).reshape(32, 8)
_PICKED = np.array([3, 30, -1], np.int32)
_GATHER = ShardedProgram("gather", lambda _, x, i: x[i], (_ROWS, _PICKED), (P("x"), P()))


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(
            program, id=program.name, marks=[pytest.mark.soak] if program.soak or number % 3 else []
        )
        for number, program in enumerate(PROGRAMS)
    ],
)
def test_values_are_those_of_one_device(program: ShardedProgram) -> None:
    assert complaint(program) is None


def test_a_gather_without_its_mask_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert complaint(_GATHER) is None
    right = local_ops._inside

    def everywhere(build: Any, *given: Any) -> Any:
        inside = right(build, *given)
        return build.same("or", inside, build.op("not", [inside], inside.type))

    monkeypatch.setattr(local_ops, "_inside", everywhere)
    assert complaint(_GATHER) is not None


@functools.cache
def built(number: int) -> tuple[Exported, Exported]:
    """A program before and after the pass."""
    exported = PROGRAMS[number].exported()
    return exported, stablehlo_tools.transform(exported, "partition")


# Of the programs the first of so many.
one_in = pytest.mark.parametrize("share", [64, pytest.param(16, marks=pytest.mark.soak)])


@one_in
def test_the_same_bytes_every_time_and_nothing_the_second_time(share: int) -> None:
    for number in range(0, len(PROGRAMS), share):
        exported, once = built(number)
        again = stablehlo_tools.transform(exported, "partition")
        assert once.mlir_module_serialized == again.mlir_module_serialized
        twice = stablehlo_tools.transform(once, "partition")
        assert twice.mlir_module_serialized == once.mlir_module_serialized


@one_in
def test_every_collective_says_where_it_comes_from(share: int) -> None:
    for number in range(0, len(PROGRAMS), share):
        name = PROGRAMS[number].name
        collectives = find_collectives(from_exported(built(number)[1]).module)
        assert collectives or "makes" in name, name
        for collective in collectives:
            assert to_place(collective.op.location) != Place(), (name, str(collective.op))


def _right(program: ShardedProgram) -> None:
    """Asks for the values of one device; XLA's own partitioner may have others."""
    got = program.run(stablehlo_tools.transform(program.exported(), "partition"))
    for one, other in zip(got, program.expected(), strict=True):
        np.testing.assert_array_equal(one, other)


def _own_rows(form: str) -> ShardedProgram:
    """Reads and writes a tensor, of which rows are divided, at `[arange(32), places]`."""

    def run(_: Constrain, x: Any, places: Any, rows: Any) -> Any:
        number = jnp.arange(32)
        if form == "fill":
            return x.at[number[:, None], places].get(mode="fill")
        if form == "loop":
            return lax.fori_loop(0, 3, lambda n, x: x.at[number, places[:, 0] + n].set(rows), x)
        if form == "drop":
            return x.at[number[:, None], places].add(rows[:, None], mode="drop")
        if form == "clip":
            return x.at[number, places[:, 0]].multiply(rows, mode="clip")
        return jax.grad(lambda x: jnp.vdot(x[number, places[:, 1]], rows))(x)

    places = np.arange(64, dtype=np.int32).reshape(32, 2) * 7 % 11 - 3
    rows = np.arange(32, dtype=np.float32)
    return ShardedProgram(form, run, (_ROWS, places, rows), (P("x"), P("x"), P("x")), "8")


@pytest.mark.parametrize("form", ["fill", "loop", "drop", "clip", "gradient"])
def test_each_device_reads_and_writes_its_own_rows(form: str) -> None:
    program = _own_rows(form)
    after = stablehlo_tools.transform(program.exported(), "partition")
    assert not find_collectives(from_exported(after).module)
    _right(program)


def test_starts_without_a_sign() -> None:
    def run(_: Constrain, x: Any, starts: Any) -> Any:
        return [lax.dynamic_update_slice(x, x[:3] * 2, (start, start)) for start in starts]

    starts = np.array([0, 6, 13, 30, 2**32 - 1], np.uint32)
    _right(ShardedProgram("unsigned starts", run, (_ROWS, starts), (P("x"), P())))


@pytest.mark.parametrize("kind", [jnp.bfloat16, jnp.float16])
def test_counting_beyond_what_a_float_counts_exactly(kind: Any) -> None:
    def run(constrain: Constrain, x: Any) -> Any:
        return constrain(lax.iota(kind, 6000) + x, P("x"))

    _right(ShardedProgram("iota", run, (np.zeros(6000, kind),), (P("x"),), "8"))


def test_what_moved_in_a_manual_computation_is_moved_on() -> None:
    def run(_: Constrain, x: Any, filling: Any) -> Any:
        def moved(v: Any, filling: Any) -> Any:
            return jnp.roll(v, 1, 1), lax.pad(v, filling, ((0, 0, 0), (2, 0, 0)))

        inside = jax.shard_map(
            moved,
            mesh=MESHES["4x2"](),
            in_specs=(P("x"), P()),
            out_specs=P("x"),
            axis_names={"x"},
            check_vma=False,
        )
        rolled, padded = inside(x, filling)
        return rolled[:, 2:], jnp.roll(rolled, -1, 1), padded[:, 1:]

    _right(ShardedProgram("moves", run, (_ROWS, np.float32(3)), (P("x", "y"), P())))


def test_one_element_over_several_devices_is_spread_from_the_one_that_has_it() -> None:
    def run(constrain: Constrain, x: Any, count: Any) -> Any:
        def step(_: Any, carried: Any) -> Any:
            one, other = carried
            return constrain(one + other[:, :1], P("x")), other + one.sum(0)

        return lax.fori_loop(0, count, step, (constrain(x[:29], P("x")), x[:29]))

    program = ShardedProgram("spread", run, (_ROWS, np.int32(2)), (P("x", "y"), P()))
    got = program.run(stablehlo_tools.transform(program.exported(), "partition{choices=shardy}"))
    for one, other in zip(got, program.expected(), strict=True):
        np.testing.assert_array_equal(one, other)


def _over_two_meshes(constrain: Constrain, x: Any) -> Any:
    other = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    return lax.with_sharding_constraint(constrain(x, P("x")), NamedSharding(other, P("y")))


def test_two_meshes_are_refused() -> None:
    program = ShardedProgram("two meshes", _over_two_meshes, (_ROWS,), (P("x"),))
    with pytest.raises(ToolError, match=r"\(P3\)"):
        stablehlo_tools.transform(program.exported(), "partition")


def test_symbolic_shapes_are_refused() -> None:
    (rows,) = export.symbolic_shape("8*b")
    sharding = NamedSharding(MESHES["4x2"](), P("x"))
    for function in (lambda x: x, lambda x: x.T):
        exported = export.export(jax.jit(function, in_shardings=sharding))(
            jax.ShapeDtypeStruct((rows, 8), np.float32)
        )
        with pytest.raises(ToolError, match=r"\(P2\)"):
            stablehlo_tools.transform(exported, "partition")


def test_what_shardys_way_refuses_goes_by_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
        sdy.mesh @mesh = <["x"=2]>
        func.func @main(%x: tensor<4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>})
            -> (tensor<4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}]>}) {
          return %x : tensor<4xf32>
        }"""
    refusal = ToolError("no way", Place(line=5, column=7))
    monkeypatch.setattr(partition._Shardy, "local", Mock(side_effect=refusal))
    loaded = stablehlo_tools.artifacts.artifact.parse(text.encode(), "x.mlir")
    said = run_pipeline(loaded, Pipeline.parse("partition{partitioner=shardy-or-xla}"))
    assert [each.message for each in said.collected] == ["no way; partitioned by XLA instead"]
    assert [c.kind for c in find_collectives(loaded.module)] == ["all_gather"]
