"""The compilers as parameters of tests: one that is not installed is skipped, with the reason."""

from __future__ import annotations

import pytest

from stablehlo_tools.targets.topologies import Target, missing_package

TARGETS = [
    pytest.param(
        target,
        id=target.value,
        marks=pytest.mark.skipif(
            missing_package(target) is not None,
            reason=f"{target.title} needs {missing_package(target)}: pip install '.[aot]'",
        ),
    )
    for target in Target
]
