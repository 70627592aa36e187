"""The token chain on random programs: exact inverse, idempotent, same values, same order.

The soak tests (`make soak`) run the same checks on many more programs.
"""

from typing import Any

import jax
import numpy as np
import pytest
from compile_targets import searched
from hypothesis import given, settings
from random_order import PIPELINES
from random_programs import DEVICES, SLOW, programs

from stablehlo_tools import bindings
from stablehlo_tools.api import transforming
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.passes.pipeline import Pipeline
from stablehlo_tools.targets.topologies import Target


def after(program: Artifact, pipeline: str) -> Artifact:
    """A copy of the program after a pipeline."""
    result = program.copy()
    transforming.run_pipeline(result, Pipeline.parse(pipeline))
    return result


def portable(program: Artifact) -> Artifact:
    """The program written as a portable artifact and read again."""
    return artifact.parse(artifact.encode(program, artifact.ArtifactForm.PORTABLE))


def text(program: Artifact) -> str:
    return artifact.to_text(program.module, locations=True)


def check_structure(source: str) -> None:
    """Threading is idempotent, its inverse exact, in every form; the result serialises."""
    # Portable artifacts lose ops that nobody uses, so start from what is left of the program.
    plain = portable(artifact.parse(source.encode()))
    for pipeline in PIPELINES:
        threaded = after(plain, pipeline)
        assert text(after(threaded, pipeline)) == text(threaded)
        assert text(after(threaded, "strip-tokens")) == text(plain)
        again = portable(threaded)
        assert text(again) == text(threaded)
        assert text(after(again, "strip-tokens")) == text(plain)
    composite = after(plain, PIPELINES[1])
    assert text(after(composite, PIPELINES[0])) == text(after(plain, PIPELINES[0]))


def check_values(source: str) -> None:
    """Every device computes the same bits before and after, on both sides of the branches.

    XLA's fusion is off: a barrier changes what is fused, and a fused kernel may round otherwise.
    """
    plain = artifact.parse(source.encode())
    rows = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
    whole = [rows[4 * i : 4 * i + 4] for i in range(DEVICES)]
    runs = [_executable(plain), *(_executable(after(plain, p)) for p in PIPELINES[:2])]
    for flag, selector in ((True, 0), (False, 1)):
        arguments = [whole, [np.array(flag)] * DEVICES, [np.array(selector, np.int32)] * DEVICES]
        results = [bindings.run_on_devices(run, arguments, devices()) for run in runs]
        wanted, *others = ([part.tobytes() for part in result[0]] for result in results)
        assert all(other == wanted for other in others)


def devices() -> list[Any]:
    return jax.devices()[:DEVICES]


def _executable(program: Artifact) -> Any:
    code = bindings.write_bytecode(program.module)
    return bindings.compile_for_devices(
        code, 1, DEVICES, devices(), partitioned=True, skipped_passes=bindings.REROUNDING_PASSES
    )


@settings(max_examples=7, suppress_health_check=SLOW)
@given(programs(variadic=True))
def test_inverse_and_idempotent(source: str):
    check_structure(source)


@settings(max_examples=2, suppress_health_check=SLOW)
@given(programs(max_ops=3))
def test_values(source: str):
    check_values(source)


@pytest.mark.parametrize("target", list(Target), ids=lambda target: target.value)
def test_order(target: Target):
    assert searched("random_order.py", target, 2, 0)["programs"] == 2


@pytest.mark.soak
@settings(max_examples=2000, suppress_health_check=SLOW)
@given(programs(variadic=True, max_ops=6))
def test_inverse_and_idempotent_soak(source: str):
    check_structure(source)


@pytest.mark.soak
@settings(max_examples=150, suppress_health_check=SLOW)
@given(programs())
def test_values_soak(source: str):
    check_values(source)


@pytest.mark.soak
@pytest.mark.parametrize("target", list(Target), ids=lambda target: target.value)
def test_order_soak(target: Target):
    assert searched("random_order.py", target, 300, 1)["programs"] == 300
