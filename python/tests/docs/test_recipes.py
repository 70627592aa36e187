"""The recipes whose library is in the lock run, and their pages show what they print."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from soaking import first

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "python" / "examples" / "recipes"
PAGES = ROOT / "docs" / "recipes"

RUN_HERE = ("flax_nnx", "flax_linen")
# Each of the others wants an environment of its own; its page says which.
NOT_IN_THE_LOCK = {
    "easydel": "easydel==0.3.0 (jax 0.9.2, flax 0.12.3, torch)",
    "keras": "keras==3.15.1",
    "levanter": "levanter 1.2 from its repository (jax 0.7.2)",
    "maxtext": "maxtext==0.2.5",
    "tunix": "google-tunix==0.1.7",
}


@pytest.mark.parametrize(
    "library",
    [
        *first(1, RUN_HERE),
        *(
            pytest.param(
                name, marks=pytest.mark.skip(reason=f"needs {needed}, which is not in the lock")
            )
            for name, needed in NOT_IN_THE_LOCK.items()
        ),
    ],
)
def test_page_shows_what_the_recipe_prints(library: str, tmp_path: Path):
    script = RECIPES / f"from_{library}.py"
    done = subprocess.run(
        [sys.executable, script, "--keep", tmp_path],
        text=True,
        capture_output=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    shown = comparable((PAGES / f"{library}.md").read_text())
    assert [line for line in comparable(done.stdout) if line not in shown] == []
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{library}.jax_export",
        f"{library}.ordered.jax_export",
    }


def test_another_number_on_the_page_would_be_found():
    printed = "  total  3.28 ms\n[exit code 0, 9.1 s]"
    shown = "total  3.29 ms\n[exit code 0, 31.0 s]"
    assert comparable(printed) != comparable(shown)
    assert comparable(printed)[1] == comparable(shown)[1]


def comparable(text: str) -> list[str]:
    """Lines without the indent of a block, the time of a run, and the size, which paths change."""
    text = re.sub(r"\d+\.\d s\]", "N s]", text)
    text = re.sub(r"[\d,]+ bytes, 8 devices", "N bytes, 8 devices", text)
    return [line.strip() for line in text.splitlines() if line.strip()]


def test_every_recipe_is_run_or_named_and_has_a_page():
    recipes = {path.stem.removeprefix("from_") for path in RECIPES.glob("from_*.py")}
    assert recipes == {*RUN_HERE, *NOT_IN_THE_LOCK}
    assert recipes <= {path.stem for path in PAGES.glob("*.md")}
