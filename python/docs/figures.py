"""Draw the figures of README and docs: the tool's own pages, photographed by a browser.

    python python/docs/figures.py [NAME ...]

Writes docs/figures/*.png, and in drawn.json beside them what each was drawn of, by which a test
tells whether it is out of date. `optimize` takes minutes: it searches as "Make a step faster" does.
`lanes` compiles a program before and after each of some passes, in half a minute.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from playwright.sync_api import FloatRect, Page, sync_playwright

if TYPE_CHECKING:
    import jax
    from jax.export import Exported

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "figures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1200, 900
STAGES = ("--stages", "4", "--microbatches", "8")
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1")
DRAWN_OF = FIGURES / "drawn.json"
_LOOK = ROOT / "stablehlo_tools" / "report" / "page"
_VERSION = re.compile(rb"stablehlo-tools \d+(\.\w+)+")
BEFORE = "partition,create-reduce-scatter"
LANES = ("pipeline-collectives", "collective-matmul", "split-batch")
H100 = ("--target", "gpu", "--hardware", "h100")
FASTER = (*H100, "--candidates", "6")


def optimized(folder: Path, page: Page) -> None:
    """The page of `optimize`: what was found, and both programs on one time axis."""
    _run(folder, "python", "python/examples/export_step.py", str(folder / "step.jax_export"))
    written = ("-o", "fast.jax_export", "--report", "why.html")
    _run(folder, "stablehlo-tools", "optimize", "step.jax_export", *FASTER, *written)
    page.goto((folder / "why.html").as_uri())
    page.wait_for_timeout(1000)
    rows = page.locator("tr").all()
    ends = [box["y"] + box["height"] for row in rows if (box := row.bounding_box())]
    whole = max(end for end in ends if end < HEIGHT)
    clip: FloatRect = {"x": 0, "y": 0, "width": WIDTH, "height": whole}
    page.screenshot(path=FIGURES / "optimize.png", clip=clip)
    keep({"optimize.png": look()})


def schedules(folder: Path, page: Page) -> None:
    """The pages of some schedules: who runs what, when."""
    for name in SCHEDULES:
        path = folder / f"{name}.html"
        _run(folder, "stablehlo-tools", *words_of(name), "-o", str(path))
        page.goto(path.as_uri())
        page.wait_for_timeout(300)
        page.add_style_tag(content=".tools, .hint { display: none }")
        chart = page.locator("section[aria-labelledby=chart-heading]")
        chart.screenshot(path=FIGURES / f"schedule-{name}.png")
        keep({f"schedule-{name}.png": digest([path.read_bytes()])})


def lanes(folder: Path, page: Page) -> None:
    """The timelines of a program before and after a pass, as XLA:GPU schedules both."""
    for name in LANES:
        _program(folder / "step.jax_export", name)
        passes = {"before": BEFORE, "after": f"{BEFORE},{name}{{hardware=h100}}"}
        files = [f"{when}.jax_export" for when in passes]
        for file, wanted in zip(files, passes.values(), strict=True):
            _run(folder, "stablehlo-tools", "opt", "step.jax_export", "-p", wanted, "-o", file)
        _run(folder, "stablehlo-tools", "report", *files, *H100, "-o", "lanes.html")
        page.goto((folder / "lanes.html").as_uri())
        page.wait_for_timeout(500)
        before, after = page.evaluate("readReport().programs.map((each) => each.exposed_ns)")
        if after >= 0.5 * before:
            raise RuntimeError(f"{name} leaves {after} of {before} ns exposed: nothing to see")
        page.locator("#figures").screenshot(path=FIGURES / f"lanes-{name}.png")
        keep({f"lanes-{name}.png": look()})


def _program(file: Path, name: str) -> None:
    """A program that the pass makes faster: FSDP, or a tensor-parallel MLP."""
    if name == "pipeline-collectives":
        _run(ROOT, "python", "python/examples/export_step.py", str(file), "--layers", "4")
    elif name == "collective-matmul":
        file.write_bytes(tensor_parallel(layers=2, rows=8192, divided=True).serialize())
    else:
        file.write_bytes(tensor_parallel(layers=4, rows=16384, divided=False).serialize())


def tensor_parallel(layers: int, rows: int, divided: bool, width: int = 8192) -> Exported:
    """An MLP whose weights are divided over eight devices; between layers, its rows are, too."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax
    from jax import export, lax
    from jax.sharding import AbstractMesh, AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    def mlp(hidden: jax.Array, *weights: jax.Array) -> jax.Array:
        for up, down in itertools.batched(weights, 2):
            whole = lax.all_gather(hidden, "model", tiled=True) if divided else hidden
            part = jax.nn.gelu(whole @ up) @ down
            if divided:
                hidden += lax.psum_scatter(part, "model", tiled=True)
            else:
                hidden += lax.psum(part, "model")
        return hidden

    mesh = AbstractMesh((8,), ("model",), axis_types=(AxisType.Auto,))
    of_rows = P("model") if divided else P()
    specs = (of_rows, *(P(None, "model"), P("model")) * layers)
    sizes = ((rows, width), *((width, 4 * width), (4 * width, width)) * layers)
    arrays = [
        jax.ShapeDtypeStruct(size, "bfloat16", sharding=NamedSharding(mesh, spec))
        for size, spec in zip(sizes, specs, strict=True)
    ]
    program = jax.shard_map(mlp, mesh=mesh, in_specs=specs, out_specs=of_rows)
    return export.export(jax.jit(program), platforms=["cuda"])(*arrays)


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


DRAWN: dict[str, Callable[[Path, Page], None]] = {
    "optimize": optimized,
    "schedules": schedules,
    "lanes": lanes,
}


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
