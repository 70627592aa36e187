"""Levanter: the step of its Trainer, on a Llama of stacked layers with named axes.

    python from_levanter.py [--keep DIR] [--optimize] --tool FILE

`Trainer.train_step` jits `Trainer._train_step` over a TrainerState; the same is exported here, with
the shardings that the trainer's axis mapping gave the state.
"""

# The library is in an environment of its own: see docs/recipes.
# pyright: reportMissingImports=false, reportUnknownVariableType=false

from __future__ import annotations

import sys
from typing import Any

from recipe import abstract, export_step, main

import jax  # isort: skip
import equinox as eqx
import haliax as hax
from jax.export import Exported
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from levanter.layers.attention import AttentionBackend
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmExample, compute_next_token_loss
from levanter.optim import AdamConfig
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig

BATCH, LENGTH, WORDS = 8, 32, 256


def build() -> Exported:
    """The step for 4 parts of the data, which divide the weights too, and 2 of the model."""
    config = LlamaConfig(
        seq_len=LENGTH,
        hidden_dim=64,
        intermediate_dim=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        attn_backend=AttentionBackend.VANILLA,
    )
    training = TrainerConfig(
        id="recipe",
        tracker=NoopConfig(),
        train_batch_size=BATCH,
        num_train_steps=10,
        model_axis_size=2,
        tensor_parallel_axes=["mlp", "heads"],
        require_accelerator=False,
        load_checkpoint=False,
    )
    words, rows = hax.Axis("vocab", WORDS), hax.Axis("batch", BATCH)
    keys = jax.random.split(jax.random.PRNGKey(0), 2)
    with Trainer(training, AdamConfig().build(10), compute_next_token_loss) as trainer:
        state = trainer.initial_state(keys[0], model_init=lambda: config.build(words, key=keys[1]))
        arrays, rest = eqx.partition(state, eqx.is_array)
        whole = NamedSharding(trainer.device_mesh, P())
        shardings = jax.tree.map(
            lambda x: x.sharding if isinstance(x.sharding, NamedSharding) else whole, arrays
        )

        def step(arrays: Any, batch: dict[str, jax.Array]) -> tuple[Any, Any]:
            tokens = hax.named(batch["tokens"], (rows, config.Pos))
            example = hax.vmap(LmExample.causal, rows)(tokens)
            state = eqx.combine(arrays, rest)
            loss, state, _, _ = trainer._train_step(state, (example,), {}, _no_hooks=True)
            return eqx.filter(state, eqx.is_array), {"loss": loss}

        tokens = jax.ShapeDtypeStruct(
            (BATCH, LENGTH), "int32", sharding=NamedSharding(trainer.device_mesh, P("data"))
        )
        return export_step(
            step,
            abstract(arrays, shardings),
            {"tokens": tokens},
            out_shardings=(shardings, {"loss": whole}),
            donated=1,
        )


if __name__ == "__main__":
    sys.exit(main(build, "from_levanter", "haliax", "equinox"))
