"""Files that other releases of jax wrote, by python/compat/write_fixture.py."""

from pathlib import Path

import pytest

from stablehlo_tools.analysis.collectives import find_collectives
from stablehlo_tools.artifacts import artifact
from stablehlo_tools.diagnostics import ToolError

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "older_jax"
READ = ("0.9.2", "0.10.2", "0.11.2", "0.12.0")
REFUSED = {
    "0.7.2": r"by a jax before 0\.8\.2",
    "0.8.1": r"by a jax before 0\.8\.2",
    "0.8.2": "by an older jax, and jax .* reads only files of the last six months",
}


def path_of(release: str) -> Path:
    return FIXTURES / f"jax_{release}.jax_export"


def test_every_fixture_is_in_a_test():
    assert {path.name for path in FIXTURES.iterdir()} == {
        path_of(release).name for release in (*READ, *REFUSED)
    }


@pytest.mark.parametrize("release", READ)
def test_what_an_older_jax_exported_is_read_and_written(release: str):
    loaded = artifact.load(str(path_of(release)))
    assert loaded.exported is not None
    assert sorted(each.kind for each in find_collectives(loaded.module)) == [
        "all_gather",
        "all_reduce",
    ]
    again = artifact.parse(artifact.encode(loaded, artifact.ArtifactForm.JAX_EXPORT), "again")
    assert again.exported is not None
    assert again.exported.in_avals == loaded.exported.in_avals


@pytest.mark.parametrize("release", REFUSED)
def test_of_what_jax_reads_no_more_the_module_alone_is_read(release: str):
    with pytest.raises(ToolError, match=f"exported {REFUSED[release]}") as refused:
        artifact.load(str(path_of(release)))
    assert "opt --module-only FILE" in str(refused.value)
    loaded = artifact.load(str(path_of(release)), module_only=True)
    assert loaded.exported is None
    assert {each.kind for each in find_collectives(loaded.module)} >= {"all_gather", "all_reduce"}
