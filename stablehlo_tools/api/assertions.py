"""Assertions for the tests of one's own programs, under pytest or anything else.

    def test_the_step():
        exported = export.export(step)(*shapes)
        stablehlo_tools.assert_collectives(exported, all_gather=2, reduce_scatter=1)
        stablehlo_tools.assert_exposed_below(exported, "h100", ms=1.5)

They take a `jax.export.Exported` or what `stablehlo_tools.load` returns, and raise AssertionError
with what there is instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.api.inspecting import inspect
from stablehlo_tools.artifacts.artifact import Artifact, from_exported
from stablehlo_tools.diagnostics import to_place

if TYPE_CHECKING:
    from jax.export import Exported

_NS = 1e6  # in a millisecond


def assert_collectives(program: Exported | Artifact, **counts: int) -> None:
    """The program's text has so many collectives of each kind, `all_gather=2`, and no others.

    An op in a loop, or in a function that is called, counts once. Raises ToolError for an op of a
    dialect that is not understood.
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    wanted = {kind: count for kind, count in counts.items() if count}
    found = collectives_of(program)
    if found != wanted:
        raise AssertionError("\n".join(found.explained_against(wanted)))


class Collectives(dict[str, int]):
    """How many collectives of each kind a program's text has; `places` are theirs, in its order."""

    def __init__(self, places: Sequence[tuple[str, str]]) -> None:
        super().__init__(Counter(kind for kind, _ in places))
        self.places = tuple(places)

    def explained_against(self, wanted: Mapping[str, int]) -> list[str]:
        """The expected kinds, the present ones, and their places."""
        return [
            f"expected {_counts_text(wanted)}, found {_counts_text(self)}:",
            *(f"  {kind}{place and f' at {place}'}" for kind, place in self.places),
        ]


def collectives_of(program: Exported | Artifact) -> Collectives:
    """How many collectives of each kind the program's text has, with their places.

    An op in a loop, or in a function that is called, counts once. Raises ToolError as above.
    """
    artifact = program if isinstance(program, Artifact) else from_exported(program)
    places = ((each.kind, to_place(each.op.location)) for each in find_collectives(artifact.module))
    return Collectives(
        [(kind, f"{place.file}:{place.line}" if place.file else "") for kind, place in places]
    )


def assert_exposed_below(
    program: Exported | Artifact, hardware: str, *, ms: float, target: str | None = None
) -> None:
    """At most `ms` milliseconds of a run on the hardware are communication that nothing hides: as
    the program is written, or as the compiler of the target, "gpu" or "tpu", schedules it.

    Raises ToolError for hardware without a profile, and where the compiler refuses.
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    inspection = inspect(program, hardware=hardware, target=target)
    exposed = inspection.document.programs[0].exposed_ns / _NS
    if exposed > ms:
        raise AssertionError(f"{exposed:.3g} ms are exposed, more than {ms:g}:\n\n{inspection}")


def _counts_text(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "no collectives"
