"""EasyDeL: the loss and the update of an EasyDeLState, on a Llama under EasyDeL's own mesh.

    python from_easydel.py [--keep DIR] [--optimize] --tool FILE

Its trainers jit a step over an EasyDeLState that merges the model, takes `compute_loss` and applies
the gradients. That is written out here. It was not run to its end: docs/recipes says how far.
"""

# The library is in an environment of its own: see docs/recipes.
# pyright: reportMissingImports=false, reportUnknownVariableType=false

from __future__ import annotations

import sys
from typing import Any

from recipe import abstract, export_step, main

import jax  # isort: skip
import easydel
import jax.numpy as jnp
import optax
from flax import nnx
from jax.export import Exported
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

BATCH, LENGTH, WORDS = 8, 32, 256


def build() -> Exported:
    """The step for fsdp 4 x tp 2, of its axes dp, fsdp, ep, tp and sp."""
    config = easydel.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * LENGTH,
        sharding_axis_dims=(1, 4, 1, 2, 1),
        attn_mechanism="vanilla",
        gradient_checkpointing="nothing_saveable",
    )
    model = easydel.LlamaForCausalLM(
        config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0)
    )
    state = easydel.EasyDeLState.create(
        model=model, tx=optax.adamw(3e-4), init_opt_state=True
    ).shard_state()

    def step(state: Any, batch: dict[str, jax.Array]) -> tuple[Any, Any]:
        def loss(tree: Any) -> jax.Array:
            outputs, _ = state.merge(tree).compute_loss(**batch)
            return outputs.loss

        value, gradients = jax.value_and_grad(loss)(state.graphstate)
        return state.apply_gradients(grads=gradients), {"loss": value}

    mesh = config.mesh
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P(("dp", "fsdp")))
    shardings = jax.tree.map(
        lambda x: x.sharding if isinstance(x.sharding, NamedSharding) else whole, state
    )
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32, sharding=rows)
    with mesh:
        return export_step(
            step,
            abstract(state, shardings),
            {"input_ids": tokens, "attention_mask": tokens, "labels": tokens},
            out_shardings=(shardings, {"loss": whole}),
            donated=1,
        )


if __name__ == "__main__":
    sys.exit(main(build, "from_easydel", "easydel", "flax"))
