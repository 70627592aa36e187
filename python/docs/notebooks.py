"""Runs the notebooks of docs/notebooks and stores what they print.

    python python/docs/notebooks.py [NAME ...]

Each runs in an empty folder, by the interpreter that runs this file; no kernel is registered.
Pages of more than PAGE_LIMIT bytes are left out of what is stored: beside each stands its text.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
PAGE_LIMIT = 40_000  # bytes of HTML of one output
SECONDS = 600  # for one cell


class ThisInterpreter(AsyncKernelManager):
    """Starts kernels by the interpreter that runs this, whatever is registered on the machine."""

    @property
    def kernel_spec(self) -> KernelSpec:
        launch = [sys.executable, "-m", "ipykernel_launcher", "--log-level=ERROR"]
        return KernelSpec(
            argv=[*launch, "-f", "{connection_file}"], display_name="Python 3", language="python"
        )


def executed(
    path: Path, cache: Path | None = None, programs: Path | None = None, begin: str = ""
) -> Any:
    """The notebook with the outputs of a run of all its cells; CellExecutionError where one fails.

    `cache` is where `optimize` keeps answers, by default a folder that is empty before and gone
    after. The commands in the folder `programs` go before those of this interpreter. The kernel
    begins by running the code `begin`.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as scratch:
        environment = dict(os.environ)
        folders = (programs, Path(sys.executable).parent, environment.get("PATH"))
        environment |= {
            "PATH": os.pathsep.join(str(folder) for folder in folders if folder),
            "STABLEHLO_TOOLS_CACHE": str(cache or Path(scratch) / "cache"),
            "NO_COLOR": "1",
            "IPYTHONDIR": str(Path(scratch) / "ipython"),
        }
        startup = Path(scratch) / "ipython" / "profile_default" / "startup"
        startup.mkdir(parents=True)
        (startup / "begin.py").write_text(begin, encoding="utf-8")
        folder = Path(scratch) / "run"
        folder.mkdir()
        client = NotebookClient(
            notebook,
            timeout=SECONDS,
            startup_timeout=SECONDS,
            kernel_manager_class=ThisInterpreter,
            resources={"metadata": {"path": str(folder)}},
        )
        client.execute(env=environment)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs = _joined(cell.outputs, f"{folder}{os.sep}")
    return notebook


def stored(notebook: Any) -> Any:
    """The notebook as it is kept: without times of execution and large pages."""
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        cell.metadata.pop("execution", None)
        for output in cell.outputs:
            page = output.get("data", {}).get("text/html", "")
            if len(page) > PAGE_LIMIT:
                del output["data"]["text/html"]
    return notebook


def texts(notebook: Any) -> list[str]:
    """What each code cell prints, comparable: times that were taken, and spaces at ends, aside."""
    return [
        comparable("".join(map(_text, cell.outputs)))
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def comparable(text: str) -> str:
    """The text without times that a run took, which are no two times alike."""
    text = text.replace("\r\n", "\n")
    text = re.sub(r"\bin \d+(\.\d+)? s\b", "in N s", text)
    return "\n".join(line.rstrip() for line in text.splitlines())


def _joined(outputs: list[Any], folder: str) -> list[Any]:
    """The outputs with what one stream prints in a row as one, and files as names in the folder."""
    joined: list[Any] = []
    for output in outputs:
        if output.output_type != "stream":
            joined.append(output)
            continue
        if joined and joined[-1].get("name") == output.name:
            joined[-1].text += output.text
        else:
            joined.append(output)
    for output in joined:
        if output.output_type == "stream":
            output.text = output.text.replace(folder, "")
    return joined


def _text(output: Any) -> str:
    if output.output_type == "stream":
        return str(output.text)
    return str(output.get("data", {}).get("text/plain", "")) + "\n"


def main(names: list[str]) -> int:
    """Runs and stores the notebooks of these names, or all."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        if names and path.stem not in names:
            continue
        nbformat.write(stored(executed(path)), path)
        print(f"{path.name}: {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
