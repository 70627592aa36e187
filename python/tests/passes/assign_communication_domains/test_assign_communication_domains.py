"""assign-communication-domains: two links at once in XLA:GPU's schedule, and what XLA refuses."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import pytest
from jax import export, lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from models.zoo import MODELS

import stablehlo_tools
from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.analysis.tasks.graph import expected_run
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.cost.hardware import load_hardware
from stablehlo_tools.diagnostics import ToolError
from stablehlo_tools.dialect.frontend_attributes import (
    SCALE_UP_FABRIC,
    communication_domain,
    set_communication_domain,
)
from stablehlo_tools.overlap.task_simulator import Simulation, simulate
from stablehlo_tools.targets.compilation import compile_artifact
from stablehlo_tools.targets.hlo.tasks import hlo_task_graph

H100 = load_hardware("h100")
ASSIGN = "assign-communication-domains"
ALL = f"{ASSIGN}{{against=text}}"
ACROSS = f"dense<[{', '.join(f'[{n}, {n + 8}]' for n in range(8))}]> : tensor<8x2xi64>"
WITHIN = "dense<[[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]> : tensor<2x8xi64>"


def two_links() -> Artifact:
    """A Llama's weights gathered between nodes, its activations within them, on 64 H100."""
    given = MODELS["decoder-2d-step"].full(layers=3, training=False)
    steps = "partition{hardware=h100},create-reduce-scatter"
    return stablehlo_tools.transform(artifact.from_exported(given, "two_links"), steps)


def chain() -> Artifact:
    """Weights gathered between two nodes, activations within each; products one after another."""
    mesh = AbstractMesh((2, 8), ("d", "t"), axis_types=(AxisType.Auto,) * 2)

    def placed(shape: tuple[int, int], axis: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(axis)))

    def local(x: jax.Array, *weights: jax.Array) -> jax.Array:
        for weight in weights:
            whole = lax.all_gather(weight, "d", axis=0, tiled=True)
            x = jnp.tanh(lax.all_gather(x, "t", axis=0, tiled=True) @ whole)
            x = lax.psum_scatter(x @ whole, "t", scatter_dimension=0, tiled=True)
        return x

    weights = [placed((4096, 4096), "d")] * 4
    body = jax.shard_map(
        local, mesh=mesh, in_specs=(P("t"), *[P("d")] * 4), out_specs=P("t"), check_vma=False
    )
    given = export.export(jax.jit(body), platforms=["cuda"])(placed((65536, 4096), "t"), *weights)
    return artifact.from_exported(given, "chain")


def scheduled(program: Artifact) -> Simulation:
    made = compile_artifact(program, "gpu")
    return simulate(hlo_task_graph(made.text, H100, made.topology.devices))


def together(run: Simulation) -> bool:
    """Whether two collectives are ever in flight at once."""
    flights = sorted(run.run.all_flights(), key=lambda flight: flight.begin)
    return any(a.end > b.begin + 1 for a, b in pairwise(flights))


@pytest.mark.soak
def test_collectives_of_two_links_are_in_flight_together() -> None:
    before = two_links()
    after = stablehlo_tools.transform(before, ASSIGN)
    domains = {communication_domain(c.op) for c in find_collectives(after.module)}
    assert domains == {"", SCALE_UP_FABRIC}
    own, now = scheduled(before), scheduled(after)
    assert not together(own)
    assert together(now)
    assert now.total_ns < 0.97 * own.total_ns
    told = [expected_run(program.module, H100).total_ns for program in (before, after)]
    assert told[1] < 0.97 * told[0]


def test_a_chain_of_products_is_left() -> None:
    """Nothing computes beside the one or the other: XLA would take longer with them in domains."""
    before = chain()
    assert str(stablehlo_tools.transform(before, ASSIGN).module) == str(before.module)
    forced = stablehlo_tools.transform(before, ALL)
    runs = [scheduled(program) for program in (before, forced)]
    assert runs[0].total_ns < runs[1].total_ns
    for program, run in zip((before, forced), runs, strict=True):
        told = expected_run(program.module, H100).exposed_ns
        assert told == pytest.approx(run.exposed_ns, rel=0.02)


def test_again_changes_nothing() -> None:
    once = stablehlo_tools.transform(two_links(), ASSIGN)
    again = stablehlo_tools.transform(once, ASSIGN)
    assert str(again.module) == str(once.module)


@pytest.mark.soak
def test_a_plan_has_a_slot_for_each_domain() -> None:
    """Experts that are exchanged within nodes, with weights that are gathered between them."""
    given = artifact.from_exported(MODELS["moe-forward"].full(layers=4), "moe")
    steps = "partition{hardware=h100},create-reduce-scatter"
    before = stablehlo_tools.transform(given, steps)
    after = stablehlo_tools.transform(before, f"{ALL},schedule-overlap")
    alone = stablehlo_tools.transform(before, "schedule-overlap")
    own, now, one = (scheduled(program).total_ns for program in (before, after, alone))
    assert now < 0.96 * one < one < own


def program(argument: str, body: str, result: str) -> Artifact:
    """A collective %g of 16 devices that stays within their nodes, and a sum that does not."""
    text = f"""module @p attributes {{mhlo.num_partitions = 16 : i32}} {{
      func.func public @main({argument}, %z: tensor<f32>) -> ({result}, tensor<f32>) {{
        %s = "stablehlo.all_reduce"(%z) ({{
        ^bb0(%l: tensor<f32>, %o: tensor<f32>):
          %a = stablehlo.add %l, %o : tensor<f32>
          stablehlo.return %a : tensor<f32>
        }}) {{channel_handle = #stablehlo.channel_handle<handle = 9, type = 1>,
          replica_groups = {ACROSS}, use_global_device_ids}} : (tensor<f32>) -> tensor<f32>
        {body}
        return %r, %s : {result}, tensor<f32>
      }}
    }}"""
    return artifact.parse(text.encode(), "program.mlir")


def collective(name: str, kind: str, operand: str, types: str, attributes: str) -> str:
    return f"""%{name} = "stablehlo.{kind}"(%{operand}) {{{attributes}, replica_groups = {WITHIN},
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>}} : {types}
      """


GATHERED = "all_gather_dim = {} : i64, use_global_device_ids"
REFUSED = {
    "a constant": (
        "%x: tensor<512x8xf32>",
        "%c = stablehlo.constant dense<1.0> : tensor<64x8xf32>\n"
        + collective(
            "g", "all_gather", "c", "(tensor<64x8xf32>) -> tensor<512x8xf32>", GATHERED.format(0)
        )
        + "%r = stablehlo.add %g, %x : tensor<512x8xf32>",
        "tensor<512x8xf32>",
    ),
    "an exchange": (
        "%x: tensor<64x128xf32>",
        collective(
            "r",
            "all_to_all",
            "x",
            "(tensor<64x128xf32>) -> tensor<8x1024xf32>",
            "split_dimension = 0 : i64, concat_dimension = 1 : i64, split_count = 8 : i64",
        ),
        "tensor<8x1024xf32>",
    ),
    "indices": (
        "%x: tensor<4x64x1xi32>, %t: tensor<32x128xf32>",
        collective(
            "g",
            "all_gather",
            "x",
            "(tensor<4x64x1xi32>) -> tensor<4x512x1xi32>",
            GATHERED.format(1),
        )
        + """%r = "stablehlo.gather"(%t, %g) {dimension_numbers = #stablehlo.gather<
          offset_dims = [2], collapsed_slice_dims = [0], start_index_map = [0],
          index_vector_dim = 2>, slice_sizes = array<i64: 1, 128>}
          : (tensor<32x128xf32>, tensor<4x512x1xi32>) -> tensor<4x512x128xf32>""",
        "tensor<4x512x128xf32>",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_xla_refuses_is_left_or_written_apart(name: str) -> None:
    tagged = program(*REFUSED[name])
    across, within = find_collectives(tagged.module)
    assert across.kind == "all_reduce"
    set_communication_domain(within.op, SCALE_UP_FABRIC)
    with pytest.raises(ToolError, match="collective_communication_domain is not supported"):
        compile_artifact(tagged, "gpu")
    after = stablehlo_tools.transform(program(*REFUSED[name]), ALL)
    domains = [communication_domain(found.op) for found in find_collectives(after.module)]
    assert domains == ["", SCALE_UP_FABRIC if name == "an exchange" else ""]
    compile_artifact(after, "gpu")
