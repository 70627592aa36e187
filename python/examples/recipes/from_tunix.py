"""Tunix: the training step of its PeftTrainer, on Qwen3 with LoRA adapters.

    python from_tunix.py [--keep DIR] [--optimize]

`PeftTrainer.train` jits `create_train_step_fn()` over the model and the optimizer; the same is
exported here, as a function of their state.
"""

# The library is in an environment of its own: see docs/recipes.
# pyright: reportMissingImports=false, reportUnknownVariableType=false

from __future__ import annotations

import sys
from typing import Any

from recipe import abstract, export_step, main

import jax  # isort: skip
import jax.numpy as jnp
import optax
import qwix
import tunix.models.qwen3.model as qwen3
from flax import nnx
from jax.export import Exported
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

BATCH, LENGTH, WORDS = 8, 32, 256
MESH = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
ADAPTED = ".*q_proj|.*k_proj|.*v_proj|.*o_proj|.*gate_proj|.*up_proj|.*down_proj"


def constrained(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """The activation, divided as the model's sharding config says."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P(*axes)))


def adapted_model() -> nnx.Module:
    """Qwen3 at a small size, each projection with an adapter of rank 8."""
    config = qwen3.ModelConfig(
        num_layers=2,
        vocab_size=WORDS,
        embed_dim=64,
        hidden_dim=128,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        rope_theta=1_000_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
        remat_config=qwen3.RematConfig.DECODER,
    )
    model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    provider = qwix.LoraProvider(module_path=ADAPTED, rank=8, alpha=16.0)
    return qwix.apply_lora_to_model(model, provider, rngs=nnx.Rngs(1), **model.get_model_input())


def build() -> Exported:
    """The trainer's step for fsdp 4 x tp 2."""
    trainer = PeftTrainer(adapted_model(), optax.adamw(1e-4), TrainingConfig(eval_every_n_steps=1))
    train_step = trainer.create_train_step_fn()
    definition, state = nnx.split({"model": trainer.model, "optimizer": trainer.optimizer})

    def step(state: Any, batch: dict[str, jax.Array]) -> tuple[Any, Any]:
        both = nnx.merge(definition, state)
        loss, _, norm = train_step(both["model"], both["optimizer"], batch)
        return nnx.state(both), {"loss": loss, "norm": norm}

    specs = jax.tree.leaves(
        nnx.get_partition_spec(state), is_leaf=lambda spec: isinstance(spec, P) or spec is None
    )
    structure = jax.tree.structure(state)
    shardings = jax.tree.unflatten(structure, [NamedSharding(MESH, spec or P()) for spec in specs])
    whole = NamedSharding(MESH, P())
    # Tunix leaves its constraints out where jax runs on a CPU, as it does where one exports.
    qwen3.shard = constrained
    return export_step(
        step,
        abstract(state, shardings),
        batch(),
        out_shardings=(shardings, {"loss": whole, "norm": whole}),
        donated=1,
    )


def batch() -> dict[str, jax.ShapeDtypeStruct]:
    """What the trainer's `gen_model_input_fn` gives the loss, divided along fsdp."""
    rows = NamedSharding(MESH, P("fsdp"))

    def array(dtype: Any, *sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=rows)

    return {
        "input_tokens": array(jnp.int32, BATCH, LENGTH),
        "input_mask": array(jnp.bool_, BATCH, LENGTH),
        "positions": array(jnp.int32, BATCH, LENGTH),
        "attention_mask": array(jnp.bool_, BATCH, LENGTH, LENGTH),
    }


if __name__ == "__main__":
    sys.exit(main(build, "from_tunix", "google-tunix", "qwix", "flax"))
