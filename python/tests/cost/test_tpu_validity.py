"""The model's kernel times against XLA:TPU's own estimates, for models that compile quickly.

`benchmarks/tpu_validity.py` does the same for all families; the first two here are of those that
the model's figures were not fitted to.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import numpy as np
import pytest
from tree import BENCHMARKS

from stablehlo_tools.targets.topologies import Target, missing_package

PACKAGE = missing_package(Target.TPU)


def _benchmark() -> ModuleType:
    path = BENCHMARKS / "tpu_validity.py"
    spec = importlib.util.spec_from_file_location("tpu_validity", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


validity = _benchmark()


@pytest.mark.skipif(PACKAGE is not None, reason=f"{PACKAGE} is not installed")
@pytest.mark.soak
@pytest.mark.parametrize("name", ["vit-forward", "encoder-decoder-forward", "convnet-forward"])
def test_kernels_rank_and_last_as_xla_tpu_expects(name: str):
    compared = validity.compare(validity.PROGRAMS[name].text())
    assert len(compared.expected) >= 25  # kernels above 10 us
    assert compared.rank_correlation >= 0.9
    assert 1 / 1.5 <= np.median(compared.ratios) / validity.SCALE <= 1.5
    assert compared.fold(validity.SCALE) <= 1.5


def test_ranks_are_compared_and_scales_are_not():
    same = validity.Comparison([1.0, 2.0, 3.0, 3.0], [10.0, 20.0, 30.0, 30.0])
    assert same.rank_correlation == pytest.approx(1)
    assert same.fold(0.1) == pytest.approx(1)
    assert same.fold(0.2) == pytest.approx(2)
    assert validity.Comparison([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]).rank_correlation == pytest.approx(
        -1
    )
