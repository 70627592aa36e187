"""The oracle of tests that compare values: exact arithmetic, without a tolerance."""

from __future__ import annotations

from stablehlo_tools.artifacts.artifact import Artifact
from stablehlo_tools.verify import Options, verify_artifacts

EXACT = Options(arithmetic="exact", trials=1, partitioned=False)
BITS = Options(arithmetic="floats", trials=1)


def assert_identical(before: Artifact, after: Artifact, options: Options = EXACT) -> None:
    """Asserts that two artifacts compute the same, and says where if they do not."""
    answer = verify_artifacts(before, after, options)
    differing = [(o.index, o.name, o.differing, o.first) for o in answer.outputs if o.differing]
    assert not differing, differing[:3]
