"""Stacks of layers in both orders: what is sent for it, what `layout=pipeline` finds and refuses,
and the maps that put checkpoints from one order into the other.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import kept_values
import numpy as np
import optax
import pytest
from jax import export, lax
from jax.export import Exported
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from kept_values import Known, assert_kept
from pipeline_checks import Sent, collectives_after_partition
from soaking import one_in

import stablehlo_tools
from stablehlo_tools import LayerOrder, ToolError, find_layer_order
from stablehlo_tools import to_layer_order as in_layers
from stablehlo_tools import to_pipeline_order as in_pipeline
from stablehlo_tools.cli.main import main as run
from stablehlo_tools.transforms.parts.expand_pipeline.expansion_plan import LayerChunks
from stablehlo_tools.transforms.parts.expand_pipeline.stacks import rounds

LAYERS, BATCH, WIDTH, INNER = 8, 8, 8, 16
MESHES = {"stage=4": {"stage": 4}, "stage=2 data=2": {"stage": 2, "data": 2}}
RULE = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
SCHEDULES = [
    "microbatches=4",
    "microbatches=4 repeats=2 schedule=circular",
    "microbatches=4 schedule=1f1b",
    "microbatches=4 repeats=2 schedule=1f1b",
]
INTERLEAVED = SCHEDULES[1]
Tree = Any


def forward(weights: Tree, x: jax.Array) -> jax.Array:
    def layer(h: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        return h + jnp.tanh(h @ w["inner"]) @ w["outer"] * w["scale"], None

    return lax.scan(layer, x @ weights["first"], weights["layers"])[0]


def gradients(weights: Tree, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Tree]:
    return jax.value_and_grad(lambda w: jnp.mean((forward(w, x) - y) ** 2))(weights)


def step(weights: Tree, moments: Tree, x: jax.Array, y: jax.Array) -> tuple[Tree, Tree, jax.Array]:
    loss, gradient = gradients(weights, x, y)
    updates, moments = RULE.update(gradient, moments, weights)
    return optax.apply_updates(weights, updates), moments, loss


def shapes(layers: int = LAYERS) -> Tree:
    stack = {"inner": (layers, WIDTH, INNER), "outer": (layers, INNER, WIDTH), "scale": (layers, 1)}
    return {"first": (WIDTH, WIDTH), "layers": stack}


def exported(
    function: Callable[..., Any],
    axes: dict[str, int],
    *,
    layers: int = LAYERS,
    divided: bool = False,
    results: P | None = None,
) -> Exported:
    """A function of weights, moments if it takes any, and a batch; `divided`: layers on stages."""
    kinds = (AxisType.Auto,) * len(axes)
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=kinds)

    def placed(shape: tuple[int, ...], *names: str) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, P(*names))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    def weight(path: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return placed(shape, *["stage"] * (divided and "layers" in jax.tree_util.keystr(path)))

    def is_shape(node: Any) -> bool:
        return isinstance(node, tuple)

    weights = jax.tree_util.tree_map_with_path(weight, shapes(layers), is_leaf=is_shape)
    samples = placed((BATCH, WIDTH), *(["data"] if "data" in axes else []))
    given: list[Any] = [weights, samples]
    if function in (gradients, step):
        given.append(samples)
    if function is step:
        moments = jax.eval_shape(RULE.init, weights)
        given.insert(1, jax.tree.map(lambda leaf: placed_like(leaf, mesh), moments))
    out: dict[str, Any] = {} if results is None else {"out_shardings": NamedSharding(mesh, results)}
    return export.export(jax.jit(function, **out))(*given)


def placed_like(leaf: Any, mesh: AbstractMesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, P()))


def arguments(program: Exported) -> tuple[Any, ...]:
    """Random ones; moments are those behind a first step."""
    rng = np.random.default_rng(0)

    def drawn(aval: Any) -> Any:
        if np.issubdtype(aval.dtype, np.integer):
            return np.ones(aval.shape, aval.dtype)
        return (0.3 * rng.uniform(0.1, 1, aval.shape)).astype(aval.dtype)

    return program.in_tree.unflatten(map(drawn, program.in_avals))[0]


@functools.cache
def known(name: str, mesh: str) -> tuple[Exported, Known]:
    """A program, what it computes, and what it would on one device without rounding."""
    function = {"forward": forward, "gradients": gradients, "step": step}[name]
    program = exported(function, MESHES[mesh])
    alone = exported(function, {"stage": 1})
    return program, Known.of(program, arguments(program), alone)


def over_stages(program: Exported) -> list[Sent]:
    """The collectives over the stages, outside of loops, that move stacks; sums are no such."""
    return [
        sent
        for sent in collectives_after_partition(program)
        if "stage" in sent.axes and sent.depth == 0 and sent.kind != "all_reduce"
    ]


def kinds(program: Exported) -> set[str]:
    return {sent.kind for sent in over_stages(program)}


def outputs_in_order(program: Exported, order: LayerOrder, name: Known) -> list[np.ndarray]:
    """The outputs of a program in the pipeline's order, brought back into that of the layers."""
    values = kept_values.run(program, in_pipeline(name.arguments, order))
    return in_layers(values, order, of="results")


def assert_same(program: Exported, order: LayerOrder, before: Known) -> None:
    """That a program in the pipeline's order computes what the one before did, nearly."""
    after = outputs_in_order(program, order, before)
    for name, new, old, truth in zip(before.names, after, before.values, before.truth, strict=True):
        scale = float(np.abs(truth).max(initial=0)) or 1.0
        allowed = 4 * np.abs(old - truth).max(initial=0) + 16 * np.finfo(np.float32).eps * scale
        assert np.abs(new - truth).max(initial=0) <= allowed, name


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("repeats", [1, 2, 3, 4, 5])
def test_the_rounds_bring_every_chunk_to_its_place(ranks: int, repeats: int) -> None:
    seen: set[int] = set()
    for sent in rounds(ranks, repeats):
        assert [p % ranks for p in sent] == list(range(ranks))
        assert sorted(p // repeats for p in sent) == list(range(ranks))
        seen |= set(sent)
    assert seen == set(range(ranks * repeats))
    assert len(rounds(ranks, repeats)) == repeats


def test_two_ranks_with_two_chunks_exchange_one_each() -> None:
    assert rounds(2, 2) == ((0, 3), (2, 1))


@pytest.mark.parametrize("divided", [False, True], ids=["whole", "divided"])
def test_interleaved_gradients_are_exchanged_and_not_gathered(divided: bool) -> None:
    check_an_exchange("stage=4", divided=divided)


@pytest.mark.soak
@pytest.mark.parametrize("divided", [False, True], ids=["whole", "divided"])
def test_gradients_with_data_are_exchanged_and_not_gathered(divided: bool) -> None:
    check_an_exchange("stage=2 data=2", divided=divided)


def check_an_exchange(mesh: str, *, divided: bool) -> None:
    _, before = known("gradients", mesh)
    program = exported(gradients, MESHES[mesh], divided=divided)
    after = stablehlo_tools.transform(program, f"expand-pipeline{{{INTERLEAVED}}}")
    assert kinds(after) == {"collective_permute"}
    a_chunk = LAYERS // MESHES[mesh]["stage"] // 2
    assert {sent.results[0].count(a_chunk) > 0 for sent in over_stages(after)} == {True}
    exchanges = 3 * (2 if divided else 1) * (2 if mesh == "stage=4" else 1)
    assert len(over_stages(after)) == exchanges
    assert_kept(before.compared(after))


def test_one_chunk_on_a_rank_needs_no_exchange() -> None:
    program, before = known("gradients", "stage=4")
    after = stablehlo_tools.transform(program, "expand-pipeline{microbatches=4}")
    assert not over_stages(after)
    assert_kept(before.compared(after))


def test_a_result_that_is_to_be_whole_is_gathered_once() -> None:
    program = exported(gradients, MESHES["stage=2 data=2"], results=P())
    after = stablehlo_tools.transform(program, f"expand-pipeline{{{INTERLEAVED}}}")
    gathered = [sent.results[0] for sent in over_stages(after) if sent.kind == "all_gather"]
    assert sorted(gathered) == sorted(shapes()["layers"].values())


def test_the_exchange_is_told_in_bytes() -> None:
    program = exported(gradients, MESHES["stage=4"])
    with pytest.warns(UserWarning, match=r"a rank sends up to (\d+) bytes") as told:
        stablehlo_tools.transform(program, f"expand-pipeline{{{INTERLEAVED} explain=true}}")
    a_layer = 4 * (2 * WIDTH * INNER + 1)
    assert any(f"up to {2 * a_layer} bytes" in str(each.message) for each in told)


@pytest.mark.parametrize("schedule", SCHEDULES[1::2])
def test_a_training_step_in_the_pipelines_order(schedule: str) -> None:
    check_a_step("stage=4", schedule)


@pytest.mark.soak
@pytest.mark.parametrize("schedule", SCHEDULES[::2])
def test_a_training_step_with_one_chunk_on_a_rank(schedule: str) -> None:
    check_a_step("stage=4", schedule)


@pytest.mark.parametrize("schedule", SCHEDULES[1:2])
def test_a_training_step_with_data_in_the_pipelines_order(schedule: str) -> None:
    check_a_step("stage=2 data=2", schedule)


@pytest.mark.soak
@pytest.mark.parametrize("schedule", [*SCHEDULES[:1], *SCHEDULES[2:]])
def test_more_training_steps_with_data_in_the_pipelines_order(schedule: str) -> None:
    check_a_step("stage=2 data=2", schedule)


def check_a_step(mesh: str, schedule: str) -> None:
    program, before = known("step", mesh)
    pipeline = f"expand-pipeline{{{schedule} layout=pipeline}}"
    order = find_layer_order(program, pipeline)
    (stacks,) = order.stacks
    assert [each.path.split("[")[0] for each in stacks.arguments] == ["weights"] * 3 + [
        "moments"
    ] * 6
    assert len(stacks.results) == 9
    after = stablehlo_tools.transform(program, pipeline)
    assert not over_stages(after)
    assert_same(after, order, before)


@pytest.mark.parametrize("mesh", one_in(2, MESHES))
def test_a_forward_pass_in_the_pipelines_order_is_the_same_in_every_bit(mesh: str) -> None:
    program, before = known("forward", mesh)
    schedule = INTERLEAVED.replace(
        "microbatches=4", f"microbatches={4 if mesh == 'stage=4' else 2}"
    )
    order = find_layer_order(program, f"expand-pipeline{{{schedule}}}")
    after = stablehlo_tools.transform(program, f"expand-pipeline{{{schedule} layout=pipeline}}")
    (output,) = outputs_in_order(after, order, before)
    assert output.tobytes() == before.values[0].tobytes()
    (wrong,) = kept_values.run(after, before.arguments)
    assert not np.allclose(wrong, output), "layers in another order are another function"


def test_arguments_arrive_divided_over_the_stages() -> None:
    program, _ = known("gradients", "stage=4")
    after = stablehlo_tools.transform(program, f"expand-pipeline{{{INTERLEAVED} layout=pipeline}}")
    again = export.deserialize(bytearray(after.serialize()))
    (stacks,) = find_layer_order(program, f"expand-pipeline{{{INTERLEAVED}}}").stacks
    for version, divided in ((program, set[int]()), (again, {e.number for e in stacks.arguments})):
        shardings = enumerate(version.in_shardings_jax())
        over_stages = {n for n, each in shardings if "stage" in getattr(each, "spec", ())}
        assert over_stages == divided


def test_a_map_survives_json_and_names_checkpoints_by_path() -> None:
    program, before = known("step", "stage=4")
    order = find_layer_order(program, f"expand-pipeline{{{INTERLEAVED}}}")
    assert LayerOrder.from_json(order.to_json()) == order
    assert order.stacks[0].order == (0, 4, 1, 5, 2, 6, 3, 7)
    weights = before.arguments[0]
    moved = in_pipeline(weights, order, at="weights")
    assert moved["first"] is weights["first"]
    np.testing.assert_array_equal(moved["layers"]["inner"][1], weights["layers"]["inner"][4])
    jax.tree.map(np.testing.assert_array_equal, moved, in_pipeline(before.arguments, order)[0])
    back = in_layers(moved, order, at="weights")
    jax.tree.map(np.testing.assert_array_equal, back, weights)
    on_device = in_pipeline(jax.tree.map(jnp.asarray, weights), order, at="weights")
    jax.tree.map(np.testing.assert_array_equal, on_device, moved)
    same = in_layers(moved, order, of="results", at="result[0]")
    jax.tree.map(np.testing.assert_array_equal, same, weights)


def test_layers_along_another_dimension_and_several_rows_a_layer() -> None:
    entry = {"number": 0, "path": "", "dimension": 1}
    stacks = {"layers": 4, "order": [0, 2, 1, 3], "arguments": [entry], "results": []}
    text = json.dumps({"axis": "stage", "ranks": 2, "repeats": 2, "stacks": [stacks]})
    order = LayerOrder.from_json(text)
    (moved,) = in_pipeline([np.arange(16).reshape(2, 8)], order)
    assert moved[0].tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert in_layers([moved], order)[0].tolist() == np.arange(16).reshape(2, 8).tolist()


def test_trees_that_do_not_fit_are_refused() -> None:
    program, before = known("step", "stage=4")
    order = find_layer_order(program, f"expand-pipeline{{{INTERLEAVED}}}")
    with pytest.raises(ToolError, match="holds layers, but only 4 arrays"):
        in_pipeline(before.arguments[0], order)
    with pytest.raises(
        ToolError, match=r"should hold 8 layers along dimension 0, but its shape is \[7"
    ):
        in_pipeline(jax.tree.map(lambda leaf: leaf[:7], before.arguments[0]), order, at="weights")
    with pytest.raises(ToolError, match="path that begins with 'parameters'"):
        in_pipeline(before.arguments[0], order, at="parameters")
    with pytest.raises(ToolError, match="not a layer map"):
        LayerOrder.from_json("{}")
    with pytest.raises(ToolError, match="must list each"):
        LayerOrder.from_json(order.to_json().replace("7", "6"))


def sliced(weights: Tree, x: jax.Array) -> jax.Array:
    """Reads a single layer outside of the loop."""
    return forward(weights, x) * weights["layers"]["scale"][2]


def joined(weights: Tree, x: jax.Array) -> jax.Array:
    """Makes the stack of two halves."""
    halves = jax.tree.map(lambda w: jnp.concatenate([w[4:], w[:4]]), weights["layers"])
    return forward({**weights, "layers": halves}, x)


@pytest.mark.parametrize(
    ("function", "op"), [(sliced, "slice"), (joined, "concatenate")], ids=["sliced", "joined"]
)
def test_ops_on_single_layers_are_refused_by_name(function: Callable[..., Any], op: str) -> None:
    program = exported(function, MESHES["stage=4"])
    with pytest.raises(ToolError, match=rf"stablehlo.{op} needs single layers.*\(P8\)") as refused:
        stablehlo_tools.transform(program, f"expand-pipeline{{{INTERLEAVED} layout=pipeline}}")
    assert refused.value.diagnostic.place.function in (
        function.__name__,
        "joined.<locals>.<lambda>",
    )
    stablehlo_tools.transform(program, f"expand-pipeline{{{INTERLEAVED}}}")


def scheduled(weights: Tree, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Constants and numbers of layers that differ from layer to layer, and a sum over all."""
    rates = jnp.asarray(np.linspace(0.5, 1.5, LAYERS, dtype=np.float32))[:, None]
    scale = weights["layers"]["scale"] * rates
    layers = {**weights["layers"], "scale": scale * (1 + jnp.arange(LAYERS)[:, None])}
    norm = optax.tree.norm(layers)
    return forward({**weights, "layers": layers}, x), norm


def test_constants_of_layers_are_put_in_order_too() -> None:
    program = exported(scheduled, MESHES["stage=4"])
    pipeline = f"expand-pipeline{{{INTERLEAVED} layout=pipeline}}"
    order = find_layer_order(program, pipeline)
    after = stablehlo_tools.transform(program, pipeline)
    assert not over_stages(after)
    before = Known.of(program, arguments(program))
    outputs = outputs_in_order(after, order, before)
    assert outputs[0].tobytes() == before.values[0].tobytes()
    np.testing.assert_allclose(outputs[1], before.values[1], rtol=1e-6)


def test_layers_that_do_not_divide_are_refused() -> None:
    program = exported(forward, {"stage": 4}, layers=9)
    with pytest.raises(ToolError, match=r"cannot cut 9 layers into 8 equal chunks.*\(P8\)"):
        stablehlo_tools.transform(program, f"expand-pipeline{{{INTERLEAVED} layout=pipeline}}")


def test_the_command_writes_the_map(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, _ = known("forward", "stage=4")
    path, written = tmp_path / "forward.jax_export", tmp_path / "map.json"
    path.write_bytes(program.serialize())
    pipeline = f"expand-pipeline{{{INTERLEAVED}}}"
    assert run(["layer-order", str(path), "-p", pipeline, "-o", str(written)]) == 0
    assert LayerOrder.from_json(written.read_text()) == find_layer_order(program, pipeline)
    assert run(["layer-order", str(path), "-p", pipeline]) == 0
    assert json.loads(capsys.readouterr().out)["repeats"] == 2
    assert run(["layer-order", str(path), "-p", "canonicalize"]) == 2
    assert "one expand-pipeline, not 0" in capsys.readouterr().err
    assert run(["layer-order", str(tmp_path / "none"), "-p", pipeline]) == 2


def test_the_order_is_that_of_the_chunks() -> None:
    for ranks, repeats, layers in ((4, 2, 8), (2, 3, 12), (3, 1, 6)):
        order = LayerChunks(ranks, repeats, layers).order()
        span = layers // (ranks * repeats)
        expected = [
            (chunk * ranks + rank) * span + layer
            for rank in range(ranks)
            for chunk in range(repeats)
            for layer in range(span)
        ]
        assert order == expected
