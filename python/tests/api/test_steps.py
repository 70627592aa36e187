"""A user's own step: exported whatever its types are, loaded, and called in a loop."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from models.devices import DEVICES  # first: sets up the devices

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
import optax
from jax import export
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import stablehlo_tools
from stablehlo_tools.diagnostics import ToolError

MESH = jax.make_mesh((DEVICES,), ("data",))
OPTIMIZER = optax.adamw(1e-2)


class State(NamedTuple):
    """The state of a training loop, as users write it."""

    count: Any
    params: Any
    optimizer: Any


def _step(state: State, batch: dict[str, Any]) -> tuple[State, dict[str, Any]]:
    def loss(params: Any) -> Any:
        return ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean()

    value, gradients = jax.value_and_grad(loss)(state.params)
    updates, optimizer = OPTIMIZER.update(gradients, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    return State(state.count + 1, params, optimizer), {"loss": value}


def _state() -> State:
    params: Any = {"w": jnp.ones((8, 8)), "none": None, "layers": {0: jnp.ones(2)}}
    state = State(jnp.zeros((), jnp.int32), params, OPTIMIZER.init(params))
    return jax.device_put(state, NamedSharding(MESH, P()))


def _batch() -> dict[str, Any]:
    batch = {"x": np.ones((16, 8), np.float32), "y": np.zeros((16, 8), np.float32)}
    return jax.device_put(batch, NamedSharding(MESH, P("data")))


def _written(tmp_path: Path, **options: Any) -> Path:
    path = tmp_path / "step.jax_export"
    step = jax.jit(_step, donate_argnums=0)
    exported = stablehlo_tools.export(step, _state(), _batch(), platforms=["cpu"], **options)
    path.write_bytes(exported.serialize())
    return path


def test_a_named_tuple_is_exported_and_comes_back_from_the_loop(tmp_path: Path) -> None:
    step = stablehlo_tools.load_step(_written(tmp_path))
    state, expected, batch = _state(), _state(), _batch()
    for _ in range(3):
        given = jax.tree.leaves(state)
        state, metrics = step(state, batch)
        expected, wanted = jax.jit(_step)(expected, batch)
        assert isinstance(state, State)
        assert metrics["loss"] == wanted["loss"]
        assert all(leaf.is_deleted() for leaf in given)
    assert all(not leaf.is_deleted() for leaf in jax.tree.leaves(batch))
    jax.tree.map(np.testing.assert_array_equal, state, expected)


def test_the_donation_of_the_export_is_that_of_the_step(tmp_path: Path) -> None:
    step = stablehlo_tools.load_step(_written(tmp_path))
    state, batch = step.donated
    assert all(jax.tree.leaves(state))
    assert not any(jax.tree.leaves(batch))


def test_a_pass_keeps_the_donation(tmp_path: Path) -> None:
    exported = export.deserialize(bytearray(_written(tmp_path).read_bytes()))
    step = stablehlo_tools.load_step(stablehlo_tools.transform(exported, "partition"))
    assert all(jax.tree.leaves(step.donated[0]))
    state, _ = step(_state(), _batch())
    assert isinstance(state, State)


def test_the_shardings_of_the_artifact_place_a_state_and_a_batch(tmp_path: Path) -> None:
    step = stablehlo_tools.load_step(_written(tmp_path))
    _, batch = step.shardings
    assert batch["x"].spec == P("data")
    placed = jax.device_put(np.ones((16, 8), np.float32), batch["x"])
    assert placed.sharding.is_equivalent_to(_batch()["x"].sharding, 2)


def test_arrays_of_numpy_are_placed_by_the_artifact(tmp_path: Path) -> None:
    step = stablehlo_tools.load_step(_written(tmp_path))
    state, _ = step(jax.tree.map(np.asarray, _state()), jax.tree.map(np.asarray, _batch()))
    assert len(jax.tree.leaves(state)[0].sharding.device_set) == DEVICES


def test_a_function_is_jitted_with_its_donation() -> None:
    exported = stablehlo_tools.export(
        _step, _state(), _batch(), platforms=["cpu"], donate_argnums=0
    )
    assert all(jax.tree.leaves(stablehlo_tools.load_step(exported).donated[0]))


def test_without_an_accelerator_the_platform_is_asked_for() -> None:
    with pytest.raises(ToolError, match=r"pass platforms=\['cuda'\] or \['tpu'\]"):
        stablehlo_tools.export(_step, _state(), _batch())


def test_a_step_of_another_platform_is_refused() -> None:
    exported = stablehlo_tools.export(_step, _state(), _batch(), platforms=["cuda"])
    with pytest.raises(ToolError, match="exported for cuda, and jax runs on cpu"):
        stablehlo_tools.load_step(exported)


def test_other_arguments_are_refused(tmp_path: Path) -> None:
    step = stablehlo_tools.load_step(_written(tmp_path))
    with pytest.raises(
        ToolError, match=r"with \[8, 2\] arrays, and was called with 2 with \[8, 1\]"
    ):
        step(_state(), {"x": np.ones((16, 8))})
    with pytest.raises(ToolError, match=r"has shape \(8, 8\), and the step was exported for \(16"):
        step(_state(), {"x": np.ones((8, 8)), "y": np.ones((16, 8))})


class Registered(NamedTuple):
    """A state that only the process that exports registers."""

    value: Any


class Unregistered(NamedTuple):
    """A state that this process registers after it has read a file with it."""

    value: Any


def test_a_file_with_types_of_another_process_is_read_and_written(tmp_path: Path) -> None:
    name = "another.process.Registered"
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    export.register_namedtuple_serialization(Registered, serialized_name=name)
    data = export.export(jax.jit(lambda r: Registered(r.value * 2)))(Registered(shape)).serialize()
    unknown = bytes(data).replace(name.encode(), b"another.process.Unknownxyz")
    path, written = tmp_path / "unknown.jax_export", tmp_path / "written.jax_export"
    path.write_bytes(unknown)
    stablehlo_tools.load(path)
    stablehlo_tools.save(stablehlo_tools.load(path), written)  # now the stand-in exists
    assert b"another.process.Unknownxyz" in written.read_bytes()
    # The name is free for the type itself.
    export.register_namedtuple_serialization(
        Unregistered, serialized_name="another.process.Unknownxyz"
    )
    (result,) = stablehlo_tools.load_step(path)(Registered(np.ones(4, np.float32)))
    np.testing.assert_array_equal(result, 2 * np.ones(4))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Momentum:
    """A state with a field that is no array, as users write it."""

    weights: Any
    biases: Any
    momentum: Any
    rate: float = field(default=1e-2, metadata={"static": True})


def _with_bias(state: Momentum, x: Any) -> Momentum:
    def loss(weights: Any, biases: Any) -> Any:
        return (jnp.tanh(x @ weights + biases) ** 2).mean()

    weights, biases = jax.grad(loss, (0, 1))(state.weights, state.biases)
    momentum = 0.9 * state.momentum + biases
    return replace(
        state,
        weights=state.weights - state.rate * weights,
        biases=state.biases - state.rate * momentum,
        momentum=momentum,
    )


def _fsdp() -> tuple[Momentum, Any]:
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("data",))
    rows, whole = NamedSharding(mesh, P(None, "data")), NamedSharding(mesh, P())
    state = Momentum(
        jax.device_put(jnp.ones((64, 64)), rows),
        jax.device_put(jnp.ones(64), whole),
        jax.device_put(jnp.zeros(64), whole),
    )
    return state, jax.device_put(jnp.ones((64, 64)), whole)


def test_a_state_stays_where_it_is_after_partition() -> None:
    """Biases are returned in their own sharding, so that the second call is the program of the
    first, and can reuse their memory."""
    state, x = _fsdp()
    exported = stablehlo_tools.export(_with_bias, state, x, platforms=["cpu"], donate_argnums=0)
    step = stablehlo_tools.load_step(stablehlo_tools.transform(exported, "partition"))
    for _ in range(3):
        before, state = state, step(state, x)
        given, returned = (
            [leaf.sharding.spec for leaf in jax.tree.leaves(each)] for each in (before, state)
        )
        assert [P(*spec) for spec in given] == [P(*spec) for spec in returned]
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    assert len(step._calls) == 1


def test_a_state_is_placed_in_its_own_type() -> None:
    state, x = _fsdp()
    exported = stablehlo_tools.export(_with_bias, state, x, platforms=["cpu"])
    step = stablehlo_tools.load_step(exported)
    placed = step.place(jax.tree.map(np.asarray, state))
    assert isinstance(placed, Momentum)
    assert placed.weights.sharding.spec == P(None, "data")
    assert "Step(" in repr(step)
    assert len(repr(step)) < 200


def test_other_static_fields_are_refused() -> None:
    state, x = _fsdp()
    exported = stablehlo_tools.export(_with_bias, state, x, platforms=["cpu"])
    other = replace(state, rate=5.0)
    with pytest.raises(
        ToolError, match=r"other types or static fields .*5\.0.* instead of .*0\.01"
    ):
        stablehlo_tools.load_step(exported)(other, x)
    stablehlo_tools.load_step(exported, check_types=False)(other, x)
    with pytest.raises(ToolError, match="by position, not by name: x"):
        stablehlo_tools.load_step(exported)(state, x=x)


def test_a_leaf_that_is_no_array_says_what_to_export() -> None:
    with pytest.raises(ToolError, match="partition") as found:
        stablehlo_tools.export(
            lambda state: state["w"], {"w": jnp.ones(2), "act": jnp.tanh}, platforms=["cpu"]
        )
    assert "equinox.partition" in str(found.value)


def test_the_wrapper_of_another_library_is_refused() -> None:
    class Wrapper:
        def __call__(self, x: Any) -> Any:
            return x

        def lower(self) -> None: ...

    with pytest.raises(ToolError, match="give the function below it"):
        stablehlo_tools.export(Wrapper(), jnp.ones(2), platforms=["cpu"])
