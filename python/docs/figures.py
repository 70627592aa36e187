"""Draw the figures of README and docs: the tool's own pages, photographed by a browser.

    python python/docs/figures.py [NAME ...]

Writes docs/figures/*.png, and in drawn.json beside them what each was drawn of, by which a test
tells whether it is out of date. `optimize` takes minutes: it searches as "Make a step faster" does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "figures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1200, 900
STAGES = ("--stages", "4", "--microbatches", "8")
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1")
DRAWN_OF = FIGURES / "drawn.json"
_LOOK = ROOT / "stablehlo_tools" / "report" / "page"
_VERSION = re.compile(rb"stablehlo-tools \d+(\.\w+)+")
FASTER = ("--target", "gpu", "--hardware", "h100", "--candidates", "6")


def optimized(folder: Path, page: Page) -> None:
    """The page of `optimize`: what was found, and both programs on one time axis."""
    _run(folder, "python", "python/examples/export_step.py", str(folder / "step.jax_export"))
    written = ("-o", "fast.jax_export", "--report", "why.html")
    _run(folder, "stablehlo-tools", "optimize", "step.jax_export", *FASTER, *written)
    page.goto((folder / "why.html").as_uri())
    page.wait_for_timeout(1000)
    page.screenshot(path=FIGURES / "optimize.png", full_page=False)
    keep({"optimize.png": look()})


def schedules(folder: Path, page: Page) -> None:
    """The pages of some schedules: who runs what, when."""
    for name in SCHEDULES:
        path = folder / f"{name}.html"
        _run(folder, "stablehlo-tools", *words_of(name), "-o", str(path))
        page.goto(path.as_uri())
        page.wait_for_timeout(300)
        chart = page.locator("section[aria-labelledby=chart-heading]")
        chart.screenshot(path=FIGURES / f"schedule-{name}.png")
        keep({f"schedule-{name}.png": digest([path.read_bytes()])})


def words_of(schedule: str) -> tuple[str, ...]:
    """The command whose page is drawn."""
    return ("schedule", schedule, *STAGES)


def digest(pages: Iterable[bytes]) -> str:
    """Of what is drawn, but for the version that it bears."""
    found = hashlib.sha256()
    for each in pages:
        found.update(_VERSION.sub(b"", each))
    return found.hexdigest()


def look() -> str:
    """Of what makes the look of a page of `optimize`: its figures take a search of minutes."""
    files = [path for path in sorted(_LOOK.iterdir()) if path.is_file()]
    return digest(path.read_bytes() for path in files if path.stem != "schedule")


def keep(drawn: dict[str, str]) -> None:
    """Notes what figures were drawn of."""
    known = json.loads(DRAWN_OF.read_text()) if DRAWN_OF.exists() else {}
    DRAWN_OF.write_text(json.dumps(dict(sorted({**known, **drawn}.items())), indent=1) + "\n")


DRAWN: dict[str, Callable[[Path, Page], None]] = {"optimize": optimized, "schedules": schedules}


def _run(folder: Path, *words: str) -> None:
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    here = ROOT if words[0] == "python" else folder
    environment = os.environ | {"PATH": programs, "JAX_PLATFORMS": "cpu"}
    subprocess.run(words, cwd=here, env=environment, check=True)


def main() -> int:
    """Draws what is asked for; 2 where there is no browser."""
    parser = argparse.ArgumentParser(description="Draw the figures of the docs.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(DRAWN))
    asked = parser.parse_args().names or list(DRAWN)
    browser = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"none of {', '.join(BROWSERS)} is in PATH", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = started.new_page(
            viewport={"width": WIDTH, "height": HEIGHT},
            color_scheme="light",
            reduced_motion="reduce",
        )
        for name in asked:
            DRAWN[name](Path(folder), page)
        started.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
