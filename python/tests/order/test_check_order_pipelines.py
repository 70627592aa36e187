"""`check-order` on what this toolkit's own passes write: pipelines, their transfers, wide ranks.

Each comes with a near miss: the same program, a little changed, that does go wrong.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pipeline_programs
import pytest
from jax import export, lax
from jax.export import Exported
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from order_cases import DEFAULTS, read, rule, verdict
from rank_sets import table_of, write_set

import stablehlo_tools
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.program_set import JobOptions

ACROSS_DATA = JobOptions(devices=((0, 2), (1, 3)))
ACROSS_STAGES = JobOptions(devices=((0, 1), (2, 3)))


def step(weights: Any, batch: Any) -> Any:
    """Loss and gradients of residual blocks in a scan."""

    def layer(h: Any, w: Any) -> tuple[Any, None]:
        return h + jnp.tanh(h @ w["up"]) @ w["down"], None

    return jax.value_and_grad(lambda w: jnp.mean(lax.scan(layer, batch, w)[0] ** 2))(weights)


@cache
def one_f_one_b(*, is_threaded: bool = False) -> str:
    """1F1B over two stages, the batch divided over two devices, all collectives explicit."""
    mesh = AbstractMesh((2, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)

    def shape(sizes: tuple[int, ...], axis: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=NamedSharding(mesh, P(axis)))

    weights = {"up": shape((4, 8, 16), "stage"), "down": shape((4, 16, 8), "stage")}
    before = export.export(jax.jit(step))(weights, shape((8, 4, 8), "data"))
    pipeline = "expand-pipeline{microbatches=2 schedule=1f1b},partition"
    return written(before, pipeline + ",thread-tokens" * is_threaded)


def written(exported: Exported, pipeline: str) -> str:
    """The text of an export after a pipeline."""
    return str(artifact.from_exported(stablehlo_tools.transform(exported, pipeline)).module)


def rule_of(text: str, copies: int, options: JobOptions = DEFAULTS) -> str:
    """The rule that so many copies of a text break."""
    return rule(verdict(read(*[text] * copies), options))


def by_all_ranks(text: str) -> str:
    """The pipeline, but each device has a row of the table of its own."""
    changed = text.replace("dense<[0, 0, 1, 1]> :", "dense<[0, 1, 0, 1]> :")
    assert changed != text
    return changed


def test_a_pipeline_beside_data_is_decided_alike_where_rows_of_a_table_are() -> None:
    assert rule_of(one_f_one_b(), 1) == "ordered"


def test_rows_that_differ_along_the_data_are_not() -> None:
    assert rule_of(by_all_ranks(one_f_one_b()), 1) == "divergent-control-flow"


@pytest.mark.parametrize("options", [ACROSS_DATA, ACROSS_STAGES], ids=["data", "stages"])
def test_a_pipeline_compiled_apart(options: JobOptions) -> None:
    threaded = one_f_one_b(is_threaded=True)
    assert rule_of(threaded, 2, options) == "ordered"
    assert rule_of(threaded, 4) == "ordered"


def test_a_table_that_is_another_in_one_program() -> None:
    """Compiled apart, one of the two programs has another schedule."""
    threaded = one_f_one_b(is_threaded=True)
    one, other = re.findall(r'constant (dense<"0x[0-9A-F]+">) : tensor<2x6x10xi32>', threaded)
    changed = threaded.replace(one, "HELD").replace(other, one).replace("HELD", other)
    programs = read(threaded, changed)
    assert rule(verdict(programs, ACROSS_DATA)) == "decided-at-run-time"


SEND_RECV = "break-permute-cycles,decompose-collective-permute"
VALID = f"{SEND_RECV}{{validity}}"
PERMUTES = "decompose-collective-permute{validity form=collective-permute},thread-tokens"


@cache
def forward(pipeline: str) -> str:
    return written(pipeline_programs.forward(4, 4), pipeline)


@pytest.mark.parametrize("copies", [1, 2, 4])
@pytest.mark.parametrize("pipeline", [SEND_RECV, VALID, VALID + ",thread-tokens", PERMUTES])
def test_transfers_that_cross_programs_in_a_loop(pipeline: str, copies: int) -> None:
    assert rule_of(forward(pipeline), copies) == "ordered"


def test_a_ring_of_transfers_that_crosses_programs() -> None:
    text = forward(SEND_RECV)
    chain, ring = (
        "dense<[[0, 1], [1, 2], [2, 3]]> : tensor<3x2xi64>",
        "dense<[[0, 1], [1, 2], [2, 3], [3, 0]]> : tensor<4x2xi64>",
    )
    changed = text.replace(chain, ring)
    assert changed != text
    assert rule_of(changed, 2) != "ordered"


def test_transfers_that_are_skipped_in_other_iterations_in_one_program() -> None:
    text = forward(VALID)
    (table,) = re.findall(r"dense<\[([\d, ]+)\]> : tensor<7xi", text)
    turned = ", ".join(reversed(table.split(", ")))
    programs = read(text, text.replace(f"[{table}]", f"[{turned}]"))
    assert rule(verdict(programs)) == "decided-at-run-time"


def rank_programs(directory: Path, devices: int) -> list[str]:
    write_set(directory, table_of(("1f1b", 3, 4, None, devices)), devices)
    return [path.read_text(encoding="utf-8") for path in sorted(directory.glob("rank_*.mlir"))]


def test_wide_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 devices a rank do the same, so that one of each is enough to look at."""
    monkeypatch.setattr("stablehlo_tools.order.cycles._MOST_WORK", 20_000)
    assert rule(verdict(read(*rank_programs(tmp_path, 64)))) == "ordered"


@pytest.mark.parametrize("devices", [2, 64])
def test_a_wide_rank_with_a_gap_in_its_chain(tmp_path: Path, devices: int) -> None:
    """Nothing orders the first two messages of rank 0 in rank 1."""
    first, middle, last = rank_programs(tmp_path, devices)
    (_, second), *_ = re.findall(r'(%\w+):2 = "stablehlo.recv"\((%\w+#1)\)', middle)
    loose = middle.replace(f'"stablehlo.recv"({second})', '"stablehlo.recv"(%v1)', 1)
    assert loose != middle
    assert rule(verdict(read(first, loose, last))) == "unordered"
